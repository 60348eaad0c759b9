"""The dtype that a node wants for each gradient that it takes: ``InputMetadata::grad_dtype``.

A Python function declares it with ``ctx.set_output_grad_dtype`` (2.14), a leaf with ``grad_dtype``. Python is given a
copy of the metadata (``torch/csrc/autograd/python_cpp_function.cpp``, 2.15) that shows the dtype of the forward's
output alone, so the number is read from that copy's memory.
"""

from __future__ import annotations

import ctypes
import functools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from . import attributes

_VALUE_IN_OBJECT = object.__basicsize__
"""The byte of a Python object of pybind11 at which the pointer to the object of C++ lies."""
_SIZE = 96
"""The size of an ``InputMetadata`` in bytes."""
_LEAF = "AccumulateGrad"
_TRIED = {torch.float32: 6, torch.float64: 7, torch.bfloat16: 15}
"""Dtypes with their numbers (``torch/headeronly/core/ScalarType.h``)."""

_pointer_at = ctypes.c_void_p.from_address


def grad_dtypes(node: Any) -> tuple[int | None, ...]:
    """Return a number of ``ScalarType`` for each gradient that a node takes; None where it takes any dtype. Takes about
    a microsecond.

    Raises:
        RuntimeError: the place of the number in memory is not known.
    """
    place = _place()
    if place is None:
        raise RuntimeError("the place where a node keeps the dtypes of its gradients is not known")
    found = [_bytes_of(metadata, place, 2) for metadata in node._input_metadata]
    return tuple([number if is_set else None for number, is_set in found])


def grad_dtypes_after(node: Any) -> tuple[Any, ...]:
    """Return the dtypes that are wanted where a node's edges lead, but for leaves that want their own dtype: half a
    microsecond for each leaf.

    Raises:
        RuntimeError: as :func:`grad_dtypes`.
    """
    with torch._C.DisableTorchFunctionSubclass():
        return _after(node)


def _after(node: Any) -> tuple[Any, ...]:
    found: list[Any] = []
    for index, (following, number) in enumerate(node.next_functions):
        if following is None:
            continue
        if type(following).__name__ != _LEAF:
            found.append((index, grad_dtypes(following)[number]))
        elif (wanted := attributes.grad_dtype(following.variable)) is not attributes.dtype(following.variable):
            found.append((index, wanted))
    return tuple(found)


def _bytes_of(metadata: Any, place: int, count: int) -> bytes:
    address: Any = _pointer_at(id(metadata) + _VALUE_IN_OBJECT).value
    return ctypes.string_at(address + place, count)


@functools.cache
def _place() -> int | None:
    """Find the byte of an ``InputMetadata`` that has the number, before the byte that says that there is one.

    The node of a leaf shows it, which follows the leaf's ``grad_dtype``. That node is made in a thread of its own,
    where no mode and no ``node_creation_hook`` of the user's is on.
    """
    with ThreadPoolExecutor(1) as apart:
        try:
            found = apart.submit(_found)
        except RuntimeError:  # at the interpreter's end no thread starts any more
            return _found()
        return found.result()


def _found() -> int | None:
    leaf = torch.zeros((), dtype=torch.bfloat16, device="cpu", requires_grad=True)
    node = torch.autograd.graph.get_gradient_edge(leaf).node
    seen = {}
    for dtype in (*_TRIED, None):
        leaf.grad_dtype = dtype
        (metadata,) = node._input_metadata
        seen[dtype] = _bytes_of(metadata, 0, _SIZE)
    places = [
        place
        for place in range(_SIZE - 1)
        if seen[None][place + 1] == 0
        and all(seen[dtype][place : place + 2] == bytes((number, 1)) for dtype, number in _TRIED.items())
    ]
    return places[0] if len(places) == 1 else None
