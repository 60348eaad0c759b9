"""The records of a stored reproduction. They are data alone: names of operators, numbers, and where each value goes."""

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
    """What a call of the tape graph gave: its place among all calls."""

    number: int


class Given(msgspec.Struct, frozen=True, tag="given", tag_field="of"):
    """A tensor, size or scalar that is given: ``kind`` is one of :data:`ir.PLACEHOLDERS`."""

    kind: str
    index: int


class Argument(msgspec.Struct, frozen=True, tag="argument", tag_field="of"):
    """In a function, one of what it is given, lists opened."""

    index: int


class Result(msgspec.Struct, frozen=True, tag="operator", tag_field="of"):
    """In a function, what one of its operators gave."""

    number: int


class Constant(msgspec.Struct, frozen=True, tag="constant", tag_field="of"):
    """What JSON has no word for: a dtype, a device, a layout, a memory format, or a number such as ``inf``."""

    kind: str
    text: str


class Scalar(msgspec.Struct, frozen=True, tag="scalar", tag_field="of"):
    """A tensor of one number."""

    value: bool | int | float | Constant
    dtype: str
    shape: list[int]


class Listed(msgspec.Struct, frozen=True, tag="list", tag_field="of"):
    """A list."""

    items: list[Value]


Value = Ref | Given | Argument | Result | Constant | Scalar | Listed | bool | int | float | str | None


class Operator(msgspec.Struct, frozen=True):
    """One call of an ATen operator, ``aten.mm.default``; or ``getitem``, which takes one of what another gave."""

    name: str
    args: list[Value] = []
    kwargs: dict[str, Value] = {}


class Function(msgspec.Struct, frozen=True):
    """What one of the engine's functions does, as operators; ``results`` is a list, or one value."""

    operators: list[Operator]
    results: Value


class TensorRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """A tensor, without what is in it.

    Attributes:
        dtype, device: as torch writes them.
        shape, stride, offset: in elements.
        storage: tensors with the same number lie in the same memory.
        parameter: ``"itself"`` or ``"view"``: it is a parameter, or a view of one.
        low, high: the smallest and the largest value, where they are known; those that are made up lie between.
        mean, deviation: of values of floating point, where they are known and finite.
        ones: of a mask, how many between its first and its last element are set.
        values: all that lies between its first and its last element, of a small tensor of whole numbers or a mask.
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
        call: the node of the tape that it belongs to.
        target: ``function``, ``stand-in``, or a name of the vocabulary, such as ``accumulate_grad``.
        name: of the engine's function; of a stand-in, what it stands for.
        function: which of the functions it is.
        results: of a stand-in, what it hands on.
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
    """Where a reproduction comes from.

    Attributes:
        backend: the name of what compiled it.
        dynamic, mode: settings, see :func:`compiled_autograd.enable`.
        where: which backward it is, or which region of one, in words.
        difference: what was found to be wrong; empty where nothing was.
        state: of the process, by name, as text (:func:`guards.ambient.ambient`).
        torch, version: of PyTorch, and of this project.
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
        calls: of the tape graph, in the order in which they run; ``returned`` is what it gives.
        tensors: those that are given; ``sizes`` and ``scalars`` likewise.
        real: what lies in their memory is in the file; else it is made up.
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
    """A value of a graph as a record.

    Args:
        known: says what a node of the graph is.

    Raises:
        TypeError: it is of a kind that is not stored.
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
    """Undo :func:`encoded`.

    Args:
        known: gives what stands for a :class:`Ref`, :class:`Given`, :class:`Argument`, :class:`Result` or
            :class:`Scalar`.

    Raises:
        ReproductionError: there is no such value.
    """
    if isinstance(value, Listed):
        return [decoded(each, known) for each in value.items]
    if isinstance(value, Constant):
        return constant(value)
    return known(value) if isinstance(value, msgspec.Struct) else value


def constant(value: Constant) -> Any:
    """What a constant stands for.

    Raises:
        ReproductionError: there is none with this text.
    """
    try:
        if value.kind in ("float", "complex"):
            return {"float": float, "complex": complex}[value.kind](value.text)
        if value.kind == "device":
            return device_of(value.text)
        return _TABLES[value.kind][value.text]
    except (KeyError, ValueError):
        raise ReproductionError(f"it has no {value.kind[:40]} {value.text[:40]!r} that is known here") from None


def dtype_of(text: str) -> torch.dtype:
    """A dtype by its name.

    Raises:
        ReproductionError: there is none of this name.
    """
    return constant(Constant("dtype", text))


def device_of(text: str) -> torch.device:
    """A device by its name.

    Raises:
        ReproductionError: it is none.
    """
    if _DEVICE.fullmatch(text):
        try:
            return torch.device(text)
        except RuntimeError:
            pass
    raise ReproductionError(f"{text[:40]!r} is no device")
