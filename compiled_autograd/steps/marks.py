"""Checks between the steps of a program: hooks of leaves, and saved tensors that may change."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import fx

from .. import ir
from ..user_code.inlined import InlinedBackward
from .steps import AccumulateStep, Executor, OpaqueStep, RegionStep


def saved_by(call: fx.Node) -> list[fx.Node]:
    """The lifted tensors that a call's node saved, and not those that it only writes to, nor what was packed."""
    parts: tuple[Any, ...] = ()
    if isinstance(call.target, ir.OpaqueOp):
        parts = call.args[1:]
    elif call.target is ir.call_backward or isinstance(call.target, InlinedBackward):
        parts = call.args[1:2]
    found: dict[fx.Node, None] = {}
    fx.map_arg(parts, lambda node: found.setdefault(node))
    return [node for node in found if node.op == "placeholder" and ir.value_kind(node) == "tensor"]


def watched(calls: Iterable[fx.Node]) -> set[fx.Node]:
    """Return the values that users' code, or calls after it, have saved: they may have been changed in place."""
    after = itertools.dropwhile(lambda call: not ir.runs_users_code(call.target), calls)
    return {saved for call in after for saved in saved_by(call)}


def mark_saved(steps: Sequence[Executor], slot_of: Mapping[fx.Node, int]) -> list[int]:
    """Tell each step what users' code may have done to it: which saved tensors it has to look at, and whether leaves
    may have been frozen; and whether what marked calls depend on may have changed. Gives the slots of those tensors."""
    found: dict[int, None] = {}
    users_code, as_they_are = False, False
    for step in steps:
        if isinstance(step, AccumulateStep):
            step.after_users_code = users_code
            continue
        if isinstance(step, OpaqueStep):
            as_they_are = True
            users_code = users_code or ir.runs_users_code(step.node.target)
        else:
            marked = [call for call in step.region.nodes if isinstance(call.target, ir.Marked)]
            step.marked = [(call.target, slot_of[call.args[0]]) for call in marked]  # type: ignore[misc, index]
            step.asks_again, step.quick = as_they_are and bool(marked), None
        if users_code:
            calls = step.region.nodes if isinstance(step, RegionStep) else [step.node]
            step.saved = list(dict.fromkeys(slot_of[source] for call in calls for source in saved_by(call)))
            found.update(dict.fromkeys(step.saved))
    return list(found)
