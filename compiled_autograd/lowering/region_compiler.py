"""A region and the values in hand -> a compiled region: looked up among those that are there, else lowered, compiled,
and run for the first time.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from .. import ir
from ..backends import ArtifactError, Backend, Compiled
from ..backends.garbage_collection import RARELY
from ..backends.protocol import drop
from ..backends.signal_handlers import raise_what_a_handler_raised
from ..diagnostics.reporting import failure_of
from ..diagnostics.structured_trace import part_of
from ..diagnostics.variant_misses import changed_meanwhile_miss, guard_miss, handed_on_miss
from ..errors import OverBudgetError, UntraceableError
from ..guards.shapes import Spec, spec_of, widened
from ..guards.value_kinds import kind_of_value
from ..shadow_cache import DamagedEntryError, Failure, Miss, StoreError
from ..steps.compiled_calls import arguments_of, put_results, run_compiled
from ..steps.marked_calls import meanwhile, to_be_traced, was_traced, with_depended_on
from ..steps.memory import is_out_of_memory
from ..steps.passes import Pass, run_passes
from ..steps.run_context import RunContext, RunReport
from ..steps.steps import CompiledRegion, RegionStep, Slots
from . import aten
from .graph_hash import graph_hash
from .lower import Lowered, leaf_of, lower
from .stored_regions import MADE, InMemoryGraph, Made, StoredRegions, copy_of, give_no_more, made_with
from .wiring import all_copied, owned, strides_widened

_MAX_OPAQUE = 4
"""The largest number of calls that stay opaque because they cannot be traced with symbols, before a region is rather
compiled for each set of shapes by itself."""
MAX_GUARDED = 8
"""The largest number of compiled versions of a region beside one another; then the oldest goes."""

RunCompiled = Callable[[Callable[[list[Any]], Sequence[Any]], list[Any]], Sequence[Any]]
Compile = Callable[[Backend, fx.GraphModule, Sequence[Any]], Made]


def compile_here(backend: Backend, graph_module: fx.GraphModule, examples: Sequence[Any]) -> Made:
    """Compile in this thread."""
    with RARELY:
        return Made(backend.compile(graph_module, examples))


class RegionCompiler:
    """Compiles regions.

    Args:
        backend: the compiler of the regions' graphs.
        passes: functions over each region's ATen graph; each returns a new graph, or None if it changed the graph in
            place.
        specs: of placeholders; after an earlier program, also of the values that its steps handed on.
        dynamic: some of the specs have a history, and each changing size becomes a symbol.
    """

    def __init__(
        self, backend: Backend, passes: Sequence[Pass], specs: Mapping[fx.Node, Spec], dynamic: bool = False
    ) -> None:
        self.backend = backend
        self.passes = tuple(passes)
        self.specs = dict(specs)
        self.dynamic = dynamic
        self.stored: StoredRegions | None = None
        self.finished: list[RunReport] = []
        self.regions: Callable[[], Iterable[RegionStep]] = tuple
        self.name_of: Callable[[fx.Node], str] = str  # for people
        self.leaf_name: Callable[[int], str] = str
        self.title: Callable[[], str] = lambda: "a tape"
        self.tape: ir.TapeGraph | None = None
        self.state: Hashable = None  # of the process, as far as a backend asks for it
        self.marked: Mapping[ir.Marked, Any] = {}  # what the state of the variant says of them
        self._opaque = 0

    # ---- looking up ------------------------------------------------------------------------------------------------

    def kind(self, step: RegionStep, slots: Slots) -> tuple[Any, ...]:
        """Return the kinds of earlier steps' values, on which compiled code depends. Guards check changing sizes."""
        if not self.dynamic:
            kind = tuple([kind_of_value(slots[slot]) for slot in step.handed_on])
        else:
            specs = {} if step.each_shape else self.specs
            kind = tuple([kind_of_value(slots[slot], specs.get(node)) for node, slot in step.asked()])
        return with_depended_on(kind, step, slots) if step.asks_again else kind

    def find(self, step: RegionStep, slots: Slots) -> tuple[bool, CompiledRegion | None]:
        """Return whether code exists for the values at hand, and the code; None instead of code if the calls run one by
        one."""
        quickly = step.known_quickly(slots)
        for compiled in step.known(self.kind(step, slots), slots, self.dynamic) if quickly is None else quickly:
            if (
                compiled is None
                or compiled.guard is None
                or compiled.guard.function([slots[slot] for slot in compiled.arguments])
            ):
                return True, None if compiled is None or compiled.proof.refuted else compiled
        return False, None

    def may_load(self, step: RegionStep) -> bool:
        """Return whether the store on disk may have the region."""
        return self.stored is not None and step.span in self.stored.regions

    def load(self, step: RegionStep, slots: Slots, context: RunContext) -> bool:
        """Take what the store on disk has for the values in hand, if it has; :meth:`find` finds it then."""
        if self.stored is None:
            return False
        for stored in self.stored.regions.get(step.span, ()):
            step.each_shape = step.each_shape or stored.record.each_shape
            kind = self.kind(step, slots)
            if stored.record.kind != repr(kind):
                continue
            try:
                with context.report.timed("load"):
                    stored.code = self.stored.read(stored.lowered).decode()
                    call = self.stored.load(self.backend, stored.artifact)
                    compiled = step.bind(stored, call, stored.record.wiring, kind, stored.record.guard())
            except (StoreError, ArtifactError) as error:
                where = f"the stored code of {len(step.region.nodes)} calls"
                found = error.found if isinstance(error, DamagedEntryError) else str(error)
                context.report.misses.append(Miss("corrupt", where, "the stored bytes", found, "it is compiled again"))
                continue
            for form in stored.record.dropped:  # another process has found it to be wrong
                instead = self.drop(step, compiled, form)
                found = "in an earlier process it differed from the real calls"
                context.report.failures.append(Failure("mismatch", self.where(step, form), found, instead))
            if compiled.guard is None or compiled.guard.function([slots[slot] for slot in compiled.arguments]):
                step.add(kind, [*step.compiled.get(kind, ()), compiled])
                context.report.loads += 1
                return True
        return False

    # ---- compiling -------------------------------------------------------------------------------------------------

    def compile_region(
        self, step: RegionStep, slots: Slots, context: RunContext, compile: Compile
    ) -> CompiledRegion | None:
        """Compile a region for the values in hand. None: the backend failed.

        Raises:
            UntraceableError: some of its calls cannot be traced.
        """
        before, depends_on = self.kind(step, slots), to_be_traced(step, slots)
        if known := [compiled for compiled in step.compiled.get(before, ()) if compiled is not None]:
            if known[-1].guard is None:  # what ran in this thread since it was not found has compiled it
                return known[-1]
            context.report.misses.append(self._guard_miss(step, known[-1], slots))
        elif step.compiled:
            context.report.misses.append(self._other_kind(step, before, next(reversed(step.compiled))))
        elif self.stored is not None and step.span in self.stored.regions and not context.report.misses:
            where = f"the results of earlier steps for {len(step.region.nodes)} calls"
            context.report.misses.append(Miss("layout", where, "as stored", "other sizes or strides"))
        for node, slot in step.made():
            spec = widened(self.specs.get(node), slots[slot]) if self.dynamic else spec_of(slots[slot])
            if spec is not None:
                self.specs[node] = spec
        with part_of(context.report):
            compiled = self._attempts(step, slots, context, compile)
        if not was_traced(step, slots, depends_on, self.marked, context.report):
            return None
        kind = self.kind(step, slots)
        step.add(kind, [*step.compiled.get(kind, ())[-MAX_GUARDED:], compiled])
        return compiled

    def first_run(
        self,
        step: RegionStep,
        compiled: CompiledRegion,
        slots: Slots,
        context: RunContext,
        run: RunCompiled | None = None,
    ) -> CompiledRegion | None:
        """Run what was just compiled. None: it failed, and the region's calls are to run one by one; only this time
        where there was too little memory."""
        arguments = arguments_of(compiled, slots)
        checked: CompiledRegion | None = None
        try:
            with context.report.timed("compile"):
                results = (run or run_compiled)(compiled.call, list(arguments))
                leaves = [slots[fresh.leaf] for fresh in step.fresh]
                specs = [self.specs.get(leaf_of(fresh.call)) for fresh in step.fresh]
                checked = step.rebind(compiled, owned(compiled.wiring, results, arguments, leaves, specs))
        except Exception as error:
            raise_what_a_handler_raised(error)
            if run is not None and is_out_of_memory(error):
                raise  # there was less than this needs elsewhere
            kind = "run" if is_out_of_memory(error) else "compile"
            context.report.failures.append(failure_of(kind, self.backend.name, step.region, error))
            if kind == "run":
                return None
            if not any(each.checked for _, _, each in self._alike(step, compiled)):
                context.report.compiles -= 1  # what cannot run does not count, nor serve another region
            give_no_more(compiled.call)
        step.put_in_place(compiled, checked)
        if checked is not None:
            put_results(checked, results, slots)
        return checked

    # ---- what the proofs ask ---------------------------------------------------------------------------------------

    def drop(self, step: RegionStep, compiled: CompiledRegion, form: str) -> str:
        """Drop a form of a compiled region permanently, also from regions that share its code.

        Returns:
            The form that runs instead, in words.
        """
        alike = self._alike(step, compiled)
        for _, made in made_with(compiled.call):
            made.dropped = tuple(dict.fromkeys((*made.dropped, form)))
        for _, _, each in alike:
            each.proof.dropped = tuple(dict.fromkeys((*each.proof.dropped, form)))
            each.proof.settled = False
            each.proof.held.clear()
        if drop(compiled.call, form):
            return "a slower form of it runs from now on"
        give_no_more(compiled.call)
        instead, *_ = (compiler.give_up(its, each) for compiler, its, each in alike)
        return instead

    def give_up(self, step: RegionStep, compiled: CompiledRegion) -> str:
        """Run the calls of a region one by one from now on; gives that in words. Neither like regions nor other
        processes learn of it."""
        compiled.proof.held.clear()
        if self.passes:  # what the user's passes have made of it was asked for, and not the calls
            for each in [it for it in step.compiled_regions() if it.proof is compiled.proof] or [compiled]:
                step.run_instead(each, _one_by_one(each.aten.graph_module()), all_copied(each.wiring))
            compiled.proof.settled = True
            return "the operators of its graph run one by one from now on"
        compiled.proof.refuted = True
        return "the region's calls run one by one from now on"

    def _alike(
        self, step: RegionStep, compiled: CompiledRegion
    ) -> list[tuple[RegionCompiler, RegionStep, CompiledRegion]]:
        """Return all regions with the same code, of other variants too, and their compilers; this one first."""
        taken_by = [each() for _, made in made_with(compiled.call) for each in made.taken_by.keyrefs()]
        takers = dict.fromkeys([self, *(compiler for compiler in taken_by if compiler is not None)])
        others = [
            (compiler, its, each)
            for compiler in takers
            for its in compiler.regions()
            for each in its.compiled_regions()
            if each.call is compiled.call and each is not compiled
        ]
        return [(self, step, compiled), *others]

    def where(self, step: RegionStep, form: str) -> str:
        """Return the name of a region and its tape, in words."""
        calls = [node.meta["call"] for node in step.region.nodes]
        return f"{form} of {self.title()}: {len(calls)} calls, of its nodes #{min(calls)} to #{max(calls)}"

    def _guard_miss(self, step: RegionStep, compiled: CompiledRegion, slots: Slots) -> Miss:
        """Make the miss of a guard: a condition on symbols held when the region was compiled, and does not hold now."""
        assert compiled.guard is not None
        nodes = [step.region.inputs[position] for position in compiled.wiring.taken]
        arguments = [slots[slot] for slot in compiled.arguments]
        self.specs.update(strides_widened(compiled.guard, nodes, arguments, self.specs))
        return guard_miss(compiled.guard, arguments, list(map(self.name_of, nodes)))

    def _other_kind(self, step: RegionStep, new: tuple[Any, ...], old: tuple[Any, ...]) -> Miss:
        """Make the miss of an earlier step's value, whose shape, strides, dtype or definedness differs from the
        compiled one."""
        for (node, _), one, other in zip(step.asked(), old, new, strict=False):
            if one != other:
                return handed_on_miss(self.name_of(node), one, other)
        if step.asks_again and old != new:
            return changed_meanwhile_miss(meanwhile(old), meanwhile(new))
        raise ir.IllegalGraphError(f"two equal kinds of inputs taken for different: {new}")

    def _attempts(self, step: RegionStep, slots: Slots, context: RunContext, compile: Compile) -> CompiledRegion | None:
        symbols = self.dynamic and not step.each_shape
        made: CompiledRegion | Failure
        try:
            made = self._attempt(step, slots, context, compile, self.specs if symbols else {})
        except UntraceableError as error:
            if symbols and self._opaque < _MAX_OPAQUE:  # of such calls there are few; the rest is for all sizes
                self._opaque += 1
                error.always = False
                raise
            if not symbols:
                raise
            made = failure_of("symbols", self.backend.name, step.region, error.cause)
        if isinstance(made, CompiledRegion):
            return made
        if not symbols:
            context.report.failures.append(made)
            return None
        step.each_shape = True
        compiled = self._attempts(step, slots, context, compile)
        if compiled is not None:
            instead = "each set of shapes is compiled by itself"
            context.report.failures.append(Failure("symbols", made.where, made.error, instead))
        return compiled

    def _attempt(
        self, step: RegionStep, slots: Slots, context: RunContext, compile: Compile, specs: Mapping[fx.Node, Spec]
    ) -> CompiledRegion | Failure:
        """Lower and compile a region.

        Raises:
            UntraceableError: some of its calls cannot be traced.
        """
        stage = "lower"
        try:
            with context.report.timed("lower"), RARELY:
                lowered = lower(step, slots, self.backend, specs, context.left())
                if self.passes:
                    about = (lowered.examples, step, lowered.wiring, self.leaf_name)
                    with torch._C._DisableAutocast():
                        lowered.graph_module = run_passes(self.passes, lowered.graph_module, *about)
                aten.verify(lowered.graph_module)
            stage = "compile"
            # The graph has its casts in it; what a compiler asks of fake tensors would have others.
            with context.report.timed("compile"), torch._C._DisableAutocast():
                graph = copy_of(lowered.graph_module)
                made = self._compile(lowered, compile, context)
                guard = None if lowered.symbols is None else lowered.symbols.guard()
        except (UntraceableError, OverBudgetError):
            raise
        except Exception as error:  # noqa: BLE001  whoever asked records it, and the region's calls run one by one
            return failure_of(stage, self.backend.name, step.region, error)
        lowering = InMemoryGraph(graph, made, lowered.origins)
        compiled = step.bind(lowering, made.call, lowered.wiring, self.kind(step, slots), guard)
        compiled.checked, compiled.proof.dropped = False, made.dropped
        return compiled

    def _compile(self, lowered: Lowered, compile: Compile, context: RunContext) -> Made:
        """Compile an ATen graph; or take what was made of one that is the same: repeated layers have such graphs, and
        structures that differ in their leaves alone."""
        graph = graph_hash(lowered.graph_module, lowered.examples) if self.backend.slow else None
        like = None if graph is None else (self.backend, self.state, graph)
        made = None if like is None else MADE.get(like)
        if made is None:
            made = compile(self.backend, lowered.graph_module, lowered.examples)
            context.report.compiles += 1
            if like is not None:
                MADE[like] = made
        made.taken_by[self] = None
        return made


def _one_by_one(graph_module: fx.GraphModule) -> Compiled:
    return lambda arguments: graph_module(*arguments)
