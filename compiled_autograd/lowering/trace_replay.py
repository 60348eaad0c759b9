"""What one call was traced to: its arguments as a key, the nodes that it made, and how these are made of others.

A call is kept without its tensors: of those that came in, what the key says; of those that were made, their metadata
and which of them share memory.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_slot, track_tensor
from torch.fx.immutable_collections import immutable_dict, immutable_list

from .fake_tensors import made_fake
from .functional import mutates

_AS_THEY_ARE = (torch.dtype, torch.device, torch.layout, torch.memory_format, type(None), bool, int, str)
_SEQUENCES = (immutable_list, list, tuple, torch.Size)
_DICTS = (immutable_dict, dict)


class NotAKeyError(Exception):
    """An argument that no key can be made of."""


class NotACopyError(Exception):
    """Something was made that cannot be made again by copying it."""


class Arguments:
    """The tensors among a call's arguments, in their order, each once."""

    def __init__(self, tracer: Any) -> None:
        self._tracer = tracer
        self.tensors: list[FakeTensor] = []
        self.nodes: list[fx.Node] = []
        self.storages: dict[int, int] = {}  # which of the arguments has it first
        self._positions: dict[int, int] = {}

    def key(self, value: Any) -> Hashable:
        """What a call depends on, of an argument.

        Raises:
            NotAKeyError: it may depend on more.
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
        position = self._positions.get(id(tensor))
        if position is not None:
            return ("again", position)
        slot = get_proxy_slot(tensor, self._tracer, None)
        if slot is None or slot.constant is not None or not _is_ordinary(tensor):
            raise NotAKeyError
        self._positions[id(tensor)] = position = len(self.tensors)
        self.tensors.append(tensor)
        self.nodes.append(slot.proxy.node)
        storage = tensor.untyped_storage()
        return (
            tensor.shape,
            tensor.stride(),
            tensor.storage_offset(),
            tensor.dtype,
            tensor.fake_device,
            tensor.requires_grad,
            tensor.is_conj(),
            tensor.is_neg(),
            storage.nbytes(),
            self.storages.setdefault(storage._cdata, position),
        )

    def position(self, tensor: Any) -> int | None:
        """Which argument a tensor is."""
        return self._positions.get(id(tensor))


@dataclass(slots=True, frozen=True)
class _Argument:
    """Stands for one of the tensors among the arguments, or for its node."""

    position: int


@dataclass(slots=True, frozen=True)
class _Operator:
    """Stands for one of the nodes that were made."""

    index: int


@dataclass(slots=True, frozen=True)
class _Memory:
    """Where a tensor lies: in that of an argument, or in the one of that number among those that were made."""

    of_argument: int | None
    own: int = 0


@dataclass(slots=True, frozen=True)
class _Value:
    """A tensor that was made."""

    memory: _Memory
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int | torch.SymInt
    dtype: torch.dtype
    device: torch.device
    conj: bool
    neg: bool

    def make(self, mode: FakeTensorMode, storage: torch.UntypedStorage) -> FakeTensor:
        """A new fake tensor like it. To be called with no mode on."""
        return made_fake(
            mode, storage, self.size, self.stride, self.offset, self.dtype, self.device, self.conj, self.neg
        )


@dataclass(slots=True, frozen=True)
class _Result:
    """A tensor that the call gave, and the node that stands for it."""

    value: _Value
    node: _Operator


@dataclass(slots=True, frozen=True)
class _Node:
    """One node, with what stands for other nodes among its arguments, and for tensors in its value."""

    name: str
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    meta: dict[str, Any]
    value: Any


@dataclass(slots=True, frozen=True)
class TracedCall:
    """What a call was traced to.

    Attributes:
        nodes: those that it made, in their order.
        memories: the sizes, in bytes, of the memory that it made.
        result: with what stands for tensors in it.
    """

    nodes: Sequence[_Node]
    memories: Sequence[int]
    result: Any

    def again(self, given: Arguments, tracer: Any) -> Any:
        """Make the same nodes of other arguments; gives what the call would give."""
        mode = given.tensors[0].fake_mode
        made: list[fx.Node] = []

        def node_of(value: Any) -> Any:
            if type(value) is _Argument:
                return given.nodes[value.position]
            return made[value.index] if type(value) is _Operator else value

        with torch._C._DisableTorchDispatch():
            memories = [torch.UntypedStorage(size, device="meta") for size in self.memories]

            def tensor_of(value: Any) -> Any:
                if type(value) is not _Value:
                    return value
                memory = value.memory
                if memory.of_argument is None:
                    return value.make(mode, memories[memory.own])
                return value.make(mode, given.tensors[memory.of_argument].untyped_storage())

            for each in self.nodes:
                node = tracer.graph.create_node(
                    "call_function", each.target, _mapped(each.args, node_of), _mapped(each.kwargs, node_of), each.name
                )
                node.meta = {**each.meta, "val": _mapped(each.value, tensor_of)}
                made.append(node)

            def result_of(value: Any) -> Any:
                if type(value) is _Argument:
                    return given.tensors[value.position]
                if type(value) is not _Result:
                    return value
                tensor = tensor_of(value.value)
                track_tensor(tensor, fx.Proxy(made[value.node.index], tracer), tracer=tracer, constant=None)
                return tensor

            return _mapped(self.result, result_of)


def _mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    """A structure with ``function`` of each of its leaves."""
    if isinstance(value, list):
        return [_mapped(each, function) for each in value]
    if type(value) is tuple:
        return tuple([_mapped(each, function) for each in value])
    if isinstance(value, dict):
        return {name: _mapped(each, function) for name, each in value.items()}
    return function(value)


def recorded(made: Sequence[fx.Node], result: Any, given: Arguments, tracer: Any) -> TracedCall:
    """What is to be remembered of a call.

    Raises:
        NotACopyError: it did what copying its nodes would not do.
    """
    if not given.tensors:
        raise NotACopyError
    recorder = _Recorder(made, given, tracer)
    nodes = [recorder.node(node) for node in made]
    return TracedCall(nodes, recorder.sizes, _mapped(result, recorder.result))


class _Recorder:
    """Puts in place of the nodes and tensors of one call what stands for them; raises :class:`NotACopyError`."""

    def __init__(self, made: Sequence[fx.Node], given: Arguments, tracer: Any) -> None:
        self.given = given
        self.tracer = tracer
        self.sizes: list[int] = []  # of the memory that the call made, in bytes
        self._operators = {node: _Operator(position) for position, node in enumerate(made)}
        self._arguments = {node: _Argument(position) for position, node in enumerate(given.nodes)}
        self._memories: dict[int, int] = {}

    def node(self, node: fx.Node) -> _Node:
        if node.op != "call_function":
            raise NotACopyError
        value = _mapped(node.meta.get("val"), self._value)
        if mutates(node) and not (isinstance(value, _Value) and value.memory.of_argument is None):
            raise NotACopyError
        packet: Any = getattr(node.target, "overloadpacket", node.target)
        name = self.tracer.graph._target_to_str(packet.__name__)
        args, kwargs = _mapped(node.args, self._input), _mapped(node.kwargs, self._input)
        return _Node(name, node.target, args, kwargs, {key: node.meta[key] for key in node.meta if key != "val"}, value)

    def result(self, value: Any) -> Any:
        """What stands for a tensor that the call gave, or a number."""
        if not isinstance(value, torch.Tensor):
            return self._value(value)
        position = self.given.position(value)
        if position is not None:
            return _Argument(position)
        slot = get_proxy_slot(value, self.tracer, None)
        if slot is None or slot.constant is not None or slot.proxy.node not in self._operators:
            raise NotACopyError
        return _Result(self._value(value), self._operators[slot.proxy.node])

    def _input(self, value: Any) -> Any:
        """What stands for a node among a node's arguments, or a constant."""
        if not isinstance(value, fx.Node):
            if isinstance(value, (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool, slice)):
                raise NotACopyError
            return value
        found = self._operators.get(value) or self._arguments.get(value)
        if found is None:
            raise NotACopyError
        return found

    def _value(self, value: Any) -> Any:
        """What stands for a tensor that is a node's value, or a number."""
        if not isinstance(value, torch.Tensor):
            if isinstance(value, (int, float, bool, type(None))):
                return value
            raise NotACopyError
        if type(value) is not FakeTensor or not _is_ordinary(value) or value.requires_grad:
            raise NotACopyError
        storage = value.untyped_storage()
        of_argument = self.given.storages.get(storage._cdata)
        if of_argument is None and storage._cdata not in self._memories:
            self._memories[storage._cdata] = len(self.sizes)
            self.sizes.append(storage.nbytes())
        return _Value(
            _Memory(of_argument, self._memories.get(storage._cdata, 0)),
            tuple(value.shape),
            value.stride(),
            value.storage_offset(),
            value.dtype,
            value.fake_device,
            value.is_conj(),
            value.is_neg(),
        )


def _is_ordinary(tensor: torch.Tensor) -> bool:
    """Whether a tensor is what its metadata says, and nothing more is known of it."""
    return tensor.layout is torch.strided and not tensor._is_zerotensor() and tensor.constant is None  # type: ignore[attr-defined]
