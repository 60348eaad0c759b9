"""What compiled code depends on, of one value that it takes."""

from __future__ import annotations

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
            stride = tuple([0 if size == 1 else each for size, each in zip(shape, stride, strict=True)])
        bits = (value.is_conj(), value.is_neg(), value._is_zerotensor())
        kind = (shape, stride, value.dtype, value.device, value.layout, *bits)
    return (type(value), *kind)
