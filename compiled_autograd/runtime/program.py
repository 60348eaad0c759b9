"""Runs one variant of a tape graph: its regions, the opaque calls between them, and what the leaves receive.

A region is lowered and compiled when it is first reached, with the values that it then has in hand: what a Python
function gave is known only there.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NoReturn

import torch
from torch import fx

from .. import ir
from ..backends import Backend
from ..backends.signal_handlers import raise_what_a_handler_raised
from ..compiling.queue import QUEUE, Job
from ..diagnostics.progress import Wait
from ..diagnostics.reporting import failure_of
from ..errors import UntraceableError
from ..guards.ambient import ambient
from ..guards.shapes import Spec
from ..ir import nan_checks, partition
from ..lowering.region_compiler import RegionCompiler
from ..lowering.wiring import all_copied
from ..proving.prover import prove
from ..shadow_cache import Failure, Miss
from ..shadow_cache.safe_text import harmless
from ..steps.accumulate import keep, write
from ..steps.compiled_calls import (
    arguments_of,
    handed_through,
    is_due,
    pass_on,
    put_results,
    run_compiled,
    store_results,
)
from ..steps.marks import saved_by
from ..steps.memory import memory_of
from ..steps.passes import Pass
from ..steps.run_context import RunContext
from ..steps.schedule import Schedule
from ..steps.steps import AccumulateStep, CompiledRegion, Executor, OpaqueStep, RegionStep, Slots
from ..threads.compile_thread import why_not_compile
from ..threads.leaf_writes import LEAF_WRITES
from ..user_code.in_place import changed, check, versions_of
from .interpret import ONE_BY_ONE, finish, heed
from .opaque_calls import drop, run_calls, run_opaque

CALLED = "it is called at each step, like an unmarked one"
"""Text of a :class:`~shadow_cache.Failure` for the way that replaces tracing of a function marked as traceable."""


class _CalledBetweenLeavesError(BaseException):
    """A marked function is called, because the region is not compiled: it sees the leaves that are written by then."""


class Program:
    """A tape graph made ready to run for one set of shapes.

    Args:
        tape, counts: see :class:`Schedule`.
        backend, passes, specs, dynamic: see :class:`RegionCompiler`.
        untraceable: calls that are known not to be traceable, and why, beside those that ``tape`` says it of.
    """

    def __init__(
        self,
        tape: ir.TapeGraph,
        backend: Backend,
        passes: Sequence[Pass],
        counts: Sequence[int],
        specs: Mapping[fx.Node, Spec],
        dynamic: bool = False,
        untraceable: Mapping[fx.Node, str] = MappingProxyType({}),
    ) -> None:
        self.tape = tape
        self.region_compiler = RegionCompiler(backend, passes, specs, dynamic)
        known = {node: node.meta["untraceable"] for node in tape.graph.nodes if "untraceable" in node.meta}
        marked = [node for node in tape.graph.nodes if isinstance(node.target, ir.Marked)]
        known |= {node: why for node in marked if (why := node.target.called) is not None}
        max_calls = partition.MAX_CALLS_OF_SLOW_REGION if backend.slow else None
        schedule = self.schedule = Schedule(tape, counts, backend.bitwise, {**known, **untraceable}, max_calls)
        self.region_compiler.regions = lambda: [step for step in schedule.steps if isinstance(step, RegionStep)]

    def run(self, given: Slots, context: RunContext) -> list[torch.Tensor | None]:
        """Run everything, with grad mode off; gives the gradients that ``autograd.grad`` asked for.

        ``given`` is what the engine handed over, kind after kind; the list is emptied.

        Raises:
            RuntimeError: NaNs are looked for, and a node of the tape gave one.
        """
        schedule, slots = self.schedule, given
        while self.region_compiler.finished:
            context.report.take(self.region_compiler.finished.pop())
        slots.extend([None] * (schedule.size - len(slots)))
        steps, log = schedule.steps, context.log
        if log is not None:
            log.begin(self.tape, lambda node: slots[schedule.slot_of[node]])
        versions = versions_of(schedule.watched, slots) if schedule.watched else {}
        position = 0
        while position < len(steps):
            step = steps[position]
            if isinstance(step, RegionStep):
                context.call = 0
                if step.saved and changed(step.saved, slots, versions):
                    self._run_until_changed(step, steps[position + 1 :], slots, versions, context)
                try:
                    self._run_region(step, slots, context)
                except UntraceableError as error:
                    steps = schedule.split(steps, position, self._untraceable(error, context.report.failures))
                    slots.extend([None] * (schedule.size - len(slots)))
                    versions = {**versions_of(schedule.watched, slots), **versions}  # more are watched now
                    continue
                except _CalledBetweenLeavesError:
                    return self._finish(schedule.before(steps, position), slots, versions, context)
                except ir.NaNFoundError as found:
                    self._accumulate_before(found.call, steps[position + 1 :], slots, context)
                    raise self._nan(found, context) from None
            elif isinstance(step, OpaqueStep):
                context.call = step.node.meta["call"]
                if log is not None:
                    log.call(step.node)
                name = self.tape.calls[context.call].name
                try:
                    if context.profile is None:
                        run_opaque(step, slots, name, versions)
                    else:
                        with context.profile.call(step.node), step.spent.timed():
                            run_opaque(step, slots, name, versions)
                except ir.NaNFoundError as found:
                    raise self._nan(found, context) from None
                why = self._one_by_one(step, slots, context)
                if why is not None:
                    context.report.failures.append(why)
                    return self._finish(step.node, slots, versions, context)
            else:
                if log is not None:
                    log.leaves(step.calls)
                with torch._C.DisableTorchFunctionSubclass():
                    write(step, slots) if context.kept is None else keep(step, slots, context.kept)
            if not isinstance(step, RegionStep):  # those have done it before they ran
                drop(step, slots)
            position += 1
        return [None if slot is None else slots[slot] for slot in schedule.outputs]

    def _finish(
        self, last: fx.Node, slots: Slots, versions: Mapping[int, int], context: RunContext
    ) -> list[torch.Tensor | None]:
        """Run all after one call of the tape graph call by call."""
        slot_of = self.schedule.slot_of.items()
        known = {node: slots[slot] for node, slot in slot_of}
        seen = {node: versions[slot] for node, slot in slot_of if slot in versions}
        return finish(self.tape, last, known, context, seen)

    def _one_by_one(self, step: OpaqueStep, slots: Slots, context: RunContext) -> Failure | None:
        """Run a call of users' code, and return why everything after it has to run call by call; None if nothing has
        to."""
        name = self.tape.calls[context.call].name
        slot_of = self.schedule.slot_of
        if context.changes and heed(self.tape, step.node, context, lambda node: slots[slot_of[node]]):
            return Failure("late_hook", name, "it added or removed hooks of the rest of this backward", ONE_BY_ONE)
        if step.added_to and step.result is not None:
            if context.added_to is None:
                context.added_to = frozenset(memory_of(slots[slot]) for slot in step.added_to) - {None}
            if memory_of(slots[step.result]) in context.added_to:
                where = f"a tensor that {name} saved in a checkpointed call"
                return Failure("saved_grad", where, "it shares memory with a .grad that is accumulated", ONE_BY_ONE)
        return None

    def _nan(self, found: ir.NaNFoundError, context: RunContext) -> RuntimeError:
        context.call = found.call
        return nan_checks.in_the_engines_words(found, self.tape.calls[found.call].name)

    def _run_until_changed(
        self,
        step: RegionStep,
        after: Sequence[Executor],
        slots: Slots,
        versions: Mapping[int, int],
        context: RunContext,
    ) -> NoReturn:
        """Run a region's calls up to the one that saved what users' code has changed in place, and say so."""
        values = {node: slots[slot] for node, slot in zip(step.region.inputs, step.inputs, strict=True)}
        seen = {node: versions[slot] for node, slot in self.schedule.slot_of.items() if slot in versions}
        stop = next(call for call in step.region.nodes if changed(saved_by(call), values, seen))
        run_calls(step, slots, until=stop)
        context.call = stop.meta["call"]
        self._accumulate_before(context.call, after, slots, context)
        for source in saved_by(stop):
            check(values[source], seen[source], self.tape.calls[context.call].name)
        raise ir.IllegalGraphError("a saved tensor has changed and has not")

    def _accumulate_before(self, call: int, after: Sequence[Executor], slots: Slots, context: RunContext) -> None:
        """Write the leaves that the eager engine would have written before it came to a node of the tape."""
        before = frozenset(self.tape.order[: self.tape.order.index(call)])
        if after and isinstance(after[0], AccumulateStep):
            with torch._C.DisableTorchFunctionSubclass():
                write(after[0].of(before), slots)

    def _untraceable(self, error: UntraceableError, failures: list[Failure]) -> dict[fx.Node, str]:
        """Return the calls that cannot be traced, and the reasons. Record a failure for marked functions."""
        reason = f"{type(error.cause).__name__}: {error.cause}"
        for node in error.nodes:
            if error.always:  # then the next variants know it too
                node.meta["untraceable"] = reason
            if isinstance(node.target, ir.Marked):  # it may be marked for other values, yet no backward asks for them
                node.target.called = reason
                failures.append(Failure("untraceable", self.region_compiler.name_of(node), reason, CALLED))
        return dict.fromkeys(error.nodes, reason)

    def _obtain(self, step: RegionStep, slots: Slots, context: RunContext) -> tuple[bool, CompiledRegion | None]:
        """Find what was not there a moment ago, load it or compile it.

        Raises:
            UntraceableError: some of its calls cannot be traced.
        """
        # A load is refused too: it may import a module that the compile imports. And a compile may wait for a thread
        # that writes leaves.
        if why_not_compile() is not None or LEAF_WRITES.writes_here():
            return False, None
        found, compiled = False, None
        compiles = context.may_compile and context.submit is None
        may_wait = not QUEUE.busy or context.submit is None  # a step that does not wait waits for no other's compile
        if may_wait and (compiles or self.region_compiler.may_load(step)):
            job = None
            try:
                job = QUEUE.submit(
                    self,
                    step,
                    slots,
                    ambient(),
                    waits_with=context.report,
                    may_compile=compiles,
                    seconds=context.left() if compiles else math.inf,
                )
            except RuntimeError as error:  # no thread can be started
                raise_what_a_handler_raised(error)
                name = self.region_compiler.backend.name
                context.report.failures.append(failure_of("submit", name, step.region, error))
            if job is not None:
                self._wait_for(job, context)
            found, compiled = self.region_compiler.find(step, slots)
        if not found and context.submit is not None:
            context.submit(self, step, slots)
        return found, compiled

    def _wait_for(self, job: Job, context: RunContext) -> None:
        """Wait for a job, and take what came of it."""
        if context.wait is None:
            context.wait = Wait(context.progress)

        def what() -> tuple[str, str]:
            regions = list(self.region_compiler.regions())
            number = regions.index(job.step) + 1 if job.step in regions else len(regions)
            doing = "tracing" if job.report.stage == "lower" else "compiling"
            return f"{doing} region {number} of {len(regions)}", harmless(self.region_compiler.title())

        shown = context.wait.shown(what) if QUEUE.is_next(job) else contextlib.nullcontext()  # else another shows its
        where, is_owner = f"the region of {len(job.step.region.nodes)} calls", job.owner is context.report
        waited = Miss("guard", where, hint=f"it was being compiled for {'this' if is_owner else 'another'} step")
        context.report.misses.append(waited)
        try:
            with shown:
                job.wait()
        except BaseException:
            try:
                importing = job.importing
                if importing is not None:  # else the program's next line may import half of a module
                    importing.wait()
            finally:
                if is_owner:
                    job.owner = None
                    if job.is_over:
                        self.region_compiler.finished.append(job.report)
            raise
        if not is_owner:
            if job.report.loads and not job.report.compiles:  # a hit, as for the owner
                context.report.misses.remove(waited)
            return
        context.report.misses.clear()
        context.report.join(job.report)
        if job.changed:
            hint = f"{job.changed} had changed, and it was not compiled: its calls ran one by one"
            context.report.misses.append(Miss("guard", where, hint=hint))
        if job.over_budget:
            context.may_compile, context.report.over_budget = False, True
        if job.error is not None:
            if not isinstance(job.error, UntraceableError):
                context.report.misses.append(waited)
            raise job.error

    def leave_opaque(self, step: RegionStep, error: UntraceableError, failures: list[Failure]) -> None:
        """Calls of a region have shown that they cannot be traced, while nothing runs."""
        steps = self.schedule.steps
        if step in steps:
            self.schedule.split(steps, steps.index(step), self._untraceable(error, failures))

    def _run_region(self, step: RegionStep, slots: Slots, context: RunContext) -> None:
        found, compiled = self.region_compiler.find(step, slots)
        if not found:
            found, compiled = self._obtain(step, slots, context)
        if context.log is not None:
            how = f"compiled by {self.region_compiler.backend.name}" if compiled is not None else "call by call"
            context.log.region(step.region.nodes, how)
        if context.profile is None:
            self._run_found(step, found, compiled, slots, context)
        elif compiled is not None and self.schedule.bitwise:
            with step.spent.timed():
                run_calls(step, slots, context.profile)
        else:
            settled = compiled is not None and compiled.checked and compiled.proof.settled
            spent = step.spent.timed() if settled else contextlib.nullcontext()
            with context.profile.region(step.region.nodes), spent:
                self._run_found(step, found, compiled, slots, context)

    def _run_found(
        self, step: RegionStep, found: bool, compiled: CompiledRegion | None, slots: Slots, context: RunContext
    ) -> None:
        due = compiled is not None and context.prove and is_due(compiled, slots, context)
        if compiled is not None and due:
            self._prove(step, compiled, slots, context)
            return
        if compiled is not None and not compiled.checked:
            if self.region_compiler.first_run(step, compiled, slots, context) is not None:
                drop(step, slots)
                return
            compiled = None
        if compiled is None:
            context.report.uncompiled += not found
            if step.marked and context.kept is None:
                raise _CalledBetweenLeavesError
            run_calls(step, slots)
            return
        pass_on(compiled, slots)
        if compiled.through is None:
            compiled.through = handed_through(compiled, len(step.region.nodes))
        if compiled.through:
            for to, source in compiled.through:
                slots[to] = slots[source]
            drop(step, slots)
            return
        arguments = arguments_of(compiled, slots)
        if not compiled.keeps_inputs:
            drop(step, slots)
            results = run_compiled(compiled.call, arguments)
        else:
            try:
                results = run_compiled(compiled.call, arguments)
                drop(step, slots)
            except Exception as error:  # noqa: BLE001  the inputs are still there: the step goes on
                raise_what_a_handler_raised(error)
                context.report.failures.append(failure_of("run", self.region_compiler.backend.name, step.region, error))
                run_calls(step, slots)
                return
        store_results(compiled, results, slots)

    def _prove(self, step: RegionStep, compiled: CompiledRegion, slots: Slots, context: RunContext) -> None:
        """Run a region beside its real calls."""

        def graph_as_it_is(slots: Slots) -> None:
            results = compiled.aten.graph_module()(*arguments_of(compiled, slots))
            put_results(step.rebind(compiled, all_copied(compiled.wiring)), results, slots)  # as nobody has seen them
            drop(step, slots)

        def real_calls(slots: Slots) -> None:
            run_calls(step, slots, again=True)

        # What the user's passes have made of the graph is what was asked for.
        reference = graph_as_it_is if self.region_compiler.passes else real_calls
        prove(self.region_compiler, step, compiled, slots, context, reference)
