"""Trials: compiled backwards are timed against eager ones, and the faster way runs."""

from __future__ import annotations

import gc
import warnings
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import compiled_autograd as ca
import shadow_cache
from compiled_autograd.cache.variants import Variant
from compiled_autograd.capture import tape
from compiled_autograd.diagnostics import reporting
from compiled_autograd.engine import records
from compiled_autograd.engine.session import Session
from compiled_autograd.policies import ledger
from compiled_autograd.policies.ledger import LEDGER
from compiled_autograd.steps.proof import MAX_WEAK
from shadow_cache import Timing

from .helpers import assert_same, expect
from .stored import restart
from .tuned import NOW, outcome_of, run_small, said_to_take, slow, soon  # noqa: F401

TRIAL = ["hit", "hit", "tuning", "tuning"] * 3
"""Backwards of a trial: each first of two does not count, and three have to."""
FIRST = ["structure_miss", "hit"]
"""Backwards before it: a hit that is compared with the real calls is not timed."""


def _weight() -> nn.Parameter:
    return nn.Parameter(torch.randn(8))


def _variants(session: Session) -> list[Variant]:
    return [variant for graph in session.graphs() for variant in graph.variants]


def _stored(folder: Path) -> list[Timing | None]:
    with shadow_cache.open(folder) as store:
        return [entry.timing for entry in store.entries()]


def _last(session: Session) -> str:
    """Return the outcome of the last backward, or the kind of its reason."""
    last = session.last
    assert last is not None
    return last.reasons[0].kind if last.outcome == "bypass" else last.outcome  # type: ignore[union-attr]


def test_a_slow_graph_is_left_to_eager_and_says_so(takes: dict[str, float]) -> None:
    session = ca.enable(backend="eager", tune=True)
    labels = run_small(session, _weight(), 18)
    assert labels == [*FIRST, *TRIAL, *["not_worth_it"] * 4]
    assert session.last is not None
    (reason,) = session.last.reasons
    assert reason.hint.startswith("eager takes 2.00 ms, the compiled graph 3.00 ms (means of 3 each)")
    expect(session.stats(), structure_misses=1, hits=7, tuning=6, bypasses={"not_worth_it": 4}, compiles=1)


def test_a_graph_that_is_slow_by_the_clock_is_left_to_eager() -> None:
    session = ca.enable(backend=slow, tune=True)
    assert run_small(session, _weight(), 18) == [*FIRST, *TRIAL, *["not_worth_it"] * 4]


@pytest.mark.parametrize("compiled", [1.0, 2.0])
def test_a_fast_graph_stays(takes: dict[str, float], compiled: float) -> None:
    takes["compiled"] = compiled
    labels = run_small(ca.enable(backend="eager", tune=True), _weight(), 60)
    assert labels == [*FIRST, *TRIAL, *["hit"] * 46]


def test_it_is_tried_again_after_ever_more_backwards(takes: dict[str, float]) -> None:
    session, weight = ca.enable(backend="eager", tune=True), _weight()
    assert run_small(session, weight, 14) == [*FIRST, *TRIAL]
    for rest in (ledger.REST, 2 * ledger.REST, 4 * ledger.REST):
        assert run_small(session, weight, rest) == ["not_worth_it"] * rest
        assert run_small(session, weight, len(TRIAL)) == TRIAL
    takes["compiled"] = 1.0
    assert set(run_small(session, weight, 8 * ledger.REST)) == {"not_worth_it"}
    assert run_small(session, weight, 20) == [*TRIAL, *["hit"] * 8]


def test_tune_false_and_deterministic_algorithms_time_nothing(takes: dict[str, float]) -> None:
    assert set(run_small(ca.enable(backend="eager", tune=False), _weight(), 20)[1:]) == {"hit"}
    ca.reset()
    torch.use_deterministic_algorithms(True)
    try:
        labels = run_small(ca.enable(backend="eager", tune=True), _weight(), 20)
    finally:
        torch.use_deterministic_algorithms(False)
    assert set(labels[1:]) == {"hit"}


def test_a_decision_holds_for_its_settings_alone(takes: dict[str, float]) -> None:
    weight = _weight()
    assert run_small(ca.enable(backend="eager", tune=True), weight, 15)[-1] == "not_worth_it"
    assert run_small(ca.enable(backend="eager", tune=False), weight, 3) == ["hit"] * 3
    assert run_small(ca.enable(backend="eager", tune=True), weight, 1) == ["not_worth_it"]


def test_other_sizes_share_a_trial(takes: dict[str, float]) -> None:
    session, small = ca.enable(backend="eager", tune=True, dynamic=False), nn.Parameter(torch.randn(3))
    labels = [label for _ in range(10) for each in (small, _weight()) for label in run_small(session, each, 1)]
    assert labels == ["structure_miss", "shape_miss", "hit", "hit", *TRIAL, *["not_worth_it"] * 4]
    assert [each.timing for each in _variants(session)] == [Timing(2.0, 3.0, 3, NOW, "eager")] * 2


def test_hits_that_are_compared_with_the_real_calls_are_not_timed(takes: dict[str, float]) -> None:
    """Gradients of zeros prove little, so that they are compared for some hits."""
    session, weight, other = ca.enable(backend="eager", tune=True), nn.Parameter(torch.zeros(8)), _weight()
    outcomes = []
    for _ in range(MAX_WEAK):
        with session:
            ((weight * weight).sum() + other.sum()).backward()
        assert_same([weight.grad, other.grad], [torch.zeros(8), torch.ones(8)])
        weight.grad = other.grad = None
        outcomes.append(outcome_of(session))
    assert outcomes == ["structure_miss", *["hit"] * (MAX_WEAK - 1)]


@pytest.mark.parametrize(("compiled", "goes_on"), [(3.0, "eager"), (1.0, "compiled")])
def test_a_decision_is_stored_and_not_taken_over_by_a_new_process(
    takes: dict[str, float], compiled: float, goes_on: str, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"backend": "eager", "tune": True, "cache_dir": tmp_path / "cache"}
    takes["compiled"], weight = compiled, _weight()
    session = ca.enable(**settings)
    run_small(session, weight, 12)
    assert _stored(tmp_path / "cache") == [None], "not decided yet"
    run_small(session, weight, 3)
    before = Timing(2.0, compiled, 3, NOW, goes_on)
    assert [each.timing for each in _variants(session)] == _stored(tmp_path / "cache") == [before]
    restart()
    takes["eager"] = 9.0
    session = ca.enable(**settings)
    assert run_small(session, weight, 3)[:2] == ["hit"] * 2 and session.stats().compiles == 0
    assert [each.timing for each in _variants(session)] == _stored(tmp_path / "cache") == [before]
    assert run_small(session, weight, 20)[-8:] == ["hit"] * 8
    assert _stored(tmp_path / "cache") == [Timing(9.0, compiled, 3, NOW, "compiled")]


def test_a_decision_that_cannot_be_written_changes_nothing(
    takes: dict[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shadow_cache.store import Store

    def fails(*given: Any) -> None:
        raise shadow_cache.StoreError("the disk is gone")

    session = ca.enable(backend="eager", tune=True, cache_dir=tmp_path / "cache")
    monkeypatch.setattr(Store, "timed", fails)
    with pytest.warns(UserWarning, match="cannot be written.*the disk is gone"):
        assert run_small(session, _weight(), 15)[-1] == "not_worth_it"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run_small(session, _weight(), 20)[-1] == "not_worth_it", "decided again, and not warned of"


def test_the_log_has_a_line_for_each_decision(takes: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(reporting._log, "isEnabledFor", lambda level: True)
    monkeypatch.setattr(reporting, "_write", lambda level, line: lines.append(line))
    run_small(ca.enable(backend="eager", tune=True), _weight(), 15)
    (line,) = [line for line in lines if line.startswith("timed ")]
    assert line.startswith("timed SumBackward0, ") and line.endswith("; eager is used")


def test_a_record_holds_no_variant_that_was_evicted(takes: dict[str, float]) -> None:
    session, weight = ca.enable(backend="eager", tune=True), _weight()
    assert run_small(session, weight, 15)[-1] == "not_worth_it"
    (graph,) = session.graphs()
    gone = weakref.ref(graph.variants[0])
    graph.evict()
    del graph
    gc.collect()
    assert gone() is None
    labels = run_small(session, weight, 2 * ledger.REST)
    assert labels[labels.index("shape_miss") :][:3] == ["shape_miss", "hit", "hit"]


# ---- the extension arrives -------------------------------------------------------------------------------------------


def test_records_survive_the_arrival_of_the_extension(takes: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its keys are others. What was timed is timed again, since hits are faster with it."""
    library = SimpleNamespace(loaded=None, module=lambda build: None, reason="")
    monkeypatch.setattr(records.Library, "LATEST", library)
    session, weight = ca.enable(backend="eager", tune=True), _weight()
    assert run_small(session, weight, 15)[-1] == "not_worth_it"
    library.loaded = SimpleNamespace(peek=lambda outputs, *given: hash((tape.peek(outputs, ()), given)))
    takes["compiled"] = 1.0
    assert run_small(session, weight, 20) == [*TRIAL, *["hit"] * 8]
    assert session.stats().captures == session.stats().compiles == 1 and not LEDGER.watched
