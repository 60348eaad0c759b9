"""Tapes of 60,000 nodes are read, and freed again on a stack of the usual size, which some 50,000 overflow."""

from __future__ import annotations

import pytest
import torch

import compiled_autograd as ca
from compiled_autograd.capture import tape
from compiled_autograd.inspection import long_tapes

from .helpers import in_subprocess

_CODE = """
import gc, resource, threading
resource.setrlimit(resource.RLIMIT_STACK, (8 << 20, resource.getrlimit(resource.RLIMIT_STACK)[1]))
threading.stack_size(8 << 20)
import torch
import compiled_autograd as ca

def made():
    x = torch.randn(4, requires_grad=True)
    y, middle = x, None
    for number in range(30_000):
        y = (y * 0.999).sin()
        if number % 100 == 0:
            y = y + x
        middle = y if number == 20_000 else middle
    return x, middle, y.sum()
"""
_RUN = """
def run():
    x, middle, loss = made()
    nodes = len(ca.inspect(loss).nodes)
    assert nodes > 60_000, nodes
    ACTION
    print("freed", flush=True)

thread = threading.Thread(target=run)
thread.start()
thread.join()
"""
_ACTIONS = {
    "at once": "del loss, middle",
    "from the middle": "del loss; del middle",
    "after it ran": "loss.backward(retain_graph=True); assert x.grad is not None; del loss, middle",
    "inspected twice": "ca.inspect(loss, middle.exp()); del loss, middle",
}


@pytest.mark.slow
def test_a_long_tape_that_was_inspected_can_be_freed() -> None:
    done = in_subprocess(_CODE + "".join(_RUN.replace("ACTION", action) for action in _ACTIONS.values()))
    assert (done.returncode, done.stdout) == (0, "freed\n" * len(_ACTIONS)), done.stderr


def test_a_tape_up_to_the_limit_is_left_alone() -> None:
    loss = torch.randn(3, requires_grad=True).exp().sin().sum()
    ca.inspect(loss)
    assert loss.grad_fn is not None and loss.grad_fn.metadata == {}


def test_nodes_of_a_long_tape_live_as_long_as_their_edges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tape, "MAX_NODES_READ", 4)
    monkeypatch.setattr(long_tapes, "_TOGETHER", 2)
    freed: list[int] = []

    class Noted(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, number):  # type: ignore[no-untyped-def]
            ctx.note = _Note(number)
            return x * 2

        @staticmethod
        def backward(ctx, gradient):  # type: ignore[no-untyped-def]
            return gradient * 2, None

    class _Note:
        def __init__(self, number: int) -> None:
            self.number = number

        def __del__(self) -> None:
            freed.append(self.number)

    x = torch.randn(3, requires_grad=True)
    y, kept = x, None
    for number in range(12):
        y = Noted.apply(y, number)
        kept = y if number == 5 else kept
    assert len(ca.inspect(y).nodes) == 13
    del y
    assert sorted(freed) == [6, 7, 8, 9, 10, 11]
    assert kept is not None
    kept.sum().backward()
    assert x.grad is not None and torch.equal(x.grad, torch.full((3,), 64.0))
    del kept
    assert sorted(freed) == list(range(12))
