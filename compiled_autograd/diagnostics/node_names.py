"""Names for people of a tape's nodes and values, by parameters, layers, source lines and saved tensors."""

from __future__ import annotations

import operator
import re
from typing import Any

from torch import fx

from .. import ir

_NEAR = 4
"""Maximum number of edges from a node to the layer after which it is named."""
_SIZES = re.compile(r"(?P<name>\w+?)_sym_(?P<kind>sizes|strides)(_opt)?")
_OF_VIEWS = (
    *("the gradients", "sizes of the base", "strides of the base", "offset of the base"),
    *("sizes of the view", "strides of the view", "offset of the view"),
)
"""The arguments of :func:`ir.copy_slices_prologue`."""


def call_name(tape: ir.TapeGraph, index: int) -> str:
    """Return a node's name for people: its number, its name, its parameter or layer, and its source line."""
    call = tape.calls[index]
    if index == 0:
        return "where the backward starts"
    layer = layer_of(tape, index)
    text = f"#{index} {call.name}" if layer is None else f"#{index} {call.name} {layer}"
    return f"{text}, {call.source}" if call.source is not None else text


def title(tape: ir.TapeGraph) -> str:
    """Return a tape's name for people: the first nodes of the backward, the model, and the number of nodes."""
    roots = [tape.calls[index].name for index in tape.calls[0].edges or ()] or [call.name for call in tape.calls[1:2]]
    text = ", ".join(dict.fromkeys(roots)) or "an empty tape"
    module, count = module_of(tape), len(tape.calls)  # with the root, as in the tape graph's text
    return f"{text}{f' of {module}' if module else ''}, {count} node{'' if count == 1 else 's'}"


def module_of(tape: ir.TapeGraph) -> str | None:
    """Return the class of the outermost module with parameters on the tape; None if unknown."""
    return next((call.module for call in tape.calls if call.module is not None), None)


def leaf_name(tape: ir.TapeGraph, index: int) -> str:
    """Return the name of the parameter of a leaf, or the leaf's number if no living module has the parameter."""
    return tape.calls[index].parameter or f"the leaf of #{index}"


def layer_of(tape: ir.TapeGraph, index: int) -> str | None:
    """Return ``of 0.weight`` for a node that takes a parameter, ``after 0`` for a node that takes the result of such a
    node, None for others."""
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
    """Return the module of a node, inferred from parameters near it: empty for the model itself, None if unknown."""
    layer = layer_of(tape, index) if index else None
    if layer is None:
        return None
    kind, _, name = layer.partition(" ")
    return name.rpartition(".")[0] if kind == "of" else name


def parameters_at(tape: ir.TapeGraph, index: int) -> list[str]:
    """Return the parameters that a node takes, directly or through one node such as a transpose; weights first."""
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
    """Return, for each lifted value that a node uses, the first such node of the tape."""
    users = [(node, next(iter(node.users), None)) for node in tape.graph.find_nodes(op="placeholder")]
    return {node.meta["lifted"]: user.meta["call"] for node, user in users if user is not None and "call" in user.meta}


def value_name(tape: ir.TapeGraph, lifted: ir.Lifted) -> str:
    """Return a lifted value's name for people: ``saved self of MulBackward0``, ``0.weight``, ``.grad of 0.weight``, or
    a size of one of these."""
    placeholders = tape.graph.find_nodes(op="placeholder")
    node = next((node for node in placeholders if node.meta["lifted"] == lifted), None)
    user = next(iter(node.users), None) if node is not None else None
    while user is not None and user.op == "call_function" and ir.rule_of(user) is not None:
        if ir.rule_of(user).gives not in ("size", "packed"):  # type: ignore[union-attr]
            dim = _dimension(user.args, node) if lifted.kind == "size" else None
            position = next((index for index, argument in enumerate(user.args) if node in _flat(argument)), 0)
            text = argument_of(tape, user, position)
            return text if dim is None else f"{text}, dimension {dim}"
        node, user = user, next(iter(user.users), None)  # a size computed from sizes, or the result of an unpack hook
    return "an unused value" if user is None else "a value that is returned unchanged"


def node_name(tape: ir.TapeGraph, node: fx.Node) -> str:
    """Return the name for people of any value of the tape graph: a lifted value, or a result of a node."""
    if node.op == "placeholder":
        return value_name(tape, node.meta["lifted"])
    if node.target is operator.getitem:
        source, index = node.args
        assert isinstance(source, fx.Node)
        return f"gradient {index} from {call_name(tape, source.meta['call'])}"
    return f"the result of {call_name(tape, node.meta['call'])}"


def _dimension(argument: Any, node: Any) -> int | None:
    """Return the index of a size in the innermost list that contains it; None if it is in no list."""
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
    """Return the name for people of an argument of a call: ``saved self of MulBackward0 after 0``."""
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
        return f"a saved value of {where}"
    kinds = {"call_backward": "saved tensors", "Packed": "saved tensors", "unpack_hook": "saved tensors"}
    return f"{kinds.get(ir.target_name(call), 'an input')} of {where}"


def readable(name: str) -> str:
    """Return ``saved self`` for the attribute ``_saved_self`` of PyTorch's node, ``sizes of self`` for
    ``_saved_self_sym_sizes``."""
    match = _SIZES.fullmatch(name)
    return f"{match['kind']} of {match['name']}" if match else f"saved {name}"


def _names(tape: ir.TapeGraph, call: fx.Node) -> dict[int, str]:
    """Return the names of a built-in node's saved values, by their positions among the call's arguments.

    Names and arguments are in the same order, but some arguments have no name (layouts, dtypes). Each name therefore
    goes to the first argument that can have it.
    """
    names = list(tape.calls[call.meta["call"]].saved)
    found: dict[int, str] = {}
    for position, argument in enumerate(call.args):
        if position >= 2 and names and _can_be(argument, names[0]):
            found[position] = names.pop(0).name
    return found


def _can_be(argument: Any, saved: ir.SavedValue) -> bool:
    """Return whether an argument can be this saved value."""
    kinds = {ir.value_kind(each) for each in _flat(argument)}
    if saved.is_tensor:
        return kinds <= {"tensor", "none", "packed"}
    if kinds & {"size", "scalar"}:
        return type(saved.value) is (ir.Listed if isinstance(argument, (list, tuple)) else int)
    return kinds <= {"none", "constant"} and ir.argument_of(argument, {}) == saved.value


def argument_name(tape: ir.TapeGraph, index: int, function: str, position: int) -> str | None:
    """Return the name of a saved value of a built-in node, such as ``saved exponent``; None if it has no name."""
    for call in tape.by_call().get(index, ()):
        if ir.target_name(call) == function:
            if call.target is ir.copy_slices_prologue:
                return _OF_VIEWS[position]
            name = _names(tape, call).get(position)
            return None if name is None else readable(name)
    return None
