"""While policies look at tapes (one is on trial, or better left to eager, or compiling has cost too much), Python asks
them, and the fast path serves what they let go on."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch

import compiled_autograd as ca
from compiled_autograd.engine.fast_path import arming as fast_path
from compiled_autograd.engine.fast_path.arming import FAST_PATH
from compiled_autograd.engine.native_hits import NativeHits
from compiled_autograd.policies import autotune
from compiled_autograd.policies.admission import ADMISSION
from compiled_autograd.policies.autotune import AUTOTUNE
from compiled_autograd.policies.background import BACKGROUND
from compiled_autograd.policies.refusals import REFUSALS, Refusal
from compiled_autograd.policies.sketches import SKETCHES

from .helpers import assert_same, mlp, trials_of_two_rows
from .test_fast_path import Make, _counters, _eager, _session, _step, _train, _until_fast, error_in_its_middle
from .test_fast_path import hits as hits  # a fixture, as the next
from .test_fast_path import net as net
from .test_interrupts import _InterruptAt


@contextmanager
def _over_budget() -> Iterator[None]:
    ADMISSION.closed = True
    try:
        yield
    finally:
        ADMISSION.closed = False
        SKETCHES.clear()


@contextmanager
def _refused() -> Iterator[None]:
    REFUSALS._refusals[(0, ())] = Refusal(1)
    try:
        yield
    finally:
        REFUSALS.clear()


@contextmanager
def _compiling() -> Iterator[None]:
    tapes = BACKGROUND._tapes
    tapes[0] = 1
    try:
        yield
    finally:
        del tapes[0]


LOOKS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "over budget": _over_budget,
    "refused": _refused,
    "compiling": _compiling,
}


@pytest.mark.parametrize(
    "looks", [pytest.param(each, marks=pytest.mark.slow if each == "compiling" else ()) for each in LOOKS]
)
def test_a_tape_that_a_policy_lets_go_on(hits: NativeHits, net: tuple[Make, list[torch.Tensor]], looks: str) -> None:
    """It is served and counted as by Python."""
    make, leaves = net
    session = _session(on_miss="background" if looks == "compiling" else "compile")
    for step in range(3):
        _step(session, make, leaves, step)
        assert session.wait(60)
    _until_fast(session, make, leaves)
    before, met, served = _counters(session), hits.hits, FAST_PATH.served
    with LOOKS[looks]():
        for step in range(5):
            assert_same(_step(session, make, leaves, step), _eager(make, leaves, step), bitwise=False)
    after = _counters(session)
    assert FAST_PATH.served == served + 5 and hits.hits == met + 5
    assert [one - other for one, other in zip(after[:4], before[:4], strict=True)] == [5] * 4
    assert after[4:] == ("hit", ["capture", "run"])
    served = FAST_PATH.served
    _step(session, make, leaves, 0)
    assert FAST_PATH.served == served + 1


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_error_is_counted_once(
    hits: NativeHits,
    net: tuple[Make, list[torch.Tensor]],
    monkeypatch: pytest.MonkeyPatch,
    error: type[BaseException],
) -> None:
    error_in_its_middle(net, monkeypatch, error, _over_budget)


@pytest.mark.parametrize("known", [True, False])
def test_an_interrupt_around_it_is_counted_once(
    hits: NativeHits, net: tuple[Make, list[torch.Tensor]], known: bool
) -> None:
    """After each call that Python makes there: whether it was served, or the tape is another."""
    make, leaves = net
    session = _session()
    _until_fast(session, make, leaves)
    loss_of, before, served = make if known else lambda step: (make(step) + 1).exp(), session.stats(), FAST_PATH.served
    interrupts = 0
    while True:
        for leaf in leaves:
            leaf.grad = None
        interrupt, loss = _InterruptAt(interrupts, (fast_path.__file__,), ("serve",)), loss_of(1)
        with _over_budget(), session:
            sys.setprofile(interrupt)
            try:
                loss.backward()
            except KeyboardInterrupt:
                interrupts += 1
            finally:
                sys.setprofile(None)
        if not interrupt.came:
            break
    after = session.stats()
    assert interrupts > 2 and after.backwards - before.backwards == interrupts + 1
    told = after.hits + after.tuning + after.structure_misses + sum(after.bypasses.values())
    assert after.backwards - told == before.backwards - before.hits - before.structure_misses
    assert (FAST_PATH.served > served) == known


def test_what_it_takes_and_does_not_run(hits: NativeHits, net: tuple[Make, list[torch.Tensor]]) -> None:
    """Python goes on with it, as it does without policies."""
    make, leaves = net
    session = _session()
    _until_fast(session, make, leaves)
    before, served = session.stats(), FAST_PATH.served
    with _over_budget(), torch.autograd.profiler.profile():
        found = _step(session, make, leaves, 1)
    assert_same(found, _eager(make, leaves, 1), bitwise=False)
    after = session.stats()
    assert FAST_PATH.served == served and (after.hits, after.bypasses) == (before.hits + 1, {})


def test_a_trial_times_what_will_serve(
    hits: NativeHits, net: tuple[Make, list[torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first hit of a trial is Python's, which begins it; the others are not."""
    trials_of_two_rows(monkeypatch)
    monkeypatch.setattr(autotune, "MAX_TIME_RATIO", 1e9)  # hits go on
    make, leaves = net
    session, served = _session(tune=True), FAST_PATH.served
    for step in range(60):
        assert_same(_step(session, make, leaves, step), _eager(make, leaves, step), bitwise=False)
        if AUTOTUNE.active and not session.stats().tuning:
            before = FAST_PATH.served - served
    stats = session.stats()
    rows = autotune.SAMPLES_PER_SIDE // (autotune.IN_A_ROW - autotune.COLD)
    assert stats.tuning == rows * autotune.IN_A_ROW
    assert stats.hits + stats.tuning + sum(stats.bypasses.values()) + stats.structure_misses == stats.backwards == 60
    (graph,) = session.graphs()
    (variant,) = graph.variants
    assert variant.timing is not None and variant.timing.samples == autotune.SAMPLES_PER_SIDE
    timed = FAST_PATH.served - served - before
    assert timed >= autotune.SAMPLES_PER_SIDE - 1


def test_a_tape_beside_one_that_is_left_to_eager(hits: NativeHits, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the small one of two models that train in turn may be."""
    small, x = torch.nn.Linear(8, 2), torch.randn(3, 8)
    makes: list[tuple[Make, list[torch.Tensor]]] = []
    makes.append((lambda step: small(x + step).sum(), list(small.parameters())))
    model = mlp()
    makes.append((lambda step: (model(x + step) ** 2).mean(), list(model.parameters())))
    session = _session(tune=True)
    with monkeypatch.context() as always:
        always.setattr(autotune, "MAX_TIME_RATIO", 0.0)
        while not session.stats().bypasses.get("not_worth_it"):
            _step(session, *makes[0], 0)
    steady = _session()
    _until_fast_beside(steady, *makes[1])
    served, before = FAST_PATH.served, (session.stats(), steady.stats())
    for step in range(20):
        for around, (make, leaves) in zip((session, steady), makes, strict=True):
            assert_same(_step(around, make, leaves, step), _eager(make, leaves, step), bitwise=False)
    after = (session.stats(), steady.stats())
    assert FAST_PATH.served == served + 20 and after[1].hits == before[1].hits + 20
    assert after[0].bypasses["not_worth_it"] == before[0].bypasses["not_worth_it"] + 20


def _until_fast_beside(session: ca.Session, make: Make, leaves: list[torch.Tensor]) -> None:
    served = FAST_PATH.served
    for step in range(10):
        assert_same(_step(session, make, leaves, step), _eager(make, leaves, step), bitwise=False)
    assert FAST_PATH.served > served


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_random_trainings(hits: NativeHits, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Where policies look or not, tapes are on trial or left to eager: each step beside eager's."""
    chance = random.Random(seed)
    monkeypatch.setattr(autotune, "SAMPLES_PER_SIDE", 2)
    monkeypatch.setattr(autotune, "BACKWARDS_BEFORE_RETRIAL", 5)

    def session() -> ca.Session:
        assert seed > 0 or BACKGROUND.wait(60)  # else it is a matter of luck whether anything serves in time
        ADMISSION.closed = chance.random() < 0.3
        autotune.MAX_TIME_RATIO = chance.choice([0.0, 1e9])
        if chance.random() < 0.1:
            SKETCHES.clear()
        return _session(tune=chance.random() < 0.7, on_miss=chance.choice(["compile", "background"]))

    monkeypatch.setattr(autotune, "MAX_TIME_RATIO", 1.0)
    monkeypatch.setattr(ADMISSION, "closed", False)
    served = _train(seed, 150, session)  # which may be none, where all is on trial or left to eager
    assert served > 0 or seed > 0


def test_what_came_next_is_tried_first(hits: NativeHits) -> None:
    """More tapes that take turns than are tried one after the other."""
    models = [torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(deep)]) for deep in range(1, 12)]
    x, session = torch.randn(3, 4), _session()

    def turn() -> None:
        for model in models:
            leaves = list(model.parameters())
            found = _step(session, lambda _: (model(x) ** 2).sum(), leaves, 1)  # noqa: B023
            assert_same(found, _eager(lambda _: (model(x) ** 2).sum(), leaves, 1), bitwise=False)  # noqa: B023

    for _ in range(9):
        turn()
    served = FAST_PATH.served
    turn()
    assert FAST_PATH.served == served + len(models)
    assert FAST_PATH._before_the_walk() is FAST_PATH._before_the_walk()  # which is asked once for all of them
