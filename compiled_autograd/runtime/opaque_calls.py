"""Runs calls for real: one that stays opaque, or those of a region one after the other."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from .. import ir
from ..proving.reference import RealCalls
from ..steps.profiling import Profile
from ..steps.steps import Executor, OpaqueStep, RegionStep, Slot, Slots
from ..torch_api.cpp_warnings import issuing_warnings
from ..user_code.in_place import Watched, changed, check


def drop(step: Executor, slots: Slots) -> None:
    """Empty the slots that no later step reads."""
    for slot in step.drops:
        slots[slot] = None


def run_calls(
    step: RegionStep,
    slots: Slots,
    profile: Profile | None = None,
    again: bool = False,
    until: fx.Node | None = None,
) -> None:
    """Run a region's opaque calls one by one, for real.

    Args:
        again: they may be run once more on the same values.
        until: those from here on are not run.
    """
    region = step.region
    known = {node: slots[slot] for node, slot in zip(region.inputs, step.inputs, strict=True)}
    drop(step, slots)
    calls = RealCalls(region.nodes, region.outputs, known, again)

    try:
        if profile is not None:
            profile.node_by_node(region.nodes, calls.run)
        else:
            for node in itertools.takewhile(lambda node: node is not until, region.nodes):
                calls.run(node)
    finally:  # after a NaN, earlier leaves are written
        for node, slot in step.outputs:
            slots[slot] = known.get(node)


def run_opaque(step: OpaqueStep, slots: Slots, name: str, versions: Mapping[int, int]) -> None:
    """Run a call that stays as it is.

    Args:
        name: of its node of the tape.
        versions: of saved tensors that users' code may have changed in place, by slot.
    """
    arguments = _arguments(step, slots)
    if step.saved:
        arguments = looked_after(step.node, step.saved, step.arguments, arguments, slots, versions, name)
    try:
        if ir.runs_users_code(step.node.target):
            result = step.node.target(*arguments)  # type: ignore[operator]
        else:
            with torch._C.DisableTorchFunctionSubclass():  # the engine's own operators are not the user's
                result = issuing_warnings(step.node.target, *arguments)  # type: ignore[arg-type]
    except RuntimeError as error:
        raise _in_eagers_words(error, name) from error.__cause__
    for slot, index in step.items:
        slots[slot] = result[index]
    if step.result is not None:
        slots[step.result] = result


def looked_after(
    node: fx.Node,
    saved: Sequence[Any],
    template: Any,
    arguments: Any,
    values: Any,
    versions: Mapping[Any, int],
    name: str,
) -> Any:
    """A call's arguments, after a look whether what its node of the tape (``name``) saved was changed in place; with
    those of a Python function such that it looks when it asks for them.

    ``saved`` are keys of ``values``, slots or nodes of the tape graph; ``template`` has them in place of the values.
    """
    if isinstance(node.target, ir.OpaqueOp):
        if changed(saved, values, versions):
            for source in saved:
                check(values[source], versions[source], name)
        return arguments
    context, tensors, *rest = arguments
    tensors = [
        Watched(value, versions[source]) if isinstance(source, (Slot, fx.Node)) and source in versions else value
        for source, value in zip(template[1], tensors, strict=True)
    ]
    return [context, tensors, *rest]


_TRACING = "[Compiled Autograd Tracing:]"


def _in_eagers_words(error: RuntimeError, name: str) -> RuntimeError:
    """``validate_outputs`` of the seam words its errors for itself; the engine names the node instead."""
    text = str(error)
    if not text.startswith(_TRACING):
        return error
    return RuntimeError(f"Function {name} returned an {text.removeprefix(_TRACING)}")


_SLOT, _SAME = "slot", "same"  # ways to an argument: what lies in a slot, or a constant


def _arguments(step: OpaqueStep, slots: Slots) -> list[Any]:
    """The arguments of a call. How each is had is found once: most are constants, or lie in slots."""
    ways = step.ways
    if ways is None:
        ways = step.ways = [_way(each) for each in step.arguments]
    return [slots[each] if way is _SLOT else each if way is _SAME else way(each, slots) for way, each in ways]


def _way(template: Any) -> tuple[Any, Any]:
    if type(template) is Slot:
        return _SLOT, template
    if not isinstance(template, (list, tuple)):
        return _SAME, template
    ways = [_way(each)[0] for each in template]
    if all(way is _SAME for way in ways):
        return _SAME, _filled(template, [])
    return (_filled if any(way not in (_SLOT, _SAME) for way in ways) else _filled_flat), template


def _filled_flat(template: Any, slots: Slots) -> list[Any]:
    return [slots[each] if type(each) is Slot else each for each in template]


def _filled(template: Any, slots: Slots) -> Any:
    if type(template) is Slot:
        return slots[template]
    if isinstance(template, (list, tuple)):
        return [_filled(each, slots) for each in template]
    return template
