"""Places in a tape graph with hooks, and places where hooks can be added."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

from torch import fx

from .. import ir
from ..user_code.hooks import post_accumulate_hook, post_hook, pre_hook, tensor_hook
from ..user_code.inlined import InlinedBackward

HOOKS = (tensor_hook, pre_hook, post_hook, post_accumulate_hook)
_VALIDATES = "validate_outputs"
UNDEFINED = -1
"""Index of a gradient that is undefined and that a hook sees: the tape graph does not show such gradients."""
_BETWEEN = (operator.getitem, ir.check_nan, ir.sum_gradients)
"""Calls between nodes of the tape, although their ``call`` is a node's."""


class HookPlaces:
    """The places of a tape graph's hooks, and places where hooks can be added.

    Attributes:
        place: by call, its position in the graph.
        given: the results of ``autograd.grad``.
        calls: by node of the tape, its calls.
        functions: by node of the tape, the call that runs the node itself, or its first part.
        leaves: by node of the tape, the call that writes to a leaf.
        hooks: all calls of hooks.
    """

    def __init__(self, tape: ir.TapeGraph) -> None:
        self.accumulates = tape.accumulates
        self.given: Sequence[Any] = tape.graph.output_node().args[0]  # type: ignore[assignment]
        self.place = {node: place for place, node in enumerate(tape.graph.nodes)}
        self._made_at = [max((self.place[part] for part in _parts_of(value)), default=-1) for value in self.given]
        self.calls = {
            call: [node for node in group if node.target not in _BETWEEN] for call, group in tape.by_call().items()
        }
        self.functions: dict[int, fx.Node] = {}
        self.leaves: dict[int, fx.Node] = {}
        self.hooks: list[fx.Node] = []
        for call, group in self.calls.items():
            for node in group:
                if is_function(node):
                    self.functions.setdefault(call, node)
                if node.target is ir.accumulate_grad:
                    self.leaves[call] = node
                if ir.hook_kind(node.target) in HOOKS:
                    self.hooks.append(node)

    @classmethod
    def of(cls, tape: ir.TapeGraph) -> HookPlaces:
        """Return the places of a tape graph, found once."""
        found: HookPlaces | None = tape.hook_places
        if found is None:
            found = tape.hook_places = cls(tape)
        return found

    def is_made(self, output: int, before: fx.Node) -> bool:
        """Return whether all nodes of the tape that contribute to a requested gradient ran before a call. The call may
        unpack a checkpointed tensor for a node that runs later."""
        return self._made_at[output] < self.place[before]

    def is_given(self, output: int, before: fx.Node) -> bool:
        """Return whether a requested gradient is made, and the hooks that see it were called."""
        hooks = chain(self.given[output])
        return self.is_made(output, before) and all(self.place[hook] < self.place[before] for hook in hooks)

    def group(self, node: fx.Node) -> tuple[int, Any, int]:
        """Return the dict of a hook: its node of the tape, its kind, and the index of the gradient for a tensor's."""
        call, kind = node.meta["call"], ir.hook_kind(node.target)
        if kind is not tensor_hook and node.target is not ir.cpp_hook:
            return call, kind, 0
        for other in self.calls[call]:
            where = entering(other)
            if where is None or ir.hook_kind(other.target) is post_hook:
                continue
            for index, value in enumerate(at(other.args, where)):
                if node in chain(value):
                    return call, kind, index
        if call in self.functions and call not in self.leaves:
            return call, kind, UNDEFINED
        return call, kind, 0  # an output that was asked for, of a node that does not run


def _parts_of(value: Any) -> list[fx.Node]:
    """The gradients that a value is the sum of."""
    for hook in chain(value):
        value = hook.args[1]
    if not isinstance(value, fx.Node):
        return []
    return ir.terms(value) if value.target is ir.sum_gradients else [value]


def chain(value: Any) -> Iterator[fx.Node]:
    """Yield the hooks of a tensor that have made a value, the last one first."""
    while isinstance(value, fx.Node) and ir.hook_kind(value.target) in (tensor_hook, ir.cpp_hook):
        yield value
        value = value.args[1]


def is_function(node: fx.Node) -> bool:
    """Return whether a call runs a node of the tape, or the first part of it."""
    if isinstance(node.target, ir.OpaqueOp):
        return node.target.__name__ != _VALIDATES
    return node.target in (ir.call_backward, ir.accumulate_grad, ir.copy_slices_prologue) or isinstance(
        node.target, InlinedBackward
    )


def entering(node: fx.Node) -> int | slice | None:
    """Return the position of the gradients that enter a node of the tape, among the arguments of a call."""
    kind = ir.hook_kind(node.target)
    if kind is pre_hook:
        return 1
    if kind is post_hook:
        return 2
    if not is_function(node):
        return None
    if node.target is ir.accumulate_grad:
        return slice(2, 3)
    if isinstance(node.target, ir.OpaqueOp) or node.target is ir.copy_slices_prologue:
        return 0
    return slice(4, None)


def at(arguments: Sequence[Any], where: int | slice) -> Sequence[Any]:
    """The gradients there."""
    found: Sequence[Any] = arguments[where]
    return found


def put(arguments: Sequence[Any], where: int | slice, values: list[Any]) -> Sequence[Any]:
    """The arguments with others there."""
    put = list(arguments)
    put[where] = values
    return put
