"""Compare a call of a node with the same call in a known structure, and explain the difference in the user's terms."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise, zip_longest

from .. import ir
from ..ir.structure_keys import Argument, CallPart, Constant, Lifted, Listed, Value, leaves, values_of
from ..shadow_cache import Miss
from .node_names import argument_name, call_name, leaf_name, uses, value_name
from .same_model import WAY_HINT

SCALAR_TYPES = (
    *("uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64"),
    *("complex32", "complex64", "complex128", "bool", "qint8", "quint8", "qint32", "bfloat16"),
)
"""Dtypes by number (``c10/core/ScalarType.h``): ``validate_outputs`` gets the dtype of its casts as a number."""
_WITH_ARGUMENTS = ("ops.", "call_backward", "AOTBackward", "traced_backward", "copy_slices", "accumulate_grad", "zeros")
NUMBER_HINT = "a number saved by the forward is part of the structure; a tensor's value is not: use a tensor instead"
_CTC_HINT = "ctc_loss saves lengths as numbers, and each set is compiled; see docs/troubleshooting.md for a workaround"
_UNDEFINED_HINT = "each set of outputs that a loss uses is compiled once"
_NOTHING, _ANY, _TRUE = Constant("", "nothing"), Constant("", ""), Constant("bool", "True")


def call_miss(tape: ir.TapeGraph, depth: int, old: CallPart, new: CallPart) -> Miss | None:
    """Return a miss for different undefined gradients or arguments; None if only the wiring of the calls differs."""
    return _undefined(tape, depth, old, new) or _of_call(tape, depth, old, new)


def _undefined(tape: ir.TapeGraph, depth: int, old: CallPart, new: CallPart) -> Miss | None:
    first = [part.arguments[0] for part in (old, new) if part.function.startswith("ops.") and part.arguments]
    if len(first) < 2 or not all(isinstance(grads, Listed) for grads in first):
        return None
    patterns = [[grad is None for grad in _items(grads)] for grads in first]
    if patterns[0] == patterns[1]:
        return None
    if len(patterns[0]) != len(patterns[1]):
        verb = "gives" if "validate_outputs" in new.function else "takes"
        what = f"{call_name(tape, depth)}: number of gradients that it {verb}"
        if depth == 0:
            what = "number of tensors that the backward starts from"
        return Miss("node_attribute", what, str(len(patterns[0])), str(len(patterns[1])))
    texts = [" ".join("undefined" if undefined else "defined" for undefined in pattern) for pattern in patterns]
    return Miss("undefined_gradients", call_name(tape, depth), old=texts[0], new=texts[1], hint=_UNDEFINED_HINT)


def _of_call(tape: ir.TapeGraph, depth: int, old: CallPart, new: CallPart) -> Miss | None:
    """Return a miss for the first argument that differs between two calls of one function."""
    function, where = new.function, call_name(tape, depth)
    if old.function != function or not function.startswith(_WITH_ARGUMENTS):
        return None
    for index, (one, other) in enumerate(zip_longest(old.arguments, new.arguments, fillvalue=_NOTHING)):
        if _unnamed(one) == _unnamed(other):
            continue
        if "validate_outputs" in function:
            return _of_output(tape, depth, one, other)
        if function == "call_backward" and index != 2:
            return _of_function(where, index, one, other)
        if isinstance(one, Listed) and all(_is_bool(leaf) for leaf in leaves((one, other))):
            hint = "requires_grad of the inputs decides which gradients are computed"
            return Miss("node_attribute", f"{where}: which inputs get a gradient", _yes(one), _yes(other), hint)
        name = argument_name(tape, depth, function, index)
        if name is None and _is_count(one) and _is_count(other):
            continue  # a dtype or a count: a later argument explains the difference better, or else dtype_miss
        what = f"{where}: {name}" if name else f"{where}: a saved value"
        return _of_options(what, one, other) or _of_argument(what, one, other)
    return _same_tensor(tape, depth, old, new)


def dtype_miss(tape: ir.TapeGraph, depth: int, old: CallPart, new: CallPart) -> Miss | None:
    """Return a miss for different dtypes of a built-in node's inputs, which the node has as numbers."""
    if not all(part.function.startswith("ops.") for part in (old, new)):
        return None
    for one, other in zip(old.arguments, new.arguments, strict=False):
        if one != other and _is_count(one) and _is_count(other):
            differing = ((a, b) for a, b in zip(leaves([one]), leaves([other]), strict=False) if a != b)
            for numbers in differing:
                what = f"{call_name(tape, depth)}: dtype of an input"
                return Miss("dtype", what, _dtype(numbers[0]), _dtype(numbers[1]), one_each("dtype"))
    return None


def _of_argument(what: str, old: Argument, new: Argument) -> Miss:
    values = values_of([old, new])
    if values:
        is_size = any(isinstance(value, Lifted) and value.kind == "size" for value in values)
        if all(_items(each) and isinstance(_items(each)[0], Listed) for each in (old, new)):  # sizes of several tensors
            counts = [len(_items(each)) for each in (old, new)]
            if counts[0] != counts[1]:
                return Miss("node_attribute", what, f"{counts[0]} tensors", f"{counts[1]} tensors", WAY_HINT)
        texts = [_described(each, "dimension" if is_size and isinstance(old, Listed) else "") for each in (old, new)]
        return Miss("shape" if is_size else "node_attribute", what, texts[0], texts[1])
    hint = (
        _CTC_HINT
        if " CtcLossBackward" in what and what.endswith("_lengths")
        else NUMBER_HINT
        if any(map(_is_number, (old, new)))
        else ""
    )
    return Miss("node_attribute", what, str(old), str(new), hint)


def _described(argument: Argument, noun: str = "") -> str:
    """Describe an argument without the names of values in a key."""
    values = values_of([argument])
    if not values:
        return f"0 {noun}s" if noun and argument == Listed(()) else str(argument)
    kind = values[0].kind if isinstance(values[0], Lifted) else ""
    noun = noun or {"size": "size", "scalar": "number"}.get(kind, "tensor")
    if noun == "tensor" and not isinstance(argument, Listed):
        return "a tensor"
    return f"{len(values)} {noun}{'' if len(values) == 1 else 's'}"


def _of_function(where: str, index: int, old: Argument, new: Argument) -> Miss:
    """Return a miss for a differing argument of :func:`functions.call_backward`."""
    if index == 1:
        counts = [str(len(list(leaves([each])))) for each in (old, new)]
        return Miss("node_attribute", f"{where}: number of saved tensors", counts[0], counts[1])
    if index == 3:
        words = {"True": "defined", "False": "undefined"}
        texts = [" ".join(words.get(text, text) for text in map(str, _items(each))) for each in (old, new)]
    else:
        texts = ["undefined" if each is None else "defined" for each in (old, new)]
    return Miss("undefined_gradients", where, texts[0], texts[1], _UNDEFINED_HINT)


def _of_output(tape: ir.TapeGraph, depth: int, old: Argument, new: Argument) -> Miss:
    """Return a miss for different metadata of the gradients that a node returns (``validate_outputs``)."""
    what = "the loss" if depth == 0 else f"the gradient from {call_name(tape, depth)}"
    found = _of_options(what, old, new)
    if found is not None:
        return found
    counts = [[len(values_of([part])) for part in _items(each)] for each in (old, new)]
    for one, other in zip_longest(*counts, fillvalue=0):
        if one != other:
            return Miss("shape", what, f"{one} dimensions", f"{other} dimensions")
    wanted = [[_items(part)[-1] if _items(part) else None for part in _items(each)] for each in (old, new)]
    for one, other in zip(*wanted, strict=False):
        if one != other:
            texts = ["any dtype" if each is None else _dtype(each) for each in (one, other)]
            return Miss("dtype", f"{what}: the required dtype", texts[0], texts[1], one_each("dtype"))
    kinds = ["subclass" if _TRUE in leaves([each]) else "plain" for each in (old, new)]
    return Miss("node_attribute", f"{what}: the kind of tensor", kinds[0], kinds[1])


def _of_options(what: str, old: Argument, new: Argument) -> Miss | None:
    """Return a miss for different dtypes or devices in an argument."""
    for (old_device, old_dtype), (device, dtype) in zip(_options(old), _options(new), strict=False):
        if old_dtype != dtype:
            return Miss("dtype", what, _dtype(old_dtype), _dtype(dtype), one_each("dtype"))
        if old_device != device:
            return Miss("device", what, old_device.text, device.text, one_each("device"))
    return None


def _options(argument: Argument) -> Iterator[tuple[Constant, int]]:
    """Yield the device and the dtype of each list in which a dtype follows a device."""
    items = _items(argument)
    for one, other in pairwise(items):
        if isinstance(one, Constant) and one.kind == "device" and type(other) is int:
            yield one, other
    for each in items:
        yield from _options(each)


def _dtype(number: Argument) -> str:
    return SCALAR_TYPES[number] if isinstance(number, int) and number < len(SCALAR_TYPES) else f"dtype {number}"


def _same_tensor(tape: ir.TapeGraph, depth: int, old: CallPart, new: CallPart) -> Miss | None:
    """Return a miss for calls of which one takes a tensor that an earlier argument or node has, and the other its
    own."""
    known = uses(tape)
    for index, (one, other) in enumerate(zip(old.arguments, new.arguments, strict=False)):
        for before, after in zip(values_of([one]), values_of([other]), strict=False):
            if before == after or isinstance(before, Value) or isinstance(after, Value):
                continue
            texts = []
            for lifted, arguments in ((before, old.arguments), (after, new.arguments)):
                if lifted in values_of(arguments[:index]):
                    texts.append("a tensor that the same node already has")
                elif known.get(lifted, depth) < depth:
                    texts.append(value_name(tape, lifted))
                else:
                    texts.append("a tensor of its own")
            name = argument_name(tape, depth, new.function, index)
            what = name or ("a saved value" if new.function != "accumulate_grad" else leaf_name(tape, depth))
            hint = "two nodes with the same tensor, and two nodes with two tensors, are different structures"
            return Miss("node_attribute", f"{call_name(tape, depth)}: {what}", texts[0], texts[1], hint)
    return None


# ---- kinds of arguments ----------------------------------------------------------------------------------------------


def _items(argument: Argument) -> tuple[Argument, ...]:
    return argument.items if isinstance(argument, Listed) else ()


def _unnamed(argument: Argument) -> Argument:
    """Replace all values in an argument by one placeholder, to compare arguments without their values' names."""
    if isinstance(argument, Listed):
        return Listed(tuple(map(_unnamed, argument.items)))
    return _ANY if isinstance(argument, (Lifted, Value)) else argument


def _is_bool(argument: Argument) -> bool:
    return isinstance(argument, Constant) and argument.kind == "bool"


def _yes(argument: Argument) -> str:
    return ", ".join("yes" if leaf == _TRUE else "no" for leaf in leaves([argument]))


def _is_count(argument: Argument) -> bool:
    """Return whether an argument is a number that may be a dtype or a count, or a list of such numbers."""
    numbers = argument.items if isinstance(argument, Listed) else (argument,)
    return all(isinstance(number, int) and number >= 0 for number in numbers)


def _is_number(argument: Argument) -> bool:
    return isinstance(argument, int) or (isinstance(argument, Constant) and argument.kind == "float")


def one_each(kind: str) -> str:
    return f"each {kind} that occurs is compiled once"
