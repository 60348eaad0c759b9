"""What people call a node of a tape, and each value that it takes: parameters, layers, source lines, saved tensors."""

from __future__ import annotations

import operator
import re
from typing import Any

from torch import fx

from .. import ir

_NEAR = 4
"""How many edges away a layer may be to name a node after it."""
_SIZES = re.compile(r"(?P<name>\w+?)_sym_(?P<kind>sizes|strides)(_opt)?")
_OF_VIEWS = (
    *("the gradients", "sizes of the base", "strides of the base", "offset of the base"),
    *("sizes of the view", "strides of the view", "offset of the view"),
)
"""What :func:`ir.copy_slices_prologue` takes."""


def call_name(tape: ir.TapeGraph, index: int) -> str:
    """A node of the tape as people know it: its number, its name, the parameter or layer it belongs to, its line."""
    call = tape.calls[index]
    if index == 0:
        return "where the backward starts"
    layer = layer_of(tape, index)
    text = f"#{index} {call.name}" if layer is None else f"#{index} {call.name} {layer}"
    return f"{text}, {call.source}" if call.source is not None else text


def title(tape: ir.TapeGraph) -> str:
    """A tape as people know it: what the backward begins at, the model, and how long it is."""
    roots = [tape.calls[index].name for index in tape.calls[0].edges or ()] or [call.name for call in tape.calls[1:2]]
    text = ", ".join(dict.fromkeys(roots)) or "an empty tape"
    module, count = module_of(tape), len(tape.calls)  # the root is one of them, as in the tape graph's text
    return f"{text}{f' of {module}' if module else ''}, {count} node{'' if count == 1 else 's'}"


def module_of(tape: ir.TapeGraph) -> str | None:
    """The class of the outermost module whose parameters it reaches, where that is known."""
    return next((call.module for call in tape.calls if call.module is not None), None)


def leaf_name(tape: ir.TapeGraph, index: int) -> str:
    """The parameter that a node accumulates into, or its number where no living module has it."""
    return tape.calls[index].parameter or f"the leaf of #{index}"


def layer_of(tape: ir.TapeGraph, index: int) -> str | None:
    """``of 0.weight`` for a node that takes a parameter, ``after 0`` for one that takes what such a node gave."""
    calls = tape.calls
    if calls[index].parameter is not None:
        return f"of {calls[index].parameter}"
    direct = parameters_at(tape, index)
    if direct:
        return f"of {direct[0]}"
    reached = list(calls[index].edges or ())
    for _ in range(_NEAR):
        for each in reached:
            found = parameters_at(tape, each)
            if found:
                return f"after {found[0].rpartition('.')[0] or found[0]}"
        reached = [after for each in reached for after in calls[each].edges or ()]
    return None


def module_near(tape: ir.TapeGraph, index: int) -> str | None:
    """The module that a node belongs to, as far as parameters near it tell; the model's own name is empty."""
    layer = layer_of(tape, index) if index else None
    if layer is None:
        return None
    kind, _, name = layer.partition(" ")
    return name.rpartition(".")[0] if kind == "of" else name


def parameters_at(tape: ir.TapeGraph, index: int) -> list[str]:
    """The parameters that a node takes, as they are or through one node such as a transpose; weights first."""
    found = []
    for edge in tape.calls[index].edges or ():
        call = tape.calls[edge]
        after = call.edges or ()
        leaf = tape.calls[after[0]] if call.parameter is None and len(after) == 1 else call
        if leaf.parameter is not None:
            found.append(leaf.parameter)
    return sorted(found, key=lambda name: not name.endswith("weight"))


# ---- values ----------------------------------------------------------------------------------------------------------


def uses(tape: ir.TapeGraph) -> dict[ir.Lifted, int]:
    """For each lifted value the first node of the tape that uses it; nothing for one that is only given back."""
    users = [(node, next(iter(node.users), None)) for node in tape.graph.find_nodes(op="placeholder")]
    return {node.meta["lifted"]: user.meta["call"] for node, user in users if user is not None and "call" in user.meta}


def value_name(tape: ir.TapeGraph, lifted: ir.Lifted) -> str:
    """What a lifted value is: ``saved self of MulBackward0``, ``0.weight``, ``.grad of 0.weight``, a size of
    something."""
    placeholders = tape.graph.find_nodes(op="placeholder")
    node = next((node for node in placeholders if node.meta["lifted"] == lifted), None)
    user = next(iter(node.users), None) if node is not None else None
    while user is not None and user.op == "call_function" and ir.rule_of(user) is not None:
        if ir.rule_of(user).gives not in ("size", "packed"):  # type: ignore[union-attr]
            dim = _dimension(user.args, node) if lifted.kind == "size" else None
            position = next((index for index, argument in enumerate(user.args) if node in _flat(argument)), 0)
            text = argument_of(tape, user, position)
            return text if dim is None else f"{text}, dimension {dim}"
        node, user = user, next(iter(user.users), None)  # a size computed of sizes, or what a hook unpacks
    return "a value that nothing uses" if user is None else "a value that is given back as it is"


def node_name(tape: ir.TapeGraph, node: fx.Node) -> str:
    """What any value of the tape graph is: a placeholder's name for people, or what a node of the tape gave."""
    if node.op == "placeholder":
        return value_name(tape, node.meta["lifted"])
    if node.target is operator.getitem:
        source, index = node.args
        assert isinstance(source, fx.Node)
        return f"gradient {index} from {call_name(tape, source.meta['call'])}"
    return f"what {call_name(tape, node.meta['call'])} gave"


def _dimension(argument: Any, node: Any) -> int | None:
    """The place of a size in the innermost list that has it; None where it stands alone."""
    for each in argument:
        if isinstance(each, (list, tuple)):
            if node in each:
                return each.index(node)
            found = _dimension(each, node)
            if found is not None:
                return found
    return None


def _flat(argument: Any) -> list[Any]:
    found: list[Any] = []
    fx.node.map_aggregate(argument, found.append)
    return found


def argument_of(tape: ir.TapeGraph, call: fx.Node, position: int) -> str:
    """One argument of a call: ``saved self of MulBackward0 after 0``."""
    where = call_name(tape, call.meta["call"])
    if call.target is ir.accumulate_grad:
        leaf = leaf_name(tape, call.meta["call"])
        return (leaf, f".grad of {leaf}", f"the gradient of {leaf}")[position]
    if call.target is ir.copy_slices_prologue:
        return f"{_OF_VIEWS[position]} in {where}"
    if ir.is_validation(call):
        if call.meta["call"] != 0:
            return f"the gradient from {where}"
        return "the gradient that the backward starts from" if position == 0 else "the loss"
    name = _names(tape, call).get(position)
    if name is not None:
        return f"{readable(name)} of {where}"
    if isinstance(call.target, ir.OpaqueOp):
        return f"what {where} saved"
    kinds = {"call_backward": "saved tensors", "Packed": "saved tensors", "unpack_hook": "saved tensors"}
    return f"{kinds.get(ir.target_name(call), 'an input')} of {where}"


def readable(name: str) -> str:
    """``saved self`` for what PyTorch's node calls ``_saved_self``, ``sizes of self`` for ``_saved_self_sym_sizes``."""
    match = _SIZES.fullmatch(name)
    return f"{match['kind']} of {match['name']}" if match else f"saved {name}"


def _names(tape: ir.TapeGraph, call: fx.Node) -> dict[int, str]:
    """For a built-in node, the name of each saved value, by its position among the call's arguments.

    Both come in one order, but the engine hands over more than has a name (layouts, dtypes); so each name goes to the
    first argument that can be its.
    """
    names = list(tape.calls[call.meta["call"]].saved)
    found: dict[int, str] = {}
    for position, argument in enumerate(call.args):
        if position >= 2 and names and _can_be(argument, names[0]):
            found[position] = names.pop(0).name
    return found


def _can_be(argument: Any, saved: ir.SavedValue) -> bool:
    """Whether an argument can be a saved value."""
    kinds = {ir.value_kind(each) for each in _flat(argument)}
    if saved.is_tensor:
        return kinds <= {"tensor", "none", "packed"}
    if kinds & {"size", "scalar"}:
        return type(saved.value) is (ir.Listed if isinstance(argument, (list, tuple)) else int)
    return kinds <= {"none", "constant"} and ir.argument_of(argument, {}) == saved.value


def argument_name(tape: ir.TapeGraph, index: int, function: str, position: int) -> str | None:
    """The name of one saved value of a node's built-in function, such as ``saved exponent``; None where it has none."""
    for call in tape.by_call().get(index, ()):
        if ir.target_name(call) == function:
            if call.target is ir.copy_slices_prologue:
                return _OF_VIEWS[position]
            name = _names(tape, call).get(position)
            return None if name is None else readable(name)
    return None
