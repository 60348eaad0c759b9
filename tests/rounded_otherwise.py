"""A backend that rounds otherwise than eager, as compiled code may, and small tapes on which that is hard to judge.

It takes operators apart as Inductor does, adds up in another order, is off by one unit in what libraries approximate,
or flushes subnormal numbers to zero. Nothing that it gives is wrong.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
STYLES = ("order", "pairs", "flush")
_LARGEST_PRODUCT = 1 << 20
_SUMS = (aten.sum.dim_IntList, aten.sum.default)
_PRODUCTS = (aten.mm.default, aten.bmm.default)
_APPROXIMATED = {
    getattr(aten, name).default
    for name in ("exp", "log", "log1p", "expm1", "tanh", "sigmoid", "erf", "rsqrt", "sin", "cos", "sqrt", "reciprocal")
}
Wrong = Callable[[list[Any]], list[Any]]


@functools.cache
def _parts() -> dict[Any, Any]:
    from torch._inductor.decomposition import select_decomp_table

    whole = {*_SUMS, *_PRODUCTS, *_APPROXIMATED}
    return {name: made_of for name, made_of in select_decomp_table().items() if name not in whole}


class RoundedOtherwise(TorchDispatchMode):
    """Computes what is asked for, rounded in one of the :data:`STYLES`."""

    def __init__(self, style: str, seed: int) -> None:
        super().__init__()
        self._style, self._random = style, torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (made_of := _parts().get(function)) is not None:
            with self:
                result = made_of(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if function in _SUMS and _has_digits(args[0]) and args[0].dim() and args[0].numel():
            result = self._sum(*args, **kwargs)
        elif function in _PRODUCTS and _has_digits(args[0]) and 0 < _terms(*args) < _LARGEST_PRODUCT:
            result = self._sum(args[0].unsqueeze(-1) * args[1].unsqueeze(-3), [-2])
        else:
            result = function(*args, **kwargs)
        if function in _APPROXIMATED and _has_digits(result):
            exact = torch.rand(result.shape, generator=self._random) < 0.5
            result = torch.where(exact, result, result.nextafter(result * 0))
        if self._style == "flush" and not function.is_view:
            result = pytree.tree_map(_flushed, result)
        return result

    def _sum(
        self, x: torch.Tensor, dims: Sequence[int] | None = None, keepdim: bool = False, dtype: Any = None
    ) -> torch.Tensor:
        dims = [dim % x.dim() for dim in dims or range(x.dim())]
        rest = [dim for dim in range(x.dim()) if dim not in dims]
        terms = x.permute(*rest, *dims).reshape(*(x.shape[dim] for dim in rest), -1)
        terms = terms[..., torch.randperm(terms.shape[-1], generator=self._random)]
        while self._style == "pairs" and terms.shape[-1] > 1:
            half = terms.shape[-1] // 2
            terms = torch.cat([terms[..., :half] + terms[..., half : 2 * half], terms[..., 2 * half :]], -1)
        result = terms.cumsum(-1)[..., -1]
        for dim in sorted(dims) if keepdim else ():
            result = result.unsqueeze(dim)
        return result if dtype is None else result.to(dtype)


def _has_digits(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in (torch.float32, torch.float64)


def _terms(one: torch.Tensor, other: torch.Tensor) -> int:
    return one.numel() * other.shape[-1]


def _flushed(value: Any) -> Any:
    return value.masked_fill(value.abs() < torch.finfo(value.dtype).tiny, 0.0) if _has_digits(value) else value


def rounding_backend(style: str, seed: int = 0, wrong: Wrong = lambda results: results) -> Callable[..., Any]:
    """The backend; ``wrong`` may make results of it wrong."""

    def compile(graph_module: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            with RoundedOtherwise(style, seed), torch.no_grad():
                results = [each if each is None else each.clone() for each in graph_module.forward(*arguments)]
            return wrong(results)

        return run

    return compile


# ---- tapes -----------------------------------------------------------------------------------------------------------

Weight = Callable[..., torch.Tensor]
Layer = Callable[[torch.Tensor, random.Random, Weight], torch.Tensor]
LAYERS: dict[str, tuple[Layer, int]] = {}


def _layer(weight: int) -> Callable[[Layer], Layer]:
    def enter(function: Layer) -> Layer:
        LAYERS[function.__name__] = function, weight
        return function

    return enter


@_layer(5)
def softmax(x: torch.Tensor, draw: random.Random, weight: Weight) -> torch.Tensor:
    dim = draw.choice((0, 1, 1))
    return x.softmax(dim) if draw.random() < 0.6 else x.log_softmax(dim)


@_layer(5)
def bias(x: torch.Tensor, draw: random.Random, weight: Weight) -> torch.Tensor:
    rows, columns = x.shape
    return x + weight(draw.choice(((columns,), (1,), (rows, 1), (), (1, columns))))


@_layer(4)
def linear(x: torch.Tensor, draw: random.Random, weight: Weight) -> torch.Tensor:
    width = draw.choice((1, 2, 3, 8, 17))
    return F.linear(x, weight((width, x.shape[1]), draw.choice((1, 0.3, 5))), weight((width,)))


@_layer(7)
def norm(x: torch.Tensor, draw: random.Random, weight: Weight) -> torch.Tensor:
    kind, rows, columns = draw.randrange(7), x.shape[0], (x.shape[1],)
    if kind == 0:
        return F.layer_norm(x, columns, weight(columns), weight(columns))
    if kind == 1:
        return F.layer_norm(x, columns)
    if kind == 2 and rows > 1:
        return F.batch_norm(x, None, None, weight(columns), weight(columns), training=True)
    if kind == 3 and x.numel() > 2:
        return F.group_norm(x, 1 if columns[0] % 2 else 2, weight(columns), weight(columns))
    if kind == 4:
        return F.rms_norm(x, columns, weight(columns))
    return F.normalize(x, dim=draw.choice((0, 1))) if kind == 5 else F.layer_norm(x, x.shape)


_SATURATED: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    lambda x: (50 * x).sigmoid(),
    lambda x: (20 * x).tanh(),
    lambda x: F.gelu(8 * x),
    lambda x: F.softplus(30 * x),
    lambda x: F.logsigmoid(40 * x),
    lambda x: (100 * x).softmax(-1),
    lambda x: F.gelu(3 * x, approximate="tanh"),
    *(F.silu, torch.relu, F.hardtanh, F.gelu, F.elu, F.mish, F.hardswish, torch.erf),
)


@_layer(4)
def saturated(x: torch.Tensor, draw: random.Random, weight: Weight) -> torch.Tensor:
    return draw.choice(_SATURATED)(x)


_OF_TIES: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    lambda x: x - x.amax(1, keepdim=True),
    lambda x: x.sort(1)[0],
    lambda x: x.topk(min(2, x.shape[1]), 1)[0],
    lambda x: x - x.max(0, keepdim=True)[0],
    lambda x: torch.maximum(x, x.flip(0)),
    lambda x: x.median(1, keepdim=True)[0] - x,
)


@_layer(3)
def tied(x: torch.Tensor, draw: random.Random, weight: Weight) -> torch.Tensor:
    return draw.choice(_OF_TIES)(x + ((x.detach() * 2).round() / 2 - x.detach()))


_CANCELLED: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    *(lambda x: x - x.mean(0, keepdim=True), lambda x: x - x.mean(1, keepdim=True), lambda x: x - x.mean()),
    lambda x: x - x.logsumexp(1, keepdim=True),
    lambda x: x.cumsum(1),
    lambda x: x / (x.std(0, keepdim=True, unbiased=False) + 1e-5),
    lambda x: x / (x.norm(dim=1, keepdim=True) + 1e-6),
    lambda x: x / (x.abs().sum(1, keepdim=True) + 1e-3),
    lambda x: x.var(1, keepdim=True, unbiased=False) - x,
)


@_layer(5)
def cancelled(x: torch.Tensor, draw: random.Random, weight: Weight) -> torch.Tensor:
    return draw.choice(_CANCELLED)(x)


@_layer(2)
def attention(x: torch.Tensor, draw: random.Random, weight: Weight) -> torch.Tensor:
    q, k = x @ weight((x.shape[1], 4)), x @ weight((x.shape[1], 4)) + weight((4,))
    return (q @ k.t() * 0.5).softmax(-1) @ x


@_layer(2)
def residual(x: torch.Tensor, draw: random.Random, weight: Weight) -> torch.Tensor:
    return x + (x @ weight((x.shape[1], x.shape[1]), 0.5)).tanh()


@_layer(2)
def recurrent(x: torch.Tensor, draw: random.Random, weight: Weight) -> torch.Tensor:
    w = weight((x.shape[1], x.shape[1]), draw.choice((0.1, 0.5)))
    for _ in range(draw.choice((5, 40))):
        x = (x @ w).tanh()
    return x


@_layer(2)
def vanishing(x: torch.Tensor, draw: random.Random, weight: Weight) -> torch.Tensor:
    return x * draw.choice((1e-10, 1e-20, 1e-30)) if draw.random() < 0.5 else x * 1e-15 * 1e15


@_layer(2)
def convolution(x: torch.Tensor, draw: random.Random, weight: Weight) -> torch.Tensor:
    y = F.conv1d(x.unsqueeze(1), weight((3, 1, 3)), weight((3,)), padding=1)
    if y.shape[0] * y.shape[2] > 1:
        y = F.batch_norm(y, None, None, weight((3,)), weight((3,)), training=True)
    return y.flatten(1)[:, :24]


_LOSSES: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    torch.sum,
    torch.mean,
    lambda x: x.square().mean(),
    lambda x: F.cross_entropy(x, torch.zeros(x.shape[0], dtype=torch.long)),
    lambda x: x[:, 0].sum(),
    lambda x: F.cross_entropy(x, torch.arange(x.shape[0]) % x.shape[1], label_smoothing=0.1),
    lambda x: x.abs().mean(),
    lambda x: (x * torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view(x.shape)).sum(),
    lambda x: F.kl_div(x.log_softmax(1), torch.ones_like(x).softmax(1), reduction="batchmean"),
)


def tape(seed: int, step: int = 0) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The loss of a seed, and its leaves: the batch, and weights that are the same at each step."""
    draw = random.Random(seed)
    dtype = draw.choices((torch.float32, torch.float64, torch.bfloat16, torch.float16), (14, 3, 1, 1))[0]
    rows, columns = draw.choice((1, 1, 2, 3, 4, 8, 33, 64)), draw.choice((1, 2, 2, 3, 4, 6, 16, 65))
    small = {torch.float32: (1e-20, 1e-36, 1e-38)}.get(dtype, ())
    tiny = {torch.float32: (1e-10, 1e-30, 1e-38, 1e-42), torch.bfloat16: (1e-38,)}.get(dtype, ())
    scale, factor = draw.choice((1, 1, 1, 30, 1e-3, *small)), draw.choice((1, 1, 1, 1, 100, *tiny))
    leaves: list[torch.Tensor] = []

    def leaf(shape: Sequence[int], scale: float = 1.0, step: int = 0) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed * 1000 + len(leaves) * 10 + step)
        value = torch.randn(tuple(shape), generator=generator, dtype=torch.float64) * scale
        leaves.append(value.to(dtype).requires_grad_())
        return leaves[-1]

    x = leaf((rows, columns), scale, step)
    x = x[:1].expand(rows, columns) if draw.random() < 0.2 else x
    names, weights = [*LAYERS], [weight for _, weight in LAYERS.values()]
    for _ in range(draw.randint(2, 7)):
        x = LAYERS[draw.choices(names, weights)[0]][0](x, random.Random(draw.random()), leaf)
    inside = draw.random() < 0.3
    loss = draw.choice(_LOSSES)(x * factor if inside else x)
    return loss if inside else loss * factor, leaves
