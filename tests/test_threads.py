"""Several threads at once: sessions belong to a thread, the seam to the process."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest
import torch
from torch import nn

import compiled_autograd as ca
from compiled_autograd.engine import session as sessions
from compiled_autograd.threads.gate import GATE, threads_running
from shadow_cache import Bypass

from .helpers import (
    WAIT,
    Squares,
    Waits,
    another_walks,
    assert_grads,
    assert_same,
    expect,
    in_subprocess,
    in_threads,
    mlp,
    total,
)


def _square(x: torch.Tensor) -> torch.Tensor:
    return (x * x).sum()


def test_a_session_holds_only_in_its_thread() -> None:
    x = torch.randn(3, requires_grad=True)

    def elsewhere() -> bool:
        _square(x).backward()
        return sessions.current() is None

    with ca.enable(backend="eager") as session:
        assert in_threads(elsewhere) == [True]
    expect(session.stats())
    assert x.grad is not None and torch.equal(x.grad, 2 * x.detach())


def test_one_session_entered_by_several_threads_counts_for_all() -> None:
    session = ca.enable(backend="eager")
    with session:  # captured once, so that nobody misses below
        _square(torch.randn(3, requires_grad=True)).backward()

    def work() -> torch.Tensor:
        x = torch.randn(3, requires_grad=True)
        with session:
            for _ in range(10):
                x.grad = None
                _square(x).backward()
        assert x.grad is not None
        return x.grad - 2 * x.detach()

    for difference in in_threads(*[work] * 4):
        assert not difference.any()
    stats = session.stats()
    assert stats.backwards == 41
    assert stats.hits + stats.tuning + stats.structure_misses + sum(stats.bypasses.values()) == 41
    assert stats.structure_misses == 1 and set(stats.bypasses) <= {"other_thread_in_backward"}


@pytest.mark.parametrize("on_unsupported", ["eager", "raise"])
def test_another_thread_in_eager_backward_is_a_reason_to_bypass(on_unsupported: str) -> None:
    """With ``raise`` too: the tape itself could be captured."""
    entered, leave = threading.Event(), threading.Event()
    other = torch.randn(3, requires_grad=True)
    session = ca.enable(backend="eager", on_unsupported=on_unsupported)
    with session:  # so that the other thread's backward is seen
        pass
    thread = threading.Thread(target=lambda: Waits.apply(other, entered, leave).sum().backward(), daemon=True)
    thread.start()
    assert entered.wait(WAIT)
    x = torch.randn(3, requires_grad=True)
    with session:
        _square(x).backward()
    leave.set()
    thread.join(WAIT)
    assert not thread.is_alive()
    expect(session.stats(), bypasses={"other_thread_in_backward": 1})
    assert x.grad is not None and torch.equal(x.grad, 2 * x.detach())
    assert other.grad is not None and torch.equal(other.grad, torch.ones(3))
    with session:
        x.grad = None
        _square(x).backward()
    expect(session.stats(), bypasses={"other_thread_in_backward": 1}, structure_misses=1)


def test_another_thread_in_compiled_backward_is_no_reason() -> None:
    """What was handed over runs outside of the engine, so the seam is free."""
    entered, leave = threading.Event(), threading.Event()
    session, mine = ca.enable(backend="eager"), ca.enable(backend="eager")

    def work() -> None:
        with session:
            Waits.apply(torch.randn(3, requires_grad=True), entered, leave).sum().backward()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    assert entered.wait(WAIT)
    x = torch.randn(3, requires_grad=True)
    with mine:
        _square(x).backward()
    leave.set()
    thread.join(WAIT)
    assert not thread.is_alive()
    expect(mine.stats(), structure_misses=1)
    expect(session.stats(), structure_misses=1)
    assert x.grad is not None and torch.equal(x.grad, 2 * x.detach())


def test_a_backward_that_began_before_the_first_enable_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gate learns of it by looking at the threads' stacks."""
    entered, leave = threading.Event(), threading.Event()
    code = torch.autograd.graph._engine_run_backward.__code__

    def work() -> None:
        torch._C._ImperativeEngine  # noqa: B018  the engine itself is not replaced in this thread
        Waits.apply(torch.randn(3, requires_grad=True), entered, leave).sum().backward()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    assert entered.wait(WAIT)
    assert thread.ident in threads_running(code)
    monkeypatch.setattr(GATE, "idents", [])  # as if it had gone in before there was a gate
    monkeypatch.setattr(GATE, "_unseen", {thread.ident})
    monkeypatch.setattr(GATE, "_find_unseen", lambda: threads_running(code), raising=False)
    x = torch.randn(3, requires_grad=True)
    with ca.enable(backend="eager") as session:
        _square(x).backward()
    monkeypatch.undo()
    leave.set()
    thread.join(WAIT)
    expect(session.stats(), bypasses={"other_thread_in_backward": 1})
    assert x.grad is not None and torch.equal(x.grad, 2 * x.detach())


def test_threads_with_different_models_and_sessions() -> None:
    references = [mlp(width=8, depth=1 + index) for index in range(4)]
    batch = torch.randn(4, 8)

    def train(index: int, network: nn.Module, enabled: bool) -> ca.Session | None:
        session = ca.enable(backend="eager") if enabled else None
        for _ in range(5):
            network.zero_grad()
            with session or ca.disable():
                network(batch * (index + 1)).square().mean().backward()
        return session

    import copy

    models = [copy.deepcopy(reference) for reference in references]
    for index, reference in enumerate(references):
        train(index, reference, enabled=False)
    done = in_threads(*[lambda i=i, m=m: train(i, m, i % 2 == 0) for i, m in enumerate(models)])
    for model, reference in zip(models, references, strict=True):
        assert_grads(model, reference)
    for session in (each for each in done if each is not None):
        stats = session.stats()
        assert stats.backwards == 5 and not stats.failures
        assert set(stats.bypasses) <= {"other_thread_in_backward"}


def _tape(kind: int, x: torch.Tensor) -> torch.Tensor:
    return [
        lambda: (x * x).sum(),
        lambda: (x.exp() * x).sum() + x.sum(),
        lambda: Squares.apply(x).sin().sum(),
        lambda: (x.view(2, 2) @ x.view(2, 2)).tanh().sum(),
    ][kind]()


def test_stress_of_eight_threads() -> None:
    """Eight threads for two seconds; some compile, some do not, one resets now and then. Nothing hangs or is wrong."""
    inputs = [torch.randn(4) for _ in range(4)]
    wanted = []
    for kind in range(4):
        leaf = inputs[kind].clone().requires_grad_()
        wanted.append(torch.autograd.grad(_tape(kind, leaf), leaf))
    ends = time.monotonic() + 2.0

    def work(number: int) -> tuple[int, ca.Stats | None]:
        session = ca.enable(backend="eager") if number % 3 else None
        rounds = 0
        while time.monotonic() < ends or rounds < 4:
            kind = (number + rounds) % 4
            leaf = inputs[kind].clone().requires_grad_()
            with session or ca.disable():
                assert_same(torch.autograd.grad(_tape(kind, leaf), leaf), wanted[kind])
            rounds += 1
            if number == 1 and rounds % 50 == 0:
                ca.reset()
        return rounds, session.stats() if session is not None else None

    for rounds, stats in in_threads(*[lambda n=n: work(n) for n in range(8)]):
        if stats is not None:
            assert stats.backwards == rounds == total(stats)
            assert stats.failures == 0
            assert set(stats.bypasses) <= {"other_thread_in_backward"}
    assert GATE.idle()


def test_a_first_enable_inside_a_hook_does_not_leave_its_thread_on_eager() -> None:
    code = """
import torch, compiled_autograd as ca
found = []

def backward(x, within=None):
    y = x * 2
    if within:
        y.register_hook(within)
    (y * y).sum().backward()
    assert torch.equal(x.grad, 8 * x.detach())

def within(grad):
    found.append(ca.enable(backend="eager", on_unsupported="raise"))

def fresh():
    return torch.ones(3, requires_grad=True)

backward(fresh(), within)
with found[0]:
    backward(fresh())
    backward(fresh())
stats = found[0].stats()
print(stats.structure_misses, stats.hits, stats.bypasses)
"""
    ended = in_subprocess(code)
    assert ended.stdout.strip() == "1 1 {}", ended.stderr


def test_two_threads_compile_the_same_structure_once() -> None:
    start = threading.Barrier(2)
    compiled: list[int] = []

    def backend(graph_module: Any, example_inputs: Any) -> Any:
        compiled.append(1)
        time.sleep(0.05)
        return graph_module.forward

    session = ca.enable(backend=backend)

    def work() -> torch.Tensor:
        x = torch.ones(3, requires_grad=True)
        start.wait(WAIT)
        with session:
            _square(x).backward()
        assert x.grad is not None
        return x.grad

    assert_same(in_threads(work, work), [torch.full((3,), 2.0)] * 2)
    stats = session.stats()
    assert stats.backwards == 2 and stats.compiles == len(compiled)
    assert stats.structure_misses <= 1


def test_a_thread_that_enters_the_eager_engine_waits_for_one_that_captures() -> None:
    """And is not counted as one that is there meanwhile, also after Ctrl-C."""
    entered, waits = threading.Event(), threading.Event()
    x = torch.randn(3, requires_grad=True)
    ca.enable(backend="eager")  # so that the gate is there

    def backward() -> None:
        waits.set()
        _square(x).backward()
        entered.set()

    thread = threading.Thread(target=backward, daemon=True)
    with another_walks():
        thread.start()
        assert waits.wait(WAIT) and not entered.wait(0.2)
        assert GATE.idents == [] and not GATE.others_in_eager()
    assert entered.wait(WAIT)
    thread.join(WAIT)
    assert x.grad is not None and torch.equal(x.grad, 2 * x.detach()) and GATE.idle()

    with another_walks():
        alarm = threading.Timer(0.2, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
        alarm.start()
        with pytest.raises(KeyboardInterrupt):
            _square(x).backward()
        assert GATE.idents == []
    alarm.join(WAIT)
    assert GATE.idle()


def test_threads_that_leave_backwards_of_one_session_to_eager_lose_no_count(monkeypatch: pytest.MonkeyPatch) -> None:
    session, verdict = ca.enable(backend="eager"), Bypass("over_budget")
    original = sessions.LeftToEager
    other = threading.Thread(target=session.left_to_eager, args=(verdict,), daemon=True)

    def made(verdict: Bypass) -> Any:
        if not other.ident:
            other.start()
            other.join(0.2)
        return original(verdict)

    monkeypatch.setattr(sessions, "LeftToEager", made)
    session.left_to_eager(verdict)
    other.join(WAIT)
    expect(session.stats(), bypasses={"over_budget": 2})


def test_an_interrupt_while_stats_are_counted_loses_none(monkeypatch: pytest.MonkeyPatch) -> None:
    session = ca.enable(backend="eager")
    for _ in range(2):
        session.left_to_eager(Bypass("over_budget"))

    def interrupt(*args: Any, **keywords: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Bypass, "label", property(interrupt))
        with pytest.raises(KeyboardInterrupt):
            session.stats()
    expect(session.stats(), bypasses={"over_budget": 2})


@pytest.mark.skipif(not hasattr(os, "fork"), reason="it forks")
def test_a_child_forked_inside_an_eager_backward_is_out_of_it_afterwards() -> None:
    code = """
import os, torch, compiled_autograd as ca
from compiled_autograd.threads.gate import GATE
ca.enable(backend="eager")
x = torch.randn(3, requires_grad=True)
y = x * 2
children = []
y.register_hook(lambda grad: children.append(os.fork()))
(y * y).sum().backward()
idle = GATE.idle()
if children[0] == 0:
    os._exit(0 if idle else 3)
print(idle, os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]))
"""
    ended = in_subprocess(code)
    assert ended.stdout.split() == ["True", "0"], ended.stderr
