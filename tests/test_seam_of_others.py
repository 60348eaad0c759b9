"""Another thread that turns PyTorch's own compiled autograd off and on while we walk: it waits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch._dynamo.compiled_autograd as torchs_own

import compiled_autograd as ca
from compiled_autograd.engine import seam

from .helpers import assert_same, expect

_SEAM = torch._C._dynamo.compiled_autograd
_LONG_ENOUGH = 0.3  # for a thread that need not wait


def _is_free() -> bool:
    """Whether nothing is set in the seam, and PyTorch's own does not take itself for turned on."""
    prior = _SEAM.set_autograd_compiler(None, False)
    _SEAM.set_autograd_compiler(*prior)
    return prior[0] is None and not torchs_own.compiled_autograd_enabled


class _Other:
    """A thread that turns PyTorch's own off, and on again when it is told to."""

    def __init__(self) -> None:
        self.entered, self.leave, self.left = threading.Event(), threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        with torchs_own._disable():
            self.entered.set()
            self.leave.wait()
        self.left.set()

    def end(self) -> None:
        self.leave.set()
        self.thread.join()


def _in_the_middle(monkeypatch: pytest.MonkeyPatch, do: Callable[[], Any]) -> None:
    """Do something in the next walk, after the seam is set and before the engine looks at it."""
    run = seam.run_backward

    def after(*args: Any) -> Any:
        monkeypatch.setattr(seam, "run_backward", run)
        do()
        return run(*args)

    monkeypatch.setattr(seam, "run_backward", after)


def _step(x: torch.Tensor, session: Any) -> None:
    x.grad = None
    with session:
        (x.exp() * x).sum().backward()


def _expected() -> torch.Tensor:
    x = torch.linspace(-1, 1, 4, requires_grad=True)
    _step(x, ca.disable())
    assert x.grad is not None
    return x.grad


def test_it_is_not_turned_off_in_the_middle_of_a_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else what we have set would be put back when it is turned on again, after we are gone."""
    x, other, session = torch.linspace(-1, 1, 4, requires_grad=True), _Other(), ca.enable(backend="eager")

    def enter() -> None:
        other.thread.start()
        other.entered.wait(_LONG_ENOUGH)

    _in_the_middle(monkeypatch, enter)
    _step(x, session)
    assert other.entered.wait(10)
    other.end()
    assert _is_free()
    _step(x, session)
    assert_same([x.grad], [_expected()])
    expect(session.stats(), structure_misses=1, hits=1)


def test_it_is_not_turned_on_in_the_middle_of_a_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the engine would run the backward, and then it would be run once more."""
    x, other, session = torch.linspace(-1, 1, 4, requires_grad=True), _Other(), ca.enable(backend="eager")
    other.thread.start()
    assert other.entered.wait(10)

    def leave() -> None:
        other.leave.set()
        other.left.wait(_LONG_ENOUGH)

    _in_the_middle(monkeypatch, leave)
    _step(x, session)
    other.end()
    assert _is_free()
    _step(x, session)
    assert_same([x.grad], [_expected()])
    expect(session.stats(), structure_misses=1, hits=1)


def test_its_cache_is_not_cleared_in_the_middle_of_a_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    x, session, cleared = torch.linspace(-1, 1, 4, requires_grad=True), ca.enable(backend="eager"), threading.Event()

    def clear() -> None:
        _SEAM.clear_cache()
        cleared.set()

    thread = threading.Thread(target=clear)
    in_time: list[bool] = []

    def begin() -> None:
        thread.start()
        in_time.append(cleared.wait(_LONG_ENOUGH))

    _in_the_middle(monkeypatch, begin)
    _step(x, session)
    thread.join()
    assert in_time == [False] and cleared.is_set()
    assert_same([x.grad], [_expected()])


def test_inside_a_walk_of_its_own_a_thread_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    x, session = torch.linspace(-1, 1, 4, requires_grad=True), ca.enable(backend="eager")

    def inside() -> None:
        prior = _SEAM.set_autograd_compiler(None, False)
        _SEAM.set_autograd_compiler(*prior)

    _in_the_middle(monkeypatch, inside)
    _step(x, session)
    assert _is_free()
    assert_same([x.grad], [_expected()])
    expect(session.stats(), structure_misses=1)


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
def test_torch_func_in_other_threads(backend: str) -> None:
    """``torch.func.grad`` turns it off and on at each call, and so does what compiles."""
    stop = threading.Event()

    def differentiate() -> int:
        calls = 0
        while not stop.is_set():
            torch.func.grad(lambda y: (y * y).sum())(torch.ones(2))
            calls += 1
        return calls

    def train(length: int) -> None:
        for count in range(1, 12):  # a structure of its own each time
            leaves = [torch.linspace(-1, 1, 4, requires_grad=True) for _ in range(2)]
            for leaf, session in zip(leaves, (ca.enable(backend=backend), ca.disable()), strict=True):
                value = leaf
                for _ in range(length + 3 * count):
                    value = value.sin()
                for _ in range(2):
                    with session:
                        value.sum().backward(retain_graph=True)
            if backend == "eager":
                assert_same([leaves[0].grad], [leaves[1].grad])
            else:
                torch.testing.assert_close(leaves[0].grad, leaves[1].grad)

    with ThreadPoolExecutor(4) as pool:
        others = [pool.submit(differentiate) for _ in range(2)]
        try:
            for training in [pool.submit(train, length) for length in (1, 2)]:
                training.result()
        finally:
            stop.set()
        assert all(other.result() for other in others)
    assert _is_free()
