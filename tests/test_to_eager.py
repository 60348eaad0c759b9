"""What goes to the eager engine without a look, from C++: it does what Python does, and leaves what that leaves."""

from __future__ import annotations

import functools
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Variable

import compiled_autograd as ca
from compiled_autograd.engine.engine import Engine
from compiled_autograd.engine.fast_path.arming import FAST_PATH
from compiled_autograd.engine.session import thread
from compiled_autograd.policies.sketches import Known
from compiled_autograd.threads.claims import CLAIMS, Claim
from compiled_autograd.threads.gate import GATE, Turn
from shadow_cache import Bypass

from .both_walks import library_of
from .helpers import in_subprocess

_LEFT, _OTHER = Bypass("not_worth_it"), Bypass("over_budget")


class _Ways:
    """The engine, with C++ before Python and without; counts those that Python saw."""

    def __init__(self, path: Any) -> None:
        self._engine: Any = Variable._execution_engine
        self.path = path

    def call(self, in_cpp: bool, act: Callable[[], Any]) -> tuple[Any, int]:
        """What ``act`` gives, or its error; and in how many calls of ``run_backward`` Python was."""
        calls, before = [], sys.getprofile()
        if in_cpp:
            self._engine.run_backward = self.path
        else:
            del self._engine.run_backward
        code = Engine.run_backward.__code__

        def note(frame: Any, event: str, argument: Any) -> None:
            if event == "call" and frame.f_code is code:
                calls.append(frame)

        try:
            sys.setprofile(note)
            result = act()
        except (ValueError, RuntimeError, KeyboardInterrupt) as error:
            result = error
        finally:
            sys.setprofile(before)
            self._engine.run_backward = self.path
        return result, len(calls)


@pytest.fixture
def ways(request: pytest.FixtureRequest) -> Iterator[_Ways]:
    ca.enable(backend="eager", cache_dir=False, tune=False, native=False)
    module = library_of(request.config).module()
    assert module is not None
    FAST_PATH.come_first(module)
    yield _Ways(FAST_PATH._path)
    ca.reset()
    assert GATE.idents == [] and GATE.idle()


class _Found:
    verdict, left, takes = _LEFT, 1000, 0.0


def _session(**settings: Any) -> ca.Session:
    return ca.enable(**{"backend": "eager", "cache_dir": False, "tune": False, **settings})


def _set(session: ca.Session, unseen: int = 5, left: int = 100, number: int | None = None, looped: bool = False) -> Any:
    """As after a sketch that says that so many are left to eager."""
    here = thread.here
    here.known = Known(_Found())
    here.known.left = left
    here.number = session.number if number is None else number
    here.verdict, here.unseen, here.away, here.length, here.looped = _LEFT, unseen, unseen, unseen + 1, looped
    here.streak = 50
    return here


def _state(here: Any, session: ca.Session) -> tuple[Any, ...]:
    left = session.left
    counted = None if left is None else (left.verdict, left.count)
    return here.unseen, here.known.left, here.length, here.streak, here.running, here.depth, counted, [*GATE.idents]


def _product(x: Tensor) -> Tensor:
    return (x * x).sum()


_SETTINGS = [
    {},
    {"unseen": 1},
    {"unseen": 0},
    {"left": 0},
    {"left": 1},
    {"number": -1},
    {"looped": True},
]


@pytest.mark.parametrize("state", _SETTINGS, ids=str)
@pytest.mark.parametrize("accumulates", [True, False])
@pytest.mark.parametrize("counted", [None, _LEFT, _OTHER], ids=str)
def test_as_python_does_it(state: dict[str, Any], accumulates: bool, counted: Bypass | None, ways: _Ways) -> None:
    outcomes = []
    for in_cpp in (False, True):
        session = _session()
        here = _set(session, **state)
        if counted is not None:
            session.left_to_eager(counted)
        x = torch.arange(3.0).requires_grad_()

        def once(x: Tensor = x, session: ca.Session = session) -> list[float]:
            loss = _product(x)
            with session:
                if accumulates:
                    loss.backward()
                    assert x.grad is not None
                    return x.grad.tolist()
                return torch.autograd.grad(loss, x)[0].tolist()

        result, calls = ways.call(in_cpp, once)
        outcomes.append((result, _state(here, session), session.stats(), calls))
    (result, after, stats, _), (in_cpp_result, in_cpp_after, in_cpp_stats, calls) = outcomes
    assert result == in_cpp_result == [0.0, 2.0, 4.0]
    assert after == in_cpp_after
    assert (stats.backwards, stats.bypasses) == (in_cpp_stats.backwards, in_cpp_stats.bypasses)
    is_left = state in ({}, {"unseen": 1}, {"left": 1}) or (state == {"looped": True} and not accumulates)
    assert calls == (0 if is_left else 1)
    if is_left:
        assert stats.bypasses["not_worth_it"] == 1 + (counted is _LEFT)


@pytest.mark.parametrize("around", [None, ca.disable], ids=["outside", "disable"])
def test_outside_of_sessions(around: Any, ways: _Ways) -> None:
    for in_cpp in (False, True):
        session = _session()
        here = _set(session)
        x = torch.arange(3.0).requires_grad_()

        def once(x: Tensor = x, session: ca.Session = session) -> list[float]:
            with session, ca.disable():
                return torch.autograd.grad(_product(x), x)[0].tolist()

        def outside(x: Tensor = x) -> list[float]:
            return torch.autograd.grad(_product(x), x)[0].tolist()

        result, calls = ways.call(in_cpp, outside if around is None else once)
        assert result == [0.0, 2.0, 4.0] and calls == (not in_cpp)
        assert (here.unseen, here.length) == (5, 0) and session.stats().backwards == 0


class _Subclass(ca.Session):
    pass


@pytest.mark.parametrize("what", ["create_graph", "native", "subclass", "line", "claims", "odd"])
def test_what_python_sees_to(what: str, ways: _Ways) -> None:
    session = _session(native=False) if what == "native" else _session()
    if what == "subclass":
        session = _Subclass(session.settings)
    _set(session)
    x = torch.arange(3.0).requires_grad_()
    loss = _product(x)

    def once() -> Any:
        with session:
            if what == "odd":  # as nobody in PyTorch calls it
                return Variable._execution_engine.run_backward((loss,), (torch.ones(()),), False, False, (x,))
            return torch.autograd.grad(loss, x, create_graph=what == "create_graph")

    turn, claim = Turn(), Claim([], [])
    turn.thread, claim.thread = -1, -1
    turn.token.release(), claim.token.release()  # of nobody: Python looks, and passes them over
    lists: dict[str, Any] = {"line": (GATE.line, turn), "claims": (CLAIMS.made, claim)}
    if what in lists:
        kept, one = lists[what]
        kept.append(one)
    result, calls = ways.call(True, once)
    for kept, one in lists.values():
        if one in kept:
            kept.remove(one)
    assert not isinstance(result, Exception) and result[0].tolist() == [0.0, 2.0, 4.0]
    assert calls == 1


def _outside(x: Tensor, loss: Tensor) -> Any:
    return torch.autograd.grad(loss, x)


@pytest.mark.parametrize("inside", [True, False])
def test_an_error_leaves_nothing_behind(inside: bool, ways: _Ways) -> None:
    states = []
    for in_cpp in (False, True):
        session = _session()
        here = _set(session)
        x = torch.arange(3.0).requires_grad_()
        product = x * x

        def fail(gradient: Tensor) -> None:
            assert thread.here.running is None and GATE.idents == [thread.here.ident]
            raise ValueError("a hook's")

        product.register_hook(fail)
        here.running = outer = object()  # type: ignore[assignment]

        def once(x: Tensor = x, product: Tensor = product, session: ca.Session = session) -> Any:
            with session if inside else ca.disable():
                return _outside(x, product.sum())

        result, calls = ways.call(in_cpp, once)
        assert isinstance(result, ValueError) and str(result) == "a hook's" and calls == (not in_cpp)
        assert here.running is outer
        here.running = None
        states.append((_state(here, session), session.stats()))
    assert states[0] == states[1] and states[0][0][-1] == []


def test_an_error_of_counting_has_that_of_the_backward_for_a_context(
    ways: _Ways, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(self: ca.Session, verdict: Bypass) -> None:
        raise KeyboardInterrupt

    def fail(gradient: Tensor) -> None:
        raise ValueError("a hook's")

    for in_cpp in (False, True):
        for fails in (False, True):
            session = _session()
            here = _set(session)
            x = torch.arange(3.0).requires_grad_()
            product = x * x
            if fails:
                product.register_hook(fail)
            with monkeypatch.context() as patch:
                patch.setattr(ca.Session, "left_to_eager", interrupt)

                def once(x: Tensor = x, product: Tensor = product, session: ca.Session = session) -> Any:
                    with session:
                        return _outside(x, product.sum())

                result, _ = ways.call(in_cpp, once)
            assert isinstance(result, KeyboardInterrupt)
            assert isinstance(result.__context__, ValueError if fails else type(None))
            assert here.unseen == 4 and here.running is None and GATE.idents == []


@pytest.mark.parametrize("kind", ["same", "chain", "around"])
def test_contexts_of_such_errors_are_as_in_a_finally(kind: str, ways: _Ways, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = []
    for in_cpp in (False, True):
        first, second = ValueError("of the backward"), ValueError("of counting")
        if kind == "around":
            first.__context__ = second

        def count(self: ca.Session, verdict: Bypass, first: ValueError = first, second: ValueError = second) -> None:
            if kind != "chain":
                raise first if kind == "same" else second
            try:
                raise KeyError("inner")
            except KeyError:
                raise second  # noqa: B904

        def fail(gradient: Tensor, first: ValueError = first) -> None:
            raise first

        session = _session()
        _set(session)
        x = torch.arange(3.0).requires_grad_()
        product = x * x
        product.register_hook(fail)

        def once(x: Tensor = x, product: Tensor = product, session: ca.Session = session) -> Any:
            with session:
                return _outside(x, product.sum())

        with monkeypatch.context() as patch:
            patch.setattr(ca.Session, "left_to_eager", count)
            error, _ = ways.call(in_cpp, once)
        chain = []
        while error is not None and len(chain) < 9:
            chain.append(str(error))
            error = error.__context__
        shown.append(chain)
    assert shown[0] == shown[1] and len(shown[0]) < 9


@pytest.mark.parametrize("counted", [None, _LEFT, _OTHER], ids=str)
@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="this system has no timers")
def test_a_signal_while_the_engine_runs_loses_no_count(counted: Bypass | None, ways: _Ways) -> None:
    class TimeIsUp(RuntimeError):
        pass

    def handler(number: int, frame: Any) -> None:
        raise TimeIsUp

    x = torch.randn(1200, 1200, requires_grad=True)
    before, interrupted = signal.signal(signal.SIGALRM, handler), 0
    try:
        for in_cpp in (False, True):
            session = _session()
            _set(session, unseen=50)
            if counted is not None:
                session.left_to_eager(counted)

            def once(session: ca.Session = session) -> Any:
                loss = (x @ x @ x).sum()
                with session:
                    signal.setitimer(signal.ITIMER_REAL, 0.004)
                    return torch.autograd.grad(loss, x)

            result, _ = ways.call(in_cpp, once)
            signal.setitimer(signal.ITIMER_REAL, 0)
            interrupted += isinstance(result, TimeIsUp)
            assert session.stats().bypasses["not_worth_it"] == 1 + (counted is _LEFT)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert interrupted == 2


def test_threads_that_find_the_extension_at_once_have_one_path(ways: _Ways, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else hits would be given to one that nobody calls."""
    engine: Any = Variable._execution_engine
    module, make = FAST_PATH._module, FAST_PATH.make
    assert module is not None and make is not None
    monkeypatch.setattr(FAST_PATH, "_made", {})
    monkeypatch.setattr(FAST_PATH, "_module", None)

    def made(found: Any) -> Any:
        if not FAST_PATH._made:  # another thread makes one meanwhile
            FAST_PATH._made[found] = make(found)
        return make(found)

    monkeypatch.setattr(FAST_PATH, "make", made)
    FAST_PATH.come_first(module)
    assert engine.run_backward is FAST_PATH._path is FAST_PATH._made[module]
    FAST_PATH._path, engine.run_backward = ways.path, ways.path


def test_one_inside_of_another(ways: _Ways) -> None:
    for in_cpp in (False, True):
        session = _session()
        here = _set(session)
        x = torch.arange(3.0).requires_grad_()
        seen = []

        def hook(gradient: Tensor) -> None:
            with torch.enable_grad():
                loss = _product(x)  # noqa: B023
            seen.append((torch.autograd.grad(loss, x)[0].tolist(), len(GATE.idents)))  # noqa: B023

        product = x * x
        product.register_hook(hook)

        def once(x: Tensor = x, product: Tensor = product, session: ca.Session = session) -> Any:
            with session:
                return _outside(x, product.sum())

        result, calls = ways.call(in_cpp, once)
        assert result[0].tolist() == [0.0, 2.0, 4.0] and seen == [([0.0, 2.0, 4.0], 1)]
        assert calls == (0 if in_cpp else 2) and GATE.idents == []
        assert here.unseen == 3 and session.stats().bypasses == {"not_worth_it": 2}


def test_threads_at_once(ways: _Ways) -> None:
    """Each has its own state, and the list of those in the engine loses nobody."""
    session, errors, count = _session(), [], 300
    start = threading.Barrier(4)

    def work() -> None:
        try:
            x = torch.arange(3.0).requires_grad_()
            start.wait(30)
            for number in range(count):
                _set(session)
                with session if number % 2 else ca.disable():
                    gradient, *_ = torch.autograd.grad(_product(x), x)
                assert gradient.tolist() == [0.0, 2.0, 4.0] and thread.here.ident not in GATE.idents
        except (AssertionError, RuntimeError) as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    assert not errors and GATE.idents == []
    assert session.stats().bypasses == {"not_worth_it": 4 * count // 2}


@pytest.mark.parametrize("seed", range(6))
def test_random_programs_leave_the_same_behind(seed: int, ways: _Ways) -> None:
    """Of many backwards one after the other, each in another state: the state after each."""
    traces = []
    for in_cpp in (False, True):
        chance = random.Random(seed)
        sessions = [_session(), _session(on_unsupported="raise"), _session(native=False)]
        x, trace, calls = torch.arange(3.0).requires_grad_(), [], 0
        here = _set(sessions[0])
        for _ in range(120):
            session = chance.choice(sessions)
            kind = chance.choice(("set", "grad", "backward", "out", "nested", "fail", "read", "graph"))
            if kind == "set":
                _set(session, chance.randrange(4), chance.randrange(4), looped=chance.random() < 0.3)
            if kind == "read":
                trace.append(session.stats().bypasses)
                continue
            product = x * x
            if kind == "nested":
                product.register_hook(functools.partial(_backward, x))
            if kind == "fail":
                product.register_hook(_fail)

            def once(session: ca.Session = session, kind: str = kind, product: Tensor = product) -> Any:
                with ca.disable() if kind == "out" else session:
                    if kind == "backward":
                        product.sum().backward()
                        return x.grad.tolist()  # type: ignore[union-attr]  # noqa: B023
                    return torch.autograd.grad(product.sum(), x, create_graph=kind == "graph")[0].tolist()  # noqa: B023

            result, seen = ways.call(in_cpp, once)
            calls += seen
            x.grad = None
            trace.append((kind, repr(result), _state(here, session), session.stats().bypasses))
        traces.append(trace)
        if in_cpp:
            assert calls < len(trace)
    assert traces[0] == traces[1]


def test_classes_without_the_slots_are_refused(request: pytest.FixtureRequest) -> None:
    module: Any = library_of(request.config).module()
    eager = (print, (object,) * 4, ([], [], []))
    with pytest.raises((TypeError, AttributeError), match="stack"):
        module.fast_path(print, print, print, thread, iter([1]), eager)
    with pytest.raises(TypeError, match="tuple"):
        module.fast_path(print, print, print, thread, iter([1]), None)


def _backward(x: Tensor, gradient: Tensor) -> None:
    with torch.enable_grad():
        loss = _product(x)
    torch.autograd.grad(loss, x)


def _fail(gradient: Tensor) -> None:
    raise ValueError("a hook's")


_FORK = """
import os, torch
import compiled_autograd as ca
from compiled_autograd.engine.fast_path.arming import FAST_PATH
from compiled_autograd.native.library import Library
from compiled_autograd.threads.claims import CLAIMS
from compiled_autograd.threads.gate import GATE
import sys, time
session = ca.enable(backend="eager", tune=False)
library = Library(__import__("pathlib").Path(sys.argv[1]) if len(sys.argv) > 1 else __import__("pathlib").Path(FOLDER))
while library.module() is None and time.monotonic() < DEADLINE: time.sleep(0.1)
FAST_PATH.come_first(library.module())
x = torch.arange(3.0).requires_grad_()
lists = GATE.idents, GATE.line, CLAIMS.made
statuses = []
def hook(gradient):
    pid = os.fork()
    if pid == 0:
        same = (GATE.idents, GATE.line, CLAIMS.made)
        os._exit(0 if all(a is b for a, b in zip(lists, same)) and len(GATE.idents) == 1 else 3)
    statuses.append(os.waitpid(pid, 0)[1])
product = x * x
product.register_hook(hook)
print(torch.autograd.grad(product.sum(), x)[0].tolist(), statuses, GATE.idents)
"""


def test_a_child_that_is_forked_in_the_midst(request: pytest.FixtureRequest, ways: _Ways) -> None:
    """It has the lists that C++ asks."""
    folder = str(request.config.cache.mkdir("native") / "builds")  # type: ignore[union-attr]
    code = _FORK.replace("FOLDER", repr(folder)).replace("DEADLINE", "time.monotonic() + 60")
    done = in_subprocess(code)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split("\n")[0] == "[0.0, 2.0, 4.0] [0] []"
