"""Backwards of many kinds, to be run by one process and found again by the next."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import compiled_autograd as ca
from compiled_autograd.process_state import PROCESS

from .helpers import Squares, mlp

Grads = list[torch.Tensor | None]
Around = Callable[[], contextlib.AbstractContextManager[Any]]
Backwards = Callable[[Around], Grads]
"""Runs a forward, and backwards each inside what it is given; gives all gradients."""


def restart() -> None:
    """What is in memory is gone, as in another process; what is on disk stays."""
    PROCESS.restart()


def wanted(backwards: Backwards) -> Grads:
    """What eager gives."""
    torch.manual_seed(0)
    return backwards(ca.disable)


def found(backwards: Backwards, session: ca.Session) -> Grads:
    """What the session gives."""
    torch.manual_seed(0)
    return backwards(lambda: session)


def grads(model: nn.Module) -> Grads:
    return [None if each.grad is None else each.grad.clone() for each in model.parameters()]


def static(around: Around) -> Grads:
    model = mlp()
    loss = model(torch.randn(4, 8)).square().mean()
    with around():
        loss.backward()
    return grads(model)


def sizes(around: Around, batches: Sequence[int] = (4, 5, 6, 7, 4)) -> Grads:
    model = mlp()
    result = []
    for batch in batches:
        model.zero_grad()
        loss = model(torch.randn(batch, 8)).square().mean()
        with around():
            loss.backward()
        result += grads(model)
    return result


def _triple(leaf: torch.Tensor) -> None:
    assert leaf.grad is not None
    leaf.grad.mul_(3)


def regions(around: Around) -> Grads:
    """Hooks of several kinds and a function of Python, with regions in between."""
    model = mlp(depth=3)
    x = torch.randn(4, 8)
    for index, layer in enumerate(model):
        x = layer(x)
        if index == 2:
            x.register_hook(lambda grad: grad * 2)
        if index == 4:
            x = Squares.apply(x)
        if index == 5:
            assert x.grad_fn is not None
            x.grad_fn.register_prehook(lambda gradients: tuple(each + 1 for each in gradients))
    model[0].weight.register_post_accumulate_grad_hook(_triple)
    with around():
        x.square().mean().backward()
    return grads(model)


def checkpoints(around: Around) -> Grads:
    model = mlp(depth=3)
    x = torch.randn(4, 8)
    x = checkpoint(model[:2], x.requires_grad_(), use_reentrant=False)
    x = checkpoint(model[2:4], x, use_reentrant=True)
    with around():
        model[4:](x).square().mean().backward()
    return grads(model)


def outputs(around: Around) -> Grads:
    """Several outputs, gradients given, and an input that is not reached."""
    x, y, unused = (torch.randn(3, 3, requires_grad=True) for _ in range(3))
    outputs = [(x @ y).tanh(), x.exp() * y, y.sin()]
    with around():
        return list(
            torch.autograd.grad(outputs, [x, y, unused], [torch.randn(3, 3) for _ in outputs], allow_unused=True)
        )


def retained(around: Around) -> Grads:
    """Two backwards through one tape: the second finds a ``.grad``."""
    model = mlp()
    loss = model(torch.randn(4, 8)).square().mean()
    result: Grads = []
    for last in (False, True):
        with around():
            loss.backward(retain_graph=not last)
        result += grads(model)
    return result


def accumulated(around: Around) -> Grads:
    """A ``.grad`` that is there is added to in place; one of them has other strides than its leaf."""
    model = mlp()
    for each in model.parameters():
        each.grad = torch.randn_like(each)
    model[0].weight.grad = torch.randn(8, 8).t()
    before = [each.grad for each in model.parameters()]
    with around():
        model(torch.randn(4, 8)).square().mean().backward()
    assert all(each.grad is grad for each, grad in zip(model.parameters(), before, strict=True))
    return grads(model)


def autocast(around: Around, inside: bool = False) -> Grads:
    model = mlp()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(torch.randn(4, 8)).float().square().mean()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside), around():
        loss.backward()
    return grads(model)


def autocast_inside(around: Around) -> Grads:
    return autocast(around, inside=True)


def shared(around: Around) -> Grads:
    """Leaves that get one tensor, a gradient handed on as it is, and a view of what is saved."""
    x, y = (torch.randn(3, 4, requires_grad=True) for _ in range(2))
    z = torch.randn(4, 3, requires_grad=True)
    given = torch.randn(3, 4)
    with around():
        (x + y + z.t()).backward(given)
    assert x.grad is not None and y.grad is not None
    memory = {each.untyped_storage().data_ptr() for each in (x.grad, y.grad, given)}
    assert len(memory) == 3
    return [x.grad, y.grad, z.grad]


def scalars(around: Around) -> Grads:
    """Numbers of every kind that an operator can save."""
    x = torch.randn(3, dtype=torch.float64, requires_grad=True)
    c = torch.randn(3, dtype=torch.complex128, requires_grad=True)
    loss = (x * 3).sum() + (x * 2.5).pow(3).sum() + (c * (1 + 2j)).abs().sum() + x.clamp(-0.1, 1e300).sum()
    loss = loss + F.leaky_relu(x, 0.2).sum() + (x * True).sum() + (x / float("inf")).sum() + x.sum() * 10**15
    with around():
        return list(torch.autograd.grad(loss, [x, c]))


def constants(around: Around) -> Grads:
    """Operators whose derivatives make tensors of their own, index, or choose."""
    x = torch.randn(4, 5, requires_grad=True)
    index = torch.tensor([0, 2, 2])
    y = torch.cat([x[index], x.flip(0)], 0)
    loss = y.cumsum(0).sort(1).values[1:].logsumexp(1).sum() + F.max_pool1d(x, 2).sum() + x.var(1).sum()
    loss = loss + torch.where(x > 0, x, x.exp()).sum() + F.pad(x, (1, 2)).norm()
    with around():
        return list(torch.autograd.grad(loss, [x]))


def convolution(around: Around) -> Grads:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 2))
    loss = F.cross_entropy(model(torch.randn(2, 3, 5, 5)), torch.tensor([0, 1]))
    with around():
        loss.backward()
    return grads(model)


def attention(around: Around) -> Grads:
    model = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
    loss = model(torch.randn(2, 5, 16)).square().mean()
    with around():
        loss.backward()
    return grads(model)


def threads(around: Around) -> Grads:
    """Four threads, each with a model of its own; one after the other comes to its first backward."""
    models = [mlp(depth=depth) for depth in (1, 1, 2, 3)]
    losses = [model(torch.randn(4, 8)).square().mean() for model in models]
    turn = threading.Lock()

    def work(loss: torch.Tensor) -> None:
        with turn, around():  # else they would meet in the engine, and bypass
            loss.backward()

    workers = [threading.Thread(target=work, args=(loss,)) for loss in losses]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return [each for model in models for each in grads(model)]


BACKWARDS: dict[str, Backwards] = {
    each.__name__: each  # type: ignore[attr-defined]
    for each in (
        *(static, sizes, regions, checkpoints, outputs, retained, accumulated, autocast, autocast_inside, shared),
        *(scalars, constants, convolution, attention, threads),
    )
}
