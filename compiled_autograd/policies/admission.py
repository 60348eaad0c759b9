"""Tapes that rarely repeat: once compiling them has cost more than its likely gain, new tapes stay on the eager engine,
unless they run there for as long as compiling would take.

A tape is recognised by its fingerprint, before the engine is called. Most backwards are not even looked at: see
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
"""Sampling of tapes with an unknown sketch: each is looked at until 8 were new, then one in two until 8 more, and so
on, at least one in 64."""
LEFT_UNSAID = 8
"""Number of backwards left to eager before the warning. A training with several losses has seen each repeat by then,
and compiles again. Backwards recognised by a wrong sketch are counted at the next look."""
DEARER = 4
"""Factor by which the required eager time grows after an unused compile."""
STORE_SECONDS, STORE_SHARE = 0.5, 0.01
"""Limit of the time for captures that only search the store: seconds, plus a fraction of the process's time."""
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
        """Count a backward on eager whose tape was looked at."""
        self.takes = seconds if by_clock() else 1 / RETURNS
        self.left_to_eager(1)

    def left_to_eager(self, times: int) -> None:
        """Count further backwards on eager."""
        self.seen += times
        self.seconds += times * self.takes

    def has_paid(self, likely: float) -> bool:
        """Return whether these tapes have run on eager for as long as compiling them is likely to take."""
        return self.seen >= RETURNS and self.seconds >= self.needed * likely

    def hold(self, likely: float) -> None:
        """Set how long the verdict holds: until eager has likely run for long enough. The tape is looked at then."""
        further = (self.needed * likely - self.seconds) / self.takes if self.takes else BELIEVED
        self.left = int(max(FIRST_SPACING, min(further, BELIEVED)))


class Admission:
    """The decision which tapes are compiled.

    Attributes:
        closed: the budget of some session was spent at the last compile, so tapes must be recognised before the engine
            is called.
        budget: the budget of that session.
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
        """Return whether a structure of a tape with this fingerprint was captured."""
        return fingerprint in self._captured

    def review(self, settings: Settings) -> Miss | None:
        """Check the balance after a compile for a session with these settings. Return a record for the store if the
        budget is now spent."""
        balance = self._last = SPENDING.balance()
        if self.closed or not balance.is_over(settings.compile_budget):
            return None
        self.closed, self.budget = True, settings.compile_budget
        allowed = balance.allowed if self.budget is None else self.budget
        new = f"{balance.lost:.1f} s are lost, and {balance.likely:.1f} s more if the last one does not repeat"
        return Miss("over_budget", "the next new structure", f"{allowed:.1f} s may be lost", new, counted(balance))

    def refuses(self, settings: Settings) -> bool:
        """Return whether compiling is refused now."""
        if not self.closed:
            return False
        return SPENDING.balance().is_over(settings.compile_budget)

    def left(self, settings: Settings) -> float:
        """Return the seconds that capturing and tracing a new tape may take."""
        return SPENDING.balance().left(settings.compile_budget) if settings.compiles and by_clock() else math.inf

    def end(self, settings: Settings, seconds: float) -> None:
        """Count a capture that was ended after these seconds."""
        SPENDING.end(seconds)
        self.review(settings)

    def is_closed_for(self, settings: Settings) -> bool:
        """Return whether the budget was spent at the last look. This is cheap, since each hit may call it."""
        return self.closed and self._last.is_over(settings.compile_budget)

    def may_ask_store(self) -> bool:
        """Return whether a tape may be captured only to search the store for it."""
        return not by_clock() or self._in_store <= STORE_SECONDS + STORE_SHARE * SPENDING.elapsed

    def asked_store(self, seconds: float) -> None:
        """Count the seconds of a search in the store without a result."""
        self._in_store += seconds

    def skips(self) -> Tape | None:
        """Return the record for a tape with an unknown sketch that is not looked at; None if it must be looked at."""
        self._skipped += 1
        if self._skipped < min(LAST_LOOK, 1 << (self._new // LOOKS_AT_ONCE)):
            self._leave(1)
            return self._unknown
        self._skipped = 0
        return None

    def look(
        self, fingerprint: int, settings: Settings, has_store: bool, before: Known | None = None
    ) -> tuple[Tape | None, bool]:
        """Return the record of a tape while :attr:`closed`, and whether it is compiled now if it is no hit.

        Args:
            has_store: there is a store on disk, which may have it.
            before: the result of its sketch until now.
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
        """Count a tape that was no hit, and was not compiled.

        Args:
            tape: its record.
            taken_from: the sketch that led to the record, which may be another tape's; None if the tape was looked at.
        """
        self._leave(1)
        if tape is None or tape.verdict is not None:
            return
        if taken_from is None:
            self._change(tape, OVER_BUDGET)
        else:
            SKETCHES.is_mixed(taken_from)

    def _leave(self, times: int) -> None:
        """Count backwards that are left to eager, and warn once."""
        self._left += times
        if self._left >= LEFT_UNSAID and not self._said:
            self._said = True
            _warn(SPENDING.balance())

    def _change(self, tape: Tape, verdict: Bypass | None) -> None:
        tape.verdict = verdict
        SKETCHES.forget()


def counted(balance: Balance) -> str:
    """Return the lost seconds and their cause, in words."""
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
