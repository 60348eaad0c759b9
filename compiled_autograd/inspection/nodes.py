"""One node of a tape as plain values, without references to the tape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from ..torch_api.dtype_names import short_name

Kind = Literal["kept", "parameter", "buffer", "input", "packed"]
"""Why a saved tensor takes memory. ``kept``: the forward made the tensor, and the tape keeps it alive. ``parameter``,
``buffer``, ``input``: the program keeps it alive anyway. ``packed``: a hook packed it, and the tape keeps the hook's
result alive."""

COUNTED: tuple[Kind, ...] = ("kept", "packed")
"""The kinds whose memory the forward keeps alive."""


Shape = tuple[int | str, ...]
"""Sizes; a symbolic size is the symbol's name."""


@dataclass(frozen=True, slots=True)
class Gradient:
    """The incoming gradient of one input of a node.

    Attributes:
        shape: empty for a scalar; None for a nested tensor.
        dtype: the dtype that the node requires; the dtype of the forward's tensor if the node takes any.
    """

    shape: Shape | None
    dtype: torch.dtype

    def __str__(self) -> str:
        return _shaped(self.dtype, self.shape)


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor that a node holds for its backward.

    Attributes:
        name: the node's name for it: ``result``, ``tensors[0]`` in a list, ``ctx.mask`` for a Python function's
            attribute.
        shape: None for a packed tensor and for a nested tensor.
        dtype: None for a packed tensor.
        device: such as ``cpu`` or ``cuda:0``; None for a packed tensor.
        bytes: the size of the tensor's whole storage, also if the tensor is only a part of it; None if unknown.
        memory: the storages to which ``kind`` applies, as pairs of number and bytes. In one tape, equal numbers mean
            the same storage.
        kind: why the tensor takes memory, see :data:`Kind`.
    """

    name: str
    shape: Shape | None
    dtype: torch.dtype | None
    device: str | None
    bytes: int | None
    memory: tuple[tuple[int, int], ...]
    kind: Kind

    def __str__(self) -> str:
        if self.dtype is None:
            return f"{self.name} packed by a hook"
        return f"{self.name} {_shaped(self.dtype, self.shape)}"


@dataclass(frozen=True, slots=True)
class TapeNode:
    """One node of the tape.

    Attributes:
        name: the engine's name, such as ``MulBackward0``.
        sequence: the sequence number. Among ready nodes, the engine runs the one with the highest number first.
        parameter: for a leaf, the name of its parameter, if a living module has the parameter.
        source: ``file:line in function`` of the forward, if :class:`trace_sources` or anomaly mode recorded it.
        edges: for each output of the node, the index of the next node and the index of that node's input; None for an
            edge to nowhere.
        module: the path of the node's module, as in ``named_modules``; empty for nodes of no module.
        gradients: the incoming gradient of each input.
        saved: the saved tensors.
        hooks: a line for each hook that Python can see: hooks on leaves, on the outputs, and on tensors that were saved
            unpacked. Hooks on nodes and C++ hooks are not visible.
    """

    name: str
    sequence: int
    parameter: str | None
    source: str | None
    edges: tuple[tuple[int, int] | None, ...]
    module: str = ""
    gradients: tuple[Gradient, ...] = ()
    saved: tuple[SavedTensor, ...] = ()
    hooks: tuple[str, ...] = ()


def _shaped(dtype: torch.dtype, shape: Shape | None) -> str:
    return f"{short_name(dtype)}[{'?' if shape is None else ','.join(map(str, shape))}]"


def shape_of(shaped: Any) -> Shape | None:
    """Return the shape of a tensor, or of an edge's gradient; None for a nested tensor."""
    try:
        return tuple([each if type(each) is int else str(each) for each in shaped.shape])
    except RuntimeError:
        return None


def size(count: int) -> str:
    """Format bytes: ``412 B``, ``8.0 KiB``, ``1.5 GiB``."""
    if count < 1024:
        return f"{count} B"
    exponent = min((count.bit_length() - 1) // 10, 3)
    return f"{count / 1024**exponent:,.1f} {('KiB', 'MiB', 'GiB')[exponent - 1]}"


def counted(nodes: int) -> str:
    """Format a number of nodes: ``1 node``, ``23 nodes``."""
    return "1 node" if nodes == 1 else f"{nodes:,} nodes"
