"""Operators that are Python functions with a backward of the user's, which gives gradients of every kind."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from .operators import Env, fit, operator
from .values import LAYOUTS, lay_out

_LAYOUTS = tuple(layout for layout in LAYOUTS if layout not in ("channels_last", "backwards"))


class LaidOut(torch.autograd.Function):
    """Its gradient lies in memory as it was told to."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layout: str) -> torch.Tensor:
        ctx.layout = layout
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return lay_out(grad * 0.5, ctx.layout), None


class GivesNone(torch.autograd.Function):
    """Its backward gives None, always or in every second step."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, gives: bool) -> torch.Tensor:
        ctx.gives = gives
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return (grad * 2 if ctx.gives else None), None


class TwoOutputs(torch.autograd.Function):
    """Two outputs, of which one is often unused, and a saved tensor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(x)
        ctx.scale = scale
        return x * scale, x * x

    @staticmethod
    def backward(ctx: Any, first: torch.Tensor, second: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return first * ctx.scale + second * 2 * x, None


class NotMaterialised(torch.autograd.Function):
    """Undefined gradients arrive as None."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor, see: Any) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        ctx.see = see
        return x * 3, y * 2

    @staticmethod
    def backward(ctx: Any, first: Any, second: Any) -> Any:
        ctx.see("not materialised", (first, second))
        return (None if first is None else first * 3), (None if second is None else second * 2), None


class HandsOn(torch.autograd.Function):
    """Its backward gives what it got, or one tensor twice."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, grad


class InPlace(torch.autograd.Function):
    """Writes into its input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad * 2


class SavesOutput(torch.autograd.Function):
    """Saves what it gives, in another layout."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        out = x.sin()
        ctx.save_for_backward(out, lay_out(x.cos(), "transposed"))
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        out, slope = ctx.saved_tensors
        return grad * slope + 0 * out


@operator(6, complex_too=True)
def laid_out(env: Env, x: torch.Tensor, y: torch.Tensor) -> Any:
    draw = env.random()
    layout, other = draw.choice(_LAYOUTS), draw.choice(_LAYOUTS)
    return LaidOut.apply(x, other if env.step % 2 and draw.random() < 0.5 else layout)


@operator(3, complex_too=True)
def python_function(env: Env, x: torch.Tensor, y: torch.Tensor) -> Any:
    kind = env.random().randrange(10)
    if kind >= 8:
        return TwoOutputs.apply(x, 0.7)[kind - 8]
    if kind == 0:
        return torch.cat([each.sum(0, keepdim=True) for each in TwoOutputs.apply(x, 0.5)])
    if kind == 1:
        return sum(TwoOutputs.apply(x, 0.3 + env.step))
    if kind == 2:
        return NotMaterialised.apply(x, fit(y, x), env.see)[0]
    if kind == 3:
        return HandsOn.apply(x, x)
    if kind == 4:
        return InPlace.apply(x * 1)
    if kind == 5:
        return SavesOutput.apply(x)
    if kind == 6:
        return HandsOn.apply(x, fit(y, x).expand_as(x))
    return torch.stack(TwoOutputs.apply(NotMaterialised.apply(x, x, env.see)[1], 0.2))


@operator(2, complex_too=True)
def gives_none(env: Env, x: torch.Tensor, y: torch.Tensor) -> Any:
    kind = env.random().randrange(4)
    below = NotMaterialised.apply(x, x, env.see)[0] if kind >= 2 else x
    given = GivesNone.apply(below, env.step % 2 == 0 and kind == 0)
    return given if kind == 3 else x + given


@operator(2)
def checkpointed(env: Env, x: torch.Tensor, y: torch.Tensor) -> Any:
    reentrant = env.random().random() < 0.4
    if env.threads > 1:
        return x
    return checkpoint(lambda value: value.sin() * value, x, use_reentrant=reentrant, preserve_rng_state=False)
