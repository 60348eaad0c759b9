"""What is known of one node of a tape, as plain values: nothing of the tape is referred to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from ..torch_api.dtype_names import short_name

Kind = Literal["kept", "parameter", "buffer", "input", "packed"]
"""Why a saved tensor takes memory: the forward made it, and the tape keeps it; or it is there anyway, as a parameter, a
buffer or an input; or a hook packed it, and what the hook made is kept."""

COUNTED: tuple[Kind, ...] = ("kept", "packed")
"""The kinds whose memory the forward keeps alive."""


Shape = tuple[int | str, ...]
"""Sizes; of one that is a symbol its name."""


@dataclass(frozen=True, slots=True)
class Gradient:
    """The gradient that comes into one input of a node.

    Attributes:
        shape: empty for a scalar; None for a nested tensor, which has none.
        dtype: the dtype that the node wants the gradient to have; where it takes any, that of the forward's tensor.
    """

    shape: Shape | None
    dtype: torch.dtype

    def __str__(self) -> str:
        return _shaped(self.dtype, self.shape)


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor that a node holds for its backward.

    Attributes:
        name: the node's for it: ``result``, ``tensors[0]`` of a list, ``ctx.mask`` of a Python function's attribute.
        shape: None for one that was packed, and for a nested tensor.
        dtype: None for one that was packed.
        device: such as ``cpu`` or ``cuda:0``; None for one that was packed.
        bytes: the size of the memory in which it lies, all of it, also where the tensor is a part of it; None where
            that cannot be known.
        memory: the pieces of that memory that the tensor's kind is said of, each with its bytes; in one tape, the same
            number is the same piece.
        kind: whether it is there because of the tape.
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
        name: the engine's, such as ``MulBackward0``.
        sequence: of the nodes whose gradients are there, the engine runs the one with the highest first.
        parameter: for a leaf, the name of the parameter that it writes to, where a living module has it.
        source: ``file:line in function`` of the forward, where :class:`trace_sources` or anomaly mode recorded it.
        edges: for each of its outputs the index of the next node and that node's input; None where there is none.
        module: the path of the module that it belongs to, as ``named_modules`` has it; empty for what belongs to none.
        gradients: what comes into each of its inputs.
        saved: the tensors that it holds.
        hooks: a line for each hook that can be seen from Python: those on leaves, on the outputs, on tensors that were
            saved as they are. Hooks on nodes, and those of C++, cannot.
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
    """The shape of a tensor, or of what an edge takes; None where it has none, being nested."""
    try:
        return tuple([each if type(each) is int else str(each) for each in shaped.shape])
    except RuntimeError:
        return None


def size(count: int) -> str:
    """Bytes for people: ``412 B``, ``8.0 KiB``, ``1.5 GiB``."""
    if count < 1024:
        return f"{count} B"
    exponent = min((count.bit_length() - 1) // 10, 3)
    return f"{count / 1024**exponent:,.1f} {('KiB', 'MiB', 'GiB')[exponent - 1]}"


def counted(nodes: int) -> str:
    """``1 node``, ``23 nodes``."""
    return "1 node" if nodes == 1 else f"{nodes:,} nodes"
