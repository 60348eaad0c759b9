"""The report of a form that was found to be wrong: the difference, its place and size, and a reproduction."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..backends.modes import DEFAULT
from ..backends.registry import FunctionBackend
from ..diagnostics.node_names import module_near
from ..reproduction.records import About
from ..reproduction.writing import Kept, keep, region_tape
from ..shadow_cache import Mismatch
from ..steps.passes import leaves_of
from .aliasing import Result
from .comparison import worst

if TYPE_CHECKING:
    from ..lowering.region_compiler import RegionCompiler
    from ..steps.steps import RegionStep, Slots


@dataclass(frozen=True, slots=True)
class Refuted:
    """A form of a compiled region that differs from the real calls.

    Attributes:
        inputs: the slots before the region's run.
        wrong: the result that differs; None for another difference.
        difference: the difference, in words.
        instead: the form that runs from now on, in words.
    """

    region_compiler: RegionCompiler
    step: RegionStep
    inputs: Slots
    form: str
    wrong: Result | None
    difference: str
    instead: str

    def mismatch(self) -> Mismatch:
        """Make the record of the difference, and write a reproduction of the region."""
        region_compiler, wrong = self.region_compiler, self.wrong
        node = self.step.region.nodes[-1] if wrong is None else wrong.node
        value = region_compiler.name_of(node)
        where = f"{value}, {region_compiler.where(self.step, self.form)}"
        most = None if wrong is None else worst(wrong.want, wrong.found)
        difference = self.difference
        if most is not None and most.error > 0:
            difference += f"; {most}"
        kept = reproduction_of(region_compiler, self.step, self.inputs, where, difference)
        leaf = next(iter(leaves_of(node)), None)
        tape, regions = region_compiler.tape, [*region_compiler.regions()]
        return Mismatch(
            "mismatch",
            where,
            difference,
            f"{self.instead}; {kept.text}",
            value=value,
            parameter=None if leaf is None else region_compiler.leaf_name(leaf),
            module=None if tape is None else module_near(tape, node.meta.get("call", 0)),
            region=regions.index(self.step) + 1 if self.step in regions else 0,
            form=self.form,
            largest=None if most is None else most.error,
            index=() if most is None else most.index,
            eager=None if most is None else most.want,
            found=None if most is None else most.found,
            reproduction=kept.path,
        )


def reproduction_of(
    region_compiler: RegionCompiler, step: RegionStep, slots: Slots, where: str, difference: str
) -> Kept:
    """Write a reproduction of one region, with made-up values.

    Args:
        slots: the slots before the region's run.
        where: the names of the region and its tape, in words.
        difference: the difference, in words.
    """
    if region_compiler.tape is None:
        return Kept(None, "there is no reproduction of it")
    name, _, mode = region_compiler.backend.name.partition(":")
    dynamic = None if region_compiler.dynamic else False
    about = About(backend=name, mode=mode or DEFAULT, dynamic=dynamic, where=where, difference=difference)
    kept = keep(*region_tape(region_compiler.tape, step, slots), about=about)
    backend = region_compiler.backend
    if kept.path is None or not isinstance(backend, FunctionBackend) or backend.is_registered:
        return kept
    return replace(kept, text=f"{kept.text}, which another process can run once it is given the backend, a function")
