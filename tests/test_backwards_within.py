"""Backwards that Python runs in the midst of one of ours: of ``gc``, of ``__del__``, of a signal's handler."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import compiled_autograd as ca
from backends.garbage_collection import RARELY
from compiled_autograd.cache import graphs
from compiled_autograd.cache.graphs import GRAPHS
from compiled_autograd.capture.capture import Capture
from compiled_autograd.capture.unnamed import Unnamed
from compiled_autograd.diagnostics.bypass import INSIDE_COMPILE
from compiled_autograd.engine import execution, seam
from compiled_autograd.engine import session as sessions
from compiled_autograd.threads.compile_thread import why_not_compile
from compiled_autograd.threads.gate import GATE, Gate
from compiled_autograd.threads.leaf_writes import LEAF_WRITES
from shadow_cache import Bypass

from .helpers import ROOT, WAIT, close, in_subprocess, in_threads, same_bits

OURS = (str(Path(ca.__file__).parent), str(ROOT / "backends"), str(ROOT / "shadow_cache"))
WEIGHT = torch.randn(4, 4)


class _RunAt:
    """Runs something where Python may run what is none of ours: after the n-th call of C in code of ours, or at the
    n-th beginning of a function there, but in traces, and either in walks or between them. ``came`` says whether it
    was so many."""

    def __init__(self, count: int, act: Callable[[], None], in_walks: bool = False) -> None:
        self.left, self.act, self.in_walks = count, act, in_walks
        self.came = False

    def __call__(self, frame: Any, event: str, argument: Any) -> None:
        if event not in ("call", "c_return") or not frame.f_code.co_filename.startswith(OURS):
            return
        if seam.walking() is not self.in_walks or torch._C._len_torch_dispatch_stack() or _is_traced(frame):
            return
        self.left -= 1
        if self.left < 0:
            sys.setprofile(None)
            self.came = True
            with torch.enable_grad():  # as under eager, backwards turn it off
                self.act()


@contextlib.contextmanager
def _watched_by(within: _RunAt) -> Iterator[None]:
    sys.setprofile(within)
    try:
        yield
    finally:
        sys.setprofile(None)


def _is_traced(frame: Any) -> bool:
    """Whether a mode's function is running: what tensors do there is part of the trace."""
    while frame is not None and frame.f_code.co_name != "__torch_dispatch__":
        frame = frame.f_back
    return frame is not None


def _loss(x: torch.Tensor, factor: float) -> torch.Tensor:
    between = (x @ WEIGHT).tanh()
    between.register_hook(lambda grad: grad * factor)
    return between.sum()


def _step(leaf: torch.Tensor | None = None, factor: float = 2.0) -> torch.Tensor:
    x = torch.ones(4, 4, requires_grad=True) if leaf is None else leaf
    _loss(x, factor).backward()
    assert x.grad is not None
    return x.grad


def _nothing_is_stuck() -> None:
    assert GATE.idle() and not GATE.line and not LEAF_WRITES.writing
    assert execution.running() is None and execution.depth() == 0 and not seam.walking()


@pytest.mark.parametrize(
    ("known", "every"),
    [(True, 1), (False, 211), *(pytest.param(False, each, marks=pytest.mark.slow) for each in (1, 23))],
)
@pytest.mark.parametrize("shared", [False, True], ids=["its_own_leaf", "the_same_leaf"])
def test_a_backward_after_every_call(known: bool, every: int, shared: bool) -> None:
    """In a hit, after each call there is; in a capture, after some of them. Both give what eager gives."""
    with ca.disable():
        right = _step()
        twice = right + right

    def work() -> int:
        with ca.enable(backend="eager", cache_dir=False, extension="off") as session:  # else hardly any of it is Python
            _step()
            for count in itertools.count(0, every):
                if not known:
                    ca.reset()
                x = torch.ones(4, 4, requires_grad=True)
                found: list[torch.Tensor] = []
                leaf = x if shared else None
                within = _RunAt(count, lambda leaf=leaf, found=found: found.append(_step(leaf)))  # type: ignore[misc]
                loss, before = _loss(x, 2.0), session.stats().backwards
                with _watched_by(within):
                    loss.backward()
                _nothing_is_stuck()
                assert session.stats().backwards - before == 1 + within.came
                assert same_bits(x.grad, twice if shared and within.came else right)
                assert shared or not within.came or same_bits(found[0], right)
                if not within.came:
                    return count
        raise AssertionError

    assert in_threads(work, timeout=WAIT if every > 1 else 10 * WAIT)[0] > 50


@pytest.mark.parametrize("leaves", [1, pytest.param(6, marks=pytest.mark.slow)])
def test_a_backward_of_second_order_within(leaves: int) -> None:
    """The engine adds to ``.grad`` in another tensor then: what is added to the old one would be lost."""

    def backward(xs: list[torch.Tensor], around: Callable[[], None] = lambda: None, **settings: Any) -> None:
        loss = sum((_loss(x, 2.0) for x in xs), start=torch.zeros(()))
        around()
        try:
            loss.backward(**settings)
        finally:
            sys.setprofile(None)

    def fresh() -> list[torch.Tensor]:
        xs = [torch.ones(4, 4, requires_grad=True) for _ in range(leaves)]
        for x in xs:
            x.grad = torch.ones(4, 4)
        return xs

    with ca.disable():
        right = fresh()
        backward(right, create_graph=True)
        backward(right)

    def work() -> int:
        with ca.enable(backend="eager", cache_dir=False, tune=False, extension="off"):
            backward(fresh())
            for count in itertools.count():
                xs = fresh()
                within = _RunAt(count, functools.partial(backward, xs, create_graph=True))
                backward(xs, functools.partial(sys.setprofile, within))
                if not within.came:
                    return count
                for x, each in zip(xs, right, strict=True):
                    assert x.grad is not None and each.grad is not None
                    assert close(x.grad.detach(), each.grad.detach())
        raise AssertionError

    assert in_threads(work)[0] > 50


@pytest.mark.parametrize("shared", [False, True], ids=["its_own_leaf", "the_same_leaf"])
@pytest.mark.parametrize(
    ("own_session", "every"),
    [
        (True, 97),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((False, 97), (True, 7), (False, 7))),
    ],
)
def test_a_backward_in_the_midst_of_a_walk(own_session: bool, shared: bool, every: int) -> None:
    """The engine would take it for one that is to be captured inside of another, and refuse both."""
    with ca.disable():
        right = _step()
        twice = right + right

    def work() -> int:
        for count in itertools.count(0, every):
            ca.reset()
            with ca.enable(backend="eager", cache_dir=False) as session:
                x = torch.ones(4, 4, requires_grad=True)
                found: list[torch.Tensor] = []

                def act(leaf: torch.Tensor | None, found: list[torch.Tensor]) -> None:
                    with contextlib.nullcontext() if own_session else ca.disable():
                        found.append(_step(leaf))

                within = _RunAt(count, functools.partial(act, x if shared else None, found), in_walks=True)
                loss = _loss(x, 2.0)
                with _watched_by(within):
                    loss.backward()
                _nothing_is_stuck()
                assert same_bits(x.grad, twice if shared and within.came else right)
                assert shared or not within.came or same_bits(found[0], right)
                assert session.stats().bypasses == ({"inside_compile": 1} if own_session and within.came else {})
                assert session.stats().structure_misses == 1  # the one around it is captured
                if not within.came:
                    return count
        raise AssertionError

    assert in_threads(work)[0] > 200


def test_a_backward_in_the_midst_of_looking_for_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is over then for all tapes of the thread, those of the backward around it included."""
    original, within = Unnamed.look_up, list[torch.Tensor]()

    def backward() -> torch.Tensor:
        parameter = torch.nn.Parameter(torch.ones(4, 4))
        with torch.enable_grad():
            return _step(parameter)

    def look_up(self: Unnamed) -> None:
        if not within:
            within.append(WEIGHT)
            within.append(backward())
        original(self)

    with ca.disable():
        right = backward()
    monkeypatch.setattr(Unnamed, "look_up", look_up)
    with ca.enable(backend="eager", cache_dir=False) as session:
        assert same_bits(backward(), right) and same_bits(within[1], right)
    assert session.stats().backwards == 2
    _nothing_is_stuck()


def test_a_write_inside_a_write() -> None:
    written: list[str] = []

    def work() -> int:
        for count in itertools.count():
            written.clear()
            within = _RunAt(count, lambda: _writing(lambda: written.append("within")))
            with _watched_by(within):
                _writing(lambda: written.append("around"))
            assert not LEAF_WRITES.writing
            if not within.came:
                assert written == ["around"]
                return count
            assert sorted(written) == ["around", "within"]
        raise AssertionError

    assert in_threads(work)[0] > 6


def _writing(then: Callable[[], object]) -> None:
    """Do something in the midst of writing a leaf."""
    assert LEAF_WRITES.in_turn(then)


def test_who_writes_leaves_waits_for_nobody_who_compiles() -> None:
    """Code that Python runs there may wait for these leaves."""
    compiles, ends = threading.Event(), threading.Event()

    def slow(graph_module: Any, examples: Any) -> Any:
        compiles.set()
        assert ends.wait(WAIT)
        return graph_module.forward

    with ca.disable():
        right = _step()

    def first() -> None:
        with ca.enable(backend=slow, cache_dir=False):
            assert same_bits(_step(), right)

    def backward() -> None:
        with ca.enable(backend="eager", cache_dir=False) as session:
            assert same_bits(_step(), right)
        assert session.stats().compiles == 0 and not session.stats().failures  # it ran call by call
        ends.set()

    def writer() -> None:
        assert compiles.wait(WAIT)
        _writing(backward)

    in_threads(first, writer, timeout=10)
    _nothing_is_stuck()


def test_a_backward_in_the_midst_of_waiting_for_the_seam() -> None:
    """It may be this thread's before that ends: so it waits for nobody who compiles, and might wait for the seam."""
    with ca.disable():
        right = _step()

    def work() -> None:
        def within() -> None:
            assert same_bits(_step(), right)
            assert why_not_compile() is INSIDE_COMPILE

        with ca.enable(backend="eager", cache_dir=False) as session:
            with GATE.lock:
                within()
            assert session.stats().bypasses == {"inside_compile": 1}
            assert why_not_compile() is None

    in_threads(work)
    _nothing_is_stuck()


def test_a_structure_goes_while_another_thread_plans() -> None:
    """As in a walk, where no lock is waited for that such a thread may have."""
    with ca.enable(backend="eager", cache_dir=False) as session:
        _step()
    (graph,) = session.graphs()
    with graphs._ADDING:
        in_threads(graph.evict, timeout=10)
    assert graph.evicted and not graph.variants


def test_what_was_left_to_eager_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a backward in the midst of counting it counts it."""
    session, verdict = ca.enable(backend="eager", cache_dir=False), Bypass("over_budget")
    session.left_to_eager(verdict)
    original, within = sessions.Outcome, list[int]()

    def made(*args: Any, **named: Any) -> Any:
        if not within:
            within.append(1)
            session.count_left()
        return original(*args, **named)

    monkeypatch.setattr(sessions, "Outcome", made)
    assert session.stats().bypasses == {"over_budget": 1} and session.stats().backwards == 1


def test_a_backward_in_the_midst_of_a_reset_while_another_thread_captures() -> None:
    """Who captures waits for no lock that a thread may have which waits for it."""
    with ca.disable():
        right = _step()
    first_in_walk, reset = threading.Event(), threading.Event()

    class Waits(Capture):
        def end_capture(self, outputs: Any) -> Any:
            if threading.current_thread() in capturing:
                first_in_walk.set()
                reset.wait(WAIT)
                time.sleep(0.1)  # the other thread waits for this walk by now
            return super().end_capture(outputs)

    capturing: list[threading.Thread] = []

    def captures() -> None:
        capturing[:] = [threading.current_thread()]
        with ca.enable(backend="eager", cache_dir=False):
            assert same_bits(_step(), right)

    def resets(count: int) -> bool:
        def within_it() -> None:
            reset.set()
            with ca.enable(backend="eager", cache_dir=False):
                assert same_bits(_step(), right)

        assert first_in_walk.wait(WAIT)
        within = _RunAt(count, within_it)
        try:
            with _watched_by(within):
                GRAPHS.clear()
                with RARELY:
                    pass
        finally:
            reset.set()
        return within.came

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(seam, "Capture", Waits)
        for count in itertools.count():
            ca.reset()
            first_in_walk.clear(), reset.clear()
            if not in_threads(captures, functools.partial(resets, count), timeout=WAIT / 3)[1]:
                break
    assert count > 10


def test_gc_runs_backwards_while_a_tape_is_captured() -> None:
    """A cycle of Python's objects whose end runs a backward, as ``gc`` finds it: at each of many steps."""
    found: list[torch.Tensor] = []

    class Ends:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            with torch.enable_grad():
                found.append(_step(factor=3.0))

    with ca.disable():
        right, within = _step(), _step(factor=3.0)

    def work() -> None:
        threshold = gc.get_threshold()
        gc.set_threshold(7, 2, 2)
        try:
            with ca.enable(backend="eager", cache_dir=False):
                for step in range(60):
                    if step % 3 == 0:
                        ca.reset()
                    Ends()
                    assert same_bits(_step(), right)
        finally:
            gc.set_threshold(*threshold)
        gc.collect()

    in_threads(work)
    _nothing_is_stuck()
    assert len(found) == 60 and all(same_bits(each, within) for each in found)


def test_what_backwards_need_is_imported_before_the_first() -> None:
    """In the midst of an import there is only half of a module, for what ``gc`` runs there too."""
    code = """
import sys, compiled_autograd as ca
ca.enable(backend="eager", cache_dir=False)
print("platformdirs" in sys.modules, "compiled_autograd.shadow_cache.store" in sys.modules)
"""
    result = in_subprocess(code)
    assert result.stdout.strip() == "True True", result.stderr[-2000:]


_GC_WHILE_IT_LOOKS = """
import gc
from compiled_autograd.threads.gate import Gate

class Ends:
    def __init__(self):
        self.itself = self
    def __del__(self):
        gate.line.clear()

keep_few_lists = [[] for _ in range(1000)]
gc.set_threshold(1, 1, 1)
for _ in range(50):
    gc.disable()
    gate = Gate()
    gate.line.extend([-1] * 50)
    Ends()
    gc.enable()
    gate.others_in_line()
    assert not gate.line
gc.disable()
print("looked")
"""


def test_gc_while_the_line_is_copied() -> None:
    """Until Python 3.11 it may run in the midst of ``list.copy()``, which then reads what is not there any more."""
    result = in_subprocess(_GC_WHILE_IT_LOOKS, PYTHONMALLOC="debug")
    assert result.returncode == 0 and "looked" in result.stdout, result.stderr[-2000:]


def test_a_fork_in_the_midst_of_a_fork() -> None:
    """As a signal's handler may make one: the lock is held until the end of both."""
    gate = Gate()

    def is_free_for_others() -> bool:
        return in_threads(lambda: gate.lock.acquire(timeout=0.01) and not gate.lock.release())[0]

    for _ in range(2):
        gate.hold_over_fork()
    for _ in range(2):
        assert not is_free_for_others()
        gate.release_after_fork()
    assert is_free_for_others()
    gate.release_after_fork()  # of a fork before which it was interrupted
