"""Threads that give to one leaf at once: nothing is lost, and nobody waits for who writes other leaves."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import compiled_autograd as ca
from compiled_autograd.engine import seam
from compiled_autograd.steps import accumulate as module
from compiled_autograd.threads.gate import GATE
from compiled_autograd.threads.leaf_writes import LEAF_WRITES
from compiled_autograd.torch_api import attributes

from .helpers import WAIT, Squares, Waits, assert_same, expect, in_threads


def _in_threads(*works: Callable[[], Any]) -> None:
    in_threads(*works)
    assert not LEAF_WRITES.writing and not LEAF_WRITES._through_nodes


def _slowly(monkeypatch: pytest.MonkeyPatch, began: threading.Event | None = None) -> None:
    """Additions read, stay away for a while, and write what was there and the gradient: as bad as can be."""

    def add(leaves: object, into: list[torch.Tensor], terms: list[torch.Tensor]) -> None:
        if began is not None:
            began.set()
        before = [each.clone() for each in into]
        time.sleep(0.01)
        for each, old, term in zip(into, before, terms, strict=True):
            each.copy_(old + term)

    def assigned(leaf: torch.Tensor, old: torch.Tensor | None, grad: torch.Tensor) -> bool:
        time.sleep(0.01)
        leaf.grad = grad
        return True

    monkeypatch.setattr(module, "_add_in_place", add)
    monkeypatch.setattr(module, "_assigned", assigned)


@pytest.mark.parametrize("function", ["built-in", "Python"])
@pytest.mark.parametrize("fresh", [False, True])
def test_two_threads_that_give_to_one_leaf(monkeypatch: pytest.MonkeyPatch, fresh: bool, function: str) -> None:
    leaf = torch.ones(4, requires_grad=True)
    session = ca.enable(backend="eager")
    together = threading.Barrier(2)

    def backward() -> None:
        with session:
            (Squares.apply(leaf) if function == "Python" else leaf * 2).sum().backward()

    for _ in range(2):  # both structures are known
        backward()
    leaf.grad = None
    _slowly(monkeypatch)
    rounds = 6

    def work() -> None:
        for number in range(rounds):
            together.wait(WAIT)
            backward()
            if fresh and together.wait(WAIT) == 0:
                assert torch.equal(leaf.grad, torch.full((4,), 4.0)), f"round {number}"  # type: ignore[arg-type]
                leaf.grad = None

    _in_threads(work, work)
    if not fresh:
        assert torch.equal(leaf.grad, torch.full((4,), 4.0 * rounds))  # type: ignore[arg-type]
    expect(session.stats(), structure_misses=2, hits=2 * rounds)


def test_a_hook_that_raises_lets_go_of_its_leaf() -> None:
    leaf = torch.ones(4, requires_grad=True)

    def hook(each: torch.Tensor) -> None:
        raise ValueError("of the user's")

    handle = leaf.register_post_accumulate_grad_hook(hook)
    with ca.enable(backend="eager") as session:
        with pytest.raises(ValueError, match="of the user's"):
            (leaf * 2).sum().backward()
        assert not LEAF_WRITES.writing
        handle.remove()
        _in_threads(lambda: (leaf * 2).sum().backward())
    assert torch.equal(leaf.grad, torch.full((4,), 4.0))  # type: ignore[arg-type]
    expect(session.stats(), structure_misses=1)


def test_who_writes_other_leaves_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither for additions nor for hooks."""
    one, other = (torch.ones(4, requires_grad=True) for _ in range(2))
    session = ca.enable(backend="eager")
    entered, done = threading.Event(), threading.Event()

    def hook(leaf: torch.Tensor) -> None:
        entered.set()
        assert done.wait(WAIT)

    one.register_post_accumulate_grad_hook(hook)

    def first() -> None:
        with session:
            (one * 2).sum().backward()

    def second() -> None:
        assert entered.wait(WAIT)
        with session:
            (other * 2).sum().backward()
        with ca.disable():  # nor does who goes to the eager engine
            (other * 2).sum().backward()
        done.set()

    _in_threads(first, second)
    expect(session.stats(), structure_misses=2)
    assert torch.equal(other.grad, torch.full((4,), 4.0))  # type: ignore[arg-type]


def test_a_hook_may_run_a_backward_into_its_own_leaf() -> None:
    leaf = torch.ones(4, requires_grad=True)
    session = ca.enable(backend="eager")
    calls: list[int] = []

    def hook(each: torch.Tensor) -> None:
        calls.append(1)
        with torch.enable_grad():
            loss = (leaf * 3).sum()
        if len(calls) < 3:
            loss.backward()

    leaf.register_post_accumulate_grad_hook(hook)

    def work() -> None:
        with session:
            (leaf * 2).sum().backward()

    _in_threads(work)
    assert len(calls) == 3 and torch.equal(leaf.grad, torch.full((4,), 8.0))  # type: ignore[arg-type]


# ---- with threads in the eager engine --------------------------------------------------------------------------------


def test_a_thread_that_enters_the_eager_engine_waits_for_those_who_write(monkeypatch: pytest.MonkeyPatch) -> None:
    leaf = torch.ones(4, requires_grad=True)
    session = ca.enable(backend="eager")
    for _ in range(2):
        with session:
            (leaf * 2).sum().backward()
    leaf.grad = torch.zeros(4)
    began = threading.Event()
    _slowly(monkeypatch, began)

    def compiled() -> None:
        with session:
            (leaf * 2).sum().backward()

    def eager() -> None:
        assert began.wait(WAIT)
        (leaf * 3).sum().backward()

    _in_threads(compiled, eager)
    assert torch.equal(leaf.grad, torch.full((4,), 5.0))
    expect(session.stats(), structure_misses=2, hits=1)


@pytest.mark.parametrize("fresh", [False, True])
def test_while_a_thread_is_in_the_eager_engine_its_nodes_write(monkeypatch: pytest.MonkeyPatch, fresh: bool) -> None:
    leaf, bare = torch.ones(4, requires_grad=True), torch.ones(4, requires_grad=True)
    session = ca.enable(backend="eager")
    ours_entered, ours_leave, eager_entered, eager_leave = (threading.Event() for _ in range(4))
    nodes: list[Any] = []
    monkeypatch.setattr(attributes, "leaf_node", lambda each, of=attributes.leaf_node: nodes.append(each) or of(each))
    if not fresh:
        leaf.grad, bare.grad = torch.ones(4), torch.ones(4)

    def compiled() -> None:
        with session:
            (Waits.apply(leaf * bare, ours_entered, ours_leave) * 2).sum().backward()

    def eager() -> None:
        assert ours_entered.wait(WAIT)
        Waits.apply(leaf * 3, eager_entered, eager_leave).sum().backward()

    def conduct() -> None:
        assert eager_entered.wait(WAIT)
        ours_leave.set()
        deadline = time.monotonic() + WAIT
        while len(nodes) < 2 and time.monotonic() < deadline:
            time.sleep(0.001)
        eager_leave.set()

    _in_threads(compiled, eager, conduct)
    assert {id(each) for each in nodes} == {id(leaf), id(bare)}
    assert torch.equal(leaf.grad, torch.full((4,), 5.0 + (not fresh)))  # type: ignore[arg-type]
    assert torch.equal(bare.grad, torch.full((4,), 2.0 + (not fresh)))  # type: ignore[arg-type]
    assert not leaf.grad._is_view() and not GATE.idents and not GATE.in_call  # type: ignore[union-attr]
    expect(session.stats(), structure_misses=1)


@pytest.mark.parametrize("others", [False, True])
def test_what_runs_call_by_call_gives_through_the_node_too(monkeypatch: pytest.MonkeyPatch, others: bool) -> None:
    """Beside a thread in the eager engine, which with `create_graph` puts another `.grad` in the place of this one."""
    leaf = torch.ones(4, requires_grad=True)
    leaf.grad, nodes = torch.ones(4), []
    monkeypatch.setattr(attributes, "leaf_node", lambda each, of=attributes.leaf_node: nodes.append(each) or of(each))
    try:
        if others:
            GATE.idents.append(-1)
        with torch.no_grad():
            module.accumulate_into(leaf, torch.ones(4))
            module.accumulate_into(leaf, None)
    finally:
        if others:
            GATE.idents.remove(-1)
    assert [id(each) for each in nodes] == ([id(leaf)] if others else [])
    assert torch.equal(leaf.grad, torch.full((4,), 2.0)) and not LEAF_WRITES.writing


def test_threads_with_sessions_and_without_on_one_leaf() -> None:
    """As it comes, for half a second: who writes large leaves and who is in the eager engine meet in all ways."""
    leaf = torch.zeros(200_000, requires_grad=True)
    leaf.grad = torch.zeros(200_000)
    ones = torch.ones(200_000)
    session = ca.enable(backend="eager")
    counts = [0] * 4
    ends = time.monotonic() + 0.5

    def work(number: int) -> None:
        while time.monotonic() < ends or not counts[number]:
            with session if number % 2 else ca.disable():
                (leaf * ones).sum().backward()
            counts[number] += 1

    _in_threads(*(lambda number=number: work(number) for number in range(4)))  # type: ignore[misc]
    assert leaf.grad.min() == leaf.grad.max() == sum(counts)


# ---- forks -----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_waits_for_no_thread_that_is_not_there() -> None:
    inside, leave = threading.Event(), threading.Event()

    def wait() -> None:
        inside.set()
        leave.wait(WAIT)

    def hold() -> None:
        LEAF_WRITES.in_turn(wait)

    def fork() -> None:
        assert inside.wait(WAIT)
        child = os.fork()
        if child == 0:
            os._exit(0 if LEAF_WRITES.in_turn(lambda: None) and not LEAF_WRITES.writing else 1)
        deadline = time.monotonic() + WAIT
        status = 0
        while not (done := os.waitpid(child, os.WNOHANG))[0]:
            if time.monotonic() > deadline:
                os.kill(child, 9)
            time.sleep(0.01)
        status = done[1]
        leave.set()
        assert status == 0

    _in_threads(hold, fork)


@pytest.mark.parametrize("inner", ["left to eager", "into a leaf that the other thread wants too"])
def test_a_backward_in_a_hook_while_another_thread_waits_for_its_leaf(inner: str) -> None:
    """Who waits for a leaf has nothing yet that anybody need wait for."""
    p, q = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    in_hook, waits = threading.Event(), threading.Event()

    def hook(leaf: torch.Tensor) -> None:
        if threading.current_thread() is threading.main_thread() or in_hook.is_set():
            return
        in_hook.set()
        waits.wait(WAIT)
        time.sleep(0.3)  # until the other thread is at the leaf
        with torch.enable_grad():
            if inner == "left to eager":
                z = torch.ones(2, requires_grad=True)
                torch.autograd.grad((z**3).sum(), z, create_graph=True)
            else:
                (q * 2).sum().backward()

    p.register_post_accumulate_grad_hook(hook)

    def step() -> None:
        with ca.enable(backend="eager", cache_dir=False):
            (q * p).sum().backward()

    def second() -> None:
        in_hook.wait(WAIT)
        waits.set()
        step()

    step()
    _in_threads(step, second)
    extra = 0 if inner == "left to eager" else 2
    assert p.grad is not None and q.grad is not None
    assert p.grad.tolist() == [3.0] * 3 and q.grad.tolist() == [3.0 + extra] * 3


def test_a_gradient_that_is_taken_away_between_the_walk_and_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """By another thread. The engine hands the tensor over all the same, and the report knows nothing of it."""
    leaf = torch.ones(4, requires_grad=True)
    session = ca.enable(backend="eager", cache_dir=False)
    begin = seam._begin

    def take() -> Any:
        leaf.grad = None
        return begin()

    for step in range(6):
        leaf.grad = torch.full((4,), 5.0) if step in (2, 3, 5) else None
        with monkeypatch.context() as patch:
            if step == 2:
                patch.setattr(seam, "_begin", take)
            with session:
                (leaf * 2).sum().backward()
        assert leaf.grad is not None and leaf.grad.tolist() == [7.0 if step in (3, 5) else 2.0] * 4
    expect(session.stats(), structure_misses=2, hits=4, captures=2)


@pytest.mark.parametrize("times", [1, 2, 100])
def test_a_gradient_that_is_given_between_the_walk_and_the_report(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """By another thread, or another one in the place of the first. The engine asserts that it has met the tensor."""
    leaf = torch.ones(4, requires_grad=True)
    session = ca.enable(backend="eager", cache_dir=False)
    begin, given = seam._begin, []

    def give() -> Any:
        if len(given) < times:
            given.append(1)
            leaf.grad = torch.full((4,), 5.0)
        return begin()

    monkeypatch.setattr(seam, "_begin", give)
    for step in range(4):
        with session:
            (leaf * 2).sum().backward()
        assert leaf.grad is not None and leaf.grad.tolist() == [7.0 + 2 * step * (times < 100)] * 4
    stats = session.stats()
    if times == 100:
        assert sum(stats.bypasses.values()) == stats.backwards == 4
    else:
        expect(stats, structure_misses=1, hits=3)
    assert GATE.idle()


@pytest.mark.parametrize("on_miss", ["compile", "background"])
def test_inside_a_write_nothing_is_compiled(on_miss: str) -> None:
    """A finalizer or a signal's handler may run a backward there; what compiles may wait for the lock."""
    leaf = torch.ones(4, requires_grad=True)

    def within() -> None:
        (leaf * leaf).exp().sum().backward()

    with ca.enable(backend="eager", cache_dir=False, on_miss=on_miss, compile_budget=float("inf")) as session:
        assert LEAF_WRITES.in_turn(within)
        assert session.wait(60) and session.stats().compiles == 0 and session.stats().backwards == 1
        first, leaf.grad = leaf.grad, None
        for _ in range(2):
            leaf.grad = None
            within()
            assert session.wait(60)
        assert session.stats().compiles == session.stats().hits == 1
    assert_same([first, leaf.grad], [2 * torch.e * torch.ones(4)] * 2, bitwise=False)
