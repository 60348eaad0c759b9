"""Explain why a structure is new, in the user's terms: the node, its parameter, the old and the new value.

Two structures are compared at the first key that differs (:meth:`ir.TapeGraph.structure`). The tapes are equal before
that key, so that references of either key to earlier nodes can be looked up in the current tape.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import TypeVar

import msgspec

from .. import ir
from ..ir.structure_keys import (
    Accumulates,
    Argument,
    CallPart,
    Lifted,
    LiftedTensor,
    Part,
    Returned,
    StructureKey,
    Value,
    values_of,
)
from ..shadow_cache import Miss
from .call_misses import call_miss, dtype_miss, one_each
from .node_names import call_name, leaf_name, title, value_name
from .same_model import WAY_HINT, Known, hint_at

_HOOKS = {
    "tensor_hook": "tensor hook",
    "cpp_hook": "C++ hook (retain_grad makes one)",
    "pre_hook": "prehook of the node",
    "post_hook": "hook of the node",
    "post_accumulate_hook": "post-accumulate-grad hook",
    "unpack_hook": "saved-tensor hook",
    "Packed": "saved-tensor hook",
}
_P = TypeVar("_P", bound=Part)
_END = "the tape ends"
_CALLS = {
    "accumulate_grad": "a gradient for the leaf",
    "sum_gradients": "a sum of gradients",
    "zeros": "zeros for an undefined gradient",
    "copy_slices_prologue": "a write into a view",
    "copy_slices_epilogue": "the end of a write into a view",
}
_GRAD_HINT = (
    "call zero_grad(set_to_none=True) before each backward, or before none: a .grad of None and an existing one are "
    "two structures, with shared compiled code if their sizes are numbers"
)
_HOOKS_HINT = "register hooks once, before the first backward; with and without are two structures, each compiled once"
_TAKEN_HINT = "another thread set or removed the .grad of a leaf while the tape was read"
_ORDER_HINT = "the forward computed its branches in another order; each order is compiled once"


def first_seen(tape: ir.TapeGraph) -> Miss:
    """Return the miss of a structure that resembles no known one. For a tape whose names were not looked up yet,
    :func:`with_title` adds the tape's name."""
    return Miss("first_seen", "" if tape.is_unnamed() else title(tape))


def with_title(miss: Miss, tape: ir.TapeGraph) -> Miss:
    """Return a miss for display: add the tape's name to a miss of :func:`first_seen` without one."""
    return msgspec.structs.replace(miss, where=title(tape)) if miss.kind == "first_seen" and not miss.where else miss


def structure_miss(
    tape: ir.TapeGraph,
    keys: Sequence[StructureKey],
    depth: int,
    nearest: StructureKey | None,
    shapes: Sequence[Sequence[int]] = (),
    others: Sequence[Known] = (),
) -> Miss:
    """Return a miss that explains why a structure is new.

    Args:
        tape: the capture.
        keys: the capture's structure.
        depth: the number of leading keys that a known structure shares.
        nearest: the known structure's next key, at which the two differ; None if the known structure ends there.
        shapes: the shapes of the lifted tensors, if known.
        others: the structures of this process that share the leading keys.
    """
    if depth == 0 and nearest is None:
        return first_seen(tape)
    miss = _where_they_part(tape, keys, depth, nearest, shapes)
    return msgspec.structs.replace(miss, hint=hint_at(tape, depth, others)) if miss.hint == WAY_HINT else miss


def _where_they_part(
    tape: ir.TapeGraph,
    keys: Sequence[StructureKey],
    depth: int,
    nearest: StructureKey | None,
    shapes: Sequence[Sequence[int]],
) -> Miss:
    if depth == len(keys):
        return order_miss(tape)
    key = keys[depth]
    old_ends, new_ends = nearest is None or nearest[0] == "end", depth == len(tape.calls)
    if old_ends and new_ends:
        return _of_end(tape, nearest or (), key)
    if new_ends:
        assert nearest is not None
        return Miss("new_node", f"the end of {title(tape)}", old=str(nearest[0]), new=_END, hint=WAY_HINT)
    if depth == 0:
        calls = [_called(each) for each in (nearest or (), key)]
        if calls[0] != calls[1]:
            return Miss("node_attribute", f"the call of autograd, for {title(tape)}", calls[0], calls[1])
    found = _of_node(tape, depth, None if old_ends else nearest, key, shapes)
    return msgspec.structs.replace(found, node=depth or None)  # the root is no node of PyTorch's tape


def _of_node(
    tape: ir.TapeGraph, depth: int, nearest: StructureKey | None, key: StructureKey, shapes: Sequence[Sequence[int]]
) -> Miss:
    """Return a miss for a node that differs from the nearest structure's; ``nearest`` None: that structure ends."""
    where = call_name(tape, depth)
    if nearest is None or nearest[0] != key[0]:
        before = _END if nearest is None else str(nearest[0])
        return Miss("new_node", where, old=before, new=str(key[0]), hint=WAY_HINT)
    found = _hooks_changed(where, nearest, key)
    pairs = [(old, new) for old, new in zip_longest(nearest, key) if old != new]
    for old, new in pairs:  # the first difference is the explanation: later parts may only have moved
        if isinstance(old, LiftedTensor) and isinstance(new, LiftedTensor):
            found = found or _of_tensor(tape, depth, old, new)
        elif isinstance(old, CallPart) and isinstance(new, CallPart):
            found = found or _grad_state(tape, depth, old, new, shapes)
            found = found or call_miss(tape, depth, old, new)
    for old, new in pairs:
        if isinstance(old, CallPart) and isinstance(new, CallPart):
            found = found or dtype_miss(tape, depth, old, new)
    return found or _wiring(tape, depth, nearest, key)


# ---- one part of a key, old and new ----------------------------------------------------------------------------------


def _parts(key: StructureKey, kind: type[_P]) -> list[_P]:
    return [part for part in key if isinstance(part, kind)]


def _hooks_changed(where: str, nearest: StructureKey, key: StructureKey) -> Miss | None:
    old, new = _hooks(nearest), _hooks(key)
    if old == new:
        return None
    return Miss("hooks_changed", where, old=_counted(old), new=_counted(new), hint=_HOOKS_HINT)


def _hooks(key: StructureKey) -> list[str]:
    return [_HOOKS[part.function] for part in _parts(key, CallPart) if part.function in _HOOKS]


def _counted(hooks: Sequence[str]) -> str:
    counts = [(hooks.count(hook), hook) for hook in dict.fromkeys(hooks)]
    return ", ".join(hook if count == 1 else f"{count} times {hook}" for count, hook in counts) or "no hook"


def _grad_state(
    tape: ir.TapeGraph, depth: int, old: CallPart, new: CallPart, shapes: Sequence[Sequence[int]]
) -> Miss | None:
    if not old.function == new.function == "accumulate_grad":
        return None
    grads = [part.arguments[1] for part in (old, new)]
    if (grads[0] is None) == (grads[1] is None):
        return None
    gradient = _tensor(tape, new.arguments[0], shapes)  # the gradient has the leaf's dtype and shape
    states = ["None" if grad is None else gradient for grad in grads]
    where = f".grad of {leaf_name(tape, depth)}"
    return Miss("grad_state", where, old=states[0], new=states[1], hint=_GRAD_HINT)


def _tensor(tape: ir.TapeGraph, value: Argument, shapes: Sequence[Sequence[int]]) -> str:
    """Format a lifted tensor: ``f32[256,128]``."""
    if not isinstance(value, Lifted) or value.kind != "input":
        return "a Tensor"
    short = tape.inputs[value.index].dtype.replace("float", "f").replace("complex", "c")
    return f"{short}[{','.join(map(str, shapes[value.index]))}]" if value.index < len(shapes) else short


def _of_tensor(tape: ir.TapeGraph, depth: int, old: LiftedTensor, new: LiftedTensor) -> Miss:
    name = value_name(tape, Lifted("input", new.index))
    where = "the loss" if depth == 0 else name
    if old.dtype != new.dtype:
        return Miss("dtype", where, old=old.dtype, new=new.dtype, hint=one_each("dtype"))
    if old.device != new.device:
        return Miss("device", where, old=old.device, new=new.device, hint=one_each("device"))
    texts = [each.properties or "no requires_grad" for each in (old, new)]
    return Miss("node_attribute", name, old=texts[0], new=texts[1])


# ---- sources of values -----------------------------------------------------------------------------------------------


def _wiring(tape: ir.TapeGraph, depth: int, nearest: StructureKey, key: StructureKey) -> Miss:
    """Return a miss for a node whose inputs have other sources, or which has other calls."""
    where = call_name(tape, depth)
    old, new = (_sources(tape, depth, each) for each in (nearest, key))
    if old != new:
        differing = [part for before, part in zip(nearest, key, strict=False) if before != part]
        kind, hint = ("hooks_changed", _HOOKS_HINT) if _hooks(tuple(differing)) else ("new_node", WAY_HINT)
        return Miss(kind, f"{where}: its inputs", _listed(old), _listed(new), hint)
    texts = [_listed([_call_text(part.function) for part in _parts(each, CallPart)]) for each in (nearest, key)]
    return Miss("node_attribute", f"{where}: its calls", texts[0], texts[1])


def _call_text(function: str) -> str:
    return _CALLS.get(function, _HOOKS.get(function, function.removeprefix("ops.")))


def _listed(texts: Sequence[str]) -> str:
    return ", ".join(texts) or "nothing"


def _sources(tape: ir.TapeGraph, depth: int, key: StructureKey) -> list[str]:
    """Return the sources of the gradients that a node's calls take."""
    values = [value for part in _parts(key, CallPart) for value in values_of(part.arguments)]
    return [_source(tape, value) for value in values if isinstance(value, Value) and (value.call or 0) < depth]


def _source(tape: ir.TapeGraph, value: Value) -> str:
    call = value.call or 0
    several = len(tape.calls[call].edges or ()) > 1
    which = f"gradient {value.edge}" if several else "the gradient"
    return f"{which} from {call_name(tape, call)}"


def _of_end(tape: ir.TapeGraph, nearest: StructureKey, key: StructureKey) -> Miss:
    """Return a miss for tapes with equal nodes that differ in the requested gradients, or in the order of the nodes."""
    asked = [_parts(each, Returned) for each in (nearest, key)]
    if asked[0] == asked[1]:
        unused = [len(_parts(each, LiftedTensor)) for each in (nearest, key)]
        if unused[0] != unused[1]:
            return Miss(
                "node_attribute", f"unused tensors of {title(tape)}", str(unused[0]), str(unused[1]), _TAKEN_HINT
            )
        return order_miss(tape)
    texts = []
    for returned in asked:
        values = [value for part in returned for value in part.values] or [None]
        texts.append(", ".join(_source(tape, each) if isinstance(each, Value) else "none" for each in values))
    return Miss("node_attribute", f"the inputs of autograd.grad(), of {title(tape)}", texts[0], texts[1])


def order_miss(tape: ir.TapeGraph) -> Miss:
    """Return the miss of a known structure whose nodes run in another order."""
    what = f"the order of the nodes, of {title(tape)}"
    return Miss("node_attribute", what, "another order", "this order", _ORDER_HINT)


def _called(root: StructureKey) -> str:
    return "autograd.grad()" if Accumulates(False) in root else "backward()"
