"""``tune``: what is slower than eager is left to eager, and the decision can be read."""

from __future__ import annotations

import gc
import os
import threading
import time
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import compiled_autograd as ca
import shadow_cache
from compiled_autograd.cache import variants
from compiled_autograd.cache.variants import Variant
from compiled_autograd.capture import tape
from compiled_autograd.diagnostics import reporting
from compiled_autograd.engine.session import Here, Session
from compiled_autograd.policies import autotune, medians, sketches
from compiled_autograd.policies.autotune import Autotune, Trial
from compiled_autograd.settings import Settings
from compiled_autograd.steps.proof import MAX_WEAK
from shadow_cache import StoreError, Timing

from .helpers import assert_same
from .stored import restart
from .tuned import compute, count_looks, leave, run_small, slow, soon  # noqa: F401


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
    run_small(session, nn.Parameter(torch.randn(8)), 25)
    assert ways == 2 * (4 * ["compiled"] + 4 * ["eager"])
    ((variant,),) = [graph.variants for graph in session.graphs()]
    assert variant.timing is not None
    assert (variant.timing.eager, variant.timing.compiled, variant.timing.samples) == (1e3, 1e3, 6)
    assert (session.stats().tuning, session.stats().bypasses) == (8, {})


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
    run_small(session, nn.Parameter(torch.randn(8)), 23)
    ((variant,),) = [graph.variants for graph in session.graphs()]
    assert variant.timing is not None and variant.timing.goes_on == "compiled"
    assert (session.stats().tuning, session.stats().bypasses) == (10, {})


def test_a_trial_that_gets_no_further_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one whose hits are all compared with the real calls: each backward would be looked at for ever."""
    monkeypatch.setattr(autotune, "SAMPLES_PER_SIDE", 8)
    monkeypatch.setattr(autotune, "PATIENCE", 3)
    session = ca.enable(backend="eager", tune=True)
    run_small(session, nn.Parameter(torch.randn(8)), 7)
    ((_, trial),) = autotune.AUTOTUNE._trials.items()
    assert trial.turn > 0
    monkeypatch.setattr(autotune.AUTOTUNE, "hit", lambda *given: None)
    run_small(session, nn.Parameter(torch.randn(8)), 12)
    assert not autotune.AUTOTUNE.active


def test_a_trial_goes_on_with_other_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have its fingerprint too."""
    monkeypatch.setattr(autotune, "SAMPLES_PER_SIDE", 8)
    monkeypatch.setattr(autotune, "MAX_TIME_RATIO", 1e9)
    session = ca.enable(backend="eager", tune=True)
    run_small(session, nn.Parameter(torch.randn(8)), 7)
    ((key, trial),) = autotune.AUTOTUNE._trials.items()
    run_small(session, nn.Parameter(torch.randn(9)), 36)
    ((first, second),) = [graph.variants for graph in session.graphs()]
    assert trial.held() is first and first.timing is not None
    assert second.timing is not None or autotune.AUTOTUNE._trials[key].held() is second


def test_a_trial_of_a_tape_that_never_comes_again_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """While there is one, every backward is looked at before it may take the fast path."""
    monkeypatch.setattr(autotune, "SAMPLES_PER_SIDE", 8)
    monkeypatch.setattr(sketches, "PATIENCE_OF_ALL", 16)
    session = ca.enable(backend="eager", tune=True)
    run_small(session, nn.Parameter(torch.randn(8)), 7)
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
    run_small(session, nn.Parameter(torch.randn(8)), 40)
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
            run_small(session, weight, 1)
    timings = [variant.timing for graph in session.graphs() for variant in graph.variants]
    assert len(timings) == 2 and all(each is not None and each.goes_on == "compiled" for each in timings)
    assert "not_worth_it" not in session.stats().bypasses


def test_nor_is_one_waited_for_where_nothing_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autotune, "SAMPLES_PER_SIDE", 8)
    monkeypatch.setattr(sketches, "PATIENCE_OF_ALL", 16)
    run_small(ca.enable(backend="eager", tune=True), nn.Parameter(torch.randn(8)), 7)
    assert autotune.AUTOTUNE.active
    labels = run_small(ca.enable(backend="eager", tune=False), nn.Parameter(torch.randn(8)), 120)
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


def test_a_slow_graph_is_left_to_eager_and_says_so() -> None:
    session = ca.enable(backend=slow, tune=True)
    labels = run_small(session, nn.Parameter(torch.randn(8)), 14)
    assert labels[:4] == ["structure_miss", "hit", "hit", "hit"]
    assert labels[4:9] == ["tuning", "hit", "tuning", "hit", "tuning"]
    assert labels[9:14] == ["not_worth_it"] * 5
    assert session.last is not None
    (reason,) = session.last.reasons
    assert "eager takes" in reason.hint and "ms" in reason.hint


@pytest.mark.parametrize("device", ["cuda", "xpu"])
def test_what_a_device_is_sent_is_waited_for(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Else the sending would be timed. The hit before which nothing was waited for counts for nobody."""
    waits: list[int] = []
    counted: list[float] = []
    monkeypatch.setattr(medians, "wait_for_devices", lambda: waits.append(len(counted)))
    monkeypatch.setattr(Trial, "add", lambda trial, times, seconds: counted.append(seconds))
    session, weight = ca.enable(backend=slow, tune=True), nn.Parameter(torch.randn(8))
    run_small(session, weight, 3)
    ((variant,),) = [graph.variants for graph in session.graphs()]
    variant.devices = frozenset({device})
    run_small(session, weight, 1)
    assert not waits and not counted
    labels = run_small(session, weight, 4)
    if device == "cuda":
        assert labels == ["hit"] * 4 and len(counted) == 4 and len(waits) == 8
    else:
        assert labels == ["hit"] * 4 and not counted and not waits


def test_it_is_tried_again_from_time_to_time() -> None:
    session = ca.enable(backend=slow, tune=True)
    labels = run_small(session, nn.Parameter(torch.randn(8)), 24)
    assert labels[14:20] == ["hit", "tuning", "hit", "tuning", "hit", "tuning"]
    assert set(labels[20:]) == {"not_worth_it"}


def test_what_is_done_around_a_hit_is_part_of_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph alone is as fast as eager, but telling the session takes longer than both."""
    monkeypatch.setattr(autotune, "MAX_TIME_RATIO", 10.0)
    session, record = ca.enable(backend="eager", tune=True), Session.record

    def slowly(self: Session, outcome: Any, *counts: Any) -> None:
        record(self, outcome, *counts)
        if outcome.outcome == "hit":
            compute()

    monkeypatch.setattr(Session, "record", slowly)
    labels = run_small(session, nn.Parameter(torch.randn(8)), 14)
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
        labels = run_small(session, nn.Parameter(torch.randn(8)), 14)
    finally:
        torch.set_num_threads(threads)
    assert labels.count("tuning") == 3 and set(labels[9:]) == {"hit"}


def test_a_fast_graph_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autotune, "MAX_TIME_RATIO", 1e9)
    session = ca.enable(backend="eager", tune=True)
    labels = run_small(session, nn.Parameter(torch.randn(8)), 20)
    assert labels.count("tuning") == 3 and set(labels[9:]) == {"hit"}


def test_tune_false_times_nothing() -> None:
    session = ca.enable(backend=slow, tune=False)
    assert set(run_small(session, nn.Parameter(torch.randn(8)), 12)[1:]) == {"hit"}


def test_deterministic_algorithms_leave_nothing_to_the_clock() -> None:
    session = ca.enable(backend=slow, tune=True)
    torch.use_deterministic_algorithms(True)
    try:
        assert set(run_small(session, nn.Parameter(torch.randn(8)), 12)[1:]) == {"hit"}
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_decision_holds_for_its_settings_alone() -> None:
    weight = nn.Parameter(torch.randn(8))
    assert run_small(ca.enable(backend=slow, tune=True), weight, 12)[-1] == "not_worth_it"
    assert run_small(ca.enable(backend="eager", tune=False), weight, 3)[-1] == "hit"
    assert run_small(ca.enable(backend=slow, tune=False), weight, 3)[-1] == "hit"


def test_what_cannot_be_captured_during_a_trial_is_no_turn_of_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused as it would be without the trial, and its time counts for nothing."""
    from compiled_autograd.diagnostics import bypass
    from compiled_autograd.threads.gate import GATE

    session = ca.enable(backend=slow, tune=True, on_unsupported="raise")
    weight = nn.Parameter(torch.randn(8))
    assert run_small(session, weight, 6)[-2:] == ["tuning", "hit"]
    run_small(session, weight, 1)  # eager's turn; the next is to be compiled
    with monkeypatch.context() as refused:
        refused.setattr(GATE, "enter_capture", lambda token: bypass.OTHER_THREAD)
        with session, pytest.raises(ca.UnsupportedBackwardError, match="other_thread"):
            (weight.exp() * weight).sum().backward()
    (trial,) = autotune.AUTOTUNE._trials.values()
    assert (len(trial.eager), len(trial.compiled)) == (2, 2)


def test_a_verdict_holds_no_variant_that_went() -> None:
    session = ca.enable(backend=slow, tune=True)
    weight = nn.Parameter(torch.randn(8))
    assert run_small(session, weight, 10)[-1] == "not_worth_it"
    (graph,) = session.graphs()
    gone = weakref.ref(graph.variants[0])
    graph.evict()
    del graph
    gc.collect()
    assert gone() is None
    assert run_small(session, weight, 4)[-1] == "not_worth_it"
    assert run_small(session, weight, 2) == ["shape_miss", "hit"]  # compiled again, once the verdict is over
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


def test_what_was_decided_holds_without_a_look_at_each_node(looks: list[int]) -> None:
    session, weight = ca.enable(backend=slow, tune=True), nn.Parameter(torch.randn(8))
    assert run_small(session, weight, 10)[-1] == "not_worth_it"
    before = len(looks)
    assert set(run_small(session, weight, 16 + 32 + 64)) == {"not_worth_it"}
    assert len(looks) - before <= 4


def test_in_a_trial_few_are_looked_at(looks: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A look takes as long as a small backward, and puts the engine's code out of the caches."""
    for name, value in (("SAMPLES_PER_SIDE", 8), ("IN_A_ROW", 5), ("COLD", 1), ("PLAIN_SAMPLES", 8)):
        monkeypatch.setattr(autotune, name, value)
    session, weight = ca.enable(backend=slow, tune=True), nn.Parameter(torch.randn(8))
    labels = run_small(session, weight, 4)
    assert len(looks) == 2, "when it was captured, and where the trial began"
    labels += run_small(session, weight, 20)
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
    assert stats.structure_misses == 2 and stats.hits + stats.tuning + sum(stats.bypasses.values()) == 18
    assert {*stats.bypasses} <= {"not_worth_it"}


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
    slower, session = ca.enable(backend=slow, tune=True), ca.enable(backend="eager", tune=True)
    weight = nn.Parameter(torch.randn(8))
    assert run_small(slower, weight, 10)[-1] == "not_worth_it"
    assert run_small(session, weight, 3)[1:] == ["hit", "hit"]
    _never_timed(session)
    before = len(looks)
    assert set(run_small(session, weight, 16 + 32 + 64)) == {"hit"}
    assert len(looks) - before <= 4


def _never_timed(session: Session) -> None:
    for variant in _variants(session):
        variant.next_trial = 10**9


def _other(weight: torch.Tensor) -> torch.Tensor:
    return (weight.sin() * weight).sum()


def test_tapes_whose_roots_say_the_same_are_told_apart_all_the_same(looks: list[int]) -> None:
    """One of them is better left to eager, and the other one is not."""
    session, weight = ca.enable(backend=slow, tune=True), nn.Parameter(torch.randn(8))
    assert run_small(session, weight, 10)[-1] == "not_worth_it"

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
        assert run_small(session, weight, 1) == ["not_worth_it"]
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
    run_small(session, weight, 8)
    (variant,) = _variants(session)
    assert variant.timing is None and _stored(tmp_path / "cache") == [None], "not decided yet"
    assert run_small(session, weight, 4) == ["tuning", *["not_worth_it"] * 3]
    timing = Timing(2.0, 3.0, 3, NOW, "eager")
    assert variant.timing == timing and _stored(tmp_path / "cache") == [timing]
    assert session.last is not None and session.last.reasons[0].hint.startswith(
        "eager takes 2.00 ms, the compiled graph 3.00 ms (medians of 3 each)"
    )
    assert (session.stats().tuning, session.stats().bypasses) == (3, {"not_worth_it": 3})


def test_a_decision_for_the_compiled_graph_is_stored_too(tmp_path: Path, clock: dict[str, float]) -> None:
    clock["compiled"] = 1.0
    session = ca.enable(backend="eager", tune=True, cache_dir=tmp_path / "cache")
    assert run_small(session, nn.Parameter(torch.randn(8)), 12)[-3:] == ["hit"] * 3
    timing = Timing(2.0, 1.0, 3, NOW, "compiled")
    assert [each.timing for each in _variants(session)] == _stored(tmp_path / "cache") == [timing]


def test_the_last_decision_is_what_is_stored(tmp_path: Path, clock: dict[str, float]) -> None:
    session = ca.enable(backend="eager", tune=True, cache_dir=tmp_path / "cache")
    weight = nn.Parameter(torch.randn(8))
    assert run_small(session, weight, 14)[-1] == "not_worth_it"
    clock["compiled"] = 3 / 4
    labels = run_small(session, weight, 12)
    assert labels[:6] == ["hit", "tuning"] * 3 and set(labels[6:]) == {"hit"}
    assert _stored(tmp_path / "cache") == [Timing(2.0, 1.5, 3, NOW, "compiled")], "the mean of 3 and 3/4, as ratios"


def test_a_decision_that_hardly_turns_has_to_turn_twice(clock: dict[str, float]) -> None:
    """Medians of few are off by a tenth now and then, and to be wrong lasts longer one way than the other."""
    session, weight = ca.enable(backend="eager", tune=True, cache_dir=False), nn.Parameter(torch.randn(8))
    assert run_small(session, weight, 14)[-1] == "not_worth_it"
    clock["compiled"] = 1.8
    labels = run_small(session, weight, 12)
    assert labels[:6] == ["hit", "tuning"] * 3 and set(labels[6:11]) == {"not_worth_it"}
    labels += run_small(session, weight, 12)
    assert labels[11:17] == ["hit", "tuning"] * 3 and set(labels[17:]) == {"hit"}
    (variant,) = _variants(session)
    assert variant.timing == Timing(2.0, 1.8, 3, NOW, "compiled")


def test_one_for_eager_that_is_found_again_holds_longer(
    clock: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a trial costs a small model is not to be paid for ever."""
    monkeypatch.setattr(autotune, "LAST_BEFORE_RETRIAL", 15)
    session, weight = ca.enable(backend="eager", tune=True, cache_dir=False), nn.Parameter(torch.randn(8))
    assert run_small(session, weight, 9) == ["structure_miss", *["hit"] * 3, *["tuning", "hit"] * 2, "tuning"]
    trial = [*["hit", "tuning"] * 3]
    for holds in (5, 10, 15, 15):
        assert run_small(session, weight, holds) == ["not_worth_it"] * holds
        assert run_small(session, weight, 6) == trial
    clock["compiled"] = 0.5  # and what is decided otherwise begins anew
    assert set(run_small(session, weight, 15)) == {"not_worth_it"}
    assert run_small(session, weight, 7) == [*trial, "hit"]


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
    assert run_small(ca.enable(**settings), weight, 12)[-1] == "not_worth_it"
    before = Timing(2.0, 3.0, 3, NOW, "eager")
    restart()
    clock["eager"] = 9.0
    session = ca.enable(**settings)
    assert run_small(session, weight, 3) == ["hit"] * 3 and session.stats().compiles == 0
    (variant,) = _variants(session)
    assert variant.timing == before and _stored(tmp_path / "cache") == [before], "the figures are there all the same"
    assert run_small(session, weight, 8) == [*["tuning", "hit"] * 2, "tuning", *["hit"] * 3]
    assert variant.timing == Timing(9.0, 3.0, 3, NOW, "compiled") and _stored(tmp_path / "cache") == [variant.timing]


def test_it_goes_where_the_entry_is(tmp_path: Path, clock: dict[str, float]) -> None:
    """Sessions with one backend share graphs, whatever folders they have."""
    one, two = (ca.enable(backend="eager", tune=True, cache_dir=tmp_path / name) for name in ("one", "two"))
    weight = nn.Parameter(torch.randn(8))
    run_small(one, weight, 2)
    assert run_small(two, weight, 10)[-1] == "not_worth_it"
    assert _stored(tmp_path / "one") == [Timing(2.0, 3.0, 3, NOW, "eager")] and not (tmp_path / "two").exists()


def test_without_an_entry_the_variant_has_it_alone(tmp_path: Path, clock: dict[str, float]) -> None:
    session = ca.enable(backend=lambda graph_module, examples: graph_module, tune=True, cache_dir=tmp_path / "cache")
    assert run_small(session, nn.Parameter(torch.randn(8)), 12)[-1] == "not_worth_it"
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
        labels = run_small(session, weight, 12)
    assert labels[9:] == ["not_worth_it"] * 3 and session.stats().failures == 0
    assert _variants(session)[0].timing == Timing(2.0, 3.0, 3, NOW, "eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run_small(session, weight, 12)[-1] == "not_worth_it", "decided anew, and not warned of again"
    monkeypatch.undo()
    assert _stored(tmp_path / "cache") == [None]


def test_a_folder_that_may_only_be_read(
    tmp_path: Path, clock: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"backend": "eager", "tune": True, "cache_dir": tmp_path / "cache"}
    weight = nn.Parameter(torch.randn(8))
    run_small(ca.enable(**settings), weight, 2)
    restart()
    access = os.access
    with monkeypatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("error")
        patch.setattr(os, "access", lambda path, mode: mode == os.R_OK and access(path, mode))
        session = ca.enable(**settings)
        assert run_small(session, weight, 12)[-1] == "not_worth_it"
        assert _variants(session)[0].timing is not None
    restart()
    assert _stored(tmp_path / "cache") == [None]


def test_the_log_has_a_line_for_each_decision(clock: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(reporting._log, "isEnabledFor", lambda level: True)
    monkeypatch.setattr(reporting, "_write", lambda level, line: lines.append(line))
    run_small(ca.enable(backend="eager", tune=True), nn.Parameter(torch.randn(8)), 12)
    (line,) = [line for line in lines if line.startswith("timed ")]
    assert line.startswith("timed SumBackward0, ") and line.endswith("; eager is used")
    assert "eager takes 2.00 ms, the compiled graph 3.00 ms (medians of 3 each)" in line


# ---- what is left to eager without a look ----------------------------------------------------------------------------
