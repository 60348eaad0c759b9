"""The records of a structure: lifted values, calls and their arguments; and the text of each for people.

The key of one node of the tape is a tuple: the node's name, and then parts. Two keys are equal if every part is. The
records are frozen and hashable. msgspec writes and reads them, so stored keys can be compared too.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import fx

# Of these records a tape has hundreds of thousands, and no cycle can begin at one: gc=False keeps them from the garbage
# collector, which would go through all of them again and again while a key is made.


class Lifted(msgspec.Struct, frozen=True, gc=False, array_like=True, tag="lifted"):
    """The meaning of a placeholder: ``node.meta["lifted"]``.

    Attributes:
        kind: one of :data:`operations.PLACEHOLDERS`.
        index: among all values of that kind that the engine hands over.
    """

    kind: str
    index: int

    def __str__(self) -> str:
        return f"{self.kind}_{self.index}"


class LiftedTensor(msgspec.Struct, frozen=True, gc=False, array_like=True, tag="tensor"):
    """All that the structure says of a lifted tensor.

    Attributes:
        index: as in :class:`Lifted`.
        dtype: without ``torch.``.
        device: as torch writes it.
        requires_grad: of the tensor that was saved.
        kind: its class where that is not one of torch's own, or its layout where it is not strided; else empty.
    """

    index: int
    dtype: str
    device: str
    requires_grad: bool = False
    kind: str = ""

    @property
    def properties(self) -> str:
        """Return the properties beside dtype and device; empty if there are none."""
        return ", ".join(filter(None, ("requires_grad" if self.requires_grad else "", self.kind)))

    def __str__(self) -> str:
        return ", ".join(filter(None, (f"input_{self.index}: {self.dtype} {self.device}", self.properties)))


class Value(msgspec.Struct, frozen=True, gc=False, array_like=True, tag="value"):
    """A result of a call.

    Attributes:
        call: the index of the tape's node that the call belongs to.
        number: of the call among those of that node, counted from 0.
        edge: the index among the call's results; None for the whole result.
    """

    call: int
    number: int
    edge: int | None = None

    def __str__(self) -> str:
        name = f"%{self.call}.{self.number}"
        return name if self.edge is None else f"{name}.{self.edge}"


class Constant(msgspec.Struct, frozen=True, gc=False, array_like=True, tag="constant"):
    """A constant that is neither an int nor None. It is compared by type and text, since 1.0, True and 1 are equal in
    Python, and no NaN equals another.

    Attributes:
        kind: the name of its class.
        text: as Python writes it.
    """

    kind: str
    text: str

    def __str__(self) -> str:
        return self.text


class Listed(msgspec.Struct, frozen=True, gc=False, array_like=True, tag="list"):
    """A list or a tuple."""

    items: tuple[Argument, ...]

    def __str__(self) -> str:
        return f"[{', '.join(map(str, self.items))}]"


Argument = Lifted | Value | Constant | Listed | int | None
"""An argument of a call."""


class CallPart(msgspec.Struct, frozen=True, gc=False, array_like=True, tag="call", cache_hash=True):
    """One call that belongs to a node of the tape; ``function`` is its name in the text form."""

    result: Value
    function: str
    arguments: tuple[Argument, ...]

    def __str__(self) -> str:
        return f"{self.result} = {self.function}({', '.join(map(str, self.arguments))})"


class Accumulates(msgspec.Struct, frozen=True, gc=False, array_like=True, tag="accumulates"):
    """A part of the first key: True for ``backward``, False for ``autograd.grad``."""

    value: bool

    def __str__(self) -> str:
        return f"accumulates={self.value}"


class Returned(msgspec.Struct, frozen=True, gc=False, array_like=True, tag="return"):
    """A part of the last key: the gradients that were asked for."""

    values: tuple[Argument, ...]

    def __str__(self) -> str:
        return f"return {Listed(self.values)}"


class RunOrder(msgspec.Struct, frozen=True, gc=False, array_like=True, tag="order"):
    """A part of the last key: indices of nodes in the order in which they run, as far as users' code can see it."""

    calls: tuple[int, ...]

    def __str__(self) -> str:
        return f"order: {list(self.calls)}"


class SavedValue(msgspec.Struct, frozen=True, gc=False):
    """A constant or tensor that a node of the tape saved under a name. A tensor has no ``value`` here."""

    name: str
    is_tensor: bool
    value: Argument = None


Part = CallPart | LiftedTensor | Accumulates | Returned | RunOrder
StructureKey = tuple[str | Part, ...]
"""The name of a node, or ``end``, and then parts."""
_TRUE, _FALSE = Constant("bool", "True"), Constant("bool", "False")
_decoder = msgspec.msgpack.Decoder(list[StructureKey])


def argument_of(value: Any, values: Mapping[fx.Node, Argument]) -> Argument:
    """The record of what a call takes; ``values`` are those of the graph's nodes."""
    kind = type(value)
    if kind is fx.Node:
        return values[value]
    if value is None or kind is int:
        return value
    if isinstance(value, (list, tuple)):
        return Listed(tuple([argument_of(each, values) for each in value]))
    if isinstance(value, bool):
        return _TRUE if value else _FALSE
    if isinstance(value, dict):
        return Constant("dict", "{" + ", ".join(f"{key}: {each}" for key, each in sorted(value.items())) + "}")
    if kind is torch.device:
        return _device(value)
    return Constant(kind.__name__, str(value))


@functools.cache
def _device(value: torch.device) -> Constant:
    """Return the one constant of a device: most constants are devices."""
    return Constant("device", str(value))


def leaves(arguments: Sequence[Argument]) -> Iterator[Lifted | Value | Constant | int | None]:
    """Yield the parts of arguments, lists opened."""
    for argument in arguments:
        if type(argument) is Listed:
            yield from leaves(argument.items)
        else:
            yield argument  # type: ignore[misc]


def values_of(arguments: Sequence[Argument]) -> list[Lifted | Value]:
    """Return all parts of arguments that are handed over or computed."""
    return [leaf for leaf in leaves(arguments) if isinstance(leaf, (Lifted, Value))]


def encode_keys(keys: Sequence[StructureKey]) -> bytes:
    """A structure's keys, as the store keeps them."""
    return msgspec.msgpack.encode(keys)


def decode_keys(data: bytes) -> list[StructureKey] | None:
    """Return the keys that :func:`encode_keys` wrote; None if damaged, or if another version wrote other records."""
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, RecursionError):
        return None
