"""One run of a compiled region beside the real calls: theirs are the results, and what differs from them is dropped.

Fresh memory is poisoned meanwhile, so that what is read before it is written shows. The inputs must be what they were,
and nothing may be written into what an earlier run gave.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec

from backends.inductor.poison import run_poisoned
from backends.modes import DEFAULT
from backends.protocol import Compiled, form_for, proving_runs
from backends.registry import FunctionBackend
from shadow_cache import Mismatch

from .. import ir
from ..diagnostics.node_names import module_near
from ..diagnostics.reporting import failure_of
from ..errors import GradientMismatchError
from ..reproduction.records import About
from ..reproduction.writing import Kept, keep, region_tape
from ..steps.compiled_calls import make_plain, put_results, run_compiled
from ..steps.memory import is_out_of_memory
from ..steps.passes import leaves_of
from ..steps.proof import Sizes
from .aliasing import Result
from .comparison import worst
from .fingerprints import Draws, Fingerprint, fingerprints, names_random, twins, written
from .judging import Judge

if TYPE_CHECKING:
    from ..lowering.region_compiler import RegionCompiler
    from ..steps.run_context import RunContext
    from ..steps.steps import CompiledRegion, RegionStep, Slots


def is_due(compiled: CompiledRegion, slots: Slots, context: RunContext) -> bool:
    """Whether a run of something compiled is to be compared with the real calls."""
    proof = compiled.proof
    if context.compare_all:
        return True
    if proof.settled and context.profile is None:
        return False
    arguments = [slots[slot] for slot in compiled.arguments]
    make_plain(arguments, compiled.plain)
    sizes = _sizes(compiled, arguments)
    form = form_for(compiled.call, arguments)
    runs = proving_runs(compiled.call)
    if context.profile is not None and proof.left.get(form, runs) < runs:
        return False  # whoever looks on would take what comparing costs for what the backward costs
    return proof.due(form, runs, sizes, final=context.profile is None)


def may_draw(compiled: CompiledRegion) -> bool:
    """Whether an operator of a region draws random numbers, as far as its name says."""
    proof = compiled.proof
    if proof.draws is None:
        proof.draws = names_random(compiled.aten.text())
    return proof.draws


def prove(
    region_compiler: RegionCompiler,
    step: RegionStep,
    compiled: CompiledRegion,
    slots: Slots,
    context: RunContext,
    real_calls: Callable[[Slots], None],
) -> bool:
    """Run a region both ways. In ``slots`` is afterwards what the real calls gave.

    Args:
        real_calls: runs the region's calls on what lies in the slots that it is given, and leaves their results there.

    Returns:
        False where there was not enough memory for that; the slots are then as they were.

    Raises:
        GradientMismatchError: the compiled code has written into what it was given, which cannot be undone.
        NaNFoundError: NaNs are looked for, and a node of the tape gave one.
    """
    with context.report.timed("prove"):
        return _Run(region_compiler, step, compiled, slots, context, real_calls).beside()


@dataclass
class _Run:
    region_compiler: RegionCompiler
    step: RegionStep
    compiled: CompiledRegion
    slots: Slots
    context: RunContext
    real_calls: Callable[[Slots], None]

    def __post_init__(self) -> None:
        self.inputs = list(self.slots)  # held, since both ways need them
        self.taken = [self.slots[slot] for slot in self.compiled.arguments]
        self.arguments = list(self.taken)
        make_plain(self.arguments, self.compiled.plain)
        self.form = form_for(self.compiled.call, self.arguments)

    def beside(self) -> bool:
        """Both ways, and what follows from the comparison. False: nothing has run, for want of memory."""
        draws = Draws(self.arguments if may_draw(self.compiled) else None)
        try:
            before = fingerprints(self.taken)
        except Exception as error:  # noqa: BLE001  the region runs without a comparison
            self._unproved(error)
            return False
        try:
            self.real_calls(self.slots)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._unproved(error)
            self.slots[: len(self.inputs)] = self.inputs
            self.inputs.clear()
            return False
        while True:
            draws.rewind()
            try:
                found = self._run_compiled()
            except Exception as error:  # noqa: BLE001  whatever a backend throws: the real calls have given the results
                draws.rewind()
                self._failed(error)
                return True
            draws.rewind()
            if found is None:
                return True  # the first run failed, and that was recorded
            try:
                unchanged = self._judge(found, before)
                del found
                if not (unchanged and self._goes_on_with_another_form()):
                    return True
            except GradientMismatchError:
                raise
            except Exception as error:  # noqa: BLE001  what was to be judged is not what the step goes on with
                self._unproved(error)
                return True

    def _goes_on_with_another_form(self) -> bool:
        """Whether another form has taken over, as the faster one does when generated code has run once: then it is
        compared at once with what the real calls have given. What draws has its states for one form alone."""
        proof = self.compiled.proof
        in_use = any(each is self.compiled for each in self.step.compiled_regions())
        if not in_use or proof.refuted or may_draw(self.compiled):
            return False
        form = form_for(self.compiled.call, self.arguments)
        if form == self.form or form in proof.left or form in proof.dropped:
            return False
        self.form = form
        return proof.due(form, proving_runs(self.compiled.call), None)

    def _failed(self, error: Exception) -> None:
        """The compiled code has raised."""
        if is_out_of_memory(error):
            self._unproved(error)
        elif isinstance(error, ir.NaNFoundError):
            self._refute(None, "it has found a NaN, and the real calls gave none")
        else:
            failure = failure_of("run", self.region_compiler.backend.name, self.step.region, error)
            instead = self.region_compiler.drop(self.step, self.compiled, self.form)
            self.context.report.failures.append(msgspec.structs.replace(failure, instead=instead))

    def _judge(self, found: Slots, before: Sequence[Fingerprint]) -> bool:
        """Compare what the compiled code left behind.

        Args:
            found: the slots as it filled them.
            before: fingerprints of what it was given.

        Returns:
            Whether nobody has written into what it was given.
        """
        changed = written(before, self.taken)
        if not changed:
            self._compare(self.inputs, self.arguments, self.slots, found)
            return True
        draws = Draws(self.arguments if may_draw(self.compiled) else None)
        try:
            self._look_who_wrote(changed)
            self._compare(*self._on_copies())
        finally:
            draws.rewind()
        return False

    def _compare(self, inputs: Slots, arguments: Sequence[Any], wanted: Slots, found: Slots) -> None:
        judge = Judge(self.region_compiler, self.step, self.compiled, inputs, arguments)
        wrong, difference, telling = judge.compare(wanted, found)
        if difference is not None:
            self._refute(wrong, difference)
            return
        self.compiled.proof.shown(self.form, _sizes(self.compiled, arguments), telling)

    def _on_copies(self) -> tuple[Slots, Sequence[Any], Slots, Slots]:
        """Both ways once more, where nobody else writes; gives what :meth:`_compare` takes."""
        inputs = self._copied(self.inputs)
        arguments = self._arguments(inputs)
        wanted, found = list(inputs), list(inputs)
        draws = Draws(arguments if may_draw(self.compiled) else None)
        self.real_calls(wanted)
        draws.rewind()
        put_results(self.compiled, self._run_form(self.compiled.call, list(arguments)), found)
        return inputs, arguments, wanted, found

    def _copied(self, slots: Slots, other: Sequence[int] = ()) -> Slots:
        """Slots with copies of what the region takes; of the arguments ``other``, copies that hold other values."""
        copied, places = list(slots), self.step.inputs
        changed = {self.compiled.arguments[index] for index in other}
        copies = twins([slots[slot] for slot in places], [at for at, slot in enumerate(places) if slot in changed])
        for slot, copy in zip(places, copies, strict=True):
            copied[slot] = copy
        return copied

    def _arguments(self, slots: Slots) -> list[Any]:
        arguments = [slots[slot] for slot in self.compiled.arguments]
        make_plain(arguments, self.compiled.plain)
        return arguments

    # ---- the compiled code ---------------------------------------------------------------------------------------

    def _run_compiled(self) -> Slots | None:
        """The slots as the compiled code fills them."""
        filled = list(self.inputs)
        if not self.compiled.checked:
            made = self.region_compiler.first_run(self.step, self.compiled, filled, self.context, self._run_form)
            if made is None:
                return None
            self.compiled = made
            return filled
        results = self._run_form(self.compiled.call, list(self.arguments))
        put_results(self.compiled, results, filled)
        return filled

    def _run_form(self, call: Compiled, arguments: list[Any]) -> Sequence[Any]:
        """Fresh memory is poisoned in all of the runs that are compared but the last, which is as later ones are."""
        if self.compiled.proof.left.get(self.form) == 1 and self.compiled.checked:
            return run_compiled(call, arguments)
        return run_compiled(functools.partial(run_poisoned, call, form=self.form), arguments)

    # ---- what follows --------------------------------------------------------------------------------------------

    def _refute(self, wrong: Result | None, difference: str) -> None:
        """The form is not used again; the next slower one takes over."""
        region_compiler, form = self.region_compiler, self.form
        instead = region_compiler.drop(self.step, self.compiled, form)
        node = self.step.region.nodes[-1] if wrong is None else wrong.node
        value = region_compiler.name_of(node)
        where = f"{value}, {region_compiler.where(self.step, form)}"
        most = None if wrong is None else worst(wrong.want, wrong.found)
        if most is not None and most.error > 0:
            difference += f"; {most}"
        kept = reproduction_of(region_compiler, self.step, self.inputs, where, difference)
        leaf = next(iter(leaves_of(node)), None)
        parameter = None if leaf is None else region_compiler.leaf_name(leaf)
        regions = [*region_compiler.regions()]
        mismatch = Mismatch(
            "mismatch",
            where,
            difference,
            f"{instead}; {kept.text}",
            value=value,
            parameter=parameter,
            module=None
            if region_compiler.tape is None
            else module_near(region_compiler.tape, node.meta.get("call", 0)),
            region=regions.index(self.step) + 1 if self.step in regions else 0,
            form=form,
            largest=None if most is None else most.error,
            index=() if most is None else most.index,
            eager=None if most is None else most.want,
            found=None if most is None else most.found,
            reproduction=kept.path,
        )
        self.context.report.mismatched(mismatch)

    def _look_who_wrote(self, changed: Sequence[int]) -> None:
        """Something has written into the inputs meanwhile: the compiled code; or the real calls too, or somebody else.

        Raises:
            GradientMismatchError: it was the compiled code.
        """
        given = self._copied(self.inputs, changed)  # other values: to write the same once more would be no change
        ours = self._written_by(lambda slots: self._run_form(self.compiled.call, self._arguments(slots)), given)
        theirs = self._written_by(self.real_calls, given) if ours else []
        del given
        # Where both write, the bytes may differ: what an operator writes depends on gradients, which are rounded.
        wrong = next((index for index in changed if index in ours and index not in theirs), None)
        if wrong is None:
            return
        node = self.step.region.inputs[self.compiled.wiring.taken[wrong]]
        name = self.region_compiler.name_of(node)
        self._refute(None, f"the compiled code has written into {name}, which was given to it")
        raise GradientMismatchError(self.context.report.mismatches, f"{name} was overwritten, and has to be made anew")

    def _written_by(self, run: Callable[[Slots], object], given: Slots) -> list[int]:
        """Which of the arguments something has written into that ran on copies of ``given``."""
        slots = self._copied(given)
        arguments = [slots[slot] for slot in self.compiled.arguments]
        before = fingerprints(arguments)
        run(slots)
        return written(before, arguments)

    def _unproved(self, error: BaseException) -> None:
        """There was no memory to compare in, or what is to be compared is of a kind that cannot be."""
        failure = failure_of("unproved", self.region_compiler.backend.name, self.step.region, error)
        where = self.region_compiler.where(self.step, self.form)
        instead = "this run was not compared with the real calls"
        self.context.report.failures.append(msgspec.structs.replace(failure, where=where, instead=instead))
        self.compiled.proof.shown(self.form, None, telling=False)


def reproduction_of(
    region_compiler: RegionCompiler, step: RegionStep, slots: Slots, where: str, difference: str
) -> Kept:
    """Write a reproduction of one region, with values that are made up.

    Args:
        slots: what it was given.
        where: which region of which tape it is, in words.
        difference: what was found.
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


def _sizes(compiled: CompiledRegion, arguments: Sequence[Any]) -> Sizes | None:
    return None if compiled.guard is None else compiled.guard.values(arguments)
