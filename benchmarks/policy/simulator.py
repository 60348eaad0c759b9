"""Replays a sequence against a policy, and adds up seconds."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol

from .sequence import Event, Tape


class Way(Enum):
    """How a backward runs."""

    SERVE = "serve"
    """Compiled if the code is there; else :meth:`Policy.missed` decides."""
    COMPILE = "compile now"
    BESIDE = "compile beside"
    EAGER = "eager"


class Action(NamedTuple):
    """A decision.

    Attributes:
        way: how the backward runs.
        spent: seconds of deciding: reading roots, reading the nodes of the tape, leaving the fast path.
        limit: maximum seconds of capture, tracing and lowering; beyond, they end and eager runs the backward.
    """

    way: Way
    spent: float = 0.0
    limit: float = math.inf


class Happened(NamedTuple):
    """The end of one backward.

    Attributes:
        ran: SERVE for a hit; COMPILE for a compile that was waited for; BESIDE for one that was requested; else EAGER.
        seconds: of the backward by a clock around it, without compiling.
        compiling: seconds of capture, lowering and compiling that the step waited for.
        start: seconds of importing the backend that it waited for.
        failed: the tape cannot be captured, or the limit ended it.
    """

    ran: Way
    seconds: float
    compiling: float = 0.0
    failed: str = ""
    start: float = 0.0


class Policy(Protocol):
    """Decides about each backward from what it has seen so far. It may read the fingerprint, the nodes,
    the root and the seconds of a look of a tape; its times it learns from :meth:`told`."""

    def action(self, tape: Tape, now: float) -> Action: ...

    def missed(self, tape: Tape, now: float) -> Action:
        """SERVE found no code. Any other way is allowed now."""
        ...

    def told(self, tape: Tape, happened: Happened) -> None: ...

    def arrived(self, tape: Tape, seconds: float) -> None:
        """The code of a request is there; lowering and compiling took that many seconds."""
        ...


@dataclass(frozen=True)
class Machine:
    """Costs that do not depend on the tape.

    Attributes:
        cores: with one, a compile beside the training takes half of it.
        slows: time of a step by its usual one while something is compiled beside it, on more than one core.
        switch: seconds that a backward takes longer after another one of its tape that ran the other way.
        by_calls: time of a backward whose regions wait for a compile, by eager's.
        imports: part of the backend's import that the first compile beside the training waits for. The first step of an
            optimizer has imported the rest (torch 2.13).
    """

    cores: int = 2
    slows: float = 1.1
    switch: float = 15e-6
    by_calls: float = 1.5
    imports: float = 0.12


TWO_CORES = Machine()


class Job(NamedTuple):
    """A request to compile beside the training, in the order of the queue."""

    tape: Tape
    wide: bool


@dataclass
class Code:
    """The compiled variants of a process. ``widens`` has the structures whose second variant serves all sizes."""

    widens: frozenset[int]
    captured: set[int] = field(default_factory=set)
    variants: dict[int, set[int]] = field(default_factory=dict)
    wide: set[int] = field(default_factory=set)

    def has(self, tape: Tape) -> bool:
        return tape.structure in self.wide or tape.shape in self.variants.get(tape.structure, ())

    def next_is_wide(self, tape: Tape) -> bool:
        """Whether a variant that is made now would serve all sizes."""
        return tape.structure in self.widens and bool(self.variants.get(tape.structure))

    def add(self, tape: Tape, wide: bool) -> None:
        self.variants.setdefault(tape.structure, set()).add(tape.shape)
        if wide:
            self.wide.add(tape.structure)


@dataclass
class Result:
    """What a policy cost on one sequence.

    Attributes:
        total: seconds of the whole program.
        eager: the same on eager alone.
        backward: seconds of backwards, deciding and waiting; ``eager_backward`` is eager's.
        longest: the longest wait of a step, in seconds, beyond its time on eager.
        compiles: compiled variants. ``unpaid`` of them have saved less than the step waited for them; a compile beside
            is unpaid if it served no faster backward.
        hits: backwards that ran compiled.
        decided: seconds of deciding.
    """

    total: float = 0.0
    eager: float = 0.0
    backward: float = 0.0
    eager_backward: float = 0.0
    longest: float = 0.0
    compiles: int = 0
    unpaid: int = 0
    hits: int = 0
    decided: float = 0.0

    @property
    def ratio(self) -> float:
        """Time of the program by eager's."""
        return self.total / self.eager


class Replay:
    """One replay: the clock, the code and the queue.

    Attributes:
        now: wall-clock seconds since the program began.
    """

    def __init__(self, policy: Policy, widens: Sequence[int], start: float, machine: Machine) -> None:
        self.policy, self.machine = policy, machine
        self.code = Code(frozenset(widens))
        self.now = 0.0
        self.result = Result()
        self._start = self._begins = start  # the process that compiles imports the backend too
        self._queue: deque[Job] = deque()
        self._left = 0.0
        self._balance: dict[tuple[int, int], float] = {}
        self._last: dict[int, bool] = {}

    def run(self, events: Sequence[Event]) -> Result:
        """Replay all backwards."""
        for event in events:
            self.one(event)
        self.result.compiles = len(self._balance)
        self.result.unpaid = sum(saved <= 0 for saved in self._balance.values())
        return self.result

    def one(self, event: Event) -> None:
        """One step: the rest of it, then its backward."""
        tape, result = event.tape, self.result
        eager = tape.eager * event.of_eager
        self._spend(event.gap)
        before = self.now
        action = self.policy.action(tape, self.now)
        spent = action.spent
        if action.way is Way.SERVE and not self.code.has(tape):
            action = self.policy.missed(tape, self.now + spent)
            spent += action.spent + tape.look  # a walk that finds nothing reads the nodes too
        happened = self._do(event, action, eager)
        self.policy.told(tape, happened)  # before a compile that it began can end
        self._spend(happened.seconds + spent)
        self._spend(happened.compiling + happened.start)
        took = self.now - before
        result.hits += happened.ran is Way.SERVE
        result.decided += spent
        result.backward += took
        result.eager_backward += eager
        result.total += took + event.gap
        result.eager += eager + event.gap
        result.longest = max(result.longest, took - eager)

    def _do(self, event: Event, action: Action, eager: float) -> Happened:
        tape, way, hit = event.tape, action.way, event.tape.hit * event.of_hit
        if way is not Way.EAGER and self.code.has(tape):
            seconds = hit + self._switch(tape, True)
            self._credit(tape, eager - seconds)
            return Happened(Way.SERVE, seconds)
        eager += self._switch(tape, False)
        if way in (Way.EAGER, Way.SERVE) or (way is Way.BESIDE and self._waits(tape)):
            return Happened(Way.EAGER, eager)
        if tape.refused:
            return Happened(Way.EAGER, eager, tape.capture, tape.refused)
        captured = tape.structure in self.code.captured
        capture = 0.0 if captured else tape.capture
        if capture + tape.lower > action.limit:
            return Happened(Way.EAGER, eager, max(0.0, action.limit), "limit")
        self.code.captured.add(tape.structure)
        start, self._start = self._start, 0.0
        if way is Way.BESIDE:
            start *= self.machine.imports
            self._request(tape)
            self._pay(tape, capture + start)
            return Happened(Way.BESIDE, self.machine.by_calls * eager, capture, start=start)
        waited = capture + tape.lower + tape.compile
        self.code.add(tape, self.code.next_is_wide(tape))
        self._pay(tape, waited + start)
        return Happened(Way.COMPILE, eager, waited, start=start)

    def _switch(self, tape: Tape, compiled: bool) -> float:
        before = self._last.get(tape.structure)
        self._last[tape.structure] = compiled
        return self.machine.switch if before is not None and before != compiled else 0.0

    def _pay(self, tape: Tape, seconds: float) -> None:
        key = (tape.structure, tape.shape)
        self._balance[key] = self._balance.get(key, 0.0) - seconds

    def _credit(self, tape: Tape, saved: float) -> None:
        key = (tape.structure, tape.shape)
        if key not in self._balance:  # the wide variant, made for other sizes, serves it
            keys = [each for each in self._balance if each[0] == tape.structure]
            key = keys[-1]
        self._balance[key] += saved

    def _waits(self, tape: Tape) -> bool:
        alike = [job for job in self._queue if job.tape.structure == tape.structure]
        return any(job.wide or job.tape.shape == tape.shape for job in alike)

    def _request(self, tape: Tape) -> None:
        waits = any(job.tape.structure == tape.structure for job in self._queue)
        wide = self.code.next_is_wide(tape) or (waits and tape.structure in self.code.widens)
        if not self._queue:
            self._left = tape.beside + self._begins
            self._begins = 0.0
        self._queue.append(Job(tape, wide))

    def _spend(self, seconds: float) -> None:
        """Let the training run for that long; longer while something is compiled beside it."""
        slows, rate = (2.0, 0.5) if self.machine.cores == 1 else (self.machine.slows, 1.0)
        while self._queue and seconds > 0:
            needed = self._left / rate
            if seconds * slows < needed:
                self.now += seconds * slows
                self._left -= seconds * slows * rate
                return
            self.now += needed
            seconds -= needed / slows
            job = self._queue.popleft()
            self.code.add(job.tape, job.wide)
            if self._queue:
                self._left = self._queue[0].tape.beside
            self.policy.arrived(job.tape, job.tape.lower + job.tape.compile)
        self.now += max(seconds, 0.0)


def replay(
    policy: Policy,
    events: Sequence[Event],
    widens: Sequence[int] = (),
    start: float = 0.0,
    machine: Machine = TWO_CORES,
) -> Result:
    """Replay the backwards of one sequence against a policy.

    Args:
        widens, start: those of the sequence.
    """
    return Replay(policy, widens, start, machine).run(events)
