"""The store's records of a variant and of its regions, beside the compiled code. They suffice to find the code for a
backward, and to run it, in another process that captured the same tape.

Calls and values are named by their position in the tape graph, which is a part of the structure's id.
"""

from __future__ import annotations

import hashlib
import operator
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec

from .. import ir
from ..diagnostics.node_names import module_of
from ..diagnostics.users_line import program, users_line
from ..guards.shapes import Spec
from ..shadow_cache import Entry, Miss, Region
from ..steps.steps import RegionRecord
from .metadata import guards_of, inputs_of, loss_of
from .variants import Handover, Shapes, TensorRecord, Variant, fits


class VariantRecord(msgspec.Struct, frozen=True):
    """The values that a variant serves, and facts found out for it.

    Attributes:
        tensors: the lifted tensors.
        sizes: the spec of all sizes.
        scalars: the scalars.
        specs: the specs of values that steps hand on, by position.
        untraceable: calls that cannot be traced, by position, and the reasons.
    """

    tensors: tuple[TensorRecord, ...]
    sizes: Spec
    scalars: tuple[int | float, ...]
    specs: tuple[tuple[int, Spec], ...] = ()
    untraceable: tuple[tuple[int, str], ...] = ()

    def serves(self, handover: Handover) -> bool:
        """Return whether this is the variant for a backward. Each region's guard checks the symbols."""
        if self.scalars != tuple(handover.scalars) or not fits(self.sizes, handover.sizes):
            return False
        if len(self.tensors) != len(handover.tensors):
            return False
        return all(record.serves(tensor) for record, tensor in zip(self.tensors, handover.tensors, strict=True))


def record_of(variant: Variant) -> VariantRecord:
    """Make the record of a variant that has run."""
    assert variant.tensors is not None
    positions = {node: position for position, node in enumerate(variant.program.tape.graph.nodes)}
    region_compiler = variant.program.region_compiler
    handed_on = [(node, spec) for node, spec in region_compiler.specs.items() if node.op != "placeholder"]
    return VariantRecord(
        tuple(variant.tensors),
        variant.shapes.sizes,
        tuple(variant.scalars),
        tuple((positions[node], spec) for node, spec in handed_on),
        tuple((positions[node], reason) for node, reason in variant.program.schedule.untraceable.items()),
    )


def entry_of(
    tape: ir.TapeGraph,
    variant: Variant,
    identity: str,
    structure: str,
    state: Sequence[Any],
    regions: Sequence[Region],
    misses: Sequence[Miss],
    seconds: float,
) -> Entry:
    """Make the store's entry of a variant that has run.

    Args:
        identity: the entry's id; ``structure`` is that of its structure.
        state: settings, ambient state and environment.
        misses: the reasons why it was made, the first one first.
        seconds: the cost of making it.
    """
    settings, ambient, environment = state
    return Entry(
        id=identity,
        structure=structure,
        loss=loss_of(tape),
        module=module_of(tape),
        source=str(users_line()),
        program=program(),
        nodes=len(tape.calls),
        settings=settings,
        ambient=ambient,
        environment=environment,
        inputs=inputs_of(tape, variant),
        dynamic=variant.shapes.dynamic,
        guards=guards_of(variant),
        record=msgspec.msgpack.encode(record_of(variant)),
        regions=tuple(regions),
        miss=misses[0] if misses else Miss("first_seen"),
        seconds=seconds,
        created=time.time(),
    )


def undropped(encoded: bytes) -> RegionRecord:
    """The record of a region, but for what was found to be wrong with it."""
    return msgspec.structs.replace(msgspec.msgpack.decode(encoded, type=RegionRecord), dropped=())


def shapes_of(record: VariantRecord, handover: Handover) -> Shapes:
    """The shapes of a record that serves a backward."""
    return replace(Shapes.of(handover), tensors=[tensor.spec for tensor in record.tensors], sizes=record.sizes)


def structure_id(tape: ir.TapeGraph, keys: Sequence[ir.StructureKey]) -> str:
    """Names a structure in the store: the same for the same tape in any process, its order of execution included."""
    digest = hashlib.sha256(ir.encode_keys(keys))
    positions = {node: position for position, node in enumerate(tape.graph.nodes)}
    for node in positions:  # records name nodes by their positions
        sources = [positions[source] for source in node.all_input_nodes]
        item = node.args[1] if node.target is operator.getitem else -1
        digest.update(msgspec.msgpack.encode((node.meta.get("call", -1), sources, item)))
    return digest.hexdigest()[:32]
