"""Values that are moved a little, to see how far results move."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

HARDLY = 8 * torch.finfo(torch.float64).eps
"""Values are moved by at most this, eight units of float64, to see whether a result jumps."""
_PLACES = 26
"""The number of bits that tell values apart."""
ELSEWHERE = 1 << (_PLACES - 1)
"""Places from here on are not used for values that a call is given or gives."""
_WITHIN = ELSEWHERE >> 1
"""Places from here on are used for results of operators within calls."""


@dataclass(frozen=True, slots=True)
class Move:
    """How values are moved.

    Attributes:
        by: the largest move, relative to a value.
        number: seed of the moves; its sign does not count. Odd numbers move values to both sides, even numbers all
            values of a tensor to one side, as rounding does where values are alike.
        least: magnitude below which values are moved as far as this one would be. The steps between subnormal numbers
            do not shrink, and code may flush these to zero.
    """

    by: float
    number: int
    least: float = 0.0


def perturbed(value: torch.Tensor, move: Move, place: int, terms: torch.Tensor | None = None) -> torch.Tensor:
    """Move each value at random. A zero stays a zero, unless it is a sum of other terms.

    Args:
        value: real or complex, of any shape.
        place: number of the value, which decides the moves too.
        terms: sums of the magnitudes of the terms, where the values are sums. A move is relative to these.

    Returns:
        float64 or complex128, of the same shape.
    """
    if value._is_zerotensor():
        return value
    seed = abs(move.number) << _PLACES | place  # the CPU's generator takes 32 bits of it
    generator = torch.Generator(value.device).manual_seed(seed)  # the user's own must not notice
    shape = (*value.shape, 2) if value.is_complex() else value.shape
    noise = torch.rand(shape, generator=generator, device=value.device, dtype=torch.float64)
    noise = noise.mul_(2).sub_(1) if move.number % 2 else noise.mul_(1 - (hash((seed, place)) & 2))
    noise = torch.view_as_complex(noise) if value.is_complex() else noise
    sizes = (value if terms is None else terms).abs()
    moves = sizes.clamp(move.least, torch.finfo(sizes.dtype).max).mul_(sizes.sign())  # an infinite value stays infinite
    return value + noise.mul_(move.by).mul_(moves)


_aten = torch.ops.aten
_SUMS = frozenset(
    {
        *(_aten.sum.default, _aten.sum.dim_IntList, _aten.mean.default, _aten.mean.dim, _aten.cumsum.default),
        *(_aten.mm.default, _aten.bmm.default, _aten.addmm.default, _aten.baddbmm.default, _aten.mv.default),
        *(_aten.dot.default, _aten.convolution.default, _aten.convolution_backward.default),
        *(_aten.scatter_add.default, _aten.index_add.default, _aten.index_put.default),
    }
)
"""Operators that add terms up. Given magnitudes, they return sums of the magnitudes of the terms."""
_COMPARISONS = frozenset({_aten.eq, _aten.ne, _aten.lt, _aten.le, _aten.gt, _aten.ge})
_MOVES_OF_A_VALUE = 8
"""Maximum number of moves between two values that were equal."""


class RoundedOperators(TorchDispatchMode):
    """Move the result of each operator; that of a sum by the rounding of its terms, which may cancel.

    Composite operators, such as the backward of a softmax, run as the core operators that PyTorch decomposes them into.
    In comparisons, values that were equal before the move count as equal, so tied values keep their parts of a
    gradient.

    Args:
        move: the size and kind of the moves.
        most: the largest move of any value so far, relative to the value.
    """

    supports_higher_order_operators = True

    def __init__(self, move: Move, most: float) -> None:
        super().__init__()
        self._move, self._most = move, most
        self._count = _WITHIN

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(function, torch._ops.OpOverload) or function.is_view or function._schema.is_mutable:
            return function(*args, **kwargs)
        if (decomposition := _decompositions().get(function)) is not None:
            with self:
                result = decomposition(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if function.overloadpacket in _COMPARISONS and args[0].is_floating_point():
            args = self._tied(*args), args[1]
        terms = result = function(*args, **kwargs)
        if function in _SUMS:
            terms = function(*pytree.tree_map_only(torch.Tensor, _magnitude, args), **kwargs)
        return pytree.tree_map(self._rounded, result, terms)

    def _tied(self, value: torch.Tensor, other: Any) -> torch.Tensor:
        return torch.where((value - other).abs() <= _MOVES_OF_A_VALUE * self._most * value.abs(), other, value)

    def _rounded(self, result: Any, terms: Any) -> Any:
        self._count += 1
        if not isinstance(result, torch.Tensor) or result.dtype not in (torch.float64, torch.complex128):
            return result
        return perturbed(result, self._move, self._count, terms) if result.layout is torch.strided else result


def _magnitude(value: torch.Tensor) -> torch.Tensor:
    return value.abs() if value.is_floating_point() or value.is_complex() else value


@functools.cache
def _decompositions() -> Mapping[Any, Callable[..., Any]]:
    from torch._decomp import core_aten_decompositions  # takes a while

    return dict(core_aten_decompositions().items())  # its own ``get`` finds nothing (2.11 to 2.15)
