"""``tune``: what is slower than eager is left to eager, and the decision can be read."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import fx, nn

import compiled_autograd as ca
from compiled_autograd import tuning, variants
from compiled_autograd.session import Session

from .helpers import assert_same


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Trials begin and end after few backwards."""
    monkeypatch.setattr(variants.Variant.__init__, "__defaults__", _defaults(3))
    monkeypatch.setattr(tuning, "SAMPLES", 3)
    monkeypatch.setattr(tuning, "AGAIN", 5)
    yield


def _defaults(warm: int) -> tuple[Any, ...]:
    return tuple(warm if value == variants.WARM else value for value in variants.Variant.__init__.__defaults__ or ())


def _slow(graph_module: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
    def run(*arguments: Any) -> Any:
        time.sleep(0.02)
        return graph_module.forward(*arguments)

    return run


def _run(session: Session, weight: torch.Tensor, times: int, factor: int = 1) -> list[str]:
    labels = []
    for _ in range(times):
        expected = torch.autograd.grad((weight.exp() * weight).sum(), weight)
        loss = (weight.exp() * weight).sum()
        with session:
            assert_same(torch.autograd.grad(loss, weight), expected)
        assert session.last is not None
        first = session.last.reasons[0] if session.last.reasons else None
        labels.append(first.label if isinstance(first, ca.session.Bypass) else session.last.outcome)
    return labels


def test_a_slow_graph_is_left_to_eager_and_says_so() -> None:
    session = ca.enable(backend=_slow, tune=True)
    labels = _run(session, nn.Parameter(torch.randn(8)), 14)
    assert labels[:4] == ["structure_miss", "hit", "hit", "hit"]
    assert labels[4:9] == ["tuning", "hit", "tuning", "hit", "tuning"]
    assert labels[9:14] == ["not_worth_it"] * 5
    assert session.last is not None
    (reason,) = session.last.reasons
    assert "eager takes" in reason.hint and "ms" in reason.hint


def test_it_is_tried_again_from_time_to_time() -> None:
    session = ca.enable(backend=_slow, tune=True)
    labels = _run(session, nn.Parameter(torch.randn(8)), 24)
    assert labels[14:20] == ["hit", "tuning", "hit", "tuning", "hit", "tuning"]
    assert set(labels[20:]) == {"not_worth_it"}


def test_a_fast_graph_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "WORTH", 1e9)
    session = ca.enable(backend="eager", tune=True)
    labels = _run(session, nn.Parameter(torch.randn(8)), 20)
    assert labels.count("tuning") == 3 and set(labels[9:]) == {"hit"}


def test_tune_false_times_nothing() -> None:
    session = ca.enable(backend=_slow, tune=False)
    assert set(_run(session, nn.Parameter(torch.randn(8)), 12)[1:]) == {"hit"}


def test_deterministic_algorithms_leave_nothing_to_the_clock() -> None:
    session = ca.enable(backend=_slow, tune=True)
    torch.use_deterministic_algorithms(True)
    try:
        assert set(_run(session, nn.Parameter(torch.randn(8)), 12)[1:]) == {"hit"}
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_decision_holds_for_its_settings_alone() -> None:
    weight = nn.Parameter(torch.randn(8))
    assert _run(ca.enable(backend=_slow, tune=True), weight, 12)[-1] == "not_worth_it"
    assert _run(ca.enable(backend="eager", tune=False), weight, 3)[-1] == "hit"
    assert _run(ca.enable(backend=_slow, tune=False), weight, 3)[-1] == "hit"


def test_what_cannot_be_captured_during_a_trial_is_no_turn_of_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused as it would be without the trial, and its time counts for nothing."""
    from compiled_autograd import bypass
    from compiled_autograd.gate import GATE

    session = ca.enable(backend=_slow, tune=True, on_unsupported="raise")
    weight = nn.Parameter(torch.randn(8))
    assert _run(session, weight, 6)[-2:] == ["tuning", "hit"]
    _run(session, weight, 1)  # eager's turn; the next is to be compiled
    with monkeypatch.context() as refused:
        refused.setattr(GATE, "enter_capture", lambda: bypass.OTHER_THREAD)
        with session, pytest.raises(ca.UnsupportedBackwardError, match="other_thread"):
            (weight.exp() * weight).sum().backward()
    (trial,) = tuning.TUNING._trials.values()
    assert (len(trial.eager), len(trial.compiled)) == (2, 2)
