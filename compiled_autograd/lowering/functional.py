"""In-place operators of an ATen graph -> operators that return a new tensor.

A write through a view is written back into the tensor that owns the memory (``slice`` -> ``slice_scatter``). Later uses
read from that tensor. ``torch.func.functionalize`` does the same by tracing the graph once more, which takes five times
as long as the trace. It remains for graphs that this module does not understand.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .fake_tensors import storage_of

_aten = torch.ops.aten


def mutates(node: fx.Node) -> bool:
    """Return whether a node of an ATen graph writes into one of its arguments."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def made_functional(graph: fx.Graph) -> bool:
    """Replace every in-place operator; False, and nothing changed, where one of them cannot be.

    Args:
        graph: as it was traced, with a fake tensor in each node's ``meta["val"]``.
    """
    writes = _Writes(graph)
    try:
        writes.replace()
    except _NotUnderstoodError:
        writes.undo()
        return False
    return True


class _NotUnderstoodError(Exception):
    """A write into memory that this module does not understand."""


@dataclass(slots=True, eq=False)
class _Memory:
    """Memory that is written to.

    Attributes:
        version: how often it was written to so far.
        seen: some tensor lies in it.
    """

    version: int = 0
    seen: bool = False


@dataclass(slots=True, eq=False)
class _Seen:
    """A tensor in such memory.

    Attributes:
        memory: the memory in which it lies.
        parent: the tensor that it is a view of; None for the owner of the memory.
        view: the node that makes it of ``parent``, or None if that node is not understood.
        value: the node with its contents, as of ``version``.
        version: of the memory.
    """

    memory: _Memory
    parent: _Seen | None
    view: fx.Node | None
    value: fx.Node
    version: int


class _Writes:
    """The changes of one graph."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._memories: dict[int | None, _Memory] = {}
        self._seen: dict[fx.Node, _Seen] = {}
        self._made: list[fx.Node] = []
        self._before: list[tuple[fx.Node, Any, Any]] = []  # arguments that were replaced

    def replace(self) -> None:
        """Replace all of them.

        Raises:
            _NotUnderstoodError: one cannot be.
        """
        nodes = list(self._graph.nodes)
        writing = [node for node in nodes if mutates(node)]
        self._memories = {_storage(node): _Memory() for node in writing}
        if None in self._memories:
            raise _NotUnderstoodError
        for node in nodes:
            first = self._seen.get(node.args[0]) if node.args and isinstance(node.args[0], fx.Node) else None
            with self._graph.inserting_before(node):
                self._take_what_is_there_now(node)
                if mutates(node):
                    self._seen[node] = self._write(node, first)
                else:
                    self._see(node, first)
        for node in reversed(writing):
            self._graph.erase_node(node)

    def undo(self) -> None:
        """Make the graph what it was."""
        for node, args, kwargs in reversed(self._before):
            node.args, node.kwargs = args, kwargs
        for node in reversed(self._made):
            self._graph.erase_node(node)

    def _take_what_is_there_now(self, node: fx.Node) -> None:
        used = [each for each in node.all_input_nodes if each in self._seen]
        now = {each: self._now(self._seen[each]) for each in used}
        if all(value is each for each, value in now.items()):
            return
        self._before.append((node, node.args, node.kwargs))
        node.args = fx.map_arg(node.args, lambda each: now.get(each, each))
        node.kwargs = fx.map_arg(node.kwargs, lambda each: now.get(each, each))

    def _now(self, seen: _Seen) -> fx.Node:
        """Return the node with the contents of a tensor at this place of the graph."""
        if seen.version != seen.memory.version:
            if seen.view is None or seen.parent is None:
                raise _NotUnderstoodError
            seen.value = self._call(seen.view.target, (self._now(seen.parent), *seen.view.args[1:]), seen.view.kwargs)
            seen.version = seen.memory.version
        return seen.value

    def _see(self, node: fx.Node, parent: _Seen | None) -> None:
        """Record the result of a node, if it may be a tensor in memory that is written to."""
        memory = self._memories.get(_storage(node))
        if memory is None:
            return
        if memory.seen:
            if parent is not None and parent.memory is not memory:
                raise _NotUnderstoodError
            view = node if parent is not None and _is_view(node, parent) else None
            if view is None and memory.version:
                raise _NotUnderstoodError
            self._seen[node] = _Seen(memory, parent, view, node, memory.version)
        elif node.op == "call_function":
            memory.seen = True
            self._seen[node] = _Seen(memory, None, None, node, memory.version)
        else:
            raise _NotUnderstoodError  # what the caller has

    def _write(self, node: fx.Node, to: _Seen | None) -> _Seen:
        operator = _functional(node.target)
        if operator is None or to is None or to.memory is not self._memories[_storage(node)]:
            raise _NotUnderstoodError
        value = self._call(operator, node.args, node.kwargs, node.meta)
        if to.parent is None and not _alike(value, node, stride=True):  # masked_fill gives a contiguous tensor
            value = self._call(_aten.copy.default, (node.args[0], value), {})
        if not _alike(value, node, stride=to.parent is None):
            raise _NotUnderstoodError
        at = to
        while at.parent is not None:
            whole = self._now(at.parent)
            value = self._put_back(at, whole, value)
            if not _alike(value, whole, stride=at.parent.parent is None):
                raise _NotUnderstoodError
            at = at.parent
        at.memory.version += 1
        at.value, at.version = value, at.memory.version
        return to

    def _put_back(self, seen: _Seen, whole: fx.Node, value: fx.Node) -> fx.Node:
        """``whole`` with ``value`` where ``seen`` lies in it."""
        if seen.view is None or seen.view.kwargs:
            raise _NotUnderstoodError
        target, rest = seen.view.target, seen.view.args[1:]
        if target in _SCATTERS:
            return self._call(_SCATTERS[target], (whole, value, *rest), {})
        call = _INVERSES[target](whole.meta["val"], *rest) if target in _INVERSES else None
        if call is None:
            raise _NotUnderstoodError
        return self._call(call[0], (value, *call[1:]), {})

    def _call(self, operator: Any, args: Any, kwargs: Any, meta: dict[str, Any] | None = None) -> fx.Node:
        node = self._graph.call_function(operator, args, kwargs)
        self._made.append(node)
        if any("val" not in each.meta for each in node.all_input_nodes):
            raise _NotUnderstoodError
        arguments, keywords = fx.map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
        node.meta = {**(meta or {}), "val": operator(*arguments, **keywords)}
        return node


def _storage(node: fx.Node) -> int | None:
    value = node.meta.get("val")
    return storage_of(value) if isinstance(value, torch.Tensor) and value.layout is torch.strided else None


def _is_view(node: fx.Node, parent: _Seen) -> bool:
    """Return whether a node is a view of its first argument that can be made again of another tensor like it."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    if any(isinstance(each.meta.get("val"), torch.Tensor) for each in node.all_input_nodes if each is not node.args[0]):
        return False  # others are sizes
    if node.target is _aten.as_strided.default:  # of the memory, not of the tensor: only of one that is all of it
        return parent.parent is None and parent.value.meta["val"].storage_offset() == 0
    return True


def _alike(node: fx.Node, other: fx.Node, stride: bool) -> bool:
    one, two = node.meta["val"], other.meta["val"]
    if not isinstance(one, torch.Tensor) or (one.is_conj(), one.is_neg()) != (two.is_conj(), two.is_neg()):
        return False
    same = (one.dtype, one.shape, one.device) == (two.dtype, two.shape, two.device)
    return same and (not stride or one.stride() == two.stride())


def _functional(target: Any) -> Any:
    """The overload that takes what an in-place one takes and gives a new tensor; None where there is none."""
    schema = target._schema
    name = target.overloadpacket.__name__
    writes = [argument for argument in schema.arguments if argument.is_write]
    if target.namespace != "aten" or not name.endswith("_") or writes != schema.arguments[:1]:
        return None
    if len(schema.returns) != 1 or torch.Tag.nondeterministic_seeded in target.tags:
        return None
    packet = getattr(_aten, name[:-1], None)
    for overload in () if packet is None else packet.overloads():
        candidate = getattr(packet, overload)
        if _takes(candidate._schema) == _takes(schema) and not _aliases(candidate._schema):
            return candidate
    return None


def _takes(schema: Any) -> list[tuple[str, str, bool, Any]]:
    return [(each.name, str(each.type), each.kwarg_only, each.default_value) for each in schema.arguments]


def _aliases(schema: Any) -> bool:
    return any(each.alias_info is not None for each in (*schema.arguments, *schema.returns))


_SCATTERS = {
    _aten.slice.Tensor: _aten.slice_scatter.default,
    _aten.select.int: _aten.select_scatter.default,
    _aten.diagonal.default: _aten.diagonal_scatter.default,
    _aten.as_strided.default: _aten.as_strided_scatter.default,
}
"""For a view of a part, what puts a part in place; both take the same arguments after their tensors."""


def _unview(whole: torch.Tensor, *_: Any) -> Any:
    if not all(type(size) is int for size in whole.shape) or not whole.is_contiguous():
        return None  # a symbol would have to be some node of the graph
    return (_aten.view.default, list(whole.shape))


def _unpermute(whole: torch.Tensor, dims: Any) -> Any:
    dims = [dim % whole.dim() for dim in dims]
    return (_aten.permute.default, [dims.index(dim) for dim in range(len(dims))])


def _unsqueeze(whole: torch.Tensor, dim: int) -> Any:
    return (_aten.unsqueeze.default, dim) if whole.dim() and whole.shape[dim] == 1 else None


_INVERSES: dict[Any, Callable[..., Any]] = {
    _aten.view.default: _unview,
    _aten._unsafe_view.default: _unview,
    _aten._reshape_alias.default: _unview,
    _aten.t.default: lambda whole: (_aten.t.default,),
    _aten.transpose.int: lambda whole, *dims: (_aten.transpose.int, *dims),
    _aten.permute.default: _unpermute,
    _aten.unsqueeze.default: lambda whole, dim: (_aten.squeeze.dim, dim),
    _aten.squeeze.dim: _unsqueeze,
    _aten.view_as_real.default: lambda whole: (_aten.view_as_complex.default,),
    _aten.view_as_complex.default: lambda whole: (_aten.view_as_real.default,),
    _aten.alias.default: lambda whole: (_aten.alias.default,),
    _aten.detach.default: lambda whole: (_aten.detach.default,),
}
"""For a view of the whole, what makes the whole of it again, with its arguments; None where nothing does."""
