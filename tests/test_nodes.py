"""Nodes of every kind that a tape can have, each against eager: Python and C++ functions, custom operators, views,
compiled forwards, checkpoints, sparse and complex gradients, tensor subclasses, autocast."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

import compiled_autograd as ca

from .helpers import Result, both, compare, expect


def _leaf(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


# ---- saved tensors that were packed ----------------------------------------------------------------------------------


def _asks(
    save: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]],
) -> tuple[Any, list[Any]]:
    """A function that notes which of its saved tensors require grad, and the notes."""
    notes: list[Any] = []

    class Asks(Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            out = x * y.sum()
            ctx.save_for_backward(*save(x, y, out))
            return out

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            notes.append([each.requires_grad for each in ctx.saved_tensors])
            return grad * 2, grad.sum().expand(5)

    return Asks, notes


@pytest.mark.parametrize("y_requires_grad", [False, True])
@pytest.mark.parametrize(
    "save", [lambda x, y, out: (x, y), lambda x, y, out: (out,), lambda x, y, out: (y, torch.ones(3), x)]
)
def test_packed_tensors_require_grad_as_those_that_were_saved(save: Any, y_requires_grad: bool) -> None:
    """Users' hooks give tensors without history; the engine knows which had one."""
    asks, notes = _asks(save)
    session = ca.enable(backend="eager")
    for context in (ca.disable(), session, session):
        y = torch.randn(5, requires_grad=y_requires_grad)
        with saved_tensors_hooks(lambda tensor: tensor.clone(), lambda tensor: tensor):
            loss = asks.apply(_leaf(4).exp(), y).sum()
        with context:
            loss.backward()
    assert notes == [notes[0]] * 3 and any(notes[0])
    expect(session.stats(), structure_misses=1, hits=1)


@pytest.mark.parametrize("function", [torch.linalg.solve, torch.linalg.solve_triangular, torch.matmul])
def test_packed_tensors_of_built_in_nodes_require_grad(function: Callable[..., torch.Tensor]) -> None:
    """Some nodes leave out the gradient of a saved tensor that requires none."""
    settings = {"upper": True} if function is torch.linalg.solve_triangular else {}

    def make() -> Any:
        a, b = _leaf(3, 3), _leaf(3, 2)
        with saved_tensors_hooks(lambda tensor: tensor.clone(), lambda tensor: tensor):
            return function(a.triu(), b.exp(), **settings).sin().sum(), [a, b]

    expect(both(make), structure_misses=1, hits=1, captures=1)


# ---- checkpointing ---------------------------------------------------------------------------------------------------


def _layers() -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(8, 8) for _ in range(4))


def _train(loss: Callable[[Any, torch.Tensor], Any], **settings: Any) -> Result:
    """Three steps of four layers, beside eager."""
    x = torch.randn(4, 8)
    return compare(_layers, lambda model: loss(model, x), counts=False, **settings)


@pytest.mark.parametrize(
    ("outer", "inner", "backwards"), [(True, True, 3), (True, False, 2), (False, True, 2), (False, False, 1)]
)
def test_nested_checkpoints(outer: bool, inner: bool, backwards: int) -> None:
    """Each reentrant one has a backward of its own."""

    def loss(model: Any, x: torch.Tensor) -> torch.Tensor:
        def block(h: torch.Tensor) -> torch.Tensor:
            inside = checkpoint(lambda h: F.dropout(model[1](h).tanh(), 0.3), h.sin(), use_reentrant=inner)
            return model[2](inside).sigmoid()

        return model[3](checkpoint(block, model[0](x), use_reentrant=outer)).square().mean()

    expect(_train(loss).stats, structure_misses=backwards, hits=2 * backwards, captures=backwards)


@pytest.mark.parametrize("early_stop", [False, True])
def test_early_stop(early_stop: bool) -> None:
    """What is recomputed after the last saved tensor is seen from the forward's side: it is counted."""
    counts: list[int] = []

    def loss(model: Any, x: torch.Tensor) -> torch.Tensor:
        def block(layer: Any, h: torch.Tensor) -> torch.Tensor:
            h = F.dropout(layer(h).tanh().exp(), 0.3).cumsum(0)  # the last of them saves nothing
            counts[-1] += 1
            return h

        counts.append(0)
        h = model[0](x)
        with set_checkpoint_early_stop(early_stop):
            for layer in model[1:3]:
                h = checkpoint(block, layer, h, use_reentrant=False)
        return model[3](h).square().mean()

    expect(_train(loss).stats, structure_misses=1, hits=2, captures=1)
    assert counts == [2 if early_stop else 4] * 6


@pytest.mark.parametrize("which", ["a policy", "a list of operators"])
def test_selective_checkpointing(which: str) -> None:
    """Products of matrices are kept and the rest is computed anew, under dispatch modes of the checkpoint's own."""
    kept = [torch.ops.aten.addmm.default]

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operator in kept else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy if which == "a policy" else kept)

    def loss(model: Any, x: torch.Tensor) -> torch.Tensor:
        h = model[0](x)
        for layer in model[1:3]:
            h = checkpoint(lambda layer, h: layer(h).tanh().exp(), layer, h, use_reentrant=False, context_fn=contexts)
        return model[3](h).square().mean()

    expect(_train(loss).stats, structure_misses=1, hits=2, captures=1)


def test_checkpoint_sequential_with_gradients_kept() -> None:
    def loss(model: Any, x: torch.Tensor) -> torch.Tensor:
        return checkpoint_sequential(nn.Sequential(*model), 2, x, use_reentrant=False).square().mean()

    expect(_train(loss, keep_grads=True).stats, structure_misses=2, hits=1, captures=2)


def test_a_checkpoint_differentiated_twice() -> None:
    """With the tape kept, it is recomputed for each."""

    def loss(model: Any, x: torch.Tensor) -> list[torch.Tensor]:
        h = checkpoint(lambda h: model[1](h).tanh(), model[0](x), use_reentrant=False)
        loss = model[2](h).square().mean()
        return [loss, loss * 2]

    expect(_train(loss).stats, structure_misses=2, hits=4, captures=2)


def test_a_function_inside_a_checkpoint() -> None:
    class Swish(Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x * x.sigmoid()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            (x,) = ctx.saved_tensors
            s = x.sigmoid()
            return grad * (s + x * s * (1 - s))

    def loss(model: Any, x: torch.Tensor) -> torch.Tensor:
        h = checkpoint(lambda h: Swish.apply(model[1](h)) + h, model[0](x), use_reentrant=False)
        return model[2](h).square().mean()

    expect(_train(loss).stats, structure_misses=1, hits=2, captures=1)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_under_autocast(reentrant: bool) -> None:
    def loss(model: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = checkpoint(lambda h: model[1](h).tanh(), model[0](x), use_reentrant=reentrant)
            return model[2](h).float().square().mean()

    stats = _train(loss).stats
    assert stats.hits == 2 * stats.structure_misses and not stats.bypasses and not stats.failures


def test_a_checkpoint_that_is_not_the_same_again_is_answered_in_eagers_words() -> None:
    def message(context: Any) -> str:
        calls: list[int] = []

        def changes(h: torch.Tensor) -> torch.Tensor:
            calls.append(1)
            return h.sin().exp() if len(calls) == 1 else h.sin()

        loss = checkpoint(changes, _leaf(4) * 2, use_reentrant=False).sum()
        with context, pytest.raises(torch.utils.checkpoint.CheckpointError) as raised:
            loss.backward()
        return str(raised.value)

    with ca.disable():
        wanted = message(ca.disable())
    assert message(ca.enable(backend="eager")) == wanted
