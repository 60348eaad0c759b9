"""A program of one region and its leaves, run in C++ on values taken from a tape, without Python objects.

:meth:`Program.run` is the Python way. It runs all programs that this module cannot run.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

import torch

from ..backends.inductor.straight_line.straight_line import StraightLine
from ..backends.protocol import Compiled
from ..native.interface import HostedProgram, Module, Question, Taken
from ..steps.accumulate import write
from ..steps.compiled_calls import run_compiled
from ..steps.steps import AccumulateStep, CompiledRegion, Executor, RegionStep, Slots
from ..threads.leaf_writes import LEAF_WRITES
from .program import Program

_MAX_TRIES = 32
"""Hits of a program after which it is no longer examined for a run without Python."""


@dataclass(slots=True, eq=False)
class NativeRun:
    """The C++ form of a program.

    Attributes:
        function: the function that its region calls.
        times_handed: how often it was handed to the fast path.
    """

    program: Program
    steps: list[Executor]
    region: RegionStep
    leaves: AccumulateStep
    compiled: CompiledRegion
    function: Compiled
    made: HostedProgram
    times_handed: int = 0

    def is_current(self) -> bool:
        """Return whether the parts of the program are still those that this was made from."""
        return self.program.schedule.steps is self.steps and _called_by(self.compiled) is self.function

    def is_usable(self, prove: bool) -> bool:
        """Return whether the program would now do no more than this, if nothing observes the run."""
        compiled, compiler = self.compiled, self.program.region_compiler
        (found, *others) = self.region.compiled.get((), (None,))
        return (
            found is compiled
            and not others
            and (compiled.proof.settled or not prove)
            and not compiled.proof.refuted
            and not compiler.finished
            and _called_by(compiled, now=True) is self.function
        )

    def questions(self, prove: bool) -> list[Question]:
        """Return questions with which C++ checks both conditions without Python."""
        compiled, call = self.compiled, self.compiled.call
        asked: list[Question] = [
            (self.program.schedule, "steps", self.steps),
            (functools.partial(self.region.compiled.get, ()), None, [compiled]),
            (self.program.region_compiler.finished.__len__, None, 0),
            (compiled, "call", call),
            (compiled, "proof", compiled.proof),
            (compiled.proof, "refuted", False),
        ]
        if prove:
            asked.append((compiled.proof, "settled", True))
        return asked + (call.questions() if isinstance(call, StraightLine) else [])

    def run(self, taken: Taken) -> None:
        """Run it, with grad mode off."""
        left = run_compiled(taken.run, self.made, LEAF_WRITES.none_needed)
        if left is not None:
            self.write(*left)

    def write(self, results: list[torch.Tensor | None], tensors: list[torch.Tensor | None]) -> None:
        """Give leaves, which are among ``tensors``, the results that C++ left to Python, with grad mode off. Both lists
        are emptied."""
        slots: Slots = [*tensors, *[None] * (self.program.schedule.size - len(tensors))]
        for slot, index in self.compiled.results:
            slots[slot] = results[index]
        results.clear()
        tensors.clear()  # a leaf keeps what nobody else holds
        with torch._C.DisableTorchFunctionSubclass():
            write(self.leaves, slots)


@dataclass(slots=True)
class NativeRuns:
    """The C++ form of one program, if it exists; ``tries`` is the number of attempts to make it."""

    current: NativeRun | None = None
    tries: int = 0

    def of(self, program: Program, module: Module) -> NativeRun | None:
        """Return the C++ form of a program; None if there is none, or not yet."""
        found = self.current  # which another thread may change
        if found is not None and found.is_current():
            return found
        if self.tries == _MAX_TRIES:
            return None
        self.tries += 1
        self.current = found = _made(program, module)
        return found


def _made(program: Program, module: Module) -> NativeRun | None:
    steps = program.schedule.steps
    if len(steps) != 2 or program.region_compiler.dynamic:
        return None
    region, leaves = steps
    if not isinstance(region, RegionStep) or not isinstance(leaves, AccumulateStep):
        return None
    compiled, *others = region.compiled.get((), (None,))
    if compiled is None or others or not _is_plain(program, region, leaves, compiled):
        return None
    function, results = _called_by(compiled), dict(compiled.results)
    gives: list[tuple[int, int, bool]] = []
    if len({*leaves.leaves}) < len(leaves.leaves):
        return None  # what one gives a leaf, another is to add to
    for leaf, owned, shared in zip(leaves.leaves, leaves.owned, leaves.shared, strict=True):
        slot = owned if owned in results else shared
        if slot not in results:
            return None
        gives.append((leaf, results[slot], slot == owned))
    taken = [*compiled.arguments, *leaves.leaves]
    if any(slot >= program.schedule.tensors for slot in taken):
        return None
    made = module.program(function, compiled.arguments, [*itertools.chain(*gives)])
    return NativeRun(program, steps, region, leaves, compiled, function, made)


def _called_by(compiled: CompiledRegion, now: bool = False) -> Compiled:
    """The straight-line program, where a region has one (and ``now`` uses it); else whatever it was compiled to."""
    call = compiled.call
    program = None
    if isinstance(call, StraightLine):
        program = call.program_in_use() if now else call.program
    return call if program is None else program


def _is_plain(program: Program, region: RegionStep, leaves: AccumulateStep, compiled: CompiledRegion) -> bool:
    """Return whether the program only runs a region on tensors and writes its results to leaves."""
    more = (compiled.copied, compiled.permuted, compiled.passed, compiled.flags, compiled.plain, region.saved)
    return (
        compiled.checked
        and not compiled.keeps_inputs
        and compiled.guard is None
        and not any(more)
        and not region.handed_on
        and not program.schedule.outputs
        and not program.schedule.watched
        and not leaves.after_users_code
    )
