"""The properties of one value on which compiled code depends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..torch_api import attributes
from .shapes import Spec, is_static, static_parts

# Private in 2.13; see cache/variants.py.
from torch._C._dynamo.guards import TensorGuards  # isort: skip

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def kind_of_value(value: Any, spec: Spec | None = None) -> Any:
    """Return the properties of an input on which compiled code depends; with a history in the spec, without changing
    sizes.

    The strides of dimensions of one element are included. They decide the order in which operators lay out their
    results (``TensorIteratorBase::reorder_dimensions``, ``suggest_memory_format``), and generated code has that layout.
    """
    if not isinstance(value, torch.Tensor):
        return value
    with torch._C.DisableTorchFunctionSubclass():
        layout = attributes.layout(value)
        stride = attributes.stride(value) if layout is torch.strided else None
        shape: Any = attributes.shape(value)
        if spec is not None and len(spec) == len(shape) and not is_static(spec):
            parts = zip(static_parts(spec), shape, strict=True)
            stride, shape = None, tuple([None if part is None else size for part, size in parts])
        bits = (attributes.is_conj(value), attributes.is_neg(value), attributes.is_zerotensor(value))
        kind = (shape, stride, attributes.dtype(value), attributes.device(value), layout, *bits)
    return (type(value), *kind)


def check_of(values: Sequence[Any]) -> Callable[..., bool] | None:
    """Makes a function that says of as many values whether each has the kind of the one in its place: in a tenth of the
    time, and it may say no where the kinds are equal. None where some are no strided tensors, or there are none."""
    if not values or not all(type(each) in _PLAIN and attributes.layout(each) is torch.strided for each in values):
        return None
    check: Callable[..., bool] = TensorGuards(*values, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    return check
