"""The dtypes that leaves and Python functions want their gradients to have: the engine's key does not say them.

A leaf says it by ``Tensor.grad_dtype``, a function by ``ctx.set_output_grad_dtype`` (2.14). The engine casts where a
gradient is handed on, and reports the dtype as the last number of what it says of each edge. Its key has all of that
but this number (``CompiledNodeArgs::collect(InputMetadata)``, ``torch/csrc/dynamo/compiled_autograd.h``, 2.15).

Leaves, and other tensors whose gradients are asked for, are asked when the tape is handed over, which takes some
0.1 microseconds for each leaf. For other dtypes the graph is another one: that number is all that differs. A function
that runs is asked for the engine's key (``functions.with_dtypes``).

A leaf whose ``data`` was given another dtype since its tape was made wants that one in the next tape alone: nodes keep
their dtype. So :class:`GradDtypes` looks for the node of such a leaf in the tape.

Another node of C++ has a dtype too, if it was set on a tensor before an operation in place made that no leaf. Such a
node is not asked, and its tape is not captured.

Where a gradient may have any dtype (None) and is a sum, the engine's way of adding decides the dtype of the sum: in
place, it is that of the first term, and whether it adds in place depends on who holds that term
(``InputBuffer::accumulate``, ``torch/csrc/autograd/input_buffer.cpp``, 2.15). So such a sum is captured only if calls
of one kind gave all terms, with tensors of one dtype.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.autograd.graph import GradientEdge

from .. import ir
from ..errors import CaptureRefusedError
from ..ir.legality import ARITHMETIC
from ..shadow_cache import unsupported
from ..torch_api import attributes
from ..torch_api.grad_dtypes import grad_dtypes
from . import tape as tape_reading

_DTYPES: dict[Any, torch.dtype | None] = {None: None, 5: torch.float16, 6: torch.float32, 7: torch.float64}
_DTYPES |= {8: torch.complex32, 9: torch.complex64, 10: torch.complex128, 15: torch.bfloat16}
_DTYPES |= {23: torch.float8_e5m2, 24: torch.float8_e4m3fn, 25: torch.float8_e5m2fnuz, 26: torch.float8_e4m3fnuz}
"""By number (``c10/core/ScalarType.h``)."""
_NUMBERS: dict[Any, Any] = {dtype: number for number, dtype in _DTYPES.items()}
_DTYPE_IN_OPTIONS = 3
_CASTS = "ToCopyBackward0"
_NOT_STRIDED = "a grad_dtype behind a compiled forward with tensors that are not strided"
_HOOKS = (ir.tensor_hook, ir.pre_hook, ir.post_hook)
_Edge = tuple[fx.Node, int]


class GradDtypes:
    """Gradient dtypes of a captured tape graph, for each leaf that it writes, or for each result; and the dtypes of
    these tensors when their tape was made, which the engine's key has."""

    __slots__ = ("accumulates", "captured", "leaves", "made")

    def __init__(self, tape: ir.TapeGraph) -> None:
        self.accumulates = tape.accumulates
        self.leaves, self.captured, self.made = [], [], []
        for leaf, value in _gradients(tape):
            made, captured = _dtypes_of(value)
            self.leaves.append(leaf)
            self.captured.append(captured)
            self.made.append(made)

    def now(
        self, tensors: Sequence[torch.Tensor], outputs: tape_reading.Ends, inputs: tape_reading.Ends
    ) -> list[torch.dtype | int | None]:
        """Return the dtypes of a tape that was handed over; an unusual one as its number."""
        with torch._C.DisableTorchFunctionSubclass():
            if not self.accumulates:
                return [_asked(asked, made, outputs) for asked, made in zip(inputs, self.made, strict=True)]
            leaves = [tensors[leaf] for leaf in self.leaves]
            return [_wanted(leaf, made, outputs) for leaf, made in zip(leaves, self.made, strict=True)]


def _wanted(leaf: torch.Tensor, made: torch.dtype | None, outputs: tape_reading.Ends) -> torch.dtype | int | None:
    """Return the dtype to which a tape casts a leaf's gradient; None if it casts nothing.

    The leaf had the dtype ``made`` when its tape was made. If it has another one now, its node is looked for in the
    tape: ``Tensor.grad_dtype`` no longer says what that node does.
    """
    if made is None:
        return None
    if attributes.dtype(leaf) is made:
        return attributes.grad_dtype(leaf)
    visited = tape_reading.walk(outputs)
    nodes = [each.node for each in visited if each.name == tape_reading.LEAF and each.node.variable is leaf]
    numbers = {grad_dtypes(node)[0] for node in nodes}
    number = numbers.pop() if len(numbers) == 1 else _NUMBERS.get(made)
    return _DTYPES.get(number, number)


def _asked(asked: Any, made: torch.dtype | None, outputs: tape_reading.Ends) -> torch.dtype | int | None:
    """Return the dtype of a requested gradient; ``made`` is None if no gradient reaches it."""
    leaf = _leaf(asked)
    if leaf is not None:
        return _wanted(leaf, made, outputs)
    if made is None:
        return None
    edge = asked if isinstance(asked, GradientEdge) else attributes.edge(asked)
    number = grad_dtypes(edge.node)[edge.output_nr]
    return _DTYPES.get(number, number)


def refuse_others(tape: ir.TapeGraph) -> None:
    """Refuse a capture with a dtype that a later tape could not be asked for, or that does not tell that of a sum.

    Raises:
        CaptureRefusedError: a node has one that is neither a leaf nor a Python function nor asked for; one has a dtype
            whose number is not known; or one takes any dtype, of a sum whose terms may have several.
    """
    taken = [value for call in tape.graph.nodes if _is_function(call) for value in call.args[4:]]
    taken += [value for _, value in _gradients(tape)]
    for value in taken:
        _refuse_unlike_terms(tape, value)
    _refuse_changes_by_hooks(tape)
    known = {edge for value in taken for edge in edges(value) if metadata_of(edge)[-1] in _DTYPES}
    for call in tape.graph.find_nodes(op="call_function", target=operator.getitem):
        edge = (call.args[0], call.args[1])
        if ir.is_validation(edge[0]) and edge not in known and metadata_of(edge) is not None:  # else it leads nowhere
            options, *_, number = metadata_of(edge)
            if number not in _DTYPES or number != options[_DTYPE_IN_OPTIONS]:
                raise CaptureRefusedError(unsupported("a grad_dtype of a tensor that is no leaf, or is no usual one"))


def _refuse_changes_by_hooks(tape: ir.TapeGraph) -> None:
    """Refuse a cast of each term of a leaf's sum if a hook may take the cast back before all terms are there.

    A hook of ``fully_shard`` does (``_set_unsharded_grad_dtypes``,
    ``torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py``, 2.15): without the cast, eager adds in 16 bits. One
    term has the same value either way. The hook of a leaf runs after the leaf's sum. Other changes are limits: those by
    other code of users, and those in tapes whose structure is known with another dtype.
    """
    gradients = [value for _, value in _gradients(tape)]
    if any(ir.hook_kind(call.target) in _HOOKS and call not in gradients for call in tape.graph.nodes):
        for value in gradients:
            told = [metadata_of(edge) for edge in edges(value)]
            if len(told) > 1 and told[0][-1] not in (None, told[0][0][_DTYPE_IN_OPTIONS]):
                raise CaptureRefusedError(unsupported("a sum of gradients for a grad_dtype that a hook may change"))


def _is_function(call: fx.Node) -> bool:
    return call.target is ir.call_backward or isinstance(call.target, ir.InlinedBackward)


def _refuse_unlike_terms(tape: ir.TapeGraph, value: Any) -> None:
    terms = [edge for edge in edges(value) if metadata_of(edge)[-1] is None]
    if len(terms) > 1 and len({_kind(tape, _before(edge)) for edge in terms}) > 1:
        raise CaptureRefusedError(unsupported("a sum of gradients that may differ in dtype, where any is taken"))


def _kind(tape: ir.TapeGraph, value: Any) -> Hashable:
    """Return a kind for a value: values of one kind have one dtype. None: the value is no floating tensor."""
    told = list(edges(value))
    if told:
        number = metadata_of(told[0])[-1]
        if number is not None:
            return _DTYPES.get(number, number)
        return _kind(tape, _before(told[0])) if len(told) == 1 else value
    if value.op == "placeholder":
        lifted = value.meta["lifted"]
        dtype = getattr(torch, tape.inputs[lifted.index].dtype) if lifted.kind == "input" else None
        return dtype if dtype in _NUMBERS else None
    call: Any = value.args[0]
    if value.target is not operator.getitem or not isinstance(call.target, ir.OpaqueOp):
        return value if value.target not in ARITHMETIC else None
    if call.target.__name__ == _CASTS:
        return _DTYPES.get(call.args[2][_DTYPE_IN_OPTIONS], value)
    dtypes = {_kind(tape, each) for each in call.all_input_nodes} - {None}
    if len(dtypes) > 1:  # how they are promoted depends on which of them has dimensions
        return value
    constants = fx.map_arg(call.args, lambda _: None)
    return call.target.__name__, value.args[1], *dtypes, str(constants)


def _before(edge: _Edge) -> Any:
    """Return the result of a node before the cast for the next one."""
    call, index = edge
    return call.args[0][index]  # type: ignore[index]


def with_grad_dtypes(tape: ir.TapeGraph, dtypes: Sequence[torch.dtype | int | None]) -> ir.TapeGraph:
    """Return the tape graph for leaves, and others that are asked for, that want their gradients in other dtypes."""
    changed = tape.copy(tape.calls)
    for dtype, (_, value) in zip(dtypes, _gradients(changed), strict=True):
        for call, index in edges(value):
            metadata = list(call.args[1])  # type: ignore[arg-type]
            metadata[index] = [*metadata[index][:-1], _NUMBERS.get(dtype, dtype)]
            call.update_arg(1, metadata)
    return changed


def _gradients(tape: ir.TapeGraph) -> list[tuple[int, Any]]:
    """The number of each lifted leaf, and the gradient that it is given; or of each result, and that."""
    if tape.accumulates:
        calls = tape.graph.find_nodes(op="call_function", target=ir.accumulate_grad, sort=True)
        return [(int(call.args[0].target.partition("_")[2]), call.args[2]) for call in calls]
    return list(enumerate(tape.graph.find_nodes(op="output")[0].args[0]))


def dtype_of(gradient: Any) -> torch.dtype | None:
    """Return the dtype of a gradient, if the tape has it."""
    return _dtypes_of(gradient)[1]


def _dtypes_of(gradient: Any) -> tuple[torch.dtype | None, torch.dtype | None]:
    """Return the dtype that the gradient's tensor had when the tape was made, and the dtype of the gradient."""
    told = next(map(metadata_of, edges(gradient)), None)
    return (None, None) if told is None else (_DTYPES.get(told[0][_DTYPE_IN_OPTIONS]), _DTYPES.get(told[-1]))


def edges(value: Any) -> Iterator[_Edge]:
    """Yield the edges that a gradient comes from: a call, and the index of its result."""
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


def edges_of(ctx: Any, arguments: Sequence[Any]) -> list[Any] | None:
    """Return the metadata that the engine would report for the edges of a compiled forward's function.

    It reports no ``validate_outputs`` there (``torch/csrc/dynamo/python_compiled_autograd.cpp``, 2.15). None for other
    functions, and where each gradient is wanted in the dtype of its tensor, which the compiled backward gives.

    Args:
        arguments: of the forward: layout, device, dtype and sizes of each, or None for what is no tensor.

    Raises:
        CaptureRefusedError: a cast is wanted of a gradient that is no strided tensor.
    """
    function = type(ctx)._forward_cls
    if getattr(function, "_aot_id", None) is None or not any(_is_cast(*edge) for edge in ctx.next_functions):
        return None
    if getattr(function, "maybe_subclass_metadata", None) is not None:
        raise CaptureRefusedError(unsupported(_NOT_STRIDED))
    following = iter(ctx.next_functions)
    found: list[Any] = []
    for each in arguments:
        node, index = (None, 0) if each is None else next(following)
        if node is None:
            found.append(None)
            continue
        layout, device, dtype, sizes = each
        if layout is not torch.strided or dtype not in _NUMBERS:
            raise CaptureRefusedError(unsupported(_NOT_STRIDED))
        wanted = grad_dtypes(node)[index]
        found.append([[None, None, device, _NUMBERS[dtype], 0, None], list(sizes), False, wanted])
    return found


def _is_cast(node: Any, index: int) -> bool:
    """Return whether a node wants a gradient in another dtype than that of its tensor."""
    return node is not None and grad_dtypes(node)[index] != _NUMBERS.get(node._input_metadata[index].dtype)


def dtype_of_number(number: int | None) -> torch.dtype | None:
    """The dtype that a number of the engine's stands for; None for one that no gradient has."""
    return _DTYPES.get(number)


def metadata_of(edge: _Edge) -> Any:
    """Return the engine's metadata of an edge: ``[options, sizes, is nested, dtype]``."""
    call, index = edge
    return call.args[1][index]  # type: ignore[index]


def _leaf(asked: Any) -> Any:
    """Return the leaf whose gradient was requested; None for another tensor."""
    if isinstance(asked, GradientEdge):
        is_leaf = type(asked.node).name(asked.node).endswith(tape_reading.LEAF)  # else it is an attribute of the user's
        return asked.node.variable if is_leaf else None  # type: ignore[attr-defined]
    return asked if attributes.is_leaf(asked) else None
