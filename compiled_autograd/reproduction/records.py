"""The records of a stored reproduction: only data, that is, names of operators, numbers, and references to values."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import msgspec
import torch

from ..errors import ReproductionError

FORMAT = 1
_DTYPES = {str(each): each for each in vars(torch).values() if isinstance(each, torch.dtype)}
_FORMATS = {str(each): each for each in vars(torch).values() if isinstance(each, torch.memory_format)}
_LAYOUTS = {str(each): each for each in vars(torch).values() if isinstance(each, torch.layout)}
_TABLES: dict[str, dict[str, Any]] = {"dtype": _DTYPES, "layout": _LAYOUTS, "memory_format": _FORMATS}
_DEVICE = re.compile(r"[a-z]{2,16}(:\d{1,3})?")


class Ref(msgspec.Struct, frozen=True, tag="call", tag_field="of"):
    """A reference to the result of a call of the tape graph, by the call's index."""

    number: int


class Given(msgspec.Struct, frozen=True, tag="given", tag_field="of"):
    """A reference to an input: a tensor, size or scalar. ``kind`` is one of :data:`ir.PLACEHOLDERS`."""

    kind: str
    index: int


class Argument(msgspec.Struct, frozen=True, tag="argument", tag_field="of"):
    """In a function, a reference to one of its arguments, with lists flattened."""

    index: int


class Result(msgspec.Struct, frozen=True, tag="operator", tag_field="of"):
    """In a function, a reference to the result of one of its operators."""

    number: int


class Constant(msgspec.Struct, frozen=True, tag="constant", tag_field="of"):
    """A constant that JSON cannot express: dtype, device, layout, memory format, or a number such as ``inf``."""

    kind: str
    text: str


class Scalar(msgspec.Struct, frozen=True, tag="scalar", tag_field="of"):
    """A tensor of one number."""

    value: bool | int | float | Constant
    dtype: str
    shape: list[int]


class Listed(msgspec.Struct, frozen=True, tag="list", tag_field="of"):
    items: list[Value]


Value = Ref | Given | Argument | Result | Constant | Scalar | Listed | bool | int | float | str | None


class Operator(msgspec.Struct, frozen=True):
    """One call of an ATen operator, such as ``aten.mm.default``; or ``getitem``, for one of several results."""

    name: str
    args: list[Value] = []
    kwargs: dict[str, Value] = {}


class Function(msgspec.Struct, frozen=True):
    """One of the engine's functions, as operators; ``results`` is a list, or one value."""

    operators: list[Operator]
    results: Value


class TensorRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """A tensor without its values.

    Attributes:
        dtype, device: as text, in torch's form.
        shape, stride, offset: in elements.
        storage: tensors with the same number share a storage.
        parameter: ``"itself"`` for a parameter, ``"view"`` for a view of one, else empty.
        low, high: the smallest and the largest value, if known; made-up values lie between them.
        mean, deviation: of floating-point values, if known and finite.
        ones: for a mask, the number of set elements between the first and the last element in memory.
        values: for a small tensor of integers or a small mask, all values between the first and the last element in
            memory.
    """

    dtype: str
    device: str
    shape: list[int]
    stride: list[int]
    storage: int
    offset: int = 0
    requires_grad: bool = False
    conj: bool = False
    neg: bool = False
    parameter: str = ""
    low: int | float | None = None
    high: int | float | None = None
    mean: float | None = None
    deviation: float = 0.0
    ones: int | None = None
    values: list[int] | None = None


class CallRecord(msgspec.Struct, frozen=True):
    """One call of the tape graph.

    Attributes:
        call: the index of the call's node of the tape.
        target: ``function``, ``stand-in``, or a name of the vocabulary, such as ``accumulate_grad``.
        name: the name of the engine's function, or of the call that a stand-in replaces.
        function: the index of the function.
        results: the results of a stand-in.
    """

    call: int
    target: str
    args: list[Value]
    name: str = ""
    function: int = -1
    results: list[TensorRecord | None] = []


class NodeRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """One node of the tape, see :class:`ir.TapeCall`."""

    name: str
    sequence: int | None = None
    edges: list[int] | None = None
    parameter: str | None = None
    module: str | None = None
    source: str | None = None


class About(msgspec.Struct, kw_only=True):
    """The origin of a reproduction.

    Attributes:
        backend: the name of the backend.
        dynamic, mode: settings, see :func:`compiled_autograd.enable`.
        where: the backward, or the region of one, in words.
        difference: the wrong result that was found; empty if none was.
        state: the state of the process by name, as text (:func:`guards.ambient.ambient`).
        torch, version: the versions of PyTorch and of this package.
    """

    backend: str = "inductor"
    dynamic: bool | None = None
    mode: str = "default"
    where: str = ""
    difference: str = ""
    state: dict[str, str] = {}
    torch: str = ""
    version: str = ""


class Record(msgspec.Struct, kw_only=True):
    """A stored reproduction.

    Attributes:
        order: see :class:`ir.TapeGraph`.
        calls: the calls of the tape graph, in order; ``returned`` has the results.
        tensors: the input tensors; ``sizes`` and ``scalars`` are the other inputs.
        real: True if the file has the values of the tensors; else values are made up.
    """

    format: int = FORMAT
    about: About
    accumulates: bool
    nodes: list[NodeRecord]
    order: list[int]
    tensors: list[TensorRecord]
    sizes: list[int]
    scalars: list[Value]
    functions: list[Function]
    calls: list[CallRecord]
    returned: list[Value]
    real: bool = False


# ---- values ----------------------------------------------------------------------------------------------------------


def encoded(value: Any, known: Callable[[Any], Value]) -> Value:
    """Encode a value of a graph.

    Args:
        known: returns the encoded value of a node of the graph.

    Raises:
        TypeError: values of this type cannot be stored.
    """
    if isinstance(value, torch.fx.Node):
        return known(value)
    if isinstance(value, (list, tuple)):
        return Listed([encoded(each, known) for each in value])
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else Constant("float", repr(value))
    if isinstance(value, complex):
        return Constant("complex", repr(value))
    for kind in ("dtype", "device", "layout", "memory_format"):
        if isinstance(value, getattr(torch, kind)):
            return Constant(kind, str(value))
    raise TypeError(f"a {type(value).__name__} cannot be stored")


def decoded(value: Value, known: Callable[[Any], Any]) -> Any:
    """Decode a value of :func:`encoded`.

    Args:
        known: returns the value of a :class:`Ref`, :class:`Given`, :class:`Argument`, :class:`Result` or
            :class:`Scalar`.

    Raises:
        ReproductionError: the value does not exist.
    """
    if isinstance(value, Listed):
        return [decoded(each, known) for each in value.items]
    if isinstance(value, Constant):
        return constant(value)
    return known(value) if isinstance(value, msgspec.Struct) else value


def constant(value: Constant) -> Any:
    """Decode a constant.

    Raises:
        ReproductionError: the constant is unknown to this PyTorch.
    """
    try:
        if value.kind in ("float", "complex"):
            return {"float": float, "complex": complex}[value.kind](value.text)
        if value.kind == "device":
            return device_of(value.text)
        return _TABLES[value.kind][value.text]
    except (KeyError, ValueError):
        raise ReproductionError(f"the {value.kind[:40]} {value.text[:40]!r} in it is unknown here") from None


def dtype_of(text: str) -> torch.dtype:
    """Return the dtype with this name.

    Raises:
        ReproductionError: there is no such dtype.
    """
    return constant(Constant("dtype", text))


def device_of(text: str) -> torch.device:
    """Return the device with this name.

    Raises:
        ReproductionError: the name is no device.
    """
    if _DEVICE.fullmatch(text):
        try:
            return torch.device(text)
        except RuntimeError:
            pass
    raise ReproductionError(f"{text[:40]!r} is no device")
