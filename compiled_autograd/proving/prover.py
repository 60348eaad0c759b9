"""One run of a compiled region beside the real calls, whose results are used. A form that differs is dropped.

Fresh memory is poisoned meanwhile, so that reads before a write show. The inputs must stay unchanged, and results of
earlier runs must not be written.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from .. import ir
from ..backends.garbage_collection import RARELY
from ..backends.inductor.poison import run_poisoned
from ..backends.protocol import Compiled, form_for, form_that_ran, proving_runs
from ..backends.signal_handlers import raise_what_a_handler_raised
from ..diagnostics.reporting import failure_of
from ..errors import GradientMismatchError
from ..steps.compiled_calls import arguments_of, put_results, run_compiled, sizes_of
from ..steps.memory import give_back_if_tight, is_out_of_memory, memory_of
from ..steps.proof import MAX_WEAK
from .aliasing import Result
from .fingerprints import Apart, Draws, copied, fingerprints, is_clean, may_draw, put_back, taken, written, written_by
from .judging import Judge, shows_nothing
from .refuted import Refuted

if TYPE_CHECKING:
    from ..lowering.region_compiler import RegionCompiler
    from ..steps.run_context import RunContext
    from ..steps.steps import CompiledRegion, RegionStep, Slots


def prove(
    region_compiler: RegionCompiler,
    step: RegionStep,
    compiled: CompiledRegion,
    slots: Slots,
    context: RunContext,
    real_calls: Callable[[Slots], None],
) -> None:
    """Run a region both ways. In ``slots`` is afterwards what the real calls gave.

    Args:
        real_calls: runs the region's calls on what lies in the slots that it is given, and leaves their results there.

    Raises:
        GradientMismatchError: the compiled code has written into what it was given, which cannot be undone.
        NaNFoundError: NaNs are looked for, and a node of the tape gave one.
    """
    with context.report.timed("prove"):
        try:
            _Run(region_compiler, step, compiled, slots, context, real_calls).beside()
        finally:
            give_back_if_tight(slots)


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
        self.arguments = arguments_of(self.compiled, self.inputs)
        self.form = form_for(self.compiled.call, self.arguments)
        self.sizes = sizes_of(self.compiled, self.arguments)
        self.before: list[Any] = []
        self.apart: Apart | None = None
        self.weak = False  # what was compared has shown little
        self.start = self.end = self._draws()

    def beside(self) -> None:
        """Run both ways, and act on the comparison."""
        fits = self.compiled.proof.fits(self.form, self.sizes) or self.context.compare_all
        if not fits or not self._is_ready() or not self._real_calls_beside():
            self.inputs, self.arguments, self.before, self.apart = [], [], [], None  # each is freed after its last use
            self.real_calls(self.slots)
            return
        self.end = self._draws()
        if not self._is_apart_from_writes():
            return
        # The first is compared though it shows nothing, and others are after many.
        may_be_left_out = self.compiled.checked and self.compiled.proof.waits() and not self.context.compare_all
        if may_be_left_out and shows_nothing(self.step, self.slots):
            self.compiled.proof.shown(self.form, None, telling=False)
            self.context.report.zeros += 1
            return
        while self._compared() and self._goes_on_with_another_form():
            pass
        self.context.report.zeros += self.weak and shows_nothing(self.step, self.slots)

    def _is_ready(self) -> bool:
        """Take what the comparison needs of the inputs. False: it cannot be had, or does not fit."""
        try:
            if self.compiled.proof.overwritten:
                self.apart = Apart(copied(self.step, self.compiled, self.inputs), self.inputs, self.slots)
            self.before = fingerprints(taken(self.compiled, self.inputs))
            give_back_if_tight(self.arguments)
        except Exception as error:  # noqa: BLE001  the real calls run without a comparison
            raise_what_a_handler_raised(error)
            self._unproved(error)
            return False
        return True

    def _real_calls_beside(self) -> bool:
        """Run the real calls, with their inputs held. False: they do not fit so; all is then as it was before."""
        try:
            self.real_calls(self.slots)
            return True
        except Exception as error:
            raise_what_a_handler_raised(error)
            if not is_out_of_memory(error):
                raise
            failure = error.with_traceback(None)  # its frames hold what the calls have given
        self.slots[: len(self.inputs)] = self.inputs
        if not is_clean(self.before, self.compiled, self.inputs):
            try:
                raise failure
            finally:
                del failure  # whose frames now include this one, with all inputs
        self._unproved(failure)
        self.start.restore()
        if self.apart is not None:
            put_back(self.compiled, self.inputs, self.apart.given)
        return False

    def _is_apart_from_writes(self) -> bool:
        """Have both ways run on copies where the real calls write, or others do meanwhile: looked for at a first run,
        and where they are known to. False: these do not fit."""
        if self.apart is None and self.compiled.checked:
            return True
        proof = self.compiled.proof
        try:
            if more := sorted({*written(self.before, taken(self.compiled, self.inputs))} - proof.overwritten):
                proof.overwritten |= self._written_by(self.real_calls, more)
                self._set_apart()
        except Exception as error:  # noqa: BLE001  the real calls have given the results
            raise_what_a_handler_raised(error)
            self._unproved(error)
            return False
        finally:
            self.end.restore()
        return True

    def _compared(self) -> bool:
        """Run the compiled code once, and judge it. False: it has not run to its end, or could not be judged."""
        inputs, found, failure = self.inputs, None, None
        try:
            self.start.restore()
            inputs = inputs if self.apart is None else copied(self.step, self.compiled, self.apart.given)
            found = self._run_compiled(inputs)  # None: the first run failed, and that was recorded
        except Exception as error:  # noqa: BLE001  whatever a backend throws: the real calls have given the results
            raise_what_a_handler_raised(error)
            failure = error.with_traceback(None)  # its frames hold what was computed
        try:
            self.end.restore()
            is_judged = self._judge(inputs, found)
            if found is None:
                if failure is not None:
                    self._failed(failure)
                return False
            if is_judged:
                return True
            found.clear()
            self._set_apart()
        except GradientMismatchError:
            raise
        except Exception as error:  # noqa: BLE001  the step does not use these results
            raise_what_a_handler_raised(error)
            cause, found = error.with_traceback(None), None
            more = self._seen_without_results(inputs)
            if failure is not None:
                self._failed(failure, more)
            else:
                self._unproved(cause, more)
            return False
        finally:
            self.end.restore()
            del failure  # whose frames may include this one, with all inputs
        return self._compared()

    def _goes_on_with_another_form(self) -> bool:
        """Return whether another form has taken over, as the faster one does after one run of generated code. It is
        compared at once with the real calls' results. Regions that draw random numbers have the generators' states for
        one form only."""
        proof = self.compiled.proof
        in_use = any(each is self.compiled for each in self.step.compiled_regions())
        if not in_use or proof.refuted or may_draw(self.compiled):
            return False
        form = form_for(self.compiled.call, self.arguments)
        if form == self.form or form in proof.left or form in proof.dropped:
            return False
        self.form = form
        return proof.due(form, proving_runs(self.compiled.call), None)

    def _failed(self, error: Exception, more: str = "") -> None:
        """Record an error of the compiled code."""
        if is_out_of_memory(error):
            self._unproved(error, more)
        elif isinstance(error, ir.NaNFoundError):
            self._refute(None, "it has found a NaN, and the real calls gave none")
        else:
            failure = failure_of("run", self.region_compiler.backend.name, self.step.region, error)
            instead = self.region_compiler.drop(self.step, self.compiled, self.form)
            self.context.report.failures.append(msgspec.structs.replace(failure, instead=instead + more))

    def _judge(self, inputs: Slots, found: Slots | None) -> bool:
        """Compare the results and effects of the compiled code.

        Args:
            inputs: the arguments of the compiled code.
            found: the slots as it filled them; None if it failed.

        Returns:
            False if the comparison has to be repeated on copies, since other code has written into the arguments.

        Raises:
            GradientMismatchError: the compiled code has written into its arguments.
        """
        overwritten = written(self.before, taken(self.compiled, inputs))
        if overwritten and (wrong := self._written_by_ours_alone(overwritten)) is not None:
            name = self.region_compiler.name_of(self.step.region.inputs[self.compiled.wiring.taken[wrong]])
            self._refute(None, f"the compiled code has written into {name}, which was given to it")
            if self.apart is None:
                mismatches = self.context.report.mismatches
                raise GradientMismatchError(mismatches, f"{name} was overwritten, and has to be made anew")
        elif overwritten and self.apart is None:
            return False
        elif found is not None:
            self._compare(inputs, found)
        return True

    def _set_apart(self) -> None:
        """Run the real calls once more, on copies into which nothing else writes."""
        given = copied(self.step, self.compiled, self.inputs)
        theirs = copied(self.step, self.compiled, given)  # the same, whoever writes meanwhile
        wanted = list(theirs)
        self.start.restore()
        self.real_calls(wanted)
        self.apart = Apart(given, theirs, wanted)
        self.before = fingerprints(taken(self.compiled, given))

    def _compare(self, inputs: Slots, found: Slots) -> None:
        apart = self.apart or Apart(inputs, self.inputs, self.slots)
        given = {memory_of(each[slot]) for each in (inputs, apart.written) for slot in self.step.inputs} - {None}
        run = self.region_compiler, self.step, self.compiled
        rounding = self.context.rounding if self.context.compare_all else None
        judge = Judge(*run, apart.given, self.arguments, given, self.context.module, rounding)
        wrong, difference, telling = judge.compare(apart.wanted, found)
        if difference is not None:
            self._refute(wrong, difference)
            return
        self.weak = not telling
        self.compiled.proof.shown(self.form, self.sizes, telling)

    def _draws(self) -> Draws:
        return Draws(self.arguments if may_draw(self.compiled) else None)

    def _run_compiled(self, inputs: Slots) -> Slots | None:
        """The slots as the compiled code fills them."""
        filled = list(inputs)
        if not self.compiled.checked:
            made = self.region_compiler.first_run(self.step, self.compiled, filled, self.context, self._run_form)
            if made is None:
                return None
            self.compiled = made
            return filled
        put_results(self.compiled, self._run_form(self.compiled.call, arguments_of(self.compiled, inputs)), filled)
        return filled

    def _run_in_place(self, slots: Slots) -> None:
        """Run the form to see its writes, also those before an error."""
        try:
            self._run_form(self.compiled.call, arguments_of(self.compiled, slots))
        except Exception as error:  # noqa: BLE001
            raise_what_a_handler_raised(error)

    def _run_form(self, call: Compiled, arguments: list[Any]) -> Sequence[Any]:
        """Run a form, with fresh memory poisoned in all compared runs but the last, which is like the later ones."""
        if self.compiled.proof.left.get(self.form) == 1 and self.compiled.checked:
            results = run_compiled(call, arguments)
        else:
            results = run_compiled(functools.partial(run_poisoned, call, form=self.form), arguments)
        self.form = form_that_ran(call, self.form)  # what is shown is shown of this one
        return results

    def _refute(self, wrong: Result | None, difference: str) -> None:
        """Drop the form permanently; the next slower one takes over."""
        instead = self.region_compiler.drop(self.step, self.compiled, self.form)
        refuted = Refuted(self.region_compiler, self.step, self.inputs, self.form, wrong, difference, instead)
        self.context.report.mismatched(refuted.mismatch())

    def _written_by_ours_alone(self, overwritten: Sequence[int]) -> int | None:
        """Return an argument that only the compiled code writes into. If that cannot be determined and the memory is
        the user's, the compiled code is assumed to be the writer.

        Args:
            overwritten: arguments written meanwhile, by the compiled code, the real calls, or other code.
        """
        proof, ours = self.compiled.proof, frozenset(overwritten)
        if proof.overwritten.issuperset(overwritten):
            return None
        try:
            proof.overwritten |= self._written_by(self.real_calls, overwritten)
            # Where both write, the bytes may differ: what an operator writes depends on gradients, which are rounded.
            if proof.overwritten.issuperset(overwritten):
                return None
            ours &= self._written_by(self._run_in_place, overwritten)
        except Exception as error:
            raise_what_a_handler_raised(error)
            if self.apart is not None:
                raise
        return min(ours - proof.overwritten, default=None)

    def _written_by(self, run: Callable[[Slots], object], changed: Sequence[int]) -> frozenset[int]:
        return written_by(run, self.step, self.compiled, self.inputs, changed)

    def _seen_without_results(self, inputs: Slots) -> str:
        """Look whether the compiled code has written, now that what it gave is gone. In words, if it cannot be seen."""
        try:
            if self.apart is None:
                self._judge(inputs, None)
        except GradientMismatchError:
            raise
        except Exception as error:  # noqa: BLE001  that is what is said
            raise_what_a_handler_raised(error)
            return "; nor was it seen whether the compiled code has written into what it was given"
        return ""

    def _unproved(self, error: BaseException, more: str = "") -> None:
        """Record a run that could not be compared, for lack of memory or for a kind of value. The real calls give the
        results. After several such runs, only the real calls run: code that was never judged is not trusted."""
        if is_out_of_memory(error):
            RARELY.search_now()  # what tracing has left has tensors too
        compiler = self.region_compiler
        failure = failure_of("unproved", compiler.backend.name, self.step.region, error)
        where, instead = compiler.where(self.step, self.form), f"this run was not compared with the real calls{more}"
        if self.compiled.proof.is_given_up(self.form, self.sizes):
            instead += f", nor the {MAX_WEAK - 1} before it; {compiler.give_up(self.step, self.compiled)}"
        self.context.report.failures.append(msgspec.structs.replace(failure, where=where, instead=instead))
