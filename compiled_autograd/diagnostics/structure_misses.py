"""Why a structure is new, in the user's terms: which node, whose parameter, what it was and what it is.

Two structures are compared where their keys part (:meth:`ir.TapeGraph.structure`). Before that place the tapes are one,
so that what a line of either key says of earlier nodes can be looked up in the tape at hand.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import zip_longest

from shadow_cache import Key, Miss

from .. import ir
from .node_names import argument_name, call_name, leaf_name, title, uses, value_name

_HOOKS = {
    "tensor_hook": "tensor hook",
    "cpp_hook": "hook of C++ (retain_grad makes one)",
    "pre_hook": "prehook of the node",
    "post_hook": "hook of the node",
    "post_accumulate_hook": "post-accumulate-grad hook",
    "unpack_hook": "saved-tensor hook",
    "Packed": "saved-tensor hook",
}
_ACCUMULATES = re.compile(r"\S+ = accumulate_grad\((?P<leaf>\S+), (?P<old>\S+), (?P<grad>\S+)\)")
_GRADIENTS = re.compile(r"= ops\.\w+\(\[(?P<grads>[^\]]*)\]")
_INPUT = re.compile(r"(?P<name>\w+): (?P<dtype>\w+) (?P<device>[\w:]+)(?P<rest>.*)")
_CALL = re.compile(r"\S+ = (?P<function>\S+?)\((?P<arguments>.*)\)")
_NAMES = re.compile(r"\b(?:input|size|scalar|object|packed)_\d+|%\d+\.\d+(?:\.\d+)?")
_VALUE = re.compile(r"%(?P<call>\d+)\.\d+(?:\.(?P<edge>\d+))?")
_OPTIONS = re.compile(r"\[(?:[^\[\]]*, )?(?P<device>(?:cpu|cuda|mps|xpu|meta)(?::\d+)?), (?P<dtype>\d+), [^\[\]]*\]")
_NUMBERS = re.compile(r"\d+|\[[\d, ]*\]")
_SCALAR_TYPES = (
    *("uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64"),
    *("complex32", "complex64", "complex128", "bool", "qint8", "quint8", "qint32", "bfloat16"),
)
"""By number (``c10/core/ScalarType.h``): ``validate_outputs`` is given the dtype that it casts to as a number."""
_SHORT = {
    "float16": "f16",
    "float32": "f32",
    "float64": "f64",
    "bfloat16": "bf16",
    "complex64": "c64",
    "complex128": "c128",
}
_END = "the tape ends"
_WITH_ARGUMENTS = ("ops.", "call_backward", "AOTBackward", "copy_slices", "accumulate_grad", "zeros")
_CALLS = {
    "accumulate_grad": "a gradient for the leaf",
    "sum_gradients": "a sum of gradients",
    "zeros": "zeros for an undefined gradient",
    "copy_slices_prologue": "a write into a view",
    "copy_slices_epilogue": "the end of a write into a view",
}
NUMBER_HINT = "a number that the forward passes as a number is part of the structure; as a tensor it would not be"
_GRAD_HINT = (
    "either zero_grad(set_to_none=True) before each backward, or gradients kept at each: that is one structure; both "
    "are two, each compiled once"
)
_WAY_HINT = "the forward took another way here; each way that it takes is compiled once"
_HOOKS_HINT = "register hooks once, before the first backward; with and without are two structures, each compiled once"
_ORDER = "order: "
_ORDER_HINT = "the forward computed its branches in another order; each order is compiled once"
_UNDEFINED_HINT = "each set of outputs that a loss uses is compiled once"


def structure_miss(
    tape: ir.TapeGraph, keys: Sequence[Key], depth: int, nearest: Key | None, shapes: Sequence[Sequence[int]] = ()
) -> Miss:
    """Why a structure is new.

    Args:
        tape: the capture.
        keys: its structure.
        depth: how many of the keys are those of a structure known before.
        nearest: of that structure, the key where the two part; None where nothing is known beyond.
        shapes: of the lifted tensors, where they are known.
    """
    if depth == 0 and nearest is None:
        return Miss("first_seen", title(tape))
    if depth == len(keys):
        return order_miss(tape)
    key = keys[depth]
    old_ends, new_ends = nearest is None or nearest[0] == "end", depth == len(tape.calls)
    if old_ends and new_ends:
        return _of_end(tape, nearest or (), key)
    if new_ends:
        assert nearest is not None
        return Miss("new_node", f"the end of {title(tape)}", old=nearest[0], new=_END, hint=_WAY_HINT)
    if depth == 0:
        calls = [_called(each) for each in (nearest or (), key)]
        if calls[0] != calls[1]:
            return Miss("node_attribute", f"what was called, for {title(tape)}", calls[0], calls[1])
    where = call_name(tape, depth)
    if old_ends or nearest is None:
        return Miss("new_node", where, old=_END, new=key[0], hint=_WAY_HINT)
    if nearest[0] != key[0]:
        return Miss("new_node", where, old=nearest[0], new=key[0], hint=_WAY_HINT)
    found = _hooks_changed(where, nearest, key)
    pairs = [(old or "", new or "") for old, new in zip_longest(nearest, key) if old != new]
    for old, new in pairs:  # the first that differs tells: the lines after it may have moved
        for explain in (_grad_state, _of_input, _undefined, _of_call):
            found = found or explain(tape, depth, old, new, shapes)
    for old, new in pairs:
        found = found or _of_dtypes(tape, depth, old, new)
    return found or _wiring(tape, depth, nearest, key)


# ---- one line of a key, old and new ----------------------------------------------------------------------------------


def _hooks_changed(where: str, nearest: Key, key: Key) -> Miss | None:
    old, new = _hooks(nearest), _hooks(key)
    if old == new:
        return None
    return Miss("hooks_changed", where, old=_counted(old), new=_counted(new), hint=_HOOKS_HINT)


def _hooks(key: Key) -> list[str]:
    return [words for line in key[1:] for hook, words in _HOOKS.items() if f"= {hook}(" in line]


def _counted(hooks: Sequence[str]) -> str:
    counts = [(hooks.count(hook), hook) for hook in dict.fromkeys(hooks)]
    return ", ".join(hook if count == 1 else f"{count} times {hook}" for count, hook in counts) or "no hook"


def _grad_state(
    tape: ir.TapeGraph, depth: int, old: str, new: str, shapes: Sequence[Sequence[int]] = ()
) -> Miss | None:
    before, after = _ACCUMULATES.search(old), _ACCUMULATES.search(new)
    if before is None or after is None or (before["old"] == "None") == (after["old"] == "None"):
        return None
    name = leaf_name(tape, depth)
    gradient = _tensor(tape, after["leaf"], shapes)  # a gradient has its leaf's dtype and shape
    states = ["None" if each["old"] == "None" else gradient for each in (before, after)]
    return Miss("grad_state", f".grad of {name}", old=states[0], new=states[1], hint=_GRAD_HINT)


def _tensor(tape: ir.TapeGraph, name: str, shapes: Sequence[Sequence[int]]) -> str:
    """``f32[256,128]``, for a lifted tensor."""
    kind, _, index = name.partition("_")
    if kind != "input":
        return "a Tensor"
    dtype = tape.inputs[int(index)].split()[0].rstrip(",")
    short = _SHORT.get(dtype, dtype)
    return f"{short}[{','.join(map(str, shapes[int(index)]))}]" if int(index) < len(shapes) else short


def _of_input(tape: ir.TapeGraph, depth: int, old: str, new: str, shapes: Sequence[Sequence[int]] = ()) -> Miss | None:
    before, after = _INPUT.fullmatch(old), _INPUT.fullmatch(new)
    if before is None or after is None:
        return None
    where = "the loss" if depth == 0 else value_name(tape, after["name"])
    for kind in ("dtype", "device"):
        if before[kind] != after[kind]:
            return Miss(kind, where, old=before[kind], new=after[kind], hint=_one(kind))
    texts = [match["rest"].lstrip(", ") or "no requires_grad" for match in (before, after)]
    return Miss("node_attribute", value_name(tape, after["name"]), old=texts[0], new=texts[1])


def _one(kind: str) -> str:
    return f"each {kind} that occurs is compiled once"


def _undefined(tape: ir.TapeGraph, depth: int, old: str, new: str, shapes: Sequence[Sequence[int]] = ()) -> Miss | None:
    before, after = _GRADIENTS.search(old), _GRADIENTS.search(new)
    if before is None or after is None:
        return None
    patterns = [[each.strip() == "None" for each in match["grads"].split(",")] for match in (before, after)]
    if patterns[0] == patterns[1]:
        return None
    if len(patterns[0]) != len(patterns[1]):
        verb = "gives" if "validate_outputs" in after[0] else "takes"
        what = f"{call_name(tape, depth)}: how many gradients it {verb}"
        if depth == 0:
            what = "how many tensors the backward starts from"
        return Miss("node_attribute", what, str(len(patterns[0])), str(len(patterns[1])))
    texts = [" ".join("undefined" if undefined else "defined" for undefined in pattern) for pattern in patterns]
    return Miss("undefined_gradients", call_name(tape, depth), old=texts[0], new=texts[1], hint=_UNDEFINED_HINT)


def _of_call(tape: ir.TapeGraph, depth: int, old: str, new: str, shapes: Sequence[Sequence[int]] = ()) -> Miss | None:
    """The first argument that differs, of two calls of one function."""
    before, after = _CALL.fullmatch(old), _CALL.fullmatch(new)
    if before is None or after is None or before["function"] != after["function"]:
        return None
    function, where = after["function"], call_name(tape, depth)
    if not function.startswith(_WITH_ARGUMENTS):
        return None
    arguments = [_arguments(match["arguments"]) for match in (before, after)]
    for index, (one, other) in enumerate(zip_longest(*arguments, fillvalue="nothing")):
        if _NAMES.sub("", one) == _NAMES.sub("", other):
            continue
        if "validate_outputs" in function:
            return _of_output(tape, depth, one, other)
        if function == "call_backward":
            return _of_function(where, index, one, other)
        if set(_words(one) + _words(other)) <= {"True", "False"} and one.startswith("["):
            hint = "requires_grad of what goes in decides which gradients are computed"
            return Miss("node_attribute", f"{where}: which inputs get a gradient", _yes(one), _yes(other), hint)
        name = argument_name(tape, depth, function, index)
        if name is None and _NUMBERS.fullmatch(one) and _NUMBERS.fullmatch(other):
            continue  # a dtype or a count, which what follows tells better; else see _of_dtypes
        what = f"{where}: {name}" if name else f"{where}: what it saved"
        return _of_options(what, one, other) or _of_argument(what, one, other)
    return _same_tensor(tape, depth, function, *arguments)


def _of_dtypes(tape: ir.TapeGraph, depth: int, old: str, new: str) -> Miss | None:
    """Numbers that a built-in node has beside what it saved: dtypes of what went in."""
    before, after = _CALL.fullmatch(old), _CALL.fullmatch(new)
    if before is None or after is None or not after["function"].startswith("ops."):
        return None
    for one, other in zip(_arguments(before["arguments"]), _arguments(after["arguments"]), strict=False):
        if one != other and _NUMBERS.fullmatch(one) and _NUMBERS.fullmatch(other):
            texts = next(((a, b) for a, b in zip(_words(one), _words(other), strict=False) if a != b), None)
            if texts is not None:
                what = f"{call_name(tape, depth)}: what went in"
                return Miss("dtype", what, _dtype(texts[0]), _dtype(texts[1]), _one("dtype"))
    return None


def _of_argument(what: str, old: str, new: str) -> Miss:
    if _NAMES.search(old) or _NAMES.search(new):
        is_size = "size_" in old + new
        if old.startswith("[[") and new.startswith("[["):  # the sizes of several tensors
            counts = [len(_arguments(each[1:-1])) for each in (old, new)]
            if counts[0] != counts[1]:
                return Miss("node_attribute", what, f"{counts[0]} tensors", f"{counts[1]} tensors", _WAY_HINT)
        texts = [_described(each, "dimension" if is_size and old.startswith("[") else "") for each in (old, new)]
        return Miss("shape" if is_size else "node_attribute", what, texts[0], texts[1])
    return Miss("node_attribute", what, old, new, NUMBER_HINT if _is_number(new) or _is_number(old) else "")


def _described(text: str, noun: str = "") -> str:
    """Without the names that values have in a key."""
    names = _NAMES.findall(text)
    if not names:
        return f"0 {noun}s" if noun and text == "[]" else text
    noun = noun or "size" if names[0].startswith("size_") else "number" if names[0].startswith("scalar_") else "tensor"
    if noun == "tensor" and not text.startswith("["):
        return "a tensor"
    return f"{len(names)} {noun}{'' if len(names) == 1 else 's'}"


def _of_function(where: str, index: int, old: str, new: str) -> Miss:
    """An argument of :func:`functions.call_backward`."""
    if index == 1:
        counts = [str(len(_words(each))) for each in (old, new)]
        return Miss("node_attribute", f"{where}: how many tensors it saved", counts[0], counts[1])
    if index == 2:
        hint = "requires_grad of what goes in decides which gradients are computed"
        return Miss("node_attribute", f"{where}: which inputs get a gradient", _yes(old), _yes(new), hint)
    if index == 3:
        texts = [each.replace("True", "defined").replace("False", "undefined").strip("[]") for each in (old, new)]
        return Miss("undefined_gradients", where, texts[0].replace(",", ""), texts[1].replace(",", ""), _UNDEFINED_HINT)
    undefined = "undefined" if new == "None" else "defined"
    return Miss("undefined_gradients", where, "defined" if old != "None" else "undefined", undefined, _UNDEFINED_HINT)


def _yes(text: str) -> str:
    return ", ".join("yes" if word == "True" else "no" for word in _words(text))


def _of_output(tape: ir.TapeGraph, depth: int, old: str, new: str) -> Miss:
    """What the gradients that a node gives are made to be, for the nodes after it."""
    what = "the loss" if depth == 0 else f"the gradient from {call_name(tape, depth)}"
    found = _of_options(what, old, new)
    if found is not None:
        return found
    counts = [[len(_NAMES.findall(part)) for part in _arguments(each[1:-1])] for each in (old, new)]
    for one, other in zip_longest(*counts, fillvalue=0):
        if one != other:
            return Miss("shape", what, f"{one} dimensions", f"{other} dimensions")
    kinds = ["subclass" if "True" in _words(each) else "plain" for each in (old, new)]
    return Miss("node_attribute", f"{what}: the kind of tensor", kinds[0], kinds[1])


def _of_options(what: str, old: str, new: str) -> Miss | None:
    """Dtype and device, where an argument carries them."""
    before, after = list(_OPTIONS.finditer(old)), list(_OPTIONS.finditer(new))
    for one, other in zip(before, after, strict=False):
        for kind in ("dtype", "device"):
            if one[kind] != other[kind]:
                texts = [_dtype(each[kind]) if kind == "dtype" else each[kind] for each in (one, other)]
                return Miss(kind, what, texts[0], texts[1], _one(kind))
    return None


def _dtype(number: str) -> str:
    return _SCALAR_TYPES[int(number)] if int(number) < len(_SCALAR_TYPES) else f"dtype {number}"


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
    return re.fullmatch(r"[-+]?[\d.]+(e[-+]?\d+)?|[-+]?inf|nan", text) is not None


# ---- where values come from ------------------------------------------------------------------------------------------


def _same_tensor(tape: ir.TapeGraph, depth: int, function: str, old: Sequence[str], new: Sequence[str]) -> Miss | None:
    """One of the two takes a tensor that it, or a node before it, has taken already; the other takes one of its own."""
    known = uses(tape)
    for index, (one, other) in enumerate(zip(old, new, strict=False)):
        for before, after in zip(_NAMES.findall(one), _NAMES.findall(other), strict=False):
            if before == after or before.startswith("%") or after.startswith("%"):
                continue
            name = argument_name(tape, depth, function, index)
            texts = []
            for token, arguments in ((before, old), (after, new)):
                first = known.get(token, depth) if known.get(token, depth) < depth else None
                again = any(token in _NAMES.findall(each) for each in arguments[:index])
                texts.append(
                    "a tensor that the same node has already"
                    if again
                    else "a tensor of its own"
                    if first is None
                    else value_name(tape, token)
                )
            hint = "whether two nodes hold one tensor or two is part of the structure"
            leaf = leaf_name(tape, depth)
            what = name or ("what it saved" if function != "accumulate_grad" else leaf)
            return Miss("node_attribute", f"{call_name(tape, depth)}: {what}", texts[0], texts[1], hint)
    return None


def _wiring(tape: ir.TapeGraph, depth: int, nearest: Key, key: Key) -> Miss:
    """What a node's calls take comes from elsewhere, or the calls that belong to it are others."""
    where = call_name(tape, depth)
    old, new = (_sources(tape, depth, each) for each in (nearest, key))
    if old != new:
        hooked = any(a != b and any(f"= {hook}(" in b for hook in _HOOKS) for a, b in zip(nearest, key, strict=False))
        kind, hint = ("hooks_changed", _HOOKS_HINT) if hooked else ("new_node", _WAY_HINT)
        return Miss(kind, f"{where}: what it takes", _listed(old), _listed(new), hint)
    texts = [_listed([_call_text(line) for line in each[1:] if _CALL.fullmatch(line)]) for each in (nearest, key)]
    return Miss("node_attribute", f"{where}: what belongs to it", texts[0], texts[1])


def _call_text(line: str) -> str:
    match = _CALL.fullmatch(line)
    function = match["function"] if match else line
    return _CALLS.get(function, _HOOKS.get(function, function.removeprefix("ops.")))


def _listed(texts: Sequence[str]) -> str:
    return ", ".join(texts) or "nothing"


def _sources(tape: ir.TapeGraph, depth: int, key: Key) -> list[str]:
    """Whose gradients a node's calls take, and which of them where a node gives several."""
    calls = [match for match in map(_CALL.fullmatch, key[1:]) if match is not None]
    values = [value for call in calls for value in _VALUE.finditer(call["arguments"])]
    return [_source(tape, value) for value in values if int(value["call"]) < depth]


def _source(tape: ir.TapeGraph, value: re.Match[str]) -> str:
    call = int(value["call"])
    several = len(tape.calls[call].edges or ()) > 1
    which = f"gradient {value['edge']}" if several else "the gradient"
    return f"{which} from {call_name(tape, call)}"


def _of_end(tape: ir.TapeGraph, nearest: Key, key: Key) -> Miss:
    """All nodes are the same, and what is asked for is not, or the order in which they run."""
    asked = [[line for line in each if not line.startswith(_ORDER)] for each in (nearest, key)]
    if asked[0] == asked[1]:
        return order_miss(tape)
    texts = []
    for each in (nearest, key):
        returned = next((line for line in each if line.startswith("return ")), "return []")
        parts = _arguments(returned.removeprefix("return [").removesuffix("]"))
        texts.append(", ".join(_source(tape, value) if (value := _VALUE.fullmatch(part)) else "none" for part in parts))
    return Miss("node_attribute", f"what autograd.grad() was asked for, of {title(tape)}", texts[0], texts[1])


def order_miss(tape: ir.TapeGraph) -> Miss:
    """The structure is known, but its nodes run in another order."""
    what = f"the order in which nodes run, of {title(tape)}"
    return Miss("node_attribute", what, "another order", "this order", _ORDER_HINT)


def _called(root: Key) -> str:
    return "autograd.grad()" if "accumulates=False" in root else "backward()"
