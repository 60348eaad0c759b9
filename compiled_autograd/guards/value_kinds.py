"""What compiled code depends on, of one value that it takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .shapes import Spec, is_static, static_parts


def kind_of_value(value: Any, spec: Spec | None = None) -> Any:
    """What compiled code depends on, of one of its inputs; of one with a history, without what changes."""
    if not isinstance(value, torch.Tensor):
        return value
    with torch._C.DisableTorchFunctionSubclass():
        stride = value.stride() if value.layout is torch.strided else None
        shape: Any = value.shape
        if spec is not None and len(spec) == len(shape) and not is_static(spec):
            parts = zip(static_parts(spec), shape, strict=True)
            stride, shape = None, tuple([None if part is None else size for part, size in parts])
        elif stride is not None and 1 in shape:  # compiled code may give a dimension of one element another stride
            instead = memory_formats(shape, stride)  # and with it, operators give another layout
            stride = tuple([instead if size == 1 else each for size, each in zip(shape, stride, strict=True)])
        bits = (value.is_conj(), value.is_neg(), value._is_zerotensor())
        kind = (shape, stride, value.dtype, value.device, value.layout, *bits)
    return (type(value), *kind)


def memory_formats(shape: Sequence[int], strides: Sequence[int]) -> int:
    """In which of the ways that operators look at a tensor its channels come last; a bit for each way.

    Convolutions and poolings in one dimension are done in two, of which the first is new, and what has no dimension for
    the batch gets one (``view4d`` and ``batchify`` in ``aten/src/ATen/native/Convolution.cpp``, 2.13).
    """
    ways = [(tuple(shape), tuple(strides))]
    if 2 <= len(shape) <= 4:
        ways.append(_unsqueezed(*ways[0], 0))
    ways = [_unsqueezed(*way, 2) if len(way[0]) == 3 else way for way in ways]
    return sum(_is_channels_last(*way) << bit for bit, way in enumerate(ways))


def _unsqueezed(shape: tuple[int, ...], strides: tuple[int, ...], dim: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """As ``Tensor.unsqueeze`` gives them."""
    return (*shape[:dim], 1, *shape[dim:]), (*strides[:dim], shape[dim] * strides[dim], *strides[dim:])


def _is_channels_last(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether operators that keep a memory format take it that the channels come last.

    As ``is_channels_last_strides_2d_s4`` and its like in ``c10/core/MemoryFormat.h`` (2.13).
    """
    if len(shape) not in (4, 5) or strides[1] == 0:
        return False
    least = 0
    for dim in (1, *range(len(shape) - 1, 1, -1), 0):
        if shape[dim] == 0 or strides[dim] < least or (dim == 0 and least == strides[1]):
            return False
        least = strides[dim] * shape[dim]
    return True
