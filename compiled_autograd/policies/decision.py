"""A record of a tape, and the one function that decides about its backwards: see :mod:`ledger`."""

from __future__ import annotations

import enum
import math
import weakref
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ..cache.variants import Variant
from ..diagnostics.bypass import COMPILING, NOT_YET, OVER_BUDGET
from ..settings import Settings
from ..shadow_cache import Bypass, Timing

ASKING = 0.1
"""Part of the likely seconds of a compile that a tape runs on eager before the store on disk is searched for it, which
takes as long as some steps of a small model."""

ALIKE_BEFORE_A_SKIP, MOST_SKIPPED, MOST_SECONDS_SKIPPED = 16, 64, 0.02


def skips(streak: int, seconds: float, rest: int = 0) -> int:
    """Return how many of the next backwards run on eager without a look at their tape.

    After a row of 16 looks that left backwards to eager, it is one; after each further look twice as many, up to 64, or
    up to 20 ms of backwards (not under deterministic algorithms). So looks are rare where they cost most, and tapes
    that take long are always looked at. The number is less by up to seven, which changes after each eight looks: so
    looks do not keep in step with a training that has several backwards in each step.

    Args:
        streak: the number of looks in a row that left a backward to eager.
        seconds: what the last of these backwards took.
        rest: backwards until the tape is tried again, if they are counted: the last one is looked at.
    """
    if streak < ALIKE_BEFORE_A_SKIP:
        return 0
    most = min(MOST_SKIPPED, 1 << min(streak - ALIKE_BEFORE_A_SKIP, MOST_SKIPPED))
    if most * seconds > MOST_SECONDS_SKIPPED and by_clock():
        most = int(MOST_SECONDS_SKIPPED / seconds)
    most = max(0, most - streak // 8 % 8)
    return min(most, rest - 1) if rest else most


class State(enum.Enum):
    """The state of a record: see :mod:`ledger`."""

    NEW = "new"
    COMPILING = "compiling"
    TIMING = "timing"
    COMPILED = "compiled"
    EAGER = "eager"
    REFUSED = "refused"


@dataclass(slots=True)
class Backoff:
    """A number of backwards that doubles with each failure. ``left`` of them are to come."""

    left: int = 0
    _next: int = 0

    def fail(self, least: int = 0) -> None:
        """Begin to wait for as many backwards, or as many as are due. The first failure is free."""
        self.left = max(self._next, least)
        self._next = max(1, 2 * self.left)

    def is_over(self, times: int = 1) -> bool:
        """Count backwards; return whether the wait is over."""
        self.left = max(0, self.left - times)
        return not self.left

    def succeed(self) -> None:
        """End the wait. The next one is short."""
        self.left = self._next = 0


@dataclass(slots=True, eq=False)
class Record:
    """The record of the tapes with one key.

    Attributes:
        reason: why the next backward runs on eager, if that is known before the walk.
        misses, rent: misses since the last compile, and their seconds on eager; ``owes`` are the seconds before the
            next decision.
        spent: seconds of compiles.
        variants: the compiled or loaded ones.
        hits: hits of these at the last miss.
        compiling: the jobs that compile its regions beside the training.
        asked: the store on disk was searched.
        rest: the wait before another try.
        loop: the same for tries of the own loop.
        turn: backwards of the trial so far; ``eager`` and ``compiled`` are their seconds.
        timing: the result of the last trial.
    """

    key: Hashable
    state: State = State.NEW
    reason: Bypass | None = None
    misses: int = 0
    rent: float = 0.0
    owes: float = 0.0
    spent: float = 0.0
    variants: list[weakref.ref[Variant]] = field(default_factory=list)
    hits: int = 0
    compiling: set[object] = field(default_factory=set)
    asked: bool = False
    rest: Backoff = field(default_factory=Backoff)
    loop: Backoff = field(default_factory=Backoff)
    turn: int = 0
    eager: list[float] = field(default_factory=list)
    compiled: list[float] = field(default_factory=list)
    timing: Timing | None = None

    def living(self) -> list[Variant]:
        """Return the variants that still exist."""
        return [variant for each in self.variants if (variant := each()) is not None]

    def lost(self) -> float:
        """Return the seconds of compiles that hits have not made up for. Hits that were not timed make up for as long
        as they ran."""
        if not self.spent:
            return 0.0
        living, timing = self.living(), self.timing
        hits = sum(each.hits for each in living)
        if not by_clock():
            return max(0.0, self.spent - hits)
        if timing is None:
            return max(0.0, self.spent - sum(each.ran for each in living))
        return max(0.0, self.spent - hits * max(0.0, timing.eager - timing.compiled) / 1e3)


class Balance(NamedTuple):
    """The seconds that another compile may cost.

    Attributes:
        lost: seconds of compiles that hits have not made up for.
        likely: seconds that another one is likely to cost.
        allowed: seconds that may be lost; infinite to compile everything.
        waits: steps wait for compiles, and tapes are compiled when they are first met.
    """

    lost: float
    likely: float
    allowed: float
    waits: bool

    @property
    def is_over(self) -> bool:
        """True if another compile might lose more than is allowed."""
        return self.lost + self.likely > self.allowed


class Action(enum.Enum):
    """The ways to treat a backward."""

    SERVE = "serve"
    COMPILE = "compile"
    ASK = "ask"
    """Capture it only to search the store on disk."""
    EAGER = "eager"


class Decision(NamedTuple):
    """An action.

    Attributes:
        reason: why eager runs the backward.
        owes: seconds that such misses have to take on eager, in all, before the next decision.
        seconds: maximum for capture and tracing.
    """

    action: Action
    reason: Bypass | None = None
    owes: float = 0.0
    seconds: float = math.inf


def next_action(record: Record, balance: Balance | None, has_store: bool = False) -> Decision:
    """Decide about one backward, and change nothing.

    Args:
        balance: None before the walk. With it, there is no code for the backward.
        has_store: there is a store on disk, and it may have code.
    """
    if balance is None:
        return Decision(Action.SERVE) if record.reason is None else Decision(Action.EAGER, record.reason)
    if record.state is State.COMPILING:
        return Decision(Action.EAGER, COMPILING)
    if balance.allowed == math.inf:
        return Decision(Action.COMPILE)
    if balance.waits and not balance.is_over:
        return Decision(Action.COMPILE, seconds=balance.allowed - balance.lost)
    if record.rent >= balance.likely and (balance.waits or not balance.is_over):
        return Decision(Action.COMPILE)
    asks = has_store and not record.asked and balance.lost <= balance.allowed
    asks_at = 0.0 if balance.waits else ASKING * balance.likely
    if asks and record.rent >= asks_at:
        return Decision(Action.ASK, OVER_BUDGET if balance.is_over else NOT_YET)
    if balance.is_over:
        return Decision(Action.EAGER, OVER_BUDGET, max(balance.likely, 2 * record.rent))
    return Decision(Action.EAGER, NOT_YET, asks_at if asks else balance.likely)


def by_clock() -> bool:
    """Return whether seconds are those of the clock."""
    return not torch.are_deterministic_algorithms_enabled()


def waits(settings: Settings) -> bool:
    """Return whether steps wait for compiles. Under deterministic algorithms they do: else the clock would decide which
    step is the first compiled one."""
    return settings.on_miss == "compile" or not by_clock()
