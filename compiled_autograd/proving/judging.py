"""Compares the results of compiled code with those of the real calls, in everything that a program could see."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from .. import ir
from ..backends.signal_handlers import raise_what_a_handler_raised
from ..lowering.wiring import restrided
from ..steps.accumulate import is_dense, obeys_layout
from ..steps.memory import first_along, repeated
from ..steps.steps import lies_apart
from .aliasing import Result, kept_from_before, newly_shared
from .comparison import (
    Optional,
    are_zeros,
    at_most,
    has_other_format,
    metadata_difference,
    noise_of,
    plainly_alike,
    sizes_up,
    tolerance,
    value_difference,
)
from .fingerprints import is_seeded, twins
from .reference import each_in_double, in_double, once_more
from .tf32 import rounding_operators, tolerance_of
from .whole import distance

if TYPE_CHECKING:
    from ..lowering.region_compiler import RegionCompiler
    from ..native.interface import Module
    from ..steps.steps import CompiledRegion, RegionStep, Slots


@dataclass(slots=True)
class Judge:
    """Compares one run of a compiled region: ``inputs`` are the slots as they were before, ``arguments`` what the
    compiled code was given, ``given`` the memory of what either way was given, and ``module`` the extension, if it is
    there: it settles most results at once. ``rounding`` gets by how much each result differs, by its slot."""

    region_compiler: RegionCompiler
    step: RegionStep
    compiled: CompiledRegion
    inputs: Slots
    arguments: Sequence[Any]
    given: set[int | None]
    module: Module | None = None
    rounding: dict[int, float] | None = None

    def compare(self, wanted: Slots, found: Slots) -> tuple[Result | None, str | None, bool]:
        """Return the result that differs, its difference in words, and whether the run could have shown much.

        Args:
            wanted: the slots as the real calls have filled them.
            found: the slots as the compiled code has filled them.
        """
        results = self._results(wanted, found)
        wants = [result.want for result in results if result.want is not None]
        bitwise = self.region_compiler.backend.bitwise and all(want.device.type == "cpu" for want in wants)
        relative = 0.0 if bitwise else tolerance(self._dtypes(results))
        sizes = [sizes_up(want) for want in wants]
        telling = all(shows for _, shows in sizes)
        beside = 0.0 if bitwise else max((size for size, _ in sizes), default=0.0)
        other_layouts: dict[int, torch.Tensor] = {}
        other_strides: list[tuple[Result, str]] = []
        doubtful: list[Result] = []
        wrong: tuple[Result, str] | None = None
        unclear = self._unclear(results, relative)
        for index, result in enumerate(results):
            difference = self._layout(result)
            if (position := self._strides_at_most(result)) is not None:
                assert result.want is not None and result.found is not None
                if difference is not None:
                    other_strides.append((result, difference))
                    other_layouts[position], difference = result.want, None
                elif has_other_format(result.want, result.found) and lies_apart(self.compiled.wiring, position):
                    other_layouts[position] = result.want
            if difference is None and result.want is not None and result.found is not None:
                if not relative:
                    difference = self._in_bits(result, beside)
                elif index in unclear and not self._plainly(result, relative, beside):
                    doubtful.append(result)
            if difference is not None:
                wrong = result, difference
                break
        wrong = self._in_float64(doubtful, relative, beside) or wrong
        if wrong is not None:
            return (*wrong, telling)
        if other_layouts:
            wiring = restrided(self.compiled.wiring, other_layouts)
            if wiring is None:
                return (*other_strides[0], telling)
            self.step.put_in_place(self.compiled, self.step.rebind(self.compiled, wiring))
        if self.rounding is not None:
            self.rounding.update({each.slot: distance(each.want, each.found) for each in results})
        shared = self._shared(results)
        return (*shared, telling) if shared is not None else (None, None, telling)

    def _dtypes(self, results: Sequence[Result]) -> list[torch.dtype]:
        values = [*self.arguments, *(result.want for result in results)]
        return [value.dtype for value in values if isinstance(value, torch.Tensor)]

    def _results(self, wanted: Slots, found: Slots) -> list[Result]:
        results = []
        for leaf in self.step.fresh:
            node = leaf.call.args[2]
            assert isinstance(node, fx.Node)
            want = wanted[leaf.shared] if wanted[leaf.owned] is None else wanted[leaf.owned]
            if found[leaf.owned] is None:
                results.append(Result(node, leaf.leaf, want, found[leaf.shared]))
            else:
                results.append(Result(node, leaf.leaf, want, found[leaf.owned], self.inputs[leaf.leaf]))
        made_for_leaves = {leaf.shared for leaf in self.step.fresh}
        for node, slot in self.step.outputs:
            if slot not in made_for_leaves or found[slot] is not None:
                results.append(Result(node, slot, wanted[slot], found[slot]))
        return results

    def _layout(self, result: Result) -> str | None:
        seen = result.leaf is None and not _only_added(result.node)
        difference = metadata_difference(result.want, result.found, strides=seen)
        if difference is not None or result.leaf is None or result.found is None:
            return difference
        if not obeys_layout(result.found, result.leaf):
            return f"its strides are {result.found.stride()}, for a leaf with {result.leaf.stride()}"
        return None

    def _strides_at_most(self, result: Result) -> int | None:
        """Return the number of a region's output whose strides matter, if nothing but its strides can differ."""
        want = result.want
        if result.leaf is not None or want is None or want.layout is not torch.strided or _only_added(result.node):
            return None
        if metadata_difference(want, result.found, strides=False) is not None:
            return None
        positions = [number for number, (node, _) in enumerate(self.step.outputs) if node is result.node]
        return positions[0] if positions and is_dense(first_along(want, repeated(want))) else None

    def _unclear(self, results: Sequence[Result], relative: float) -> Collection[int]:
        """Return the numbers of the results that the extension does not show to be the same but for rounding."""
        values = [value for each in results for value in (each.want, each.found) if value is not None]
        if self.module is None or not relative or not all(map(ir.is_plain, values)):
            return range(len(results))
        return self.module.unlike([each.want for each in results], [each.found for each in results], relative)

    def _plainly(self, result: Result, relative: float, beside: float) -> bool:
        assert result.want is not None and result.found is not None
        noise, name = self.compiled.proof.noise, result.node.name
        if name in noise and at_most(noise[name] * beside, result.want, result.found):
            return True
        return plainly_alike(result.want, result.found, relative, beside)

    def _in_float64(self, doubtful: Sequence[Result], relative: float, beside: float) -> tuple[Result, str] | None:
        """Return the first result whose difference is not rounding, and the difference in words.

        One run of the calls computes all values in float64. Each result that this does not settle is computed from
        moved inputs, in turn, until one is wrong.
        """
        unsettled: set[int] = set()
        for node, double in self._each_in_double(doubtful):
            for index, result in enumerate(doubtful):
                if result.node is node and self._beside(result, relative, beside, {0: double}.get) is not None:
                    unsettled.add(index)
            del double  # before the next is computed
        for index in sorted(unsettled):
            result = doubtful[index]
            difference = self._beside(result, relative, beside, functools.partial(self._in_double, result.node))
            if difference is not None:
                return result, difference
        return None

    def _each_in_double(self, results: Sequence[Result]) -> Iterable[tuple[fx.Node, Optional]]:
        nodes = list(dict.fromkeys(result.node for result in results))
        if not nodes or not self._has_float64():
            return [(node, None) for node in nodes]
        return each_in_double(self.step.region.nodes, self._given(), nodes)

    def _beside(self, result: Result, relative: float, beside: float, wide: Callable[[int], Optional]) -> str | None:
        """Return how a result differs, given the same value in float64."""
        assert result.want is not None and result.found is not None
        doubles: list[Optional] = []

        def noted(moved: int) -> Optional:
            double = wide(moved)
            if moved == 0:
                doubles.append(double)
            return double

        difference = value_difference(result.want, result.found, relative, noted, beside, self._coarse)
        if difference is None and doubles and doubles[0] is not None and beside > 0:
            most = noise_of(result.want, result.found, doubles[0], relative * beside)
            if most is not None:
                self.compiled.proof.noise[result.node.name] = most / beside
        return difference

    def _in_bits(self, result: Result, beside: float) -> str | None:
        """Return how a result that must have the same bits differs, unless two runs of the real calls differ too."""
        assert result.want is not None and result.found is not None
        difference = value_difference(result.want, result.found, 0.0, lambda _: None)
        if difference is None or self.region_compiler.passes:
            return difference
        again = once_more(self.step.region.nodes, self._given(), result.node)
        if again is None or value_difference(result.want, again, 0.0, lambda _: None) is None:
            return difference
        wide = functools.partial(self._in_double, result.node)
        return value_difference(result.want, result.found, tolerance(self._dtypes([result])), wide, beside)

    def _coarse(self) -> float:
        """Return the tolerance for calls of the region that may round more coarsely than their dtypes."""
        operators = rounding_operators([self.inputs[slot] for slot in self.step.inputs])
        return tolerance_of(self.compiled.aten.text(), operators) if operators else 0.0

    def _given(self) -> dict[fx.Node, Any]:
        """Return the inputs of the region for another run of its calls: copies, if the calls write into them."""
        region = self.step.region
        values = [self.inputs[slot] for slot in self.step.inputs]
        if self.compiled.proof.overwritten:
            values = twins(values)
        return dict(zip(region.inputs, values, strict=True))

    def _has_float64(self) -> bool:
        """Return whether float64 can be computed: not for a graph changed by the user's passes, nor with random
        operators, which would draw other numbers."""
        if self.region_compiler.passes:
            return False
        compiled = self.compiled
        return not (compiled.proof.draws and is_seeded(compiled.aten.text()))  # names say more than is so

    def _in_double(self, node: fx.Node, moved: int) -> Optional:
        return in_double(self.step.region.nodes, self._given(), node, moved) if self._has_float64() else None

    def _shared(self, results: Sequence[Result]) -> tuple[Result, str] | None:
        """Return a result that shares memory, if the real calls' result does not."""
        difference = newly_shared(results, self.given)
        if difference is not None or self.region_compiler.backend.allocates:
            return difference
        return kept_from_before(self.compiled.proof, results, self.given)


def shows_nothing(step: RegionStep, slots: Slots) -> bool:
    """Return whether a region gave only zeros, as for a loss with a margin that is reached. False if that cannot be
    checked.

    Args:
        slots: the slots as the region has filled them.
    """
    leaves = [each.shared if slots[each.owned] is None else each.owned for each in step.fresh]
    try:
        return are_zeros([slots[slot] for slot in {*leaves, *(slot for _, slot in step.outputs)}])
    except Exception as error:  # noqa: BLE001  no memory, or not what it needs: the results are there, and go on
        raise_what_a_handler_raised(error)
        return False


def _only_added(node: fx.Node) -> bool:
    """Return whether a gradient is only added into leaves, for which its strides do not matter."""
    return all(user.target is ir.accumulate_grad for user in node.users)
