"""``tune``: what is slower than eager is left to eager, and the decision can be read."""

from __future__ import annotations

import gc
import math
import os
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn

import compiled_autograd as ca
import shadow_cache
from compiled_autograd.cache import variants
from compiled_autograd.cache.variants import Variant
from compiled_autograd.capture import tape
from compiled_autograd.diagnostics import reporting
from compiled_autograd.engine import engine
from compiled_autograd.engine import session as sessions
from compiled_autograd.engine.session import Here, Session
from compiled_autograd.policies import autotune, medians, sketches
from compiled_autograd.policies.autotune import AUTOTUNE, Autotune, Trial
from compiled_autograd.settings import Settings
from compiled_autograd.steps.proof import MAX_WEAK
from shadow_cache import Bypass, StoreError, Timing

from .helpers import assert_same, in_threads, switching_every
from .stored import restart


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Trials begin and end after few backwards, which take turns."""
    monkeypatch.setattr(variants.Variant.__init__, "__defaults__", _defaults(3))
    monkeypatch.setattr(autotune, "SAMPLES_PER_SIDE", 3)
    monkeypatch.setattr(autotune, "IN_A_ROW", 1)
    monkeypatch.setattr(autotune, "COLD", 0)
    monkeypatch.setattr(medians, "COLDER", 0.0)
    monkeypatch.setattr(autotune, "CLOSE", (1.0, 1.0))
    monkeypatch.setattr(medians, "WIDE", math.inf)
    monkeypatch.setattr(autotune, "BACKWARDS_BEFORE_RETRIAL", 5)
    yield


def _defaults(warm: int) -> tuple[Any, ...]:
    return tuple(
        warm if value == variants.HITS_BEFORE_TIMING else value
        for value in variants.Variant.__init__.__defaults__ or ()
    )


def test_each_way_runs_in_a_row_and_the_first_of_it_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A way that is slow only after the other one, as caches make it, is not taken for slow."""
    monkeypatch.setattr(autotune, "SAMPLES_PER_SIDE", 6)
    monkeypatch.setattr(autotune, "IN_A_ROW", 4)
    monkeypatch.setattr(autotune, "COLD", 1)
    ways: list[str] = []

    real = autotune.AUTOTUNE.eager

    def eager(trial: Trial, seconds: float) -> None:
        ways.append("eager")
        real(trial, 9.0 if ways[-2] == "compiled" else 1.0)

    def took(trial: Trial, seconds: float) -> None:
        ways.append("compiled")
        Autotune.took(trial, 9.0 if len(ways) == 1 or ways[-2] == "eager" else 1.0)

    monkeypatch.setattr(autotune.AUTOTUNE, "eager", eager)
    monkeypatch.setattr(autotune.AUTOTUNE, "took", took)
    session = ca.enable(backend="eager", tune=True)
    _run(session, nn.Parameter(torch.randn(8)), 25)
    assert ways == 2 * (4 * ["compiled"] + 4 * ["eager"])
    ((variant,),) = [graph.variants for graph in session.graphs()]
    assert variant.timing is not None
    assert (variant.timing.eager, variant.timing.compiled, variant.timing.samples) == (1e3, 1e3, 6)
    assert session.stats().bypasses == {"tuning": 8}


def _trial(eager: list[float], compiled: list[float]) -> Trial:
    held: Any = lambda: None  # noqa: E731
    return Trial((0, None, False), held, eager=eager, compiled=compiled)


@pytest.mark.parametrize(
    ("eager", "compiled", "goes_on"),
    [
        ([80e-6] * 3, [70e-6] * 3, "eager"),  # some 65, out of a trial
        ([80e-6] * 3, [65e-6] * 3, "compiled"),
        ([20e-6] * 3, [12e-6] * 3, "eager"),
        ([20e-6] * 3, [9e-6] * 3, "compiled"),
        ([5e-3] * 3, [5.05e-3] * 3, "compiled"),
    ],
)
def test_a_trial_makes_eager_colder_than_it_is(
    eager: list[float], compiled: list[float], goes_on: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(medians, "COLDER", 15e-6)
    timing = _trial(eager, compiled).decide()
    assert timing is not None and timing.goes_on == goes_on


def test_a_coarse_clock_divides_by_nothing() -> None:
    """Ten milliseconds on some systems: a small backward takes none."""
    trial = _trial([0.0] * 8, [0.0] * 8)
    assert trial.is_decided()
    timing = trial.decide(0.0)
    assert timing is not None and timing.goes_on == "compiled"


def test_a_trial_is_decided_once() -> None:
    """Two threads may both have found that it can be."""
    trial = _trial([1.0] * 8, [2.0] * 8)
    assert trial.is_decided() and trial.decide() is not None
    assert trial.verdict is not None and not trial.is_decided() and trial.decide() is None


def test_what_plainly_loses_is_not_timed_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autotune, "SAMPLES_PER_SIDE", 8)

    def decided(compiled: list[float], eager: list[float]) -> bool:
        return _trial(eager, compiled).is_decided()

    assert decided([1.3, 1.4, 1.1, 1.3, 1.3], [1.0, 0.9, 1.0, 1.0])
    assert not decided([1.3, 1.4, 1.1, 1.3], [1.0, 0.9, 1.0, 1.0])  # it was slower before eager's, and may be no more
    assert not decided([1.3, 1.4, 1.1, 1.3, 1.0], [1.0, 0.9, 1.0, 1.0])
    assert not decided([1.2, 1.4, 1.2, 1.2, 1.2], [1.0, 0.9, 1.0, 1.0])
    assert not decided([1.3, 1.4, 1.3, 1.3, 1.3], [1.0, 0.9, 1.0])
    assert not decided([1.0, 0.9, 1.0, 1.0, 1.0], [1.3, 1.4, 1.3, 1.3])
    assert decided([1.0] * 8, [1.0] * 8)


def test_a_slow_while_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As another process, or larger batches, make one: all that was compiled in it took longer than eager's later."""
    for name, value in (("SAMPLES_PER_SIDE", 8), ("IN_A_ROW", 5), ("COLD", 1)):
        monkeypatch.setattr(autotune, name, value)

    def took(trial: Trial, seconds: float) -> None:
        Autotune.took(trial, 9.0 if trial.turn <= 5 else 1.0)

    monkeypatch.setattr(autotune.AUTOTUNE, "took", took)
    real = autotune.AUTOTUNE.eager
    monkeypatch.setattr(autotune.AUTOTUNE, "eager", lambda trial, seconds: real(trial, 2.0))
    session = ca.enable(backend="eager", tune=True)
    _run(session, nn.Parameter(torch.randn(8)), 23)
    ((variant,),) = [graph.variants for graph in session.graphs()]
    assert variant.timing is not None and variant.timing.goes_on == "compiled"
    assert session.stats().bypasses == {"tuning": 10}


def test_a_trial_that_gets_no_further_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one whose hits are all compared with the real calls: each backward would be looked at for ever."""
    monkeypatch.setattr(autotune, "SAMPLES_PER_SIDE", 8)
    monkeypatch.setattr(autotune, "PATIENCE", 3)
    session = ca.enable(backend="eager", tune=True)
    _run(session, nn.Parameter(torch.randn(8)), 7)
    ((_, trial),) = autotune.AUTOTUNE._trials.items()
    assert trial.turn > 0
    monkeypatch.setattr(autotune.AUTOTUNE, "hit", lambda *given: None)
    _run(session, nn.Parameter(torch.randn(8)), 12)
    assert not autotune.AUTOTUNE.active


def test_a_trial_goes_on_with_other_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have its fingerprint too."""
    monkeypatch.setattr(autotune, "SAMPLES_PER_SIDE", 8)
    monkeypatch.setattr(autotune, "MAX_TIME_RATIO", 1e9)
    session = ca.enable(backend="eager", tune=True)
    _run(session, nn.Parameter(torch.randn(8)), 7)
    ((key, trial),) = autotune.AUTOTUNE._trials.items()
    _run(session, nn.Parameter(torch.randn(9)), 36)
    ((first, second),) = [graph.variants for graph in session.graphs()]
    assert trial.held() is first and first.timing is not None
    assert second.timing is not None or autotune.AUTOTUNE._trials[key].held() is second


def test_a_trial_of_a_tape_that_never_comes_again_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """While there is one, every backward is looked at before it may take the fast path."""
    monkeypatch.setattr(autotune, "SAMPLES_PER_SIDE", 8)
    monkeypatch.setattr(sketches, "PATIENCE_OF_ALL", 16)
    session = ca.enable(backend="eager", tune=True)
    _run(session, nn.Parameter(torch.randn(8)), 7)
    assert autotune.AUTOTUNE.active

    def other(weight: torch.Tensor) -> None:
        with session:
            (weight.sin() * weight).sum().backward()

    x = torch.randn(3, requires_grad=True)
    for _ in range(120):
        other(x)
        x.grad = None
    first = session.graphs()[0].variants[0]
    assert first.timing is None, "it was not decided"
    assert first not in [each.held() for each in autotune.AUTOTUNE._trials.values()]
    _run(session, nn.Parameter(torch.randn(8)), 40)
    assert first.timing is not None, "it was begun again"


def test_sizes_of_other_variants_are_timed_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that take turns: eager's backwards of a trial have both, and so do those that are compiled. Where hits of
    one variant alone were timed, small ones made eager fast, and all was left to it for ever."""
    for name, value in (("SAMPLES_PER_SIDE", 8), ("IN_A_ROW", 5), ("COLD", 1), ("CLOSE", (0.9, 1.15))):
        monkeypatch.setattr(autotune, name, value)
    big, small = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(3, 3))
    takes = {"seconds": 1.0}
    real = autotune.AUTOTUNE.eager
    monkeypatch.setattr(autotune.AUTOTUNE, "eager", lambda trial, seconds: real(trial, 2 * takes["seconds"]))
    took = Autotune.took
    monkeypatch.setattr(autotune.AUTOTUNE, "took", lambda trial, seconds: took(trial, takes["seconds"]))
    session = ca.enable(backend="eager", tune=True)
    for _ in range(60):
        for weight, seconds in ((big, 10.0), (small, 1.0)):
            takes["seconds"] = seconds
            _run(session, weight, 1)
    timings = [variant.timing for graph in session.graphs() for variant in graph.variants]
    assert len(timings) == 2 and all(each is not None and each.goes_on == "compiled" for each in timings)
    assert "not_worth_it" not in session.stats().bypasses


def test_nor_is_one_waited_for_where_nothing_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autotune, "SAMPLES_PER_SIDE", 8)
    monkeypatch.setattr(sketches, "PATIENCE_OF_ALL", 16)
    _run(ca.enable(backend="eager", tune=True), nn.Parameter(torch.randn(8)), 7)
    assert autotune.AUTOTUNE.active
    labels = _run(ca.enable(backend="eager", tune=False), nn.Parameter(torch.randn(8)), 120)
    assert set(labels) == {"hit"} and not autotune.AUTOTUNE.active


def test_hits_that_are_compared_with_the_real_calls_are_not_timed() -> None:
    session = ca.enable(backend="eager", tune=True)
    weight, other = nn.Parameter(torch.zeros(8)), nn.Parameter(torch.ones(8))

    def run() -> None:
        with session:
            ((weight * weight).sum() + other.sum()).backward()
        weight.grad = other.grad = None

    for _ in range(MAX_WEAK + 2):  # a gradient of zeros shows little: it is compared again and again
        run()
    assert session.stats().hits > variants.HITS_BEFORE_TIMING > 3 and not autotune.AUTOTUNE.active
    for _ in range(3):
        run()
    assert autotune.AUTOTUNE.active


def _compute(seconds: float = 0.02) -> None:
    """To sleep would be no time of the processor's."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def _slow(graph_module: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
    def run(*arguments: Any) -> Any:
        _compute()
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
        labels.append(first.label if isinstance(first, Bypass) else session.last.outcome)
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


def test_what_is_done_around_a_hit_is_part_of_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph alone is as fast as eager, but telling the session takes longer than both."""
    monkeypatch.setattr(autotune, "MAX_TIME_RATIO", 10.0)
    session, record = ca.enable(backend="eager", tune=True), Session.record

    def slowly(self: Session, outcome: Any, *counts: Any) -> None:
        record(self, outcome, *counts)
        if outcome.outcome == "hit":
            _compute()

    monkeypatch.setattr(Session, "record", slowly)
    labels = _run(session, nn.Parameter(torch.randn(8)), 14)
    assert labels[4:9] == ["tuning", "hit", "tuning", "hit", "tuning"]
    assert labels[9:14] == ["not_worth_it"] * 5


def test_a_hit_that_another_thread_has_decided_about_is_timed_for_nobody() -> None:
    class Deciding(Trial):
        """Another thread decides in the midst of what this one does."""

        def last_counts(self) -> bool:
            self.eager, self.compiled = [], []
            return True

    held: Any = lambda: None  # noqa: E731
    Autotune.took(Deciding((0, None, False), held, compiled=[1.0]), 2.0)


def test_what_others_on_the_machine_take_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one thread computes, processor time is asked: here a hit waits, and computes little."""
    monkeypatch.setattr(autotune, "MAX_TIME_RATIO", 50.0)
    session, record = ca.enable(backend="eager", tune=True), Session.record

    def waiting(self: Session, outcome: Any, *counts: Any) -> None:
        record(self, outcome, *counts)
        if outcome.outcome == "hit":
            time.sleep(0.02)

    monkeypatch.setattr(Session, "record", waiting)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        labels = _run(session, nn.Parameter(torch.randn(8)), 14)
    finally:
        torch.set_num_threads(threads)
    assert labels.count("tuning") == 3 and set(labels[9:]) == {"hit"}


def test_a_fast_graph_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autotune, "MAX_TIME_RATIO", 1e9)
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
    from compiled_autograd.diagnostics import bypass
    from compiled_autograd.threads.gate import GATE

    session = ca.enable(backend=_slow, tune=True, on_unsupported="raise")
    weight = nn.Parameter(torch.randn(8))
    assert _run(session, weight, 6)[-2:] == ["tuning", "hit"]
    _run(session, weight, 1)  # eager's turn; the next is to be compiled
    with monkeypatch.context() as refused:
        refused.setattr(GATE, "enter_capture", lambda token: bypass.OTHER_THREAD)
        with session, pytest.raises(ca.UnsupportedBackwardError, match="other_thread"):
            (weight.exp() * weight).sum().backward()
    (trial,) = autotune.AUTOTUNE._trials.values()
    assert (len(trial.eager), len(trial.compiled)) == (2, 2)


def test_a_verdict_holds_no_variant_that_went() -> None:
    session = ca.enable(backend=_slow, tune=True)
    weight = nn.Parameter(torch.randn(8))
    assert _run(session, weight, 10)[-1] == "not_worth_it"
    (graph,) = session.graphs()
    gone = weakref.ref(graph.variants[0])
    graph.evict()
    del graph
    gc.collect()
    assert gone() is None
    assert _run(session, weight, 4)[-1] == "not_worth_it"
    assert _run(session, weight, 2) == ["shape_miss", "hit"]  # compiled again, once the verdict is over
    assert not autotune.AUTOTUNE.active


def test_the_oldest_trials_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autotune, "_MAX_TRIALS", 2)
    trials, held = Autotune(), []
    for number in range(5):
        variant: Any = variants.Variant(("settings",), None, [], bool, None, None)  # type: ignore[arg-type]
        variant.key, variant.hits = shadow_cache.VariantKey((), ()), 100
        held.append(variant)
        trials.hit(variant, 1e-3, lambda number=number: number, Settings())
    assert [number for number, *_ in trials._trials] == [3, 4]


# ---- tapes are told apart by their roots -----------------------------------------------------------------------------


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One number for each tape whose nodes were looked at."""
    found: list[int] = []
    fingerprint = tape.fingerprint
    monkeypatch.setattr(tape, "fingerprint", lambda *ends: found.append(fingerprint(*ends)) or found[-1])
    monkeypatch.setattr(autotune, "BACKWARDS_BEFORE_RETRIAL", 10_000)
    return found


def test_what_was_decided_holds_without_a_look_at_each_node(looks: list[int]) -> None:
    session, weight = ca.enable(backend=_slow, tune=True), nn.Parameter(torch.randn(8))
    assert _run(session, weight, 10)[-1] == "not_worth_it"
    before = len(looks)
    assert set(_run(session, weight, 16 + 32 + 64)) == {"not_worth_it"}
    assert len(looks) - before <= 4


def test_in_a_trial_few_are_looked_at(looks: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A look takes as long as a small backward, and puts the engine's code out of the caches."""
    for name, value in (("SAMPLES_PER_SIDE", 8), ("IN_A_ROW", 5), ("COLD", 1), ("PLAIN_SAMPLES", 8)):
        monkeypatch.setattr(autotune, name, value)
    session, weight = ca.enable(backend=_slow, tune=True), nn.Parameter(torch.randn(8))
    labels = _run(session, weight, 4)
    assert len(looks) == 2, "when it was captured, and where the trial began"
    labels += _run(session, weight, 20)
    assert labels == ["structure_miss", *["hit"] * 7, *["tuning"] * 5, *["hit"] * 5, *["tuning"] * 5, "not_worth_it"]
    assert len(looks) <= 2 + 6 + 2, "once in six backwards, after two of eager's, and when it was decided"


def test_a_tape_with_the_sketch_of_one_on_trial_is_not_timed_for_it(looks: list[int]) -> None:
    """Tapes that take turns: what is compiled for the other is another variant."""
    session = ca.enable(backend="eager", tune=True)

    def run(times: int, power: int) -> None:
        for _ in range(times):
            x = torch.ones(4, requires_grad=True)
            loss = (x**2 if power == 2 else x.exp()).sum()
            with session:
                loss.backward()
            assert x.grad is not None and torch.equal(x.grad, 2 * torch.ones(4) if power == 2 else torch.ones(4).exp())

    run(4, 2)
    (trial,) = autotune.AUTOTUNE._trials.values()
    for _ in range(8):
        run(1, 3)
        run(1, 2)
    first = trial.held()
    assert first is not None and first.timing is not None and first.timing.samples == 3
    stats = session.stats()
    assert stats.structure_misses == 2 and stats.hits + sum(stats.bypasses.values()) == 18
    assert {*stats.bypasses} <= {"tuning", "not_worth_it"}


@pytest.mark.parametrize("first", [0, 1])
def test_nor_on_the_eager_engine(monkeypatch: pytest.MonkeyPatch, first: int) -> None:
    """Tapes with one sketch that take turns from the first step on: what was timed until that was seen is dropped."""
    for name, value in {"IN_A_ROW": 5, "COLD": 1, "SAMPLES_PER_SIDE": 8}.items():
        monkeypatch.setattr(autotune, name, value)
    session, now, decided = ca.enable(backend="eager", tune=True), 0, []
    timed: list[tuple[autotune.Trial, int]] = []
    eager, decide = autotune.Autotune.eager, autotune.Trial.decide
    monkeypatch.setattr(autotune.Autotune, "eager", lambda *given: timed.append((given[1], now)) or eager(*given))
    monkeypatch.setattr(autotune.Trial, "decide", lambda *given: decided.append(given[0]) or decide(*given))
    losses = [lambda x: (x * 2).sin().cos().sum(), lambda x: (x * 2).exp().tanh().sum()]
    for number in range(first, 80):
        x = torch.ones(4, requires_grad=True)
        loss = losses[number % 2](x)
        now = tape.fingerprint([loss])
        with session:
            loss.backward()
    assert decided and timed and all(tape_timed == trial.key[0] for trial, tape_timed in timed if trial in decided)


def test_a_tape_beside_one_that_was_decided_about_is_not_looked_at_either(looks: list[int]) -> None:
    slow, session = ca.enable(backend=_slow, tune=True), ca.enable(backend="eager", tune=True)
    weight = nn.Parameter(torch.randn(8))
    assert _run(slow, weight, 10)[-1] == "not_worth_it"
    assert _run(session, weight, 3)[1:] == ["hit", "hit"]
    _never_timed(session)
    before = len(looks)
    assert set(_run(session, weight, 16 + 32 + 64)) == {"hit"}
    assert len(looks) - before <= 4


def _never_timed(session: Session) -> None:
    for variant in _variants(session):
        variant.next_trial = 10**9


def _other(weight: torch.Tensor) -> torch.Tensor:
    return (weight.sin() * weight).sum()


def test_tapes_whose_roots_say_the_same_are_told_apart_all_the_same(looks: list[int]) -> None:
    """One of them is better left to eager, and the other one is not."""
    session, weight = ca.enable(backend=_slow, tune=True), nn.Parameter(torch.randn(8))
    assert _run(session, weight, 10)[-1] == "not_worth_it"

    def run_other() -> str:
        expected = torch.autograd.grad(_other(weight), weight)
        loss = _other(weight)
        with session:
            assert_same(torch.autograd.grad(loss, weight), expected)
        assert session.last is not None
        return session.last.outcome

    outcomes = []
    for _ in range(100):
        outcomes.append(run_other())
        _never_timed(session)
        assert _run(session, weight, 1) == ["not_worth_it"]
    assert outcomes.index("structure_miss") <= sketches.FIRST_SPACING
    assert set(outcomes[outcomes.index("structure_miss") + 1 :]) == {"hit"}


def test_threads_have_sketches_of_their_own() -> None:
    """Numbers of nodes are a thread's own."""
    weight = nn.Parameter(torch.randn(8))
    found: list[list[Any]] = []

    def run() -> None:
        here = Here()
        found.append([tape.sketch([(weight.exp() * weight).sum()], (), here) for _ in range(5)])

    run()
    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
        thread.join()
    assert len({each for one in found for each in one[1:]}) == 1


def test_a_leaf_has_no_sketch() -> None:
    assert tape.sketch([nn.Parameter(torch.randn(()))], (), Here()) is None


# ---- the decision, and where it stands -------------------------------------------------------------------------------

NOW = 1.75e9


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Milliseconds that each kind of backward is said to take; to be changed."""
    takes = {"eager": 2.0, "compiled": 3.0}
    hit, eager = Autotune.hit, Autotune.eager

    def hit_at(self: Autotune, variant: Variant, seconds: float, *others: Any) -> None:
        hit(self, variant, takes["compiled"] / 1e3, *others)

    def eager_at(self: Autotune, trial: Trial, seconds: float) -> None:
        eager(self, trial, takes["eager"] / 1e3)

    monkeypatch.setattr(Autotune, "hit", hit_at)
    monkeypatch.setattr(Autotune, "eager", eager_at)
    monkeypatch.setattr(autotune.time, "time", lambda: NOW)
    return takes


def _variants(session: Session) -> list[Variant]:
    return [variant for graph in session.graphs() for variant in graph.variants]


def _stored(folder: Path) -> list[Timing | None]:
    with shadow_cache.open(folder) as store:
        return [entry.timing for entry in store.entries()]


@pytest.mark.parametrize(
    ("eager", "compiled", "goes_on"),
    [
        ([1.0, 9.0, 1.0], [2.0, 2.0, 2.0], "eager"),
        ([1.0, 1.0, 9.0], [1.02, 1.02, 1.02], "compiled"),
        ([1.0, 1.0, 1.0], [1.03, 1.03, 0.0], "eager"),
        ([1.0, 1.0, 1.0, 1.0], [0.5, 0.5, 8.0], "compiled"),
    ],
)
def test_medians_decide(eager: list[float], compiled: list[float], goes_on: str) -> None:
    trial = Trial((0, None), lambda: None, [each / 1e3 for each in eager], [each / 1e3 for each in compiled])  # type: ignore[arg-type]
    timing = trial.decide()
    assert timing is not None
    assert (timing.eager, timing.compiled) == (pytest.approx(1.0), pytest.approx(sorted(compiled)[1]))
    assert (timing.samples, timing.goes_on) == (3, goes_on) and timing.when == pytest.approx(time.time(), abs=60)
    assert (trial.verdict is not None) == timing.on_eager == (goes_on == "eager")
    assert trial.verdict is None or trial.verdict.hint == f"{timing}; timed again from time to time"


def test_a_decision_for_eager_is_stored(tmp_path: Path, clock: dict[str, float]) -> None:
    session = ca.enable(backend="eager", tune=True, cache_dir=tmp_path / "cache")
    weight = nn.Parameter(torch.randn(8))
    _run(session, weight, 8)
    (variant,) = _variants(session)
    assert variant.timing is None and _stored(tmp_path / "cache") == [None], "not decided yet"
    assert _run(session, weight, 4) == ["tuning", *["not_worth_it"] * 3]
    timing = Timing(2.0, 3.0, 3, NOW, "eager")
    assert variant.timing == timing and _stored(tmp_path / "cache") == [timing]
    assert session.last is not None and session.last.reasons[0].hint.startswith(
        "eager takes 2.00 ms, the compiled graph 3.00 ms (medians of 3 each)"
    )
    assert session.stats().bypasses == {"tuning": 3, "not_worth_it": 3}


def test_a_decision_for_the_compiled_graph_is_stored_too(tmp_path: Path, clock: dict[str, float]) -> None:
    clock["compiled"] = 1.0
    session = ca.enable(backend="eager", tune=True, cache_dir=tmp_path / "cache")
    assert _run(session, nn.Parameter(torch.randn(8)), 12)[-3:] == ["hit"] * 3
    timing = Timing(2.0, 1.0, 3, NOW, "compiled")
    assert [each.timing for each in _variants(session)] == _stored(tmp_path / "cache") == [timing]


def test_the_last_decision_is_what_is_stored(tmp_path: Path, clock: dict[str, float]) -> None:
    session = ca.enable(backend="eager", tune=True, cache_dir=tmp_path / "cache")
    weight = nn.Parameter(torch.randn(8))
    assert _run(session, weight, 14)[-1] == "not_worth_it"
    clock["compiled"] = 3 / 4
    labels = _run(session, weight, 12)
    assert labels[:6] == ["hit", "tuning"] * 3 and set(labels[6:]) == {"hit"}
    assert _stored(tmp_path / "cache") == [Timing(2.0, 1.5, 3, NOW, "compiled")], "the mean of 3 and 3/4, as ratios"


def test_a_decision_that_hardly_turns_has_to_turn_twice(clock: dict[str, float]) -> None:
    """Medians of few are off by a tenth now and then, and to be wrong lasts longer one way than the other."""
    session, weight = ca.enable(backend="eager", tune=True, cache_dir=False), nn.Parameter(torch.randn(8))
    assert _run(session, weight, 14)[-1] == "not_worth_it"
    clock["compiled"] = 1.8
    labels = _run(session, weight, 12)
    assert labels[:6] == ["hit", "tuning"] * 3 and set(labels[6:11]) == {"not_worth_it"}
    labels += _run(session, weight, 12)
    assert labels[11:17] == ["hit", "tuning"] * 3 and set(labels[17:]) == {"hit"}
    (variant,) = _variants(session)
    assert variant.timing == Timing(2.0, 1.8, 3, NOW, "compiled")


def test_one_for_eager_that_is_found_again_holds_longer(
    clock: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a trial costs a small model is not to be paid for ever."""
    monkeypatch.setattr(autotune, "LAST_BEFORE_RETRIAL", 15)
    session, weight = ca.enable(backend="eager", tune=True, cache_dir=False), nn.Parameter(torch.randn(8))
    assert _run(session, weight, 9) == ["structure_miss", *["hit"] * 3, *["tuning", "hit"] * 2, "tuning"]
    trial = [*["hit", "tuning"] * 3]
    for holds in (5, 10, 15, 15):
        assert _run(session, weight, holds) == ["not_worth_it"] * holds
        assert _run(session, weight, 6) == trial
    clock["compiled"] = 0.5  # and what is decided otherwise begins anew
    assert set(_run(session, weight, 15)) == {"not_worth_it"}
    assert _run(session, weight, 7) == [*trial, "hit"]


def test_what_is_close_is_timed_more_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autotune, "SAMPLES_PER_SIDE", 8)
    monkeypatch.setattr(autotune, "CLOSE", (0.9, 1.15))

    def decided(compiled: float, eager: float, samples: int) -> bool:
        return _trial([eager] * samples, [compiled] * samples).is_decided()

    assert decided(1.2, 1.0, 8) and decided(0.85, 1.0, 8) and not decided(0.85, 1.0, 7)
    assert not decided(1.0, 1.0, 8) and not decided(1.1, 1.0, 23)
    assert decided(1.0, 1.0, 24) and decided(1.1, 1.0, 24)


def test_what_is_far_apart_is_timed_more_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where lengths change from one step to the next."""
    monkeypatch.setattr(medians, "WIDE", 1.5)

    def decided(eager: list[float], compiled: list[float]) -> bool:
        return _trial(eager, compiled).is_decided()

    wide, narrow = [1.0, 5.0, 9.0], [0.5, 0.5, 0.6]
    assert not decided(wide, narrow) and not decided(narrow, wide)
    assert decided(3 * wide, 3 * narrow) and decided(narrow, [2.0, 2.0, 2.1])
    small, big = [0.5, 0.5, 0.5, 0.9], [3.0] * 4
    timing = _trial(small + big, [0.6, 0.6, 0.7, 1.0, 2.0, 2.0, 2.0, 2.0]).decide()
    assert timing is not None and timing.goes_on == "compiled", "what is lost with one size is won with the other"
    assert _trial([1.0, 9.0], [1.0, 9.0]).decide() is not None


def test_in_a_new_process_it_is_seen_but_not_taken_over(tmp_path: Path, clock: dict[str, float]) -> None:
    weight = nn.Parameter(torch.randn(8))
    settings = {"backend": "eager", "tune": True, "cache_dir": tmp_path / "cache"}
    assert _run(ca.enable(**settings), weight, 12)[-1] == "not_worth_it"
    before = Timing(2.0, 3.0, 3, NOW, "eager")
    restart()
    clock["eager"] = 9.0
    session = ca.enable(**settings)
    assert _run(session, weight, 3) == ["hit"] * 3 and session.stats().compiles == 0
    (variant,) = _variants(session)
    assert variant.timing == before and _stored(tmp_path / "cache") == [before], "the figures are there all the same"
    assert _run(session, weight, 8) == [*["tuning", "hit"] * 2, "tuning", *["hit"] * 3]
    assert variant.timing == Timing(9.0, 3.0, 3, NOW, "compiled") and _stored(tmp_path / "cache") == [variant.timing]


def test_it_goes_where_the_entry_is(tmp_path: Path, clock: dict[str, float]) -> None:
    """Sessions with one backend share graphs, whatever folders they have."""
    one, two = (ca.enable(backend="eager", tune=True, cache_dir=tmp_path / name) for name in ("one", "two"))
    weight = nn.Parameter(torch.randn(8))
    _run(one, weight, 2)
    assert _run(two, weight, 10)[-1] == "not_worth_it"
    assert _stored(tmp_path / "one") == [Timing(2.0, 3.0, 3, NOW, "eager")] and not (tmp_path / "two").exists()


def test_without_an_entry_the_variant_has_it_alone(tmp_path: Path, clock: dict[str, float]) -> None:
    session = ca.enable(backend=lambda graph_module, examples: graph_module, tune=True, cache_dir=tmp_path / "cache")
    assert _run(session, nn.Parameter(torch.randn(8)), 12)[-1] == "not_worth_it"
    (variant,) = _variants(session)
    assert variant.not_stored and variant.timing == Timing(2.0, 3.0, 3, NOW, "eager")


def test_a_decision_that_cannot_be_written_changes_nothing(
    tmp_path: Path, clock: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    from shadow_cache.store import Store

    def fails(*arguments: Any) -> None:
        raise StoreError("the disk is gone")

    session = ca.enable(backend="eager", tune=True, cache_dir=tmp_path / "cache")
    monkeypatch.setattr(Store, "timed", fails)
    weight = nn.Parameter(torch.randn(8))
    with pytest.warns(UserWarning, match="cannot be written.*the disk is gone"):
        labels = _run(session, weight, 12)
    assert labels[9:] == ["not_worth_it"] * 3 and session.stats().failures == 0
    assert _variants(session)[0].timing == Timing(2.0, 3.0, 3, NOW, "eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _run(session, weight, 12)[-1] == "not_worth_it", "decided anew, and not warned of again"
    monkeypatch.undo()
    assert _stored(tmp_path / "cache") == [None]


def test_a_folder_that_may_only_be_read(
    tmp_path: Path, clock: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"backend": "eager", "tune": True, "cache_dir": tmp_path / "cache"}
    weight = nn.Parameter(torch.randn(8))
    _run(ca.enable(**settings), weight, 2)
    restart()
    access = os.access
    with monkeypatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("error")
        patch.setattr(os, "access", lambda path, mode: mode == os.R_OK and access(path, mode))
        session = ca.enable(**settings)
        assert _run(session, weight, 12)[-1] == "not_worth_it"
        assert _variants(session)[0].timing is not None
    restart()
    assert _stored(tmp_path / "cache") == [None]


def test_the_log_has_a_line_for_each_decision(clock: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(reporting._log, "isEnabledFor", lambda level: True)
    monkeypatch.setattr(reporting, "_write", lambda level, line: lines.append(line))
    _run(ca.enable(backend="eager", tune=True), nn.Parameter(torch.randn(8)), 12)
    (line,) = [line for line in lines if line.startswith("timed ")]
    assert line.startswith("timed SumBackward0, ") and line.endswith("; eager goes on")
    assert "eager takes 2.00 ms, the compiled graph 3.00 ms (medians of 3 each)" in line


# ---- what is left to eager without a look ----------------------------------------------------------------------------


def _left(session: Session, weight: torch.Tensor, times: int) -> None:
    """Backwards that are left to eager, without a question about any of them in between."""
    with session:
        for _ in range(times):
            torch.autograd.grad((weight.exp() * weight).sum(), weight)


def test_what_is_not_looked_at_is_counted_all_the_same(looks: list[int]) -> None:
    session, weight = ca.enable(backend=_slow, tune=True), nn.Parameter(torch.randn(8))
    assert _run(session, weight, 10)[-1] == "not_worth_it"
    before, seen = session.stats(), len(looks)
    _left(session, weight, 500)
    assert len(looks) - seen <= 6
    assert session.last is not None and session.last.outcome == "bypass"
    assert [each.kind for each in session.last.reasons] == ["not_worth_it"]  # type: ignore[union-attr]
    after = session.stats()
    assert after.backwards == before.backwards + 500
    assert after.bypasses["not_worth_it"] == before.bypasses["not_worth_it"] + 500
    assert sum(each.count for each in session._steps.events()) == after.backwards - after.hits


def test_threads_that_share_a_session_lose_no_count(looks: list[int]) -> None:
    session, weight = ca.enable(backend=_slow, tune=True), nn.Parameter(torch.randn(8))
    assert _run(session, weight, 10)[-1] == "not_worth_it"
    before = session.stats().backwards
    with switching_every(1e-6):
        in_threads(*[lambda: _left(session, weight, 400)] * 4)
    stats = session.stats()
    assert stats.backwards == before + 1600
    assert stats.hits + stats.structure_misses + sum(stats.bypasses.values()) == stats.backwards
    assert stats.bypasses["not_worth_it"] > 1500


def test_roots_are_not_read_each_time_and_what_comes_then_is_found(
    looks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After many that were left to eager one after the other, one that is a hit is taken for one of them some times."""
    read: list[int] = []
    sketch = engine.sketch
    monkeypatch.setattr(engine, "sketch", lambda *ends: read.append(1) or sketch(*ends))
    session, weight = ca.enable(backend=_slow, tune=True), nn.Parameter(torch.randn(8))

    def longer() -> torch.Tensor:
        return (weight.sin().cos() * weight.tanh()).sum()

    wanted = torch.autograd.grad(longer(), weight)
    with session:
        torch.autograd.grad(longer(), weight)
    assert _run(session, weight, 10)[-1] == "not_worth_it"
    most = sketches.LOOKS_AWAY[1]
    _left(session, weight, sketches.LEFT_BEFORE_LOOKING_AWAY + sketches.LOOKS_AWAY_OF * most)
    read.clear()
    looks.clear()
    _left(session, weight, 10 * (1 + most))
    assert len(read) <= 40 and len(looks) <= 3
    outcomes = []
    for _ in range(2 * (most + 1) + 40):
        with session:
            assert_same(torch.autograd.grad(longer(), weight), wanted)
        assert session.last is not None
        outcomes.append(session.last.outcome)
    first = outcomes.index("hit")
    assert first <= 2 * (most + 1) and {*outcomes[first:]} <= {"hit", "bypass"} and outcomes[first:].count("hit") >= 5


@pytest.mark.parametrize("what", ["another session", "forgotten", "another thread", "other settings in turn"])
def test_what_is_taken_for_others_without_a_look_is_of_the_same_thread_and_settings(
    what: str, looks: list[int]
) -> None:
    session, weight = ca.enable(backend=_slow, tune=True), nn.Parameter(torch.randn(8))
    plain = ca.enable(backend=_slow, tune=False)
    _run(plain, weight, 2)
    assert _run(session, weight, 10)[-1] == "not_worth_it"
    here = sessions.thread.here
    while here.unseen <= 10:
        _left(session, weight, 1)
    if what == "another session":
        assert _run(plain, weight, 3) == ["hit"] * 3
    elif what == "forgotten":
        AUTOTUNE.clear()
        assert _run(session, weight, 3) == ["hit", "tuning", "hit"]
    elif what == "another thread":
        in_threads(lambda: (_run(plain, weight, 3), _left(session, weight, 3)))
        assert plain.stats().hits == 4 and here.unseen > 10
    else:
        for _ in range(100):
            assert _run(plain, weight, 1) == ["hit"]
            assert _run(session, weight, 1) == ["not_worth_it"]
        assert not here.unseen
    assert plain.stats().backwards == plain.stats().hits + 1


@pytest.mark.parametrize("leaf", [False, True])
def test_one_alone_is_taken_for_others_after_those_without_a_look(leaf: bool, looks: list[int]) -> None:
    """Its sketch is of all of them. A leaf has none."""
    session, weight, here = ca.enable(backend=_slow, tune=True), nn.Parameter(torch.randn(8)), sessions.thread.here

    def loss() -> torch.Tensor:
        return weight if leaf else weight.cos().exp().sin().sum()

    with session:
        torch.autograd.grad(loss(), weight, torch.ones(8) if leaf else None)
    assert _run(session, weight, 10)[-1] == "not_worth_it"
    while not here.unseen:
        _left(session, weight, 1)
    _left(session, weight, here.unseen)
    labels = []
    for _ in range(3):
        with session:
            torch.autograd.grad(loss(), weight, torch.ones(8) if leaf else None)
        assert session.last is not None
        labels.append(session.last.outcome)
    assert labels == (["hit"] * 3 if leaf else ["bypass", "hit", "hit"]) and not here.away


def test_what_was_not_taken_is_given_back() -> None:
    """Else a verdict would end too soon where sessions take turns."""
    looks, verdict = sketches.Looks(), Bypass("not_worth_it")
    known = sketches.Known(Trial((0, None, False), lambda: None, verdict=verdict, left=1000))  # type: ignore[arg-type]
    known.left = known.given = 1000
    for _ in range(sketches.LEFT_BEFORE_LOOKING_AWAY):
        assert looks.took_for(known, 1) is verdict
    assert looks.unseen == 16 and known.used == sketches.LEFT_BEFORE_LOOKING_AWAY + 16
    looks.unseen -= 3
    assert looks.took_for(sketches.UNKNOWN, 2) is None
    assert not looks.unseen and known.used == sketches.LEFT_BEFORE_LOOKING_AWAY + 3
    for spare in (0, 1, 2, 5):
        known.left = 1 + spare
        assert looks.took_for(known, 1) is verdict
        assert looks.unseen == max(0, spare - 1) and known.left == min(1, spare)
        known.left = 0  # it was forgotten
        assert looks.took_for(known, 1) is None and known.left == 0 and not looks.unseen


def test_the_log_has_a_line_for_each(caplog: pytest.LogCaptureFixture, looks: list[int]) -> None:
    session, weight = ca.enable(backend=_slow, tune=True), nn.Parameter(torch.randn(8))
    assert _run(session, weight, 10)[-1] == "not_worth_it"
    level = reporting._log.level
    reporting._log.setLevel("INFO")
    try:
        with caplog.at_level("INFO", logger=reporting._log.name):
            _left(session, weight, 5)
    finally:
        reporting._log.setLevel(level)
    assert len([each for each in caplog.messages if "not_worth_it" in each]) == 5


@pytest.mark.parametrize("policy", ["on_miss", "on_unsupported"])
def test_who_wants_an_error_is_not_taken_for_others(policy: str, looks: list[int]) -> None:
    """What is left to eager under other settings says nothing, and no tape goes by without a look."""

    def loss() -> torch.Tensor:
        y = weight * (1 + 1j)
        if policy == "on_unsupported":
            torch.view_as_real(y).mul_(2)  # a view that sizes and strides do not describe
        return y.abs().square().mean()

    options: dict[str, Any] = {"backend": _slow, "tune": True, "cache_dir": False}
    session, weight = ca.enable(**options), nn.Parameter(torch.randn(8))
    strict, other = ca.enable(**options, **{policy: "raise"}), ca.enable(**options, on_miss="eager")
    assert _run(session, weight, 10)[-1] == "not_worth_it"
    for before in (other, strict):
        _left(before, weight, 100)
        while before is other and sessions.thread.here.unseen < 5:
            _left(before, weight, 1)
        with pytest.raises((ca.CacheMissError, ca.UnsupportedBackwardError)), strict:
            torch.autograd.grad(loss(), weight)


def test_what_came_before_many_others_is_forgotten_too() -> None:
    looks, kept = sketches.Looks(), sketches.Sketches()
    kept.keep("one", Trial((0, None, False), lambda: None, verdict=Bypass("not_worth_it"), left=1000))
    looks.took_for(known := kept.known["one"], 1)
    for each in range(sketches._MAX_KEPT):
        kept.keep(each, None)
    kept.forget()
    assert known.left == 0


def test_what_runs_in_the_midst_of_a_sketch_changes_nothing_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """``gc`` and signals run backwards of other sessions at any call."""
    looks, verdict = sketches.Looks(), Bypass("not_worth_it")
    known, other = (
        sketches.Known(Trial((0, None, False), lambda: None, verdict=each, left=1000)) for each in (verdict, None)
    )
    for each in (known, other):
        each.left = each.given = 1000

    def least(*numbers: int) -> int:
        monkeypatch.undo()
        assert looks.took_for(other, 2) is None
        return min(numbers)

    looks.streak = sketches.LEFT_BEFORE_LOOKING_AWAY
    monkeypatch.setattr(sketches, "min", least, raising=False)
    assert looks.took_for(known, 1) is verdict
    assert (looks.known, looks.number, looks.verdict) == (known, 1, verdict)
    assert looks.unseen and known.used == 1 + looks.unseen and not other.used


def test_what_is_left_in_the_midst_of_counting_is_counted(looks: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    session, weight = ca.enable(backend=_slow, tune=True), nn.Parameter(torch.randn(8))
    assert _run(session, weight, 10)[-1] == "not_worth_it"
    _left(session, weight, 20)
    before, real = session.stats().backwards, sessions._Left

    def left(verdict: Bypass) -> Any:
        monkeypatch.setattr(sessions, "_Left", real)
        _left(session, weight, 5)  # as ``gc`` or a signal may
        return real(verdict)

    monkeypatch.setattr(sessions, "_Left", left)
    _left(session, weight, 1)
    assert session.stats().backwards == before + 6


def test_where_two_kinds_come_in_phases_the_second_is_soon_found(
    looks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sketches, "LOOKS_AWAY_FOR", 0.0)  # as if eager took long
    session, weight = ca.enable(backend=_slow, tune=True), nn.Parameter(torch.randn(8))
    plain = lambda: weight.cos().exp().sin().sum()  # noqa: E731
    with session:
        torch.autograd.grad(plain(), weight)
    ((variant,),) = [graph.variants for graph in session.graphs()]
    variant.next_trial = sys.maxsize
    assert _run(session, weight, 10)[-1] == "not_worth_it"
    found = 0
    for _ in range(10):
        _left(session, weight, 400)
        before = session.stats().hits
        with session:
            for _ in range(50):
                torch.autograd.grad(plain(), weight)
        found += session.stats().hits - before
    assert found >= 10 * 30


def test_one_on_trial_is_not_taken_for_those_that_are_left(looks: list[int]) -> None:
    """Else its trial would take thousands of steps, in which it runs on eager."""
    session, weight = ca.enable(backend=_slow, tune=True), nn.Parameter(torch.randn(8))
    assert _run(session, weight, 10)[-1] == "not_worth_it"
    _left(session, weight, 100)
    labels = []
    for _ in range(150):
        with session:
            torch.autograd.grad(weight.cos().exp().sin().sum(), weight)
        assert session.last is not None
        first = session.last.reasons[0] if session.last.reasons else None
        labels.append(first.label if isinstance(first, Bypass) else session.last.outcome)
        _left(session, weight, 5)
    assert labels.count("tuning") >= 3


def test_a_sketch_of_one_on_trial_that_another_has_too_is_not_believed_for_long() -> None:
    """Else those on trial were hits for a thousand backwards, however slow these are, and their trial did not end."""
    kept, trial = sketches.Sketches(), Trial((0, None, False), lambda: None)
    kept.keep_on_trial("one", trial, 5)
    known = kept.known["one"]
    assert known.left == 5
    known.left = 0
    kept.keep("one", None)  # another tape, which is on no trial
    assert not known.left and known.found is None
    kept.keep_on_trial("one", trial, 5)
    kept.keep("one", None)
    assert not known.left
