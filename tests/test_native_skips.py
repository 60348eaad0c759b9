"""Backwards that run on eager without a look at their tape: C++ does what ``Engine.run_backward`` does in Python."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.autograd import Variable

import compiled_autograd as ca
from compiled_autograd.engine import engine as module_of_engine
from compiled_autograd.engine import here as module_of_here
from compiled_autograd.engine.engine import Engine
from compiled_autograd.engine.native_hits import NativeHits
from compiled_autograd.engine.session import Session, thread
from compiled_autograd.policies.decision import Record
from compiled_autograd.shadow_cache import Bypass
from compiled_autograd.threads.gate import GATE
from compiled_autograd.threads.leaf_writes import LEAF_WRITES

from .both_walks import library_of
from .helpers import assert_same, in_threads

VERDICT = Bypass("over_budget")
LEAF = torch.arange(1.0, 5.0)


@pytest.fixture(params=["python", "cpp"])
def fallbacks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """One way of the two; grows by one with each backward that C++ hands on, and that Python is called for."""
    ca.enable()
    engine: Any = Variable._execution_engine
    handed_on: list[int] = []

    def fallback(*args: Any, **named: Any) -> Any:
        handed_on.append(1)
        return Engine.run_backward(engine, *args, **named)

    if request.param == "cpp":
        module = library_of(request.config).module()
        assert module is not None
        monkeypatch.setitem(engine.__dict__, "run_backward", module_of_engine._fast_path(fallback, module))
    else:
        monkeypatch.setitem(engine.__dict__, "run_backward", fallback)
    handed_on.append(request.param == "cpp")
    yield handed_on
    ca.reset()


def _session(skips: int) -> Session:
    """A session that skips as many looks in this thread."""
    session, here = ca.enable(backend="eager", cache_dir=False, tune=False), thread.here
    here.unseen, here.verdict, here.record, here.number = skips, VERDICT, Record(None), session.number
    here.record.reason = VERDICT
    return session


def _loss(leaf: torch.Tensor) -> torch.Tensor:
    return (leaf * leaf).sum()


def _is_as_ever() -> None:
    assert thread.here.running is None and GATE.idle()


def test_a_skipped_backward_is_eagers_and_is_counted(fallbacks: list[int]) -> None:
    leaf, in_cpp = LEAF.clone().requires_grad_(), fallbacks.pop()
    with _session(3) as session:
        _loss(leaf).backward()
        assert_same([leaf.grad, *torch.autograd.grad(_loss(leaf), leaf)], [2 * LEAF, 2 * LEAF])
        assert thread.here.unseen == 1
        _loss(leaf).backward(inputs=[leaf], retain_graph=True)
        assert thread.here.unseen == 0 and len(fallbacks) == (0 if in_cpp else 3)
        _is_as_ever()
        _loss(leaf).backward()  # this one is looked at
    assert session.stats().bypasses == {"over_budget": 3} and session.stats().backwards == 4
    assert_same([leaf.grad], [6 * LEAF])


def test_without_a_session_eager_runs(fallbacks: list[int]) -> None:
    leaf, in_cpp = LEAF.clone().requires_grad_(), fallbacks.pop()
    session = _session(3)
    with session, ca.disable():
        _loss(leaf).backward()
    _loss(leaf).backward()
    assert_same([leaf.grad], [4 * LEAF])
    assert thread.here.unseen == 3 and session.stats().backwards == 0 and len(fallbacks) == (0 if in_cpp else 2)
    _is_as_ever()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_inside_is_raised_and_the_backward_is_counted(
    fallbacks: list[int], error: type[BaseException]
) -> None:
    def hook(grad: torch.Tensor) -> None:
        assert GATE.idents == [threading.get_ident()]
        raise error("of the user")

    leaf = LEAF.clone().requires_grad_()
    leaf.register_hook(hook)
    with _session(2) as session, pytest.raises(error, match="of the user"):
        _loss(leaf).backward()
    assert thread.here.unseen == 1 and session.stats().bypasses == {"over_budget": 1}
    _is_as_ever()


def test_a_backward_inside_a_skipped_one(fallbacks: list[int]) -> None:
    inner, leaf = LEAF.clone().requires_grad_(), LEAF.clone().requires_grad_()

    def hook(grad: torch.Tensor) -> None:
        with torch.enable_grad():
            _loss(inner).backward()

    leaf.register_hook(hook)
    with _session(2) as session:
        _loss(leaf).backward()
    assert_same([leaf.grad, inner.grad], [2 * LEAF, 2 * LEAF])
    assert thread.here.unseen == 0 and session.stats().bypasses == {"over_budget": 2}
    _is_as_ever()


def _of_other_number(session: Session) -> None:
    thread.here.number = session.number + 1


def _of_other_reason(session: Session) -> None:
    thread.here.record.reason = Bypass("not_worth_it")


@pytest.mark.parametrize("change", [_of_other_number, _of_other_reason])
def test_what_was_decided_for_something_else_is_not_skipped(
    fallbacks: list[int], change: Callable[[Session], None]
) -> None:
    leaf = LEAF.clone().requires_grad_()
    with _session(2) as session:
        change(session)
        _loss(leaf).backward()
    assert session.stats().structure_misses == 1 and len(fallbacks) == 2


def test_create_graph_and_the_own_loop_are_left_to_python(fallbacks: list[int]) -> None:
    leaf, in_cpp = LEAF.clone().requires_grad_(), fallbacks.pop()
    with _session(3) as session:
        (grad,) = torch.autograd.grad(_loss(leaf), leaf, create_graph=True)
        assert grad.requires_grad and thread.here.unseen == 3 and session.stats().bypasses == {"create_graph": 1}
        thread.here.looped = True
        _loss(leaf).backward()
        assert len(fallbacks) == 2 and thread.here.unseen == 2
        torch.autograd.grad(_loss(leaf), leaf)
        assert len(fallbacks) == (2 if in_cpp else 3) and thread.here.unseen == 1
        thread.here.looped = False
    assert_same([leaf.grad], [2 * LEAF])


@pytest.mark.parametrize("threads", [GATE.line, LEAF_WRITES.writing])
def test_while_another_thread_has_the_seam_or_writes_leaves_python_waits(
    fallbacks: list[int], threads: list[int]
) -> None:
    leaf = LEAF.clone().requires_grad_()
    with _session(1) as session:
        threads.append(-1)
        try:
            _loss(leaf).backward()
        finally:
            threads.remove(-1)
    assert_same([leaf.grad], [2 * LEAF])
    assert len(fallbacks) == 2 and session.stats().bypasses == {"over_budget": 1}


def test_threads_lose_no_count(fallbacks: list[int]) -> None:
    def work() -> int:
        leaf = LEAF.clone().requires_grad_()
        with _session(200) as session:
            for _ in range(200):
                _loss(leaf).backward()
        assert_same([leaf.grad], [400 * LEAF])
        return session.stats().bypasses["over_budget"]

    assert in_threads(*[work] * 4) == [200] * 4
    _is_as_ever()


def test_backwards_left_to_eager_by_their_arguments_are_skipped_too(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, decide = [], module_of_engine.by_arguments
    monkeypatch.setattr(module_of_engine, "by_arguments", lambda *given: asked.append(1) or decide(*given))
    leaf = LEAF.clone().requires_grad_()
    with ca.enable(backend="eager", cache_dir=False, tune=False) as session:
        for _ in range(5):
            _loss(leaf.exp()).backward()
        for _ in range(500):
            inside = leaf.exp()
            assert_same(torch.autograd.grad(_loss(inside), inside), [2 * LEAF.exp()])
        left = session.stats().bypasses
        outcomes = []
        for _ in range(70):
            leaf.grad = None
            _loss(leaf.exp()).backward()
            assert_same([leaf.grad], [2 * (2 * LEAF).exp()], bitwise=False)
            outcomes.append(session.last.outcome if session.last else "")
    assert left == {"intermediate_input": 500} and len(asked) < 40
    assert "hit" in outcomes and set(outcomes[outcomes.index("hit") :]) == {"hit"}


LOSSES: list[Callable[[torch.Tensor], torch.Tensor]] = [
    _loss,
    lambda leaf: leaf.exp().sum(),
    lambda leaf: leaf.tanh().cos().sum(),
]


def _one_of(chance: random.Random, session: Any) -> tuple[Any, ...]:
    """What a backward of a random kind gives, what the session says of it, and how many are skipped after it."""
    leaf, loss, kind = LEAF.clone().requires_grad_(), chance.choice(LOSSES), chance.randrange(6)
    found: Any = None
    if kind == 5:
        leaf.register_hook(lambda grad: 1 / 0)
    inside = leaf * 1.0
    with session, contextlib.suppress(ZeroDivisionError):
        if kind == 1:
            found = torch.autograd.grad(loss(inside), leaf)
        elif kind == 2:
            found = torch.autograd.grad(loss(inside), inside)
        elif kind == 3:
            found = torch.autograd.grad(loss(inside), leaf, create_graph=True)
        else:
            loss(inside).backward(retain_graph=kind == 4)
    values = [leaf.grad, *(found or ())]
    last = session.last if isinstance(session, Session) else None
    told = None if last is None else (last.outcome, [reason.kind for reason in last.reasons])
    return [None if each is None else each.tolist() for each in values], told, thread.here.unseen, GATE.idle()


def _program(seed: int) -> list[Any]:
    """Backwards in rows, in sessions that compile, that may not, and without one."""
    ca.reset()
    thread.here.skip_none()
    chance, given = random.Random(seed), {"backend": "eager", "cache_dir": False, "tune": False, "on_miss": "compile"}
    sessions: list[Any] = [ca.enable(**given), ca.enable(**given, compile_budget=0.0), ca.disable()]
    found: list[Any] = []
    for _ in range(12):
        session, row = chance.choice(sessions), random.Random(chance.random())
        alike = chance.random() < 0.7
        state = row.getstate()
        for _ in range(chance.randrange(1, 25)):
            if alike:
                row.setstate(state)
            found.append(_one_of(row, session))
    return [*found, *(each.stats().bypasses for each in sessions[:2])]


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(6, 60))])
def test_programs_of_all_kinds(seed: int, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways skip the same backwards, and give and count the same."""
    ca.enable()
    monkeypatch.setattr(module_of_here, "skips", lambda streak, seconds, rest: min(4, max(0, streak - 2)))
    engine: Any = Variable._execution_engine
    module = library_of(request.config).module()
    assert module is not None
    programs = []
    for way in (None, module):
        handed_on: list[int] = []

        def fallback(*args: Any, handed_on: list[int] = handed_on, **named: Any) -> Any:
            handed_on.append(1)
            return Engine.run_backward(engine, *args, **named)

        run = fallback if way is None else module_of_engine._fast_path(fallback, way)
        monkeypatch.setitem(engine.__dict__, "run_backward", run)
        torch.use_deterministic_algorithms(True)  # so that no clock decides
        try:
            programs.append((_program(seed), len(handed_on)))
        finally:
            torch.use_deterministic_algorithms(False)
    (in_python, all_of_them), (in_cpp, handed_on_of_cpp) = programs
    assert in_python == in_cpp and handed_on_of_cpp < all_of_them
    ca.reset()


def test_an_interrupt_while_a_backward_that_raised_is_counted(
    fallbacks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interrupt is raised: it is not lost for the backward's own error."""

    def hook(grad: torch.Tensor) -> None:
        raise ValueError("of the user")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    leaf = LEAF.clone().requires_grad_()
    leaf.register_hook(hook)
    monkeypatch.setattr(Session, "left_to_eager", interrupt)
    with _session(1), pytest.raises(KeyboardInterrupt):
        _loss(leaf).backward()
    _is_as_ever()


def test_a_first_backward_of_a_thread_waits_for_a_walk_that_begins_in_it(
    fallbacks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Making the thread's state runs Python, so that another thread may begin a walk."""
    state, walking, ended = type(thread).__dict__["here"], threading.Event(), threading.Event()
    make = state._make

    def walk() -> None:
        GATE.line.append(-1)
        with GATE.lock:
            walking.set()
            ended.wait(0.3)
            GATE.line.remove(-1)

    def makes() -> Any:
        threading.Thread(target=walk, daemon=True).start()
        assert walking.wait(60)
        return make()

    monkeypatch.setattr(state, "_make", makes)

    def first() -> bool:
        leaf = LEAF.clone().requires_grad_()
        seen = []
        leaf.register_hook(lambda grad: seen.append(list(GATE.line)))
        _loss(leaf).backward()
        return seen == [[]]

    assert in_threads(first) == [True]


@pytest.mark.parametrize("inside", [False, True])
def test_the_extension_runs_them_from_the_first_skip_on(monkeypatch: pytest.MonkeyPatch, inside: bool) -> None:
    asked: list[object] = []
    monkeypatch.setattr(NativeHits, "skip_looks", lambda self, settings: asked.append(settings))
    leaf = LEAF.clone().requires_grad_()
    with ca.enable(backend="eager", cache_dir=False, tune=False, on_miss="compile", compile_budget=0.0) as session:
        for _ in range(100):
            between = leaf * 1.0
            torch.autograd.grad(_loss(between), between if inside else leaf)
    assert asked == [session.settings] and thread.here.skipped
