"""Why a backward was no hit, in the user's terms: which node, whose parameter, what it was and what it is."""

from __future__ import annotations

import re
from collections.abc import Sequence

from shadow_cache import Key, Miss

from . import ir
from .shapes import Spec

_HOOKS = ("tensor_hook", "cpp_hook", "pre_hook", "post_hook", "post_accumulate_hook", "unpack_hook", "Packed")
_ACCUMULATES = re.compile(r"accumulate_grad\(\S+, (?P<old>\S+), ")
_GRADIENTS = re.compile(r"= ops\.\w+\(\[(?P<grads>[^\]]*)\]")
_INPUT = re.compile(r"(?P<name>\w+): (?P<dtype>\w+) (?P<device>[\w:]+)(?P<rest>.*)")
_CALL = re.compile(r"\S+ = (?P<function>\S+?)\((?P<arguments>.*)\)")
_NAMES = re.compile(r"\b(input|size|scalar|object|packed)_\d+|%\d+\.\d+")
_SCALAR_TYPES = (
    *("uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64"),
    *("complex32", "complex64", "complex128", "bool", "qint8", "quint8", "qint32", "bfloat16"),
)
"""By number (``c10/core/ScalarType.h``): ``validate_outputs`` is given the dtype that it casts to as a number."""
_NEAR = 4
"""How many edges away a parameter may be to name a node after it."""


def place(tape: ir.TapeGraph, index: int) -> str:
    """A node of the tape as people know it: its name, the parameter that it belongs to, the line that made it."""
    call = tape.calls[index]
    parameter = _parameter_near(tape, index)
    text = call.name if parameter is None else f"{call.name} of {parameter}"
    return f"{text}, {call.source}" if call.source is not None else text


def _parameter_near(tape: ir.TapeGraph, index: int) -> str | None:
    reached = [index]
    for _ in range(_NEAR):
        for each in reached:
            if tape.calls[each].parameter is not None:
                return tape.calls[each].parameter
        reached = [after for each in reached for after in tape.calls[each].edges or ()]
    return None


def structure_miss(tape: ir.TapeGraph, keys: Sequence[Key], depth: int, nearest: Key | None) -> Miss:
    """Why a structure is new.

    Args:
        tape: the capture.
        keys: its structure.
        depth: how many of the keys are those of a structure known before.
        nearest: of that structure, the key where the two part; None where nothing is known beyond.
    """
    if depth == 0 and nearest is None:
        return Miss("first_seen")
    key = keys[depth]
    if depth == len(tape.calls):  # the end
        return Miss("node_attribute", "the end of the tape", old=str(nearest), new=str(key))
    where = place(tape, depth)
    if nearest is None:
        return Miss("new_node", where, old="the end of the tape", new=key[0])
    if nearest[0] != key[0]:
        return Miss("new_node", where, old=nearest[0], new=key[0])
    old, new = next(((a, b) for a, b in zip(nearest, key, strict=False) if a != b), ("", ""))
    return (
        _hooks_changed(where, nearest, key)
        or _grad_state(tape, depth, old, new, key)
        or _of_input(where, old, new)
        or _undefined(where, old, new)
        or _of_call(where, old, new)
        or Miss("node_attribute", where, old=old, new=new)
    )


def _of_call(where: str, old: str, new: str) -> Miss | None:
    """The first argument that differs, of two calls of one function."""
    before, after = _CALL.fullmatch(old), _CALL.fullmatch(new)
    if before is None or after is None or before["function"] != after["function"]:
        return None
    arguments = [_arguments(match["arguments"]) for match in (before, after)]
    for index, (one, other) in enumerate(zip(*arguments, strict=False)):
        if _NAMES.sub("", one) == _NAMES.sub("", other):
            continue
        if "validate_outputs" in before["function"]:
            return _of_output(where, one, other)
        if set(_words(one) + _words(other)) <= {"True", "False"}:
            hint = "requires_grad of what goes in decides which gradients are computed"
            texts = [", ".join("yes" if word == "True" else "no" for word in _words(text)) for text in (one, other)]
            return Miss("node_attribute", f"{where}: which inputs get a gradient", texts[0], texts[1], hint)
        hint = "a number that the forward passes as a number is part of the structure; as a tensor it would not be"
        return Miss("node_attribute", f"{where}: argument {index}", one, other, hint if _is_number(other) else "")
    return None


def _of_output(where: str, old: str, new: str) -> Miss:
    """What the gradients that a node gives are made to be, for the nodes after it."""
    for kind in ("dtype", "device"):
        one, other = (_dtypes(text) if kind == "dtype" else _devices(text) for text in (old, new))
        if one != other:
            pairs = [(a, b) for a, b in zip(one, other, strict=False) if a != b] or [(str(one), str(other))]
            return Miss(kind, f"the gradients of {where}", *pairs[0])
    return Miss("node_attribute", f"the gradients of {where}", old, new)


def _dtypes(text: str) -> list[str]:
    found = re.findall(r"(\d+)\](?=[,\]]|$)", text)
    return [_SCALAR_TYPES[int(each)] if int(each) < len(_SCALAR_TYPES) else each for each in found]


def _devices(text: str) -> list[str]:
    return re.findall(r"\b(?:cpu|cuda|mps|xpu|meta)(?::\d+)?", text)


def _arguments(text: str) -> list[str]:
    """Split at the commas that no bracket encloses."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "[({") - (letter in "])}")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def _words(text: str) -> list[str]:
    return re.findall(r"[^\s,\[\]]+", text)


def _is_number(text: str) -> bool:
    return re.fullmatch(r"[-+\d.e]+", text) is not None


def _hooks_changed(where: str, nearest: Key, key: Key) -> Miss | None:
    old, new = _hooks(nearest), _hooks(key)
    if old == new:
        return None
    return Miss("hooks_changed", where, old=", ".join(old) or "no hook", new=", ".join(new) or "no hook")


def _hooks(key: Key) -> list[str]:
    return [hook for line in key[1:] for hook in _HOOKS if f"= {hook}(" in line]


def _grad_state(tape: ir.TapeGraph, depth: int, old: str, new: str, key: Key) -> Miss | None:
    before, after = _ACCUMULATES.search(old), _ACCUMULATES.search(new)
    if before is None or after is None or (before["old"] == "None") == (after["old"] == "None"):
        return None
    name = tape.calls[depth].parameter or "a leaf"
    kinds = {match["name"]: match["dtype"] for match in map(_INPUT.match, key[1:]) if match}
    states = ["None" if each["old"] == "None" else kinds.get(each["old"], "a Tensor") for each in (before, after)]
    hint = "zero_grad(set_to_none=True) before each backward, or gradients kept at each, is one structure; both are two"
    return Miss("grad_state", f".grad of {name}", old=states[0], new=states[1], hint=hint)


def _of_input(where: str, old: str, new: str) -> Miss | None:
    before, after = _INPUT.fullmatch(old), _INPUT.fullmatch(new)
    if before is None or after is None:
        return None
    for kind in ("dtype", "device"):
        if before[kind] != after[kind]:
            return Miss(kind, where, old=before[kind], new=after[kind])
    return Miss("node_attribute", where, old=before["rest"].lstrip(", "), new=after["rest"].lstrip(", "))


def _undefined(where: str, old: str, new: str) -> Miss | None:
    before, after = _GRADIENTS.search(old), _GRADIENTS.search(new)
    if before is None or after is None:
        return None
    patterns = [[each.strip() == "None" for each in match["grads"].split(",")] for match in (before, after)]
    if patterns[0] == patterns[1]:
        return None
    texts = [" ".join("undefined" if undefined else "defined" for undefined in pattern) for pattern in patterns]
    return Miss("undefined_gradients", where, old=texts[0], new=texts[1])


def shape_miss(
    tape: ir.TapeGraph, before: tuple[Sequence[Spec], Spec], after: tuple[Sequence[Spec], Spec], dynamic: bool
) -> Miss | None:
    """Which dimension of which saved tensor was found to change; None where none was.

    Args:
        tape: the tape graph.
        before: what the nearest variant was made for: a spec for each lifted tensor, and one for all sizes.
        after: what was handed over now.
        dynamic: whether what changed is a symbol from now on.
    """
    hint = "any size from now on" if dynamic else "one more variant; dynamic=None makes one for all sizes"
    for kind, olds, news in (("input", before[0], after[0]), ("size", [before[1]], [after[1]])):
        for index, (old, new) in enumerate(zip(olds, news, strict=True)):
            for dim, (one, other) in enumerate(zip(old, new, strict=True)):
                if type(one) is int and one != other:
                    number = index if kind == "input" else dim
                    where = _used_by(tape, f"{kind}_{number}")
                    which = f"{where}, dimension {dim}" if kind == "input" else f"{where}, a size"
                    return Miss("shape", which, old=str(one), new=str(other), hint=hint)
    return None


def layout_miss(
    tape: ir.TapeGraph, before: Sequence[tuple[int, ...] | None], after: Sequence[tuple[int, ...] | None]
) -> Miss | None:
    """Which saved tensor has other strides; None where none has."""
    for index, (old, new) in enumerate(zip(before, after, strict=True)):
        if old != new:
            hint = "contiguous() where it is made would keep one layout"
            return Miss("layout", f"{_used_by(tape, f'input_{index}')}, strides", str(old), str(new), hint)
    return None


def _used_by(tape: ir.TapeGraph, name: str) -> str:
    call = uses(tape).get(name)
    return name if call is None else f"{place(tape, call)}: {name}"


def uses(tape: ir.TapeGraph) -> dict[str, int]:
    """For each placeholder the first node of the tape that uses it."""
    placeholders = tape.graph.find_nodes(op="placeholder")
    return {str(node.target): user.meta["call"] for node in placeholders for user in list(node.users)[:1]}
