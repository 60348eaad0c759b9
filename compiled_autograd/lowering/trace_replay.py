"""The trace of one call: its arguments as a key, the nodes that it made, and how to copy these nodes.

A call is kept without its tensors. The key has the properties of the arguments. Of the tensors that the call made, the
metadata is kept, and which of them share memory. Nodes and memories are numbered: first those of the arguments, then
those that the call made.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_slot, track_tensor
from torch.fx.immutable_collections import immutable_dict, immutable_list
from torch.fx.node import map_aggregate

from .fake_tensors import made_fake, metadata_of
from .functional import mutates

_AS_THEY_ARE = (torch.dtype, torch.device, torch.layout, torch.memory_format, type(None), bool, int, str)
_SEQUENCES = (immutable_list, list, tuple, torch.Size)
_DICTS = (immutable_dict, dict)


class NotAKeyError(Exception):
    """An argument that no key can be made of."""


class NotACopyError(Exception):
    """The call made something that copying cannot make again."""


class Arguments:
    """The tensors among a call's arguments, in their order, each once."""

    def __init__(self, tracer: Any) -> None:
        self.tracer = tracer
        self.tensors: list[FakeTensor] = []
        self.nodes: list[fx.Node] = []
        self.storages: dict[int, int] = {}  # which of the arguments has it first
        self.positions: dict[int, int] = {}  # by the tensors' ids

    def key(self, value: Any) -> Hashable:
        """Return a key for the properties of an argument on which a call depends.

        Raises:
            NotAKeyError: the call may depend on more.
        """
        kind = type(value)
        if kind is FakeTensor:
            return self._tensor(value)
        if kind in _SEQUENCES:
            return (kind, *[self.key(each) for each in value])
        if kind in _AS_THEY_ARE:
            return (kind, value)
        if kind is float:
            return (kind, value.hex())  # of two zeros, which one
        if kind is complex:
            return (kind, value.real.hex(), value.imag.hex())
        if kind in _DICTS:
            return (kind, *[(name, self.key(each)) for name, each in sorted(value.items())])
        raise NotAKeyError

    def _tensor(self, tensor: FakeTensor) -> Hashable:
        position = self.positions.get(id(tensor))
        if position is not None:
            return ("again", position)
        slot = get_proxy_slot(tensor, self.tracer, None)
        if slot is None or slot.constant is not None or not _is_ordinary(tensor):
            raise NotAKeyError
        self.positions[id(tensor)] = position = len(self.tensors)
        self.tensors.append(tensor)
        self.nodes.append(slot.proxy.node)
        storage = tensor.untyped_storage()
        memory = self.storages.setdefault(storage._cdata, position)
        return (*metadata_of(tensor), tensor.requires_grad, storage.nbytes(), memory)


@dataclass(slots=True, frozen=True)
class _Numbered:
    """Stands for the node of that number."""

    number: int


@dataclass(slots=True, frozen=True)
class _Value:
    """A tensor that was made, and the number of its memory."""

    memory: int
    metadata: tuple[Any, ...]


@dataclass(slots=True, frozen=True)
class _Result:
    """A tensor that the call gave, and the number of the node that stands for it; None for one of the arguments."""

    node: int
    value: _Value | None


@dataclass(slots=True, frozen=True)
class _Node:
    """One node, with placeholders for other nodes among its arguments, and for tensors in its ``meta["val"]``."""

    name: str
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    meta: dict[str, Any]


@dataclass(slots=True, frozen=True)
class TracedCall:
    """The trace of a call.

    Attributes:
        nodes: those that it made, in their order.
        memories: the sizes, in bytes, of the memory that it made.
        result: the call's result, with placeholders for tensors.
    """

    nodes: Sequence[_Node]
    memories: Sequence[int]
    result: Any

    def again(self, given: Arguments) -> Any:
        """Make the same nodes of other arguments; gives what the call would give."""
        mode, tracer = given.tensors[0].fake_mode, given.tracer
        nodes = list(given.nodes)
        memories = [tensor.untyped_storage() for tensor in given.tensors]

        def node_of(value: Any) -> Any:
            return nodes[value.number] if type(value) is _Numbered else value

        def tensor_of(value: Any) -> Any:
            return made_fake(mode, memories[value.memory], *value.metadata) if type(value) is _Value else value

        def result_of(value: Any) -> Any:
            if type(value) is not _Result:
                return value
            if value.value is None:
                return given.tensors[value.node]
            tensor = tensor_of(value.value)
            track_tensor(tensor, fx.Proxy(nodes[value.node], tracer), tracer=tracer, constant=None)
            return tensor

        with torch._C._DisableTorchDispatch():
            memories += [torch.UntypedStorage(size, device="meta") for size in self.memories]
            for each in self.nodes:
                args, kwargs = map_aggregate(each.args, node_of), map_aggregate(each.kwargs, node_of)
                node = tracer.graph.create_node("call_function", each.target, args, kwargs, each.name)
                node.meta = {**each.meta, "val": map_aggregate(each.meta["val"], tensor_of)}
                nodes.append(node)
            return map_aggregate(self.result, result_of)


def recorded(made: Sequence[fx.Node], result: Any, given: Arguments) -> TracedCall:
    """Return the trace of a call.

    Raises:
        NotACopyError: copying the call's nodes would not do the same as the call.
    """
    if not given.tensors:
        raise NotACopyError
    recorder = _Recorder(made, given)
    nodes = [recorder.node(node) for node in made]
    return TracedCall(nodes, recorder.sizes, map_aggregate(result, recorder.result))


class _Recorder:
    """Puts in place of the nodes and tensors of one call what stands for them; raises :class:`NotACopyError`."""

    def __init__(self, made: Sequence[fx.Node], given: Arguments) -> None:
        self.given = given
        self.sizes: list[int] = []  # of the memory that the call made, in bytes
        self._nodes = {node: number for number, node in enumerate((*given.nodes, *made))}
        self._memories = dict(given.storages)

    def node(self, node: fx.Node) -> _Node:
        if node.op != "call_function":
            raise NotACopyError
        value = map_aggregate(node.meta.get("val"), self._value)
        if mutates(node) and not (isinstance(value, _Value) and value.memory >= len(self.given.tensors)):
            raise NotACopyError
        packet: Any = getattr(node.target, "overloadpacket", node.target)
        name = self.given.tracer.graph._target_to_str(packet.__name__)
        args, kwargs = map_aggregate(node.args, self._input), map_aggregate(node.kwargs, self._input)
        return _Node(name, node.target, args, kwargs, {**node.meta, "val": value})

    def result(self, value: Any) -> Any:
        """Return the placeholder of a tensor that the call gave, or a number."""
        if not isinstance(value, torch.Tensor):
            return self._value(value)
        position = self.given.positions.get(id(value))
        if position is not None:
            return _Result(position, None)
        slot = get_proxy_slot(value, self.given.tracer, None)
        number = -1 if slot is None or slot.constant is not None else self._nodes.get(slot.proxy.node, -1)
        if number < len(self.given.nodes):
            raise NotACopyError
        return _Result(number, self._value(value))

    def _input(self, value: Any) -> Any:
        """Return the placeholder of a node among a node's arguments, or a constant."""
        if not isinstance(value, fx.Node):
            if isinstance(value, (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool, slice)):
                raise NotACopyError
            return value
        found = self._nodes.get(value)
        if found is None:
            raise NotACopyError
        return _Numbered(found)

    def _value(self, value: Any) -> Any:
        """Return the placeholder of a tensor that is a node's value, or a number."""
        if not isinstance(value, torch.Tensor):
            if isinstance(value, (int, float, bool, type(None))):
                return value
            raise NotACopyError
        if type(value) is not FakeTensor or not _is_ordinary(value) or value.requires_grad:
            raise NotACopyError
        storage = value.untyped_storage()
        new = len(self.given.tensors) + len(self.sizes)
        memory = self._memories.setdefault(storage._cdata, new)
        if memory == new:
            self.sizes.append(storage.nbytes())
        return _Value(memory, metadata_of(value))


def _is_ordinary(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has no properties beside its metadata."""
    return tensor.layout is torch.strided and not tensor._is_zerotensor() and tensor.constant is None  # type: ignore[attr-defined]
