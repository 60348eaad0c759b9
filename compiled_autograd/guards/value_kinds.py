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
            instead = int(is_channels_last(shape, stride))  # and with it, operators give another layout
            stride = tuple([instead if size == 1 else each for size, each in zip(shape, stride, strict=True)])
        bits = (value.is_conj(), value.is_neg(), value._is_zerotensor())
        kind = (shape, stride, value.dtype, value.device, value.layout, *bits)
    return (type(value), *kind)


def strides_that_matter(tensor: torch.Tensor) -> list[int | None]:
    """The strides of a strided tensor; None for a dimension of one element, which has any: an operator may give it
    another one at each call. In four and five dimensions all matter, as they may say that the channels come last."""
    if tensor.dim() in (4, 5):
        return list(tensor.stride())
    return [None if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]


def comparable_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides of a strided tensor, with 1 for those that do not matter (:func:`strides_that_matter`)."""
    return tuple(1 if stride is None else stride for stride in strides_that_matter(tensor))


def is_channels_last(shape: Sequence[int], strides: Sequence[int]) -> bool:
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
