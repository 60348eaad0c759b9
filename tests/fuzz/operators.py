"""The operators that programs draw from: the table, and those that compute point by point, reduce or multiply.

An operator takes what it is given in any number of dimensions, and decides by dimensions and its salt alone, so that
the tape is the same at each step. One that cannot be run with what it is given (a size of zero) hands on its input.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F


class Env(Protocol):
    """What an operator may ask for."""

    step: int
    threads: int

    def random(self) -> random.Random:
        """The same numbers at every step."""

    def see(self, what: str, given: Any) -> None:
        """Write down what users' code was given."""

    def weight(self, slot: str, shape: tuple[int, ...], scale: float = 1.0) -> torch.Tensor:
        """A leaf of the operator's own, trained or frozen, in some layout."""

    def constant(self, slot: str, shape: tuple[int, ...]) -> torch.Tensor:
        """A tensor that needs no gradient, new at each step, in some layout."""

    def indices(self, slot: str, shape: tuple[int, ...], below: int) -> torch.Tensor:
        """Whole numbers, new at each step."""


Function = Callable[[Any, torch.Tensor, torch.Tensor], Any]
TABLE: dict[str, tuple[Function, int, bool]] = {}
"""For each operator its function, how often it is drawn, and whether it takes complex numbers."""


def operator(weight: int = 2, complex_too: bool = False) -> Callable[[Function], Function]:
    """Enter a function into the table."""

    def enter(function: Function) -> Function:
        TABLE[function.__name__] = (function, weight, complex_too)
        return function

    return enter


def fit(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """A part of ``y`` that broadcasts to the shape of ``x``."""
    while y.dim() > x.dim():
        y = y.select(0, 0)
    for dim in range(-y.dim(), 0):
        if y.shape[dim] > x.shape[dim]:
            y = y.narrow(dim, 0, x.shape[dim])
        elif y.shape[dim] < x.shape[dim]:
            y = y.narrow(dim, 0, 1)
    return y


def at_least(x: torch.Tensor, dims: int) -> torch.Tensor:
    """Leading dimensions of size one, where there are too few."""
    return x[(None,) * (dims - x.dim())] if x.dim() < dims else x


def exactly(x: torch.Tensor, dims: int) -> torch.Tensor:
    """Leading dimensions added, or flattened into one."""
    return x.flatten(0, x.dim() - dims) if x.dim() > dims else at_least(x, dims)


_POINTWISE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sin": torch.sin,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "relu": torch.relu,
    "leaky_relu": lambda x: F.leaky_relu(x, 0.2),
    "hardtanh": F.hardtanh,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "elu": F.elu,
    "softplus": F.softplus,
    "neg": torch.neg,
    "abs": torch.abs,
    "clamp": lambda x: x.clamp(-0.5, 0.8),
    "cube": lambda x: x**3,
    "reciprocal": lambda x: 1 / (x * x + 1),
    "sqrt": lambda x: (x * x + 0.1).sqrt(),
    "exp": lambda x: (-x * x).exp(),
    "log": lambda x: (x * x + 0.5).log(),
    "erf": torch.erf,
    "atan": torch.atan,
    "hardswish": F.hardswish,
    "logsigmoid": F.logsigmoid,
    "threshold": lambda x: F.threshold(x, 0.1, 0.0),
}
_POINTWISE_COMPLEX = ("sin", "tanh", "neg", "cube", "abs", "exp")


@operator(10, complex_too=True)
def pointwise(env: Env, x: torch.Tensor, y: torch.Tensor) -> Any:
    names = _POINTWISE_COMPLEX if x.is_complex() else tuple(_POINTWISE)
    return _POINTWISE[env.random().choice(names)](x)


@operator(2)
def narrowed(env: Env, x: torch.Tensor, y: torch.Tensor) -> Any:
    return x.float().sin().to(x.dtype) if env.random().random() < 0.5 else (x.bfloat16() * 2).to(x.dtype)


@operator(3, complex_too=True)
def scalar(env: Env, x: torch.Tensor, y: torch.Tensor) -> Any:
    value = 0.3 + 0.4 * env.step
    made = (x * value, x + value, value - x, x / (value + 1), x.mul(0.7), torch.add(x, fit(y, x), alpha=0.6))
    return made[env.random().randrange(6)]


@operator(8, complex_too=True)
def binary(env: Env, x: torch.Tensor, y: torch.Tensor) -> Any:
    y = fit(y, x)
    kind = env.random().randrange(5 if x.is_complex() or y.is_complex() else 12)
    if kind == 5:
        return torch.maximum(x, y)
    if kind == 6:
        return torch.where(x > 0, x, y)
    if kind == 7:
        return torch.lerp(x, y, 0.3)
    if kind == 8:
        return torch.hypot(x, y)
    if kind == 9:
        return torch.minimum(y, x)
    if kind == 10:
        return torch.addcmul(x, y, x, value=0.5)
    if kind == 11:
        return torch.logaddexp(x, y)
    return (x + y, x - y, x * y, x / (y * y.conj() + 1), y - x * y)[kind]


@operator(4, complex_too=True)
def square(env: Env, x: torch.Tensor, y: torch.Tensor) -> Any:
    return x * x


@operator(3, complex_too=True)
def outer(env: Env, x: torch.Tensor, y: torch.Tensor) -> Any:
    x, y = exactly(x, 1), exactly(y, 1)
    return x[:9, None] * y[None, :9]


@operator(5, complex_too=True)
def reduce(env: Env, x: torch.Tensor, y: torch.Tensor) -> Any:
    draw = env.random()
    x = at_least(x, 1)
    dim, keep = draw.randrange(x.dim()), draw.random() < 0.5
    kinds: list[Callable[[], torch.Tensor]] = [
        lambda: x.sum(dim, keepdim=keep),
        lambda: x.mean(dim, keepdim=keep),
        lambda: x.sum().expand(x.shape),
        lambda: x - x.mean(dim, keepdim=True),
        lambda: x.sum(tuple(range(x.dim() - 1)), keepdim=keep),
        lambda: x.cumsum(dim),
        lambda: x.prod(dim, keepdim=keep),
        lambda: x.norm(dim=dim, keepdim=keep),
        lambda: x.amax(dim, keepdim=keep),
        lambda: x.max(dim, keepdim=keep).values,
        lambda: x.var(dim, keepdim=keep),
        lambda: x.logsumexp(dim, keepdim=keep),
        lambda: x / (x.std() + 1),
        lambda: x.sort(dim).values,
        lambda: x.median(dim, keepdim=keep).values,
        lambda: x.cumprod(dim),
        lambda: x.topk(1, dim).values,
        lambda: x.flatten().kthvalue(1).values + x,
    ]
    return draw.choice(kinds[:8] if x.is_complex() else kinds)()


@operator(9, complex_too=True)
def residual(env: Env, x: torch.Tensor, y: torch.Tensor) -> Any:
    x = at_least(x, 2)
    inner = x.shape[-1]
    draw = env.random()
    layers = draw.choice((1, 2, 3, 3))
    shared, kind = draw.random() < 0.3, draw.randrange(9)
    for layer in range(layers):
        w = env.weight(f"w{0 if shared else layer}", (inner, inner), 0.7)
        product = x @ (w.transpose(0, 1) if draw.random() < 0.5 else w)
        if kind < 4:
            x = x + product
        else:
            x = (product + x, x - product, x * product, x + product.tanh(), x * 2 + product)[kind - 4]
    return x


@operator(6, complex_too=True)
def linear(env: Env, x: torch.Tensor, y: torch.Tensor) -> Any:
    x = at_least(x, 2)
    draw = env.random()
    outer = draw.choice((1, 3, 4, 8))
    w = env.weight("w", (outer, x.shape[-1]))
    bias = env.weight("b", (outer,)) if draw.random() < 0.5 else None
    if draw.random() < 0.3 and x.dim() == 2 and bias is not None:
        return torch.addmm(bias, x, w.t(), beta=0.5, alpha=2.0)
    return F.linear(x, w, bias)


@operator(5, complex_too=True)
def product(env: Env, x: torch.Tensor, y: torch.Tensor) -> Any:
    x = at_least(x, 2)
    kind = env.random().randrange(8)
    if kind == 0:
        return x @ x.transpose(-1, -2)
    if kind == 1:
        return x.transpose(-1, -2) @ x
    if kind == 2:
        return x @ env.constant("c", (x.shape[-1], 5))
    if kind == 3:
        return x @ env.weight("v", (x.shape[-1],))
    if kind == 4:
        return torch.bmm(exactly(x, 3), exactly(x, 3).mT)
    if kind == 5:
        return torch.einsum("...ij,kj->...ki", x, env.weight("w", (3, x.shape[-1])))
    if kind == 6:
        y = fit(at_least(y, 2), x).expand_as(x)
        return x @ y.mT @ y
    batch = exactly(x, 3)
    return torch.baddbmm(batch, batch, env.weight("w", (batch.shape[0], batch.shape[2], batch.shape[2]), 0.5))


@operator(3, complex_too=True)
def complex_parts(env: Env, x: torch.Tensor, y: torch.Tensor) -> Any:
    kind = env.random().randrange(5)
    if not x.is_complex():
        if x.dtype not in (torch.float32, torch.float64):
            return x
        z = torch.complex(x, fit(y, x).real.expand(x.shape).to(x.dtype))
        return (z.conj().imag * x, z.abs(), (z * z).real, z.conj().imag, torch.view_as_real(z * z).sum(-1))[kind]
    return (x.conj() * x, x.conj(), x.conj().imag + 1j * x.real, x * x.abs(), x.resolve_conj() * x.conj())[kind]


@operator(2, complex_too=True)
def fourier(env: Env, x: torch.Tensor, y: torch.Tensor) -> Any:
    if x.dtype not in (torch.float64, torch.complex128):
        return x
    return torch.fft.fft(at_least(x, 1)).abs()


@operator(3, complex_too=True)
def several_products(env: Env, x: torch.Tensor, y: torch.Tensor) -> Any:
    """What arrives at ``g`` is a factor of several products."""
    x = at_least(x, 2)
    g = x * 1
    first = env.weight("a", (x.shape[-1], x.shape[-1]), 0.5)
    second = env.weight("b", (x.shape[-1], x.shape[-1]), 0.5)
    return (g @ first) * (g @ second) + g
