"""Run eager and compiled; keep eager's gradients; compare.

A tape without users' code can run twice. The eager engine computes its gradients first, then compiled code computes
them too, and whole gradients are compared, which costs little. If they are not plainly the same, the regions are
compared one by one, on the tape's values (:mod:`compiled_autograd.proving.prover`). Only that comparison decides
whether something is wrong, and where.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ... import ir
from ...backends.signal_handlers import raise_what_a_handler_raised
from ...cache.graphs import CompiledGraph
from ...cache.variants import Variant
from ...diagnostics.reporting import text_of
from ...errors import GradientMismatchError
from ...guards.ambient import Ambient
from ...proving.comparison import tolerance
from ...proving.fingerprints import Draws, may_draw, names_random
from ...proving.whole import apart, distance, is_like, most_of_rounding
from ...runtime.program import Program
from ...shadow_cache import Failure, Mismatch
from ...steps.accumulate import give
from ...steps.memory import is_out_of_memory
from ...steps.run_context import RunContext
from ...steps.steps import AccumulateStep, OpaqueStep, RegionStep, Slots
from ...torch_api import attributes
from ...user_code.in_place import all_versions
from ..call import Call

Gradients = list[torch.Tensor | None]
_WRITES_WHAT_IT_SAVED = "Rnn"
"""Part of the names of nodes that write into saved values: a second run would find other values."""


def may_run_twice(graph: CompiledGraph) -> bool:
    """Return whether a tape has only PyTorch's own nodes, and none of them changes anything."""
    if graph.runs_twice is None:
        tape = graph.tape
        targets = [node.target for node in tape.graph.nodes]
        graph.runs_twice = not (
            tape.needs_engine
            or tape.runs_users_code
            or any(isinstance(each, ir.InlinedBackward) for each in targets)
            or any(isinstance(each, ir.OpaqueOp) and each.custom for each in targets)
            or any(_WRITES_WHAT_IT_SAVED in call.name for call in tape.calls)
        )
    return graph.runs_twice


def may_run_beside(variant: Variant, ambient: Ambient, context: RunContext) -> bool:
    """Return whether whole gradients can be compared, and nothing observes the run that would count it twice: a
    profiler, a log of nodes, or anomaly mode."""
    looked_at = context.profile is not None or context.log is not None or dict(ambient)["check_nan"]
    return not looked_at and not variant.program.region_compiler.passes  # which change gradients on purpose


def asked_for(call: Call, program: Program, slots: Slots) -> list[Any] | None:
    """Return the inputs for which the eager engine gives the same gradients as compiled code. None if these are not one
    gradient for each leaf, or the results of ``autograd.grad``."""
    leaves = [slots[slot] for slot in _leaves(program)]
    if not call.accumulate_grad:
        return None if leaves else list(call.inputs)
    ids = {id(leaf) for leaf in leaves}
    if len(ids) < len(leaves) or any(output is not None for output in program.schedule.outputs):
        return None
    if call.inputs and ids != {id(each) for each in call.inputs}:
        return None
    with torch._C.DisableTorchFunctionSubclass():
        return leaves if leaves and all(attributes.requires_grad(leaf) for leaf in leaves) else None


def _leaves(program: Program) -> list[int]:
    """The slots of the leaves, in the order in which they are written."""
    return [leaf for step in program.schedule.steps if isinstance(step, AccumulateStep) for leaf in step.leaves]


@dataclass
class Beside:
    """One backward that runs both ways.

    Args:
        asked: see :func:`asked_for`.
        on_eager: runs a backward on the eager engine, with the engine's arguments.
        slots: the values of the tape.
    """

    call: Call
    variant: Variant
    asked: list[Any]
    on_eager: Callable[..., Any]
    slots: Slots
    context: RunContext
    eager_writes: bool = field(init=False)
    """True if the eager engine writes leaves: only if no leaf has a ``.grad``, since the amount added to an existing
    one would be unknown."""

    def __post_init__(self) -> None:
        self.eager_writes = self.call.accumulate_grad and all(attributes.grad(leaf) is None for leaf in self.asked)

    def run(self) -> Gradients:
        """Run it both ways; leaves get what the eager engine has computed. Gives what ``autograd.grad`` asked for.

        Raises:
            GradientMismatchError: compiled code has written into what it was given, which cannot be undone.
        """
        report, program = self.context.report, self.variant.program
        report.compared = True
        drawn_from = self.slots if _may_draw(program) else None
        start = Draws(drawn_from)
        try:
            with report.timed("prove"):
                wanted = self._by_eager()
        except Exception as error:
            raise_what_a_handler_raised(error)
            if not is_out_of_memory(error):
                raise
            self._tell("unproved", f"{type(error).__name__}: {error}", "this run was not compared with eager")
            start.restore()
            for leaf in self.asked if self.eager_writes else ():
                attributes.set_grad(leaf, None)
            return program.run(self.slots, self.context)
        end = Draws(drawn_from)
        try:
            wanted = self._compared(wanted, start)
        finally:
            end.restore()
            if self.call.accumulate_grad and not self.eager_writes:
                self.slots.clear()
                give(self.asked, wanted)
        return wanted

    def _by_eager(self) -> Gradients:
        call = self.call
        kept = call.outputs, call.grads, call.keep_graph, call.create_graph
        if self.eager_writes:
            self.on_eager(*kept, call.inputs, call.allow_unreachable, call.accumulate_grad)
            return [attributes.grad(leaf) for leaf in self.asked]
        return list(self.on_eager(*kept, tuple(self.asked), call.accumulate_grad or call.allow_unreachable, False))

    def _compared(self, wanted: Gradients, start: Draws) -> Gradients:
        """Compare what compiled code gives. Gives ``wanted``, or what the real calls give where that is more."""
        tensors = self.slots[: self.variant.program.schedule.tensors]
        versions = all_versions(tensors)
        found = self._compiled(start)
        now = all_versions(tensors)
        if isinstance(found, list):
            with self.context.report.timed("prove"):
                if not self._apart(wanted, found) and now == versions:
                    return wanted
        failures = len(self.context.report.failures)
        real = self._region_by_region(start)
        self._see_what_was_written({slot for slot, version in enumerate(versions) if now[slot] != version})
        if len(self.context.report.failures) == failures:
            if isinstance(found, list):
                self._settle(real, found, start)
            else:
                self._tell("run", found, "eager's gradients were used")
            self._doubt_the_tape(wanted, real)
        undefined = [(one is None) is not (other is None) for one, other in zip(wanted, real, strict=True)]
        return real if any(undefined) else wanted

    def _compiled(self, start: Draws) -> Gradients | str:
        """Return the gradients of compiled code, or the text of its error. The error itself would keep its frames
        alive, and those of its causes: the caller's are among them."""
        start.restore()
        try:
            return self._kept()
        except GradientMismatchError:
            raise
        except Exception as error:  # noqa: BLE001  whatever a backend throws: eager's gradients are there
            raise_what_a_handler_raised(error)
            return text_of(error)

    def _kept(self) -> Gradients:
        """Run compiled code, and write no leaf."""
        context, program = self.context, self.variant.program
        context.kept, uncompiled = {}, context.report.uncompiled
        try:
            results = program.run(list(self.slots), context)
        finally:
            kept, context.kept = context.kept, None
        context.report.uncompiled = max(uncompiled, context.report.uncompiled - uncompiled)
        return [kept[leaf] for leaf in _leaves(program)] if self.call.accumulate_grad else results

    def _region_by_region(self, start: Draws) -> Gradients:
        """Return the results of the real calls of each region, compared with compiled code."""
        start.restore()
        self.context.compare_all = True
        try:
            return self._kept()
        finally:
            self.context.compare_all = False

    def _apart(self, wanted: Gradients, found: Gradients) -> list[int]:
        program = self.variant.program
        bitwise = program.region_compiler.backend.bitwise and self.variant.devices <= {"cpu"}
        return apart(wanted, found, 0.0 if bitwise else self._tolerance(), self.variant.rounding, self.context.module)

    def _tolerance(self) -> float:
        return tolerance([*{tensor.dtype for tensor in self.slots[: self.variant.program.schedule.tensors]}])

    def _settle(self, real: Gradients, found: Gradients, start: Draws) -> None:
        """Judge whole gradients that differ although each region is right. A difference that repeats is rounding,
        and sets the limit for later runs. A difference that does not repeat, or is too large for rounding, is
        unexplained."""
        again, known = self._compiled(start), self.variant.rounding
        if not isinstance(again, list):
            return
        for index in self._apart(real, found):
            rounding = distance(real[index], again[index])
            if rounding <= self._most_of_rounding(real, index):
                known[index] = max(known.get(index, 0.0), rounding)
        for index in self._apart(real, found):
            if not is_like(real[index], found[index]):
                continue
            rounding, error = (distance(real[index], each[index]) for each in (again, found))
            if error > min(rounding, self._most_of_rounding(real, index)):
                what = f"gradient {index} was {error:.3g} from eager's, and {rounding:.3g} when compiled code ran again"
                self._tell("unproved", what, "eager's gradients were used")

    def _most_of_rounding(self, real: Gradients, index: int) -> float:
        """The largest rounding of a gradient. A sum that cancelled has no size of its own: its region's comparison has
        shown how large rounding makes it."""
        program = self.variant.program
        slots = [{each} for each in program.schedule.outputs]
        if self.call.accumulate_grad:
            steps = [step for step in program.schedule.steps if isinstance(step, AccumulateStep)]
            slots = [{*each} for step in steps for each in zip(step.leaves, step.owned, step.shared, strict=True)]
        known = max((self.context.rounding.get(slot, 0.0) for slot in slots[index] if slot is not None), default=0.0)
        return most_of_rounding(real, index, self._tolerance(), known)

    def _doubt_the_tape(self, wanted: Gradients, real: Gradients) -> None:
        """Report real calls that differ from eager. Then not compiled code is wrong, but the tape graph; or another
        thread has written into ``.grad``."""
        for index in self._apart(wanted, real):
            error = distance(wanted[index], real[index])
            alike = is_like(wanted[index], real[index])
            if alike and error > most_of_rounding(wanted, index, self._tolerance()):
                what = f"gradient {index} was {error:.3g} from eager's as the real calls of the tape graph gave it, too"
                self._tell("unproved", what, "eager's gradients were used")

    def _see_what_was_written(self, slots: set[int]) -> None:
        """Report writes into the inputs of compiled code while it ran. The comparison of regions finds writes of each
        run.

        Raises:
            GradientMismatchError: a region had such an input.
        """
        program, report = self.variant.program, self.context.report
        given = {slot for step in program.schedule.steps if isinstance(step, RegionStep) for slot in step.inputs}
        nodes = [node for node, slot in program.schedule.slot_of.items() if slot in slots & given]
        if not nodes:
            return
        name = program.region_compiler.name_of(nodes[0])
        what = f"{name}, an input of compiled code, was overwritten while the code ran"
        where = program.region_compiler.title()
        report.mismatched(Mismatch("mismatch", where, what, "eager's gradients were used", value=name))
        raise GradientMismatchError(report.mismatches, f"{name} was overwritten, and has to be computed again")

    def _tell(self, kind: str, error: str, instead: str) -> None:
        where = self.variant.program.region_compiler.title()
        self.context.report.failures.append(Failure(kind, where, error, instead))


def _may_draw(program: Program) -> bool:
    for step in program.schedule.steps:
        if isinstance(step, RegionStep):
            compiled = step.compiled_regions()
            if not compiled or any(map(may_draw, compiled)):
                return True
        elif isinstance(step, OpaqueStep) and names_random(str(step.node.target).lower()):
            return True
    return False
