"""Calls what a region was compiled to: from its slots, and back into them. Whether such a run is to be compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from ..backends.protocol import form_for, is_last, proving_runs
from ..ir import NaNFoundError
from .memory import in_own_memory, laid_out, made_plain
from .proof import Sizes
from .run_context import RunContext
from .steps import CompiledRegion, Slots

_Results = TypeVar("_Results")


def arguments_of(compiled: CompiledRegion, slots: Slots) -> list[Any]:
    """Return the arguments of a compiled region, some of them without conjugate and negative bit."""
    arguments = [slots[slot] for slot in compiled.arguments]
    for position in compiled.plain:
        arguments[position] = made_plain(arguments[position])
    return arguments


def sizes_of(compiled: CompiledRegion, arguments: Sequence[Any]) -> Sizes | None:
    """Return the values of the symbols of compiled code; None if it has no symbols."""
    return None if compiled.guard is None else compiled.guard.values(arguments)


def is_due(compiled: CompiledRegion, slots: Slots, context: RunContext) -> bool:
    """Return whether a run of compiled code has to be compared with the real calls."""
    proof = compiled.proof
    if context.compare_all:
        return True
    if proof.settled and context.profile is None:
        return False
    arguments = arguments_of(compiled, slots)
    sizes = sizes_of(compiled, arguments)
    form = form_for(compiled.call, arguments)
    runs = proving_runs(compiled.call)
    if context.profile is not None and proof.left.get(form, runs) < runs:
        return False  # whoever looks on would take what comparing costs for what the backward costs
    return proof.due(form, runs, sizes, final=context.profile is None and is_last(compiled.call, form))


def run_compiled(call: Callable[..., _Results], *arguments: Any) -> _Results:
    """Call something compiled."""
    if torch._C._is_any_autocast_enabled():
        with torch._C._DisableAutocast():  # the graph has its casts in it
            return call(*arguments)
    return call(*arguments)


def pass_on(compiled: CompiledRegion, slots: Slots) -> None:
    """Put what goes to leaves as it is where they look for it."""
    for to, source in compiled.passed:
        slots[to] = slots[source]


def store_results(compiled: CompiledRegion, results: Sequence[Any], slots: Slots) -> None:
    """Put what a compiled region gave where the steps after it look for it.

    Raises:
        NaNFoundError: NaNs are looked for, and a node of the tape gave one.
    """
    for slot, index in compiled.results:
        slots[slot] = results[index]
    for slot, index in compiled.copied:
        slots[slot] = in_own_memory(results[index])
    for slot, index, order in compiled.permuted:
        slots[slot] = laid_out(results[index], order)
    if compiled.flags and results[-1].any():
        raise NaNFoundError(*compiled.flags[results[-1].tolist().index(True)])


def put_results(compiled: CompiledRegion, results: Sequence[Any], slots: Slots) -> None:
    """Pass values on and store results, while the region's inputs are still in their slots."""
    pass_on(compiled, slots)
    store_results(compiled, results, slots)


_MAX_CALLS_THROUGH = 8
"""Regions with more calls are not examined for whether they compute anything."""


def handed_through(compiled: CompiledRegion, calls: int) -> list[tuple[int, int]]:
    """Slots that get what lies in others, where a region computes nothing: such as what a node gives to the next one,
    between a function and a hook, when it has the shape and the dtype that it is to have. Empty for other regions."""
    more = (compiled.copied, compiled.permuted, compiled.flags, compiled.plain)
    if calls > _MAX_CALLS_THROUGH or any(more) or not compiled.results:
        return []
    *takes, output = compiled.aten.graph_module().graph.nodes
    places = {node: slot for node, slot in zip(takes, compiled.arguments, strict=False) if node.op == "placeholder"}
    given = output.args[0]
    if len(places) < len(takes) or not all(given[index] in places for _, index in compiled.results):
        return []
    return [(slot, places[given[index]]) for slot, index in compiled.results]
