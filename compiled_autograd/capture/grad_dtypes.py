"""Which dtype each leaf wants its gradient to have (``Tensor.grad_dtype``): the engine's key does not say it.

The engine casts to it where a gradient is handed to the leaf, and reports it as the last number of what it says of each
edge; of that its key has all but this number (``CompiledNodeArgs::collect(InputMetadata)``,
``torch/csrc/dynamo/compiled_autograd.h``, 2.13). So the leaves are asked when the tape is handed over, which takes some
0.1 microseconds for each, and for other dtypes the graph is another one: that number is all that differs.

A leaf whose ``data`` was given another dtype since its tape was made wants that one in the next tape alone: nodes keep
what they were made for.

A tensor that is no leaf has one too, if it was set before an operation in place made it none. It cannot be asked for
then: such a tape is not captured.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.autograd.graph import GradientEdge

from shadow_cache import unsupported

from .. import ir
from ..errors import CaptureRefusedError
from . import tape as tape_reading

_DTYPES: dict[Any, torch.dtype | None] = {None: None, 5: torch.float16, 6: torch.float32, 7: torch.float64}
_DTYPES |= {8: torch.complex32, 9: torch.complex64, 10: torch.complex128, 15: torch.bfloat16}
_DTYPES |= {23: torch.float8_e5m2, 24: torch.float8_e4m3fn, 25: torch.float8_e5m2fnuz, 26: torch.float8_e4m3fnuz}
"""By number (``c10/core/ScalarType.h``)."""
_NUMBERS = {dtype: number for number, dtype in _DTYPES.items()}
_DTYPE_IN_OPTIONS = 3
_Edge = tuple[fx.Node, int]


class GradDtypes:
    """Those that a tape graph was captured with, for each leaf that it writes, or for each result that it gives; and
    which dtypes these leaves had when their tape was made, which the engine's key has."""

    __slots__ = ("accumulates", "captured", "leaves", "made")

    def __init__(self, tape: ir.TapeGraph) -> None:
        self.accumulates = tape.accumulates
        self.leaves, self.captured, self.made = [], [], []
        for leaf, value in _gradients(tape):
            made, captured = _dtypes_of(value)
            self.leaves.append(leaf)
            self.captured.append(captured)
            self.made.append(made)

    def now(self, tensors: Sequence[torch.Tensor], inputs: Sequence[Any]) -> list[torch.dtype | None]:
        """Those of a tape that was handed over; as they were captured, for what is no leaf."""
        with torch._C.DisableTorchFunctionSubclass():
            if self.accumulates:
                return [_wanted(tensors[leaf], made) for leaf, made in zip(self.leaves, self.made, strict=True)]
            leaves = zip(map(_leaf, inputs), self.captured, self.made, strict=True)
            return [captured if leaf is None else _wanted(leaf, made) for leaf, captured, made in leaves]


def _wanted(leaf: torch.Tensor, made: torch.dtype | None) -> torch.dtype | None:
    """What a leaf that had the dtype ``made`` when its tape was made wants from that.

    The node cannot be asked. Of a ``grad_dtype`` that is set once a leaf has another dtype, it does not know.
    """
    dtype: torch.dtype | None = leaf.grad_dtype
    return dtype if dtype is made or made is None or dtype is not leaf.dtype else made


def refuse_others(tape: ir.TapeGraph, inputs: Sequence[Any]) -> None:
    """Refuse a capture with a dtype that a later tape could not be asked for.

    Raises:
        CaptureRefusedError: a tensor that is no leaf has one, or a leaf has one whose number is not known.
    """
    leaves = tape.accumulates or [_leaf(each) is not None for each in inputs]
    known = {
        edge
        for index, (_, value) in enumerate(_gradients(tape))
        if leaves is True or leaves[index]
        for edge in edges(value)
        if metadata_of(edge)[-1] in _DTYPES
    }
    for call in tape.graph.find_nodes(op="call_function", target=operator.getitem):
        edge = (call.args[0], call.args[1])
        if ir.is_validation(edge[0]) and edge not in known and metadata_of(edge) is not None:  # else it leads nowhere
            options, *_, number = metadata_of(edge)
            if number not in _DTYPES or number != options[_DTYPE_IN_OPTIONS]:
                raise CaptureRefusedError(unsupported("a grad_dtype of a tensor that is no leaf, or is no usual one"))


def with_grad_dtypes(tape: ir.TapeGraph, dtypes: Sequence[torch.dtype | None]) -> ir.TapeGraph:
    """The tape graph for leaves that want their gradients to have other dtypes."""
    changed = tape.copy(tape.calls)
    for dtype, (_, value) in zip(dtypes, _gradients(changed), strict=True):
        for call, index in edges(value):
            metadata = list(call.args[1])  # type: ignore[arg-type]
            metadata[index] = [*metadata[index][:-1], _NUMBERS[dtype]]
            call.update_arg(1, metadata)
    return changed


def _gradients(tape: ir.TapeGraph) -> list[tuple[int, Any]]:
    """The number of each lifted leaf, and the gradient that it is given; or of each result, and that."""
    if tape.accumulates:
        calls = tape.graph.find_nodes(op="call_function", target=ir.accumulate_grad, sort=True)
        return [(int(call.args[0].target.partition("_")[2]), call.args[2]) for call in calls]
    return list(enumerate(tape.graph.find_nodes(op="output")[0].args[0]))


def dtype_of(gradient: Any) -> torch.dtype | None:
    """That of what becomes a gradient, where the tape says it."""
    return _dtypes_of(gradient)[1]


def _dtypes_of(gradient: Any) -> tuple[torch.dtype | None, torch.dtype | None]:
    """That of the tensor whose gradient it becomes, when the tape was made, and that of the gradient."""
    told = next(map(metadata_of, edges(gradient)), None)
    return (None, None) if told is None else (_DTYPES.get(told[0][_DTYPE_IN_OPTIONS]), _DTYPES.get(told[-1]))


def edges(value: Any) -> Iterator[_Edge]:
    """Where what becomes a gradient was handed on by the nodes before: the call, and which of its results."""
    worklist = [value]
    while worklist:
        value = worklist.pop()
        if not isinstance(value, fx.Node):
            continue
        if value.target in (ir.tensor_hook, ir.cpp_hook):
            worklist.append(value.args[1])
        elif value.target is ir.sum_gradients:
            worklist.extend(value.args)
        elif value.target is operator.getitem:
            call: Any = value.args[0]
            index: Any = value.args[1]
            if ir.is_validation(call):
                yield call, index
            elif call.target in (ir.pre_hook, ir.post_hook):
                worklist.append(call.args[1][index])


def dtype_of_number(number: int) -> torch.dtype | None:
    """The dtype that a number of the engine's stands for; None for one that no gradient has."""
    return _DTYPES.get(number)


def metadata_of(edge: _Edge) -> Any:
    """What the engine says of an edge: ``[options, sizes, is nested, dtype]``."""
    call, index = edge
    return call.args[1][index]  # type: ignore[index]


def _leaf(asked: Any) -> Any:
    """The leaf whose gradient was asked for; None where that is another tensor's."""
    if isinstance(asked, GradientEdge):
        is_leaf = type(asked.node).name(asked.node).endswith(tape_reading.LEAF)  # else it is an attribute of the user's
        return asked.node.variable if is_leaf else None  # type: ignore[attr-defined]
    return asked if asked.is_leaf else None
