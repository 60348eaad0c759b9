"""Facts of an entry in the store, for people: its nodes, its inputs, its guards, its origin."""

from __future__ import annotations

from typing import Any

from .. import ir
from ..diagnostics.node_names import call_name, uses
from ..guards.shapes import size_in
from ..shadow_cache import Call, Input, Structure
from .variants import Variant


def structure_of(tape_graph: ir.TapeGraph, identity: str) -> Structure:
    """A tape as the store keeps it: its keys as text for people, and as records to be compared with."""
    keys = tape_graph.structure()
    *texts, end = [tuple(map(str, key)) for key in keys]
    calls = tuple(
        Call(call.name, text, call.parameter, call.source, tuple(call.edges or ()))
        for call, text in zip(tape_graph.calls, texts, strict=True)
    )
    return Structure(identity, calls, end, tape_graph.readable(), ir.encode_keys(keys))


def loss_of(tape_graph: ir.TapeGraph) -> str:
    return tape_graph.calls[1].name if len(tape_graph.calls) > 1 else tape_graph.calls[0].name


def inputs_of(tape_graph: ir.TapeGraph, variant: Variant) -> tuple[Input, ...]:
    users = uses(tape_graph)
    symbols: dict[Any, str] = {}
    inputs = []
    for index, spec in enumerate(variant.shapes.tensors):
        lifted = tape_graph.inputs[index]
        sizes = map(size_in, spec)
        names = [str(size) if isinstance(size, int) else symbols.setdefault(size, f"s{len(symbols)}") for size in sizes]
        user = users.get(ir.Lifted("input", index))
        where = "unused" if user is None else call_name(tape_graph, user)
        inputs.append(Input(where, lifted.dtype, lifted.device, tuple(names)))
    return tuple(inputs)


def guards_of(variant: Variant) -> tuple[str, ...]:
    """Return the conditions on the symbols, without those that only name a symbol's source."""
    guards = [each.guard for step in variant.regions for each in step.compiled_regions() if each.guard is not None]
    conditions = [condition for guard in guards for condition in guard.conditions if condition.origin is None]
    return tuple(dict.fromkeys(map(str, conditions)))
