"""What must hold on every supported version of PyTorch, where they differ below."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.overrides import TorchFunctionMode

import compiled_autograd as ca

from .helpers import assert_same, expect, in_subprocess


def test_a_leaf_with_and_without_a_gradient() -> None:
    """Both kinds in one tape, and each in both states."""
    one, other = (torch.linspace(-1, 1, 4, requires_grad=True) for _ in range(2))
    session = ca.enable(backend="eager")
    for which in (one, other, one):
        which.grad = None
        with session:
            (one.exp() * other).sum().backward()
    assert_same([one.grad, other.grad], [one.exp() * other, 2 * one.exp()])
    assert session.stats().bypasses == {}
    expect(session.stats(), structure_misses=3)


def test_a_mode_of_the_users_sees_no_stand_in() -> None:
    class Seeing(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(getattr(function, "__name__", ""))
            return function(*args, **(kwargs or {}))

    seen: list[str] = []
    x = torch.linspace(-1, 1, 4, requires_grad=True)
    x.grad = torch.ones(4)
    loss = x.exp().sum()
    with ca.enable(backend="eager") as session, Seeing():
        torch.autograd.backward(loss)
    assert not {"__get__", "grad"} & set(seen)
    expect(session.stats(), structure_misses=1)
    assert_same([x.grad], [1 + x.exp()])


def test_threads_that_end_one_after_the_other() -> None:
    """The first one, too, in which anything is traced."""
    code = """
import os, threading, torch
import compiled_autograd as ca
def work():
    x = torch.ones(3, requires_grad=True)
    with ca.enable(backend="eager", cache_dir=False):
        (x.exp() * x).sum().backward()
for _ in range(4):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    ca.reset()
os._exit(0)  # torch 2.12 for CUDA may abort at exit, also after a plain backward in a thread
"""
    done = in_subprocess(code)
    assert done.returncode == 0, done.stderr


def test_the_graph_of_a_cumulative_product_does_not_grow_with_its_length() -> None:
    assert _operators(lambda x: x.cumprod(0), 4) == _operators(lambda x: x.cumprod(0), 40)


def _operators(function: Callable[[torch.Tensor], torch.Tensor], length: int) -> int:
    counts: list[int] = []

    def backend(graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        counts.append(sum(node.op == "call_function" for node in graph_module.graph.nodes))
        return graph_module.forward

    x = torch.linspace(0.5, 1.5, length, requires_grad=True)
    wanted = torch.autograd.grad((function(x) * 2).sum(), x)
    with ca.enable(backend=backend, dynamic=False) as session:
        found = torch.autograd.grad((function(x) * 2).sum(), x)
    torch.testing.assert_close(found, wanted)
    stats = session.stats()
    assert counts and stats.failures == 0 and not stats.bypasses
    return sum(counts)
