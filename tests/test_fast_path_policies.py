"""While tapes are watched (on trial, or left to eager), the fast path leaves these to Python and serves the others."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import compiled_autograd as ca
from compiled_autograd.compiling.queue import QUEUE
from compiled_autograd.engine import backward
from compiled_autograd.engine.fast_path import arming as fast_path
from compiled_autograd.engine.fast_path.arming import FAST_PATH
from compiled_autograd.engine.native_hits import NativeHits
from compiled_autograd.engine.records import key_of
from compiled_autograd.policies import ledger
from compiled_autograd.policies.decision import Record, State
from compiled_autograd.policies.ledger import LEDGER

from .helpers import assert_same, mlp, trials_of_two_rows
from .test_fast_path import Make, _counters, _eager, _session, _step, _train, _until_fast, error_in_its_middle
from .test_fast_path import hits as hits  # a fixture, as the next
from .test_fast_path import net as net
from .test_interrupts import _InterruptAt


@contextmanager
def _on_trial(session: ca.Session, loss: torch.Tensor) -> Iterator[Record]:
    """The tape of a loss is on a trial that does not end, in which compiled backwards go on."""
    record = LEDGER.of(key_of(session.number, (loss,), ()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ledger, "ROWS", (10**9,))
        LEDGER._begin_trial(record)
        yield record
        LEDGER._change(record, State.COMPILED, None)


def test_a_tape_on_trial_is_served_and_counted_as_by_python(
    hits: NativeHits, net: tuple[Make, list[torch.Tensor]]
) -> None:
    make, leaves = net
    session = _session()
    _until_fast(session, make, leaves)
    before, met, served = _counters(session), hits.hits, FAST_PATH.served
    with _on_trial(session, make(0)) as record:
        for step in range(5):
            assert_same(_step(session, make, leaves, step), _eager(make, leaves, step), bitwise=False)
    after = _counters(session)
    assert FAST_PATH.served == served + 5 and hits.hits == met + 5 and record.turn == 5
    assert [one - other for one, other in zip(after[:4], before[:4], strict=True)] == [5] * 4
    assert after[4:] == ("hit", ["capture", "run"])
    _step(session, make, leaves, 0)
    assert FAST_PATH.served == served + 6 and record.turn == 5


def test_tapes_beside_one_that_is_watched_are_served_without_python(
    hits: NativeHits, net: tuple[Make, list[torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    make, leaves = net
    session, x = _session(), torch.randn(3, requires_grad=True)
    _until_fast(session, make, leaves)
    monkeypatch.setattr(backward, "run", lambda *given: pytest.fail("Python was asked"))
    with _on_trial(session, x.exp().sum()):
        served = FAST_PATH.served
        for step in range(5):
            assert_same(_step(session, make, leaves, step), _eager(make, leaves, step), bitwise=False)
    assert FAST_PATH.served == served + 5


def test_an_output_that_is_no_tensor_is_left_to_python(hits: NativeHits, net: tuple[Make, list[torch.Tensor]]) -> None:
    """While some tape is watched."""
    make, leaves = net
    session, x = _session(), torch.randn(3, requires_grad=True)
    _until_fast(session, make, leaves)
    with _on_trial(session, x.exp().sum()):
        y = x.sin()
        with session:
            torch.autograd.backward([torch.autograd.graph.get_gradient_edge(y)], [torch.ones(3)])
    assert_same([x.grad], [x.detach().cos()])


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_error_is_counted_once(
    hits: NativeHits,
    net: tuple[Make, list[torch.Tensor]],
    monkeypatch: pytest.MonkeyPatch,
    error: type[BaseException],
) -> None:
    error_in_its_middle(net, monkeypatch, error, _on_trial)


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
        with _on_trial(session, loss), session:
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
    with _on_trial(session, make(1)), torch.autograd.profiler.profile():
        found = _step(session, make, leaves, 1)
    assert_same(found, _eager(make, leaves, 1), bitwise=False)
    after = session.stats()
    assert FAST_PATH.served == served and (after.hits, after.bypasses) == (before.hits + 1, {})


def test_a_trial_times_what_will_serve(
    hits: NativeHits, net: tuple[Make, list[torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    trials_of_two_rows(monkeypatch)
    monkeypatch.setattr(ledger, "WORTH", 1e9)  # hits go on
    make, leaves = net
    session, served = _session(tune=True), FAST_PATH.served
    for step in range(60):
        assert_same(_step(session, make, leaves, step), _eager(make, leaves, step), bitwise=False)
    stats = session.stats()
    assert stats.tuning == 2 * ledger.ROWS[0]
    assert stats.hits + stats.tuning + sum(stats.bypasses.values()) + stats.structure_misses == stats.backwards == 60
    (graph,) = session.graphs()
    (variant,) = graph.variants
    assert variant.timing is not None and variant.timing.samples == ledger.SAMPLES
    assert FAST_PATH.served - served > 60 - stats.tuning - 15


def test_a_tape_beside_one_that_is_left_to_eager(hits: NativeHits, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the small one of two models that train in turn may be."""
    small, x = torch.nn.Linear(8, 2), torch.randn(3, 8)
    makes: list[tuple[Make, list[torch.Tensor]]] = []
    makes.append((lambda step: small(x + step).sum(), list(small.parameters())))
    model = mlp()
    makes.append((lambda step: (model(x + step) ** 2).mean(), list(model.parameters())))
    session = _session(tune=True)
    with monkeypatch.context() as always:
        always.setattr(ledger, "WORTH", 1e-9)
        for _ in range(100):
            _step(session, *makes[0], 0)
    assert session.stats().bypasses["not_worth_it"] > 10
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
    monkeypatch.setattr(ledger, "SAMPLES", 2)
    monkeypatch.setattr(ledger, "REST", 5)

    def session() -> ca.Session:
        assert seed > 0 or QUEUE.wait(60)  # else it is a matter of luck whether anything serves in time
        ledger.WORTH = chance.choice([1e-9, 1e9])
        if chance.random() < 0.1:
            LEDGER.clear()
        budget = chance.choice([0.0, math.inf])
        on_miss = chance.choice(["compile", "background"])
        return _session(tune=chance.random() < 0.7, on_miss=on_miss, compile_budget=budget)

    monkeypatch.setattr(ledger, "WORTH", 1.0)
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
