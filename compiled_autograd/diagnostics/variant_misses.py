"""Explain why no variant of a structure serves, in the user's terms: sizes, strides, state, settings, guards."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch

from .. import ir
from ..guards.ambient import CHECKPOINTED, TRACED
from ..guards.shapes import SPECIAL, Guard, Origin, Spec, size_in
from ..shadow_cache import Miss, VariantKey
from ..torch_api import attributes
from .node_names import uses, value_name

_PARTS = (
    *((1, "shape"), (3, "dtype"), (4, "device"), (2, "strides"), (0, "kind of tensor"), (5, "layout")),
    *((6, "conjugation"), (7, "negation"), (8, "zeros without memory")),
)
"""The parts of a tensor's kind by their index in ``guards.value_kinds.kind_of_value``. Strides come after the shape, as
they usually change with it."""
STATE_HINTS = {
    "ambient_state": "set it once, before training; each value that occurs is compiled once",
    "backend_or_settings": "code for the earlier settings stays cached",
    "environment": "it is compiled again for this environment",
}
"""Hints for misses due to another state, other settings or another environment."""
_HINTS = {
    CHECKPOINTED: "layers were checkpointed in other groups; each grouping that occurs is compiled once",
    TRACED: "each set of plain values that a traceable backward reads is compiled once: make a value that changes a "
    "tensor",
}


def shape_miss(
    tape: ir.TapeGraph, before: tuple[Sequence[Spec], Spec], after: tuple[Sequence[Spec], Spec], dynamic: bool
) -> Miss | None:
    """Return a miss for the first dimension of a saved tensor that changed; None if no dimension changed.

    Args:
        tape: the tape graph.
        before: the sizes of the nearest variant: a spec for each lifted tensor, and one for all sizes.
        after: the current sizes.
        dynamic: whether the changed sizes are symbols from now on.
    """
    pairs: list[tuple[ir.Lifted, int | None, Any, Any]] = []
    for index, (old, new) in enumerate(zip(before[0], after[0], strict=True)):
        lifted = ir.Lifted("input", index)
        both = zip(map(size_in, old), new, strict=True)
        pairs += [(lifted, dim, one, other) for dim, (one, other) in enumerate(both)]
    for index, (one, other) in enumerate(zip(before[1], after[1], strict=True)):
        pairs.append((ir.Lifted("size", index), None, one, other))
    changes = [pair for pair in pairs if type(pair[2]) is int and type(pair[3]) is int and pair[2] != pair[3]]
    if not changes:
        return None
    lifted, dim, one, other = changes[0]
    hint = _now_dynamic(changes) if dynamic else "one more variant; with dynamic=None, one variant serves many sizes"
    return _at_value("shape", tape, lifted, "" if dim is None else f", dimension {dim}", one, other, hint)


def _at_value(kind: str, tape: ir.TapeGraph, lifted: ir.Lifted, part: str, old: Any, new: Any, hint: str = "") -> Miss:
    """Return a miss for a lifted value, or a part of one, that differs."""
    where = f"{value_name(tape, lifted)}{part}"
    return Miss(kind, where, str(old), str(new), hint, node=uses(tape).get(lifted) or None)


def _now_dynamic(changes: Sequence[tuple[ir.Lifted, int | None, int, int]]) -> str:
    """Return a hint with the sizes that are symbols from now on. Sizes 0 and 1 are still compiled separately."""
    histories = list(dict.fromkeys((one, other) for _, _, one, other in changes))
    tensors = len({lifted for lifted, dim, _, _ in changes if dim is not None})
    said = ", ".join(f"{one} -> {other}" for one, other in histories[:4])
    more = f" and {len(histories) - 4} more" if len(histories) > 4 else ""
    of = f", in {tensors} tensor{'' if tensors == 1 else 's'}" if tensors else ""
    special = [other for _, other in histories if other in SPECIAL]
    then = "sizes 0 and 1 are each compiled separately" if special else "other such sizes are hits"
    return f"now dynamic: {said}{more}{of}; {then}"


def value_miss(
    kind: str, tape: ir.TapeGraph, of: str, before: Sequence[Any], after: Sequence[Any], part: str = "", hint: str = ""
) -> Miss | None:
    """Return a miss for the first lifted value of the kind ``of``, or its ``part``, that differs; None if none does."""
    for index, (old, new) in enumerate(zip(before, after, strict=True)):
        if old != new:
            return _at_value(kind, tape, ir.Lifted(of, index), part, old, new, hint)
    return None


class TensorKind(msgspec.Struct, frozen=True):
    """The number of dimensions and the kind of a tensor, for people: ``2 dimensions``, ``1 dimension, conjugated``."""

    dims: int
    properties: tuple[str, ...] = ()

    def __str__(self) -> str:
        return ", ".join((f"{self.dims} dimension{'' if self.dims == 1 else 's'}", *self.properties))


def tensor_miss(tape: ir.TapeGraph, before: Sequence[TensorKind], after: Sequence[TensorKind]) -> Miss | None:
    """Return a miss for the first saved tensor with another number of dimensions or of another kind; None if none."""
    for index, (old, new) in enumerate(zip(before, after, strict=True)):
        if old != new:
            kind = "shape" if old.properties == new.properties else "layout"
            return _at_value(kind, tape, ir.Lifted("input", index), "", old, new)
    return None


def tensor_kind(tensor: torch.Tensor) -> TensorKind:
    """Return the kind of a tensor. Its properties: ``conjugated``, ``negated``, ``zeros without memory``, the layout if
    not strided, the class if not ``torch.Tensor``."""
    with torch._C.DisableTorchFunctionSubclass():
        bits = (attributes.is_conj(tensor), attributes.is_neg(tensor), attributes.is_zerotensor(tensor))
        properties = [*itertools.compress(("conjugated", "negated", "zeros without memory"), bits)]
        if attributes.layout(tensor) is not torch.strided:
            properties.append(_text(attributes.layout(tensor)))
        if type(tensor) is not torch.Tensor:
            properties.append(type(tensor).__qualname__)
        return TensorKind(attributes.dim(tensor), tuple(properties))


def state_miss(key: VariantKey, known: Sequence[VariantKey]) -> Miss:
    """Return a miss for the first setting or state that differs from the nearest of ``known``; all of them differ."""
    nearest = max(known, key=lambda other: (other.settings == key.settings, other.ambient == key.ambient))
    kind, before, after = "ambient_state", nearest.ambient, key.ambient
    if nearest.settings != key.settings:
        kind, before, after = "backend_or_settings", nearest.settings, key.settings
    olds, news = dict(before), dict(after)
    name, old, new = next(
        (each, olds.get(each), news.get(each)) for each in olds | news if olds.get(each) != news.get(each)
    )
    return Miss(kind, name, text_of_part(name, old), text_of_part(name, new), state_hint(kind, name))


def state_hint(kind: str, name: str) -> str:
    """Return the hint for a differing part of the state."""
    return _HINTS.get(name, STATE_HINTS[kind])


def guard_miss(guard: Guard, arguments: Sequence[Any], names: Sequence[str]) -> Miss:
    """Return a miss for a violated guard of a region.

    Args:
        guard: the region's guard; one of its conditions is violated.
        arguments: the current arguments of the region.
        names: the arguments' names for people.
    """
    broken = guard.broken(arguments)
    assert broken is not None
    hint = "sizes that need other code are compiled separately; each set of such sizes once"
    origin, found = broken.origin, [each for each in guard.origins if each[0] in broken.symbols]
    if origin is not None and not found:
        was, now = broken.expression, str(origin.among(arguments))
        return Miss("guard", _argument(origin, names), was, now, hint)
    short = {symbol: "n" if len(found) == 1 else f"n{number}" for number, (symbol, _) in enumerate(found)}
    number = "the stride" if origin is not None and origin.what == "stride" else "the size"
    new = [f"{short[symbol]} = {each.among(arguments)}" for symbol, each in found]
    if origin is not None:
        new.append(f"{number} = {origin.among(arguments)}")
    where = "; ".join(dict.fromkeys(_argument(each, names) for _, each in found))
    return Miss("guard", where, old=broken.text(short, number), new=", ".join(new), hint=hint)


def _argument(origin: Origin, names: Sequence[str]) -> str:
    name = names[origin.argument]
    if not origin.what:
        return name
    return f"{name}, {'dimension' if origin.what == 'size' else 'stride'} {origin.dim}"


def handed_on_miss(name: str, old: Any, new: Any) -> Miss:
    """Return a miss for a result of an uncompiled step that differs from the kind for which the next region was
    compiled.

    Args:
        name: the result's name for people.
        old: the compiled kind (``guards.value_kinds.kind_of_value``).
        new: the current kind.
    """
    hint = "return the same kind of value from the function or hook each time: each kind is compiled once"
    if not isinstance(old, tuple) or not isinstance(new, tuple) or not old or not new:
        texts = [
            "undefined" if each is None else "a tensor" if isinstance(each, tuple) else str(each) for each in (old, new)
        ]
        kind = "undefined_gradients" if "undefined" in texts else "shape"
        return Miss(kind, name, texts[0], texts[1], hint)
    kinds = {"shape": "shape", "dtype": "dtype", "device": "device"}
    part, what = next((part, what) for part, what in _PARTS if old[part] != new[part])
    return Miss(kinds.get(what, "layout"), f"{name}, {what}", _text(old[part]), _text(new[part]), hint)


def changed_meanwhile_miss(old: Sequence[Any] | None, new: Sequence[Any] | None) -> Miss:
    """Return a miss for dependencies of marked functions and hooks that an earlier call of the same backward changed.

    Args:
        old: the dependencies of each at compilation; None if they were the same as at the start of the backward.
        new: the current dependencies of each; None likewise.
    """
    before, after = [None if some is None else text_of_part(TRACED, tuple(some)) for some in (old, new)]
    before, after = before or "as at the start of the backward", after or "as at the start of the backward"
    return Miss("ambient_state", f"{TRACED}, changed in the same backward", before, after, _HINTS[TRACED])


def text_of_part(name: str, value: Any) -> str:
    """Format a setting or a part of the ambient state for people."""
    if name == "autocast":
        return "off" if value is None else ", ".join(f"{device} {_text(dtype)}" for device, dtype in value)
    if name == "cudnn":
        return ", ".join(
            f"{part} {'on' if on else 'off'}"
            for part, on in zip(("cudnn", "benchmark", "deterministic"), value, strict=True)
        )
    if name == TRACED:
        return "nothing traced" if value is None else "; ".join(_of_traced(*each) for each in value if each is not None)
    return _text(value)


def _of_traced(code: Any, asked: Any, attributes: Sequence[tuple[str, Any]]) -> str:
    """Format the dependencies of a traceable function that are most likely to change: plain values of its ``ctx``, its
    closure and its module."""
    if not isinstance(code, tuple):
        return f"{code}: no plain attributes"
    own, _, inside, named, _ = code
    around = zip(own.co_freevars, inside[len(inside) - len(own.co_freevars) :], strict=True)
    parts = [_of_plain(name, value) for name, value in attributes]
    parts += [_of_plain(name, value) for name, value in (*around, *named) if _is_scalar(value)]
    return f"{getattr(own, 'co_qualname', own.co_name)}: {', '.join(parts) or 'no plain attributes'}"


def _of_plain(name: str, value: tuple[Any, ...]) -> str:
    if value[0] == "other":
        return name
    return f"{name}={float.fromhex(value[1]) if value[0] == 'float' else value[1]}"


def _is_scalar(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and value[0] in ("bool", "int", "float", "str", "NoneType")


def _text(value: Any) -> str:
    if isinstance(value, (torch.dtype, torch.layout)) or (isinstance(value, str) and value.startswith("torch.")):
        return str(value).removeprefix("torch.")
    if isinstance(value, type) or (isinstance(value, Callable) and hasattr(value, "__qualname__")):  # type: ignore[arg-type]
        return value.__qualname__.rpartition("<locals>.")[2]
    if isinstance(value, tuple):
        return f"({', '.join(_text(each) for each in value)}{',' if len(value) == 1 else ''})"
    return str(value)
