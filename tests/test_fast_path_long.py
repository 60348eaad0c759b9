"""The fast path over many hits: of none is anything kept, however it ended, whatever interrupts it, and whatever other
threads do meanwhile."""

from __future__ import annotations

import contextlib
import gc
import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import compiled_autograd as ca
from compiled_autograd.engine.fast_path import arming
from compiled_autograd.engine.fast_path.arming import FAST_PATH
from compiled_autograd.engine.native_hits import NativeHits
from compiled_autograd.report import step_log
from compiled_autograd.steps.run_context import RunReport
from compiled_autograd.threads.leaf_writes import LEAF_WRITES

from .both_walks import Both
from .helpers import assert_same, in_threads, mlp, resident_pages, switching_every, total
from .test_fast_path import _UNTIL_FAST, Asks, Make, _eager, _session, _step, _until_fast
from .test_fast_path import hits as hits  # a fixture, as the next
from .test_fast_path import net as net
from .test_interrupts import _nothing_is_stuck

Way = Callable[[ca.Session, Make, list[torch.Tensor]], object]


# ---- what is kept ----------------------------------------------------------------------------------------------------


def _served(session: ca.Session, make: Make, leaves: list[torch.Tensor]) -> None:
    _step(session, make, leaves, 1)


def _gone_already(session: ca.Session, make: Make, leaves: list[torch.Tensor]) -> None:
    """The tape is asked for once more, which is an error."""
    loss = make(1)
    for leaf in leaves:
        leaf.grad = None
    with session:
        loss.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()


def _ended_by_an_error(session: ca.Session, make: Make, leaves: list[torch.Tensor]) -> None:
    """In its middle."""
    asks: Any = LEAF_WRITES.none_needed
    asks.error = ValueError
    with pytest.raises(ValueError, match="here"):
        _step(session, make, leaves, 1)
    asks.error = None


def _taken_and_left_to_python(session: ca.Session, make: Make, leaves: list[torch.Tensor]) -> None:
    session.graphs()[0].variants[0].program.region_compiler.finished.append(RunReport())
    _step(session, make, leaves, 1)


def _in_another_state(session: ca.Session, make: Make, leaves: list[torch.Tensor]) -> None:
    """One hit that it has no answers of, and one that it has."""
    torch.use_deterministic_algorithms(True)
    try:
        _step(session, make, leaves, 1)
    finally:
        torch.use_deterministic_algorithms(False)
    _step(session, make, leaves, 1)


def _of_another_tape(session: ca.Session, make: Make, leaves: list[torch.Tensor]) -> None:
    _step(session, lambda step: make(step).sin(), leaves, 1)
    _step(session, make, leaves, 1)


def _forgotten(session: ca.Session, make: Make, leaves: list[torch.Tensor]) -> None:
    """It is handed over anew, with new questions."""
    FAST_PATH.forget()
    session.graphs()[0].variants[0].native.current.times_handed = 0  # type: ignore[union-attr]
    for _ in range(3):
        _step(session, make, leaves, 1)


WAYS: dict[Way, int] = {
    _served: 100_000,
    _gone_already: 10_000,
    _ended_by_an_error: 10_000,
    _taken_and_left_to_python: 10_000,
    _in_another_state: 20_000,
    _of_another_tape: 20_000,
    _forgotten: 5_000,
}


@dataclass
class _Asked:
    """What is asked of, and what is to be answered, of the questions that were handed over until it was closed."""

    objects: dict[int, Any] = field(default_factory=dict)
    closed: bool = False


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> _Asked:
    found = _Asked()

    def noted(make: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
        def questions(*arguments: Any) -> list[Any]:
            made = make(*arguments)
            if not found.closed:
                found.objects.update((id(each), each) for question in made for each in question)
            return made

        return questions

    for owner, name in ((arming, "_before_the_walk"), (arming, "_of_the_run"), (arming.ambient, "questions")):
        monkeypatch.setattr(owner, name, noted(getattr(owner, name)))
    monkeypatch.setattr(LEAF_WRITES, "none_needed", Asks())
    monkeypatch.setattr(Both, "note", lambda *given: None)  # it keeps a list of writes
    for name in ("MAX_FIRST", "MAX_LAST"):  # what a session knows of its last steps is soon as much as it will be
        monkeypatch.setattr(step_log, name, 10)
    return found


def _keep_nothing(
    session: ca.Session, make: Make, leaves: list[torch.Tensor], asked: _Asked, way: Way, times: int, is_long: bool
) -> None:
    _until_fast(session, make, leaves)
    (graph,) = session.graphs()
    (variant,) = graph.variants
    for _ in range(100):
        way(session, make, leaves)
    asked.closed = True
    state = [session, session.settings, graph, variant, variant.program, LEAF_WRITES, 1, ()]
    owned = [*state, *leaves, *asked.objects.values()]
    names = ["objects", "blocks", "pages", *[repr(each)[:50] for each in owned]]

    def held() -> list[int]:
        gc.collect()
        pages = resident_pages() if is_long else 0  # sanitizers, under which the short ones run, keep what is freed
        return [len(gc.get_objects()), sys.getallocatedblocks(), pages, *map(sys.getrefcount, owned)]

    before = held()
    for _ in range(times):
        way(session, make, leaves)
    after = held()
    more = {name: now - then for name, now, then in zip(names, after, before, strict=True) if now != then}
    assert max(map(abs, more.values()), default=0) < min(0.75 * times, 1000), more
    assert_same(_step(session, make, leaves, 1), _eager(make, leaves, 1), bitwise=False)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__[1:])
def test_nothing_is_kept(hits: NativeHits, net: tuple[Make, list[torch.Tensor]], asked: _Asked, way: Way) -> None:
    _keep_nothing(_session(), *net, asked, way, 300, False)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__[1:])
def test_nothing_is_kept_of_many_more(
    hits: NativeHits, net: tuple[Make, list[torch.Tensor]], asked: _Asked, way: Way
) -> None:
    _keep_nothing(_session(), *net, asked, way, WAYS[way], True)


# ---- garbage ---------------------------------------------------------------------------------------------------------


def test_hits_that_go_while_garbage_is_looked_for(hits: NativeHits, net: tuple[Make, list[torch.Tensor]]) -> None:
    """Each allocation may begin a search, in which variants go, and their hits with them: also the first one of a
    backward."""
    make, leaves = net
    sessions, came = [_session(), _session(check=False), _session(progress=False)], 0
    kept: list[Any] = []
    for session in sessions:
        _until_fast(session, make, leaves)
    (variant,), wanted = sessions[0].graphs()[0].variants, _eager(make, leaves, 1)

    def forget(phase: str, _: object) -> None:
        gc.callbacks.remove(forget)
        FAST_PATH.forget()
        kept.extend([[(), (), ()] for _ in range(100)])  # where what it keeps them in was

    for allocations in range(1, 30):
        variant.native.current.times_handed = 0  # type: ignore[union-attr]
        for session in sessions:
            _step(session, make, leaves, 1)
        assert len(FAST_PATH._handed) == 3
        loss = make(1)
        for leaf in leaves:
            leaf.grad = None
        kept.extend([(object(), object(), object()) for _ in range(3000)])  # Python has none left of those that went
        gc.collect()
        gc.callbacks.append(forget)
        gc.set_threshold(allocations)
        try:
            with session:
                loss.backward()
        finally:
            gc.set_threshold(700, 10, 10)
            came += forget not in gc.callbacks
            gc.callbacks[:] = [each for each in gc.callbacks if each is not forget]
        kept.clear()
        assert_same([leaf.grad for leaf in leaves], wanted, bitwise=False)
    assert came > 10 or sys.version_info >= (3, 12), "from then on Python searches between lines of its own code"


# ---- Ctrl-C ----------------------------------------------------------------------------------------------------------

_ROUNDS = 150


def test_ctrl_c_at_any_moment(hits: NativeHits, net: tuple[Make, list[torch.Tensor]]) -> None:
    """Real signals: nothing is taken for ever, each backward is counted as one thing, and the next is served."""
    make, leaves = net
    session, armed, ended = _session(), False, 0
    _until_fast(session, make, leaves)
    with session:
        for _ in range(_UNTIL_FAST):  # with a gradient to add to: a structure of its own, which takes long to capture
            make(1).backward()
    wanted, begun = _eager(make, leaves, 1), FAST_PATH.served

    def interrupt(*_: object) -> None:
        if armed:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with session:
            for _ in range(_ROUNDS):
                losses = [make(1) for _ in range(20)]
                signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-5, 1e-3))
                try:
                    armed = True
                    for loss in losses:
                        loss.backward()
                    armed = False
                except KeyboardInterrupt:
                    armed, ended = False, ended + 1
                signal.setitimer(signal.ITIMER_REAL, 0)
                _nothing_is_stuck()
                assert_same(_step(contextlib.nullcontext(), make, leaves, 1), wanted, bitwise=False)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    stats = session.stats()
    assert stats.backwards == total(stats)
    assert ended > _ROUNDS / 3 and FAST_PATH.served >= begun + _ROUNDS


# ---- threads ---------------------------------------------------------------------------------------------------------


def _train(index: int, steps: int, session: ca.Session) -> None:
    """A model of its own, of the structure that others have too; each step beside eager."""
    generator = torch.Generator().manual_seed(index)
    model, x = mlp(depth=1), torch.randn(3, 8, generator=generator)
    leaves = list(model.parameters())
    for step in range(steps):
        loss = (model(x + step) ** 2).mean()
        wanted = torch.autograd.grad(loss, leaves, retain_graph=True)
        for leaf in leaves:
            leaf.grad = None
        with session:
            loss.backward(retain_graph=step % 7 == 0)
        assert_same([leaf.grad for leaf in leaves], wanted, bitwise=False)


def test_threads_while_what_is_asked_changes(hits: NativeHits, net: tuple[Make, list[torch.Tensor]]) -> None:
    """Hits are served while another thread changes the state that they ask for, looks for garbage, and has hits, plans
    or everything forgotten, and made anew."""
    make, leaves = net
    _until_fast(_session(), make, leaves)
    sessions, left, served = [_session() for _ in range(3)], [0, 0, 0], FAST_PATH.served

    def train(index: int) -> None:
        try:
            _train(index, 100, sessions[index])
        finally:
            left.pop()

    def change_state() -> None:
        torch.use_deterministic_algorithms(not torch.are_deterministic_algorithms_enabled())

    def disturb() -> None:
        chance, changes = random.Random(0), [change_state, FAST_PATH.forget, hits.forget, gc.collect, ca.reset]
        while left:
            chance.choices(changes, [20, 20, 10, 10, 1])[0]()
            time.sleep(chance.uniform(0, 0.02))

    try:
        with switching_every(1e-6):
            in_threads(*[lambda index=index: train(index) for index in range(3)], disturb)
    finally:
        torch.use_deterministic_algorithms(False)
    stats = [session.stats() for session in sessions]
    assert [each.backwards for each in stats] == [100] * 3 and not any(each.failures for each in stats)
    assert FAST_PATH.served > served
