"""Tapes that hardly ever come back: once compiling them has cost more than is likely to come of it, what is new is left
to the eager engine, unless it runs there for as long as compiling it would take.

What a tape is, is told by its fingerprint, before the engine is asked. Most backwards are not even looked at: see
:mod:`sketches`.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass

from ..diagnostics.bypass import OVER_BUDGET
from ..diagnostics.reporting import warn_once
from ..process_state import PROCESS
from ..settings import Settings
from ..shadow_cache import Bypass, Miss
from .sketches import BELIEVED, FIRST_SPACING, SKETCHES, Known
from .spending import RETURNS, SPENDING, Balance, by_clock

LOOKS_AT_ONCE, LAST_LOOK = 8, 64
"""Of tapes whose sketch is not known, each is looked at until so many were new; then one in two for as many, and so on,
down to one in this many."""
LEFT_UNSAID = 8
"""So many backwards are known to be left to eager before that is warned of: a training with several losses has seen
each come back by then, and compiles again. Those that are taken for others by their sketch are known of at the next
look."""
DEARER = 4
"""Each time that a tape was compiled in vain, it has to run on eager for so many times as long before it is again."""
STORE_SECONDS, STORE_SHARE = 0.5, 0.01
"""To capture tapes only to ask the store for them may take so many seconds, and this part of the time."""
_MAX_TAPES, _MAX_CAPTURED = 4096, 100_000


@dataclass(slots=True, eq=False)
class Tape:
    """Tapes with one fingerprint, once the budget was spent.

    Attributes:
        verdict: why they are left to eager; None where they may be hits.
        captured: something with this fingerprint was captured.
        looks, seen: how often they were looked at, and left to eager at least.
        takes: seconds of the last backward on eager that was looked at.
        seconds: that they have run on eager since they were compiled last.
        needed: for how many times as long as compiling takes they have to.
        left: for how many backwards the verdict holds at most.
    """

    verdict: Bypass | None
    captured: bool = False
    looks: int = 0
    seen: int = 0
    takes: float = 0.0
    seconds: float = 0.0
    needed: float = 1.0
    left: int = BELIEVED

    def ran_on_eager(self, seconds: float) -> None:
        """One that was looked at did."""
        self.takes = seconds if by_clock() else 1 / RETURNS
        self.left_to_eager(1)

    def left_to_eager(self, times: int) -> None:
        """So many more were."""
        self.seen += times
        self.seconds += times * self.takes

    def has_paid(self, likely: float) -> bool:
        """Whether they have run on eager for as long as it is likely to take to compile them."""
        return self.seen >= RETURNS and self.seconds >= self.needed * likely

    def hold(self, likely: float) -> None:
        """They have not: the verdict holds until they are likely to have, so that they are looked at then."""
        further = (self.needed * likely - self.seconds) / self.takes if self.takes else BELIEVED
        self.left = int(max(FIRST_SPACING, min(further, BELIEVED)))


class Admission:
    """Which tapes are compiled.

    Attributes:
        closed: the budget of some session was spent when something was compiled last; so tapes must be told apart
            before the engine is asked.
        budget: that session's.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget all."""
        self.closed = False
        self.budget: float | None = None
        self._last = Balance(0, 0, 0.0, 0.0, 0.0)
        self._tapes: dict[int, Tape] = {}
        self._captured: set[int] = set()
        self._unknown = Tape(OVER_BUDGET)
        self._new = self._skipped = self._left = 0
        self._said = False
        self._in_store = 0.0

    def captured(self, fingerprint: int) -> None:
        """A new structure was."""
        if len(self._captured) >= _MAX_CAPTURED:
            self._captured.clear()
        self._captured.add(fingerprint)

    def has_captured(self, fingerprint: int) -> bool:
        """Whether a structure of a tape with this fingerprint was captured."""
        return fingerprint in self._captured

    def review(self, settings: Settings) -> Miss | None:
        """Something was compiled for a session with these settings. Where that was the last that may be, gives a record
        for the store."""
        balance = self._last = SPENDING.balance()
        if self.closed or not balance.is_over(settings.compile_budget):
            return None
        self.closed, self.budget = True, settings.compile_budget
        allowed = balance.allowed if self.budget is None else self.budget
        new = f"{balance.lost:.1f} s are lost, and {balance.likely:.1f} s more if the last one does not repeat"
        return Miss("over_budget", "the next new structure", f"{allowed:.1f} s may be lost", new, counted(balance))

    def refuses(self, settings: Settings) -> bool:
        """Whether something that would have to be compiled now shall not be."""
        if not self.closed:
            return False
        return SPENDING.balance().is_over(settings.compile_budget)

    def left(self, settings: Settings) -> float:
        """The seconds that something new may take to be captured and traced."""
        return SPENDING.balance().left(settings.compile_budget) if settings.compiles and by_clock() else math.inf

    def end(self, settings: Settings, seconds: float) -> None:
        """A capture was ended after so long."""
        SPENDING.end(seconds)
        self.review(settings)

    def is_closed_for(self, settings: Settings) -> bool:
        """The same as of the last look: each hit may ask."""
        return self.closed and self._last.is_over(settings.compile_budget)

    def may_ask_store(self) -> bool:
        """Whether a tape may be captured only to see whether the store has it."""
        return not by_clock() or self._in_store <= STORE_SECONDS + STORE_SHARE * SPENDING.elapsed

    def asked_store(self, seconds: float) -> None:
        """That took so long, and the store did not have it."""
        self._in_store += seconds

    def skips(self) -> Tape | None:
        """What a tape whose sketch is not known is taken for without a look; None where it is to be looked at."""
        self._skipped += 1
        if self._skipped < min(LAST_LOOK, 1 << (self._new // LOOKS_AT_ONCE)):
            self._leave(1)
            return self._unknown
        self._skipped = 0
        return None

    def look(
        self, fingerprint: int, settings: Settings, has_store: bool, before: Known | None = None
    ) -> tuple[Tape | None, bool]:
        """What is known of a tape while :attr:`closed`; and whether it is to be compiled now, if it is no hit.

        Args:
            has_store: there is a store on disk, which may have it.
            before: what its sketch has led to until now.
        """
        balance = self._last = SPENDING.balance()
        if not balance.is_over(self.budget):
            self.closed, self._left = False, 0
            SKETCHES.forget()
        if not balance.is_over(settings.compile_budget):
            return None, False
        tape, is_new = self._tapes.get(fingerprint), False
        if tape is None:
            if len(self._tapes) >= _MAX_TAPES:
                self._tapes.clear()
            captured = fingerprint in self._captured
            tape = self._tapes[fingerprint] = Tape(None if captured else OVER_BUDGET, captured)
            is_new = not captured
        self._new = self._new + 1 if is_new else max(0, self._new - LOOKS_AT_ONCE)
        tape.looks += 1
        if tape.verdict is None:
            return tape, False
        if before is not None and before.verdict is not None and isinstance(before.found, Tape):
            both = {before.found, tape}  # where they are two, nobody knows which of them it was
            for each in both:
                each.left_to_eager(before.used // len(both))
            self._leave(before.used)
        if tape.has_paid(balance.likely):
            tape.seen, tape.seconds, tape.needed = 0, 0.0, DEARER * tape.needed
            self._change(tape, None)
            return tape, True
        tape.hold(balance.likely)
        asks = tape.captured and tape.looks > 2 and not tape.looks & (tape.looks - 1)
        if asks or (is_new and has_store and self.may_ask_store()):
            self._change(tape, None)
        else:
            self._leave(1)
        return tape, False

    def missed(self, tape: Tape | None, taken_from: Hashable = None) -> None:
        """A tape was no hit, and was not compiled.

        Args:
            tape: what it was taken for.
            taken_from: the sketch by which it was, and may be another; None where it was looked at.
        """
        self._leave(1)
        if tape is None or tape.verdict is not None:
            return
        if taken_from is None:
            self._change(tape, OVER_BUDGET)
        else:
            SKETCHES.is_mixed(taken_from)

    def _leave(self, times: int) -> None:
        """So many are left to eager, or were."""
        self._left += times
        if self._left >= LEFT_UNSAID and not self._said:
            self._said = True
            _warn(SPENDING.balance())

    def _change(self, tape: Tape, verdict: Bypass | None) -> None:
        tape.verdict = verdict
        SKETCHES.forget()


def counted(balance: Balance) -> str:
    """What was lost on how much, in words."""
    return (
        f"compiling took {balance.lost:.1f} s for {balance.made} structures or shapes, only {balance.returned} of "
        f"which repeated {RETURNS} times, and hits have not saved as much"
    )


def _warn(balance: Balance) -> None:
    warn_once(
        f"{counted(balance)}. From now on, new structures and shapes run on the eager engine unless they repeat for "
        "long (bypass 'over_budget'). If lengths differ, pad to a few lengths or mark them "
        "(torch._dynamo.mark_dynamic). Put ca.disable() around backwards that never repeat. compile_budget=SECONDS "
        "sets how much time may be lost; float('inf') compiles everything.",
        "over_budget",
    )


ADMISSION = Admission()
PROCESS.register(ADMISSION, reset=ADMISSION.clear)
