"""What compiled code depends on, of one value that it takes."""

from __future__ import annotations

from typing import Any

import torch

from .shapes import Spec, is_static, static_parts


def kind_of_value(value: Any, spec: Spec | None = None) -> Any:
    """What compiled code depends on, of one of its inputs; of one with a history, without what changes.

    The strides of dimensions of one element are part of it: they decide in which order operators lay out their results
    (``TensorIteratorBase::reorder_dimensions``, ``suggest_memory_format``), and generated code has that layout in it.
    """
    if not isinstance(value, torch.Tensor):
        return value
    with torch._C.DisableTorchFunctionSubclass():
        stride = value.stride() if value.layout is torch.strided else None
        shape: Any = value.shape
        if spec is not None and len(spec) == len(shape) and not is_static(spec):
            parts = zip(static_parts(spec), shape, strict=True)
            stride, shape = None, tuple([None if part is None else size for part, size in parts])
        bits = (value.is_conj(), value.is_neg(), value._is_zerotensor())
        kind = (shape, stride, value.dtype, value.device, value.layout, *bits)
    return (type(value), *kind)
