"""Compute the memory of a variant's backward, in bytes, from the sizes in its graphs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

from .. import ir
from ..cache.variants import Variant
from ..shadow_cache.report import data
from ..steps.steps import AccumulateStep, RegionStep
from .sizes import RegionSizes, given_tensors, run_region, size_in_bytes
from .stages import newest

_MAX_POINTS = 800
_HOW = (
    "Computed from the sizes in the graphs, as if the operators ran one by one; a backend that fuses operators needs "
    "less memory. Weights are not counted."
)


def run_without_memory(variant: Variant) -> dict[int, RegionSizes]:
    """Return the memory use of each region, by the number of its step."""
    known: dict[fx.Node, Any] = given_tensors(variant)
    found: dict[int, RegionSizes] = {}
    for number, step in enumerate(variant.program.schedule.steps):
        compiled = newest(step) if isinstance(step, RegionStep) else None
        if isinstance(step, RegionStep) and compiled is not None:
            sizes = found[number] = run_region(step, compiled, known)
            if not sizes.error:
                known.update((step.outputs[place][0], sizes.results[index]) for place, index in compiled.wiring.values)
    return found


def memory_of(variant: Variant, sizes: Mapping[int, RegionSizes], lines: Mapping[tuple[int, str], int]) -> data.Memory:
    """Return the bytes after each operator.

    Args:
        sizes: the result of :func:`run_without_memory`.
        lines: for a step and a name, the line of the ATen stage that defines the name.
    """
    wrong = next((each.error for each in sizes.values() if each.error), "")
    if wrong or not sizes:
        return data.Memory((), (), f"Not known: {wrong or 'nothing is compiled'}.")
    saved, made = _saved(variant, sizes), 0
    points: list[tuple[int, int, int]] = [(saved, made, -1)]
    steps: list[int] = []
    slots = {slot: node for node, slot in variant.program.schedule.slot_of.items()}
    given = given_tensors(variant)
    for number, step in enumerate(variant.program.schedule.steps):
        steps.append(len(points))
        region = sizes.get(number)
        if region is not None:
            saved, made = saved - region.saved, made - region.made
            points += [(saved + use.saved, made + use.made, lines.get((number, use.name), -1)) for use in region.uses]
            results = {
                each.untyped_storage()._cdata: size_in_bytes(each) for each in region.results if each is not None
            }
            made += sum(results.values())
        elif not isinstance(step, AccumulateStep):
            dropped = [slots[slot] for slot in step.drops if slot in slots]
            saved -= sum(size_in_bytes(given.get(node)) for node in dropped if not _outlives(node))
        points.append((max(saved, 0), max(made, 0), -1))
    return _thinned(points, steps)


def _saved(variant: Variant, sizes: Mapping[int, RegionSizes]) -> int:
    weights = {node for each in sizes.values() for node in each.weights}
    given = given_tensors(variant)
    return sum(size_in_bytes(value) for node, value in given.items() if node not in weights and not _outlives(node))


def _outlives(node: fx.Node) -> bool:
    """Return whether a placeholder is only a leaf or the ``.grad`` of one."""
    return all(user.target is ir.accumulate_grad for user in node.users)


def _thinned(points: list[tuple[int, int, int]], steps: list[int]) -> data.Memory:
    """Reduce the points to at most :data:`_MAX_POINTS`: of neighbouring points, keep the highest."""
    stride = -(-len(points) // _MAX_POINTS)
    kept = [
        max(points[first : first + stride], key=lambda point: point[0] + point[1])
        for first in range(0, len(points), stride)
    ]
    return data.Memory(tuple(kept), tuple(first // stride for first in steps), _HOW)
