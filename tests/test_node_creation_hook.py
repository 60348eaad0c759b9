"""``torch.autograd.graph.node_creation_hook`` (since 2.14) sees the nodes that it sees under eager, none of ours."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import compiled_autograd as ca

from .own_loops import alike, extension, session  # noqa: F401

pytestmark = [
    pytest.mark.skipif(not hasattr(torch.autograd.graph, "node_creation_hook"), reason="torch has no such hook yet"),
    pytest.mark.usefixtures("extension"),
]
_BACKWARDS = 6


class _Differentiates(torch.autograd.Function):
    """Records and runs a tape in its backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        with torch.enable_grad():
            inner = ctx.saved_tensors[0].detach().requires_grad_()
            (found,) = torch.autograd.grad((inner * 2).sum(), inner)
        return gradient * found


def _plain(x: torch.Tensor) -> torch.Tensor:
    for _ in range(10):
        x = (x * x).tanh()
    return x.sum()


def _second(x: torch.Tensor) -> torch.Tensor:
    (found,) = torch.autograd.grad((x * x).tanh().sum(), x, create_graph=True)
    return found.square().sum()


_PROGRAMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "plain": _plain,
    "second derivative": _second,
    "recomputed": lambda x: checkpoint(lambda a: (a * x).tanh().sin(), x, use_reentrant=False).sum(),  # type: ignore[union-attr]
    "recomputed, reentrant": lambda x: checkpoint(lambda a: a.tanh().sin(), x * 2, use_reentrant=True).sum(),  # type: ignore[union-attr]
    "within a backward": lambda x: _Differentiates.apply(x.sin()).sum(),
}
_SESSIONS: dict[str, Callable[[], ca.Session]] = {
    "captures and hits": lambda: ca.enable(backend="eager", cache_dir=False, tune=False, extension="off"),
    "hits in C++": lambda: ca.enable(backend="eager", cache_dir=False, tune=False, extension="auto"),
    "own loop": session,
}


def _created(program: Callable[[torch.Tensor], torch.Tensor], around: Any) -> list[Any]:
    """The names of the nodes that were made in some backwards, and the gradients."""
    seen: list[Any] = []
    torch.manual_seed(0)
    with torch.autograd.graph.node_creation_hook(lambda node: seen.append(node.name())), around:
        for _ in range(_BACKWARDS):
            x = torch.randn(4, 5, requires_grad=True)
            program(x).backward()
            seen.append(x.grad)
    return seen


@pytest.mark.parametrize("used", _SESSIONS)
@pytest.mark.parametrize("program", _PROGRAMS)
def test_it_sees_the_nodes_that_eager_makes(program: str, used: str) -> None:
    """The extension and its own loop are checked in the midst of it, and their tapes are not seen."""
    session = _SESSIONS[used]()
    found = _created(_PROGRAMS[program], session)
    assert alike(found, _created(_PROGRAMS[program], contextlib.nullcontext()))
    stats = session.stats()
    assert stats.own_loop > 0 if used == "own loop" else stats.hits > 0


@pytest.mark.parametrize("used", _SESSIONS)
def test_hooks_that_it_registers_are_called(used: str) -> None:
    """They change gradients, at captures and hits as on eager."""

    def register(node: Any) -> None:
        if node.name().startswith("Tanh"):
            node.register_hook(lambda into, out: tuple(None if each is None else each * 3 for each in into))

    def run(around: Any) -> list[Any]:
        torch.manual_seed(0)
        grads = []
        with torch.autograd.graph.node_creation_hook(register), around:
            for _ in range(_BACKWARDS):
                x = torch.randn(4, 5, requires_grad=True)
                (x * 2).tanh().sum().backward()
                grads.append(x.grad)
        return grads

    session = _SESSIONS[used]()
    assert alike(run(session), run(contextlib.nullcontext()))
    stats = session.stats()
    assert stats.own_loop > 0 if used == "own loop" else stats.hits > 0
