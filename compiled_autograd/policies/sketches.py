"""Results of looks at tapes, found again by a sketch of their roots alone. A sketch takes a microsecond. A look at each
node takes longer than the time that a small backward may lose."""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from time import perf_counter
from typing import Protocol

from ..process_state import PROCESS
from ..settings import Settings
from ..shadow_cache import Bypass
from .own_loop import Tries
from .spending import by_clock

FIRST_SPACING, FURTHER, LAST_SPACING = 16, 4, 4092
"""Interval between looks at a tape, in backwards: at first, the factor of its growth, and at most. A look takes as long
as two small backwards. The largest interval plus one is a prime, so that for alternating tapes it is not always the
same one that is looked at."""
BELIEVED = 1030
"""Maximum interval between looks at tapes that are not left to eager, and at tapes on eager until they have paid for a
compile: policies count backwards at looks."""
LEFT_BEFORE_LOOKING_AWAY, LOOKS_AWAY, LOOKS_AWAY_OF, LOOKS_AWAY_FOR = 32, (16, 66), 4, 3e-3
"""Skipping of roots: the number of consecutive tapes of a thread on eager before it begins, the least and the largest
number of skipped roots, the divisor of the streak that gives that number, and the limit in seconds. Reading a root
takes ten microseconds, a tenth of a small backward. The skipped backwards may take only as many seconds as the limit on
eager: else hits that occur in phases would be missed. A pseudo-random 0 to 3 is subtracted (:attr:`Looks.dice`), so
that for alternating tapes it is not always the same root that is read."""
SECONDS_FOR_A_ROOT, MOST_ROOTS, MOST_LET_GO = 2e-4, 1024, 255
"""Search for a missed tape: seconds for each root that is read, the maximum number of roots, and of pauses. If another
tape was among the skipped ones, the next roots are read: as many as before the first skip, or more if the skipped
backwards took longer than usual. A hit is assumed to save a tenth of its step's time, so the reading takes less than
half of the savings. Without a hit among these roots, the next search is left out, then the next three, up to the
maximum."""
PATIENCE_OF_ALL = 4096
"""Number of backwards after which a policy forgets a tape that did not repeat. While a policy has any record, all tapes
are looked at, which keeps small hits from the fast path."""
_MAX_KEPT = 4096
_MAX_NUMBERS = 1024
_numbers = PROCESS.register(itertools.count(1))


class Found(Protocol):
    """The result of a look at a whole tape. ``verdict`` is the reason to leave it to eager, or None. ``left`` is the
    maximum number of backwards for which the verdict holds. ``takes`` is the seconds of each on eager, 0 if unknown."""

    verdict: Bypass | None
    left: int
    takes: float


class Known:
    """The result of a sketch.

    Attributes:
        found: the result of the last look.
        verdict: the verdict of that result.
        left: the number of backwards for which it still holds; ``given`` is the number at first.
        spacing: the maximum number of backwards for which it may hold; 0 if the sketch is ambiguous.
        away: the maximum number of backwards that may have the same result without a sketch.
        timed: the result is a trial that is under way.
        tries: tries of the own loop on such backwards.
    """

    __slots__ = ("away", "found", "given", "left", "spacing", "timed", "tries", "verdict")

    def __init__(self, found: Found | None) -> None:
        self.spacing = FIRST_SPACING
        self.tries = Tries()
        self.hold(found)

    def hold(self, found: Found | None) -> None:
        """Set the result of a look."""
        self.found, self.timed = found, False
        self.verdict = None if found is None else found.verdict
        self.left = self.given = min(self.spacing, BELIEVED if found is None else found.left)
        least, most = LOOKS_AWAY
        takes = 0.0 if found is None else found.takes
        self.away = min(most, max(least, int(LOOKS_AWAY_FOR / takes))) if takes else least

    @property
    def used(self) -> int:
        """The number of backwards for which the result was used."""
        return self.given - self.left


def still_holds(found: Found, before: Known | None) -> bool:
    """Return whether a verdict holds for one more backward, and count this one. If ``before``, the result of the tape's
    sketch until now, is that verdict, the backwards since the last look are counted too."""
    if before is not None and before.found is found:
        found.left -= before.used
    holds = found.left > 0
    found.left -= holds
    return holds


class Round:
    """Counts backwards, those among them that were not looked at."""

    def __init__(self) -> None:
        self._count = 0

    def is_over(self, before: Known | None) -> bool:
        """Count a look at a tape with the result ``before`` so far, and return whether :data:`PATIENCE_OF_ALL`
        backwards passed."""
        self._count += 1 + (0 if before is None else before.used)
        if self._count < PATIENCE_OF_ALL:
            return False
        self._count = 0
        return True


UNKNOWN = PROCESS.register(Known(None))
"""The result of a sketch that has no result yet."""
UNKNOWN.left = 0


class Doubts:
    """The question whether the skipped roots of a thread included another tape, which may be a hit.

    Attributes:
        began: the time of the first of the last skipped tapes.
        usual: the seconds of each, from one to the next, the last time that all were equal.
        first: the value from which the streak (:attr:`Looks.streak`) then starts, also after a tape that is not left.
        let_go, spared: the number of searches to leave out, and how many of them are left.
    """

    __slots__ = ("began", "first", "let_go", "spared", "usual")

    def __init__(self) -> None:
        self.began = self.usual = 0.0
        self.first = self.let_go = self.spared = 0

    def begin(self, alike: int) -> None:
        """Begin to skip roots. ``alike`` is the number of equal tapes skipped before, or 0."""
        now = perf_counter()
        if alike:
            self.usual = (now - self.began) / alike
        self.began = now

    def looks_for_it(self, length: int) -> bool:
        """Return whether to read the next roots, after skipped tapes with an unexpected number of nodes. The streak
        then starts from ``first``."""
        if self.spared:
            self.spared -= 1
            return False
        self.let_go = self.spared = min(2 * self.let_go + 1, MOST_LET_GO)
        roots = LEFT_BEFORE_LOOKING_AWAY
        if by_clock():
            more = perf_counter() - self.began - self.usual * length
            roots = max(roots, min(int(more / SECONDS_FOR_A_ROOT), MOST_ROOTS))
        self.first = LEFT_BEFORE_LOOKING_AWAY - roots
        return True

    def found(self) -> int:
        """Return the start of the streak after a tape that is not left to eager. It may be another tape than the slow
        one, or none was slow. So the next search reads fewer roots, until the tape is missed."""
        first, self.let_go, self.spared = self.first, 0, 0
        self.first = -(-3 * first // 4)
        return first


class Looks:
    """The looks at tapes of one thread.

    Attributes:
        last_root, away: see :func:`tape.sketch`.
        streak: the number of tapes left to eager since the last one that was not, or was timed.
        known, verdict: the result of the last sketch, under the settings of that ``number``.
        unseen: the number of next tapes with the same result without a sketch.
        length: their number at first, plus one for the next; 0 if another tape came since.
        looped: the own loop may be tried on some of these.
        dice: a pseudo-random number of 16 bits, renewed each time that roots are skipped.
        doubts: whether another tape was among them. This is its own object, so that this one, which each backward
            reads, has few lines of memory.
    """

    __slots__ = (
        "away",
        "dice",
        "doubts",
        "known",
        "last_root",
        "length",
        "looped",
        "number",
        "streak",
        "unseen",
        "verdict",
    )

    def __init__(self) -> None:
        self.last_root = self.streak = self.number = self.away = self.unseen = self.length = self.dice = 0
        self.looped = True
        self.known = UNKNOWN
        self.verdict: Bypass | None = None
        self.doubts = Doubts()

    def took_for(self, known: Known, number: int, looks_away: bool = True) -> Bypass | None:
        """Use the result of a tape's sketch, under the settings of a number.

        Args:
            looks_away: the next tapes may have the same result without a sketch.

        Returns:
            The reason to leave it to eager; None if there is none, or the tape must be looked at.
        """
        verdict, unseen = known.verdict, 0
        if looks_away and self.streak + 1 >= LEFT_BEFORE_LOOKING_AWAY:
            unseen = max(LOOKS_AWAY[0], self.streak // LOOKS_AWAY_OF)
            unseen = min(unseen, known.away) - (self.dice >> 14)
            unseen = min(unseen, known.left - 2)  # one is left, or it was forgotten
            self.dice = (25173 * self.dice + 13849) & 0xFFFF
            self.doubts.begin(0 if self.unseen or known is not self.known else self.length)
        # No call from here on: what ``gc`` or a signal runs has backwards of its own.
        if self.known.left > 0:  # else it was forgotten, and counts no more
            self.known.left += self.unseen
        self.known, self.number, self.verdict = known, number, verdict
        self.away = self.unseen = self.length = 0
        if known.left <= 0 or verdict is None:
            return None
        known.left -= 1
        self.streak += 1
        if 0 < unseen < known.left:
            tries = known.tries
            self.looped = tries.rest < unseen
            if not self.looped:  # it is not asked for any of these, and they are counted now
                tries.rest -= unseen
            self.away = self.unseen = unseen
            self.length = unseen + 1
            known.left -= unseen
            self.streak += unseen
        return verdict

    def were_not_alike(self) -> None:
        """Note that the tapes without a sketch and the next one have made an unexpected number of nodes."""
        length, self.length = self.length, 0
        if length and self.doubts.looks_for_it(length):
            self.streak = self.doubts.first

    def goes_on(self) -> None:
        """End the streak at a hit or a trial."""
        self.streak = self.doubts.found()


class Sketches:
    """Results of looks at whole tapes, by sketch (:func:`tape.sketch`) and settings. They are only hints: different
    tapes may have one sketch.

    Attributes:
        known: the results, by number of the settings and sketch; empty while no policy has a record.
        mixed: ambiguous sketches: one of their tapes is left to eager and another is not.
    """

    def __init__(self) -> None:
        self.known: dict[Hashable, Known] = {}
        self.mixed: set[Hashable] = set()
        self._numbers: dict[Hashable, int] = {}

    def number(self, settings: Settings) -> int:
        """Return a number for settings with the same results, since settings take long to compare."""
        loop = (settings.own_loop, settings.native is False)
        may = (settings.tune, settings.check, settings.on_unsupported, settings.on_miss)
        key = (settings.key, *may, settings.compile_budget, *loop)
        number = self._numbers.get(key)
        if number is None:
            if len(self._numbers) >= _MAX_NUMBERS:
                self._numbers.clear()
            number = self._numbers[key] = next(_numbers)
        return number

    def keep(self, sketch: Hashable, found: Found | None) -> None:
        """Keep the result of a look at a tape."""
        known = self.known.get(sketch)
        if known is None:
            if len(self.known) >= _MAX_KEPT:
                self.forget()
            known = self.known[sketch] = Known(found)
        elif not known.timed and known.verdict is (None if found is None else found.verdict):
            known.spacing = min(FURTHER * known.spacing, LAST_SPACING)
        else:
            known.spacing = 0
            if found is not None and known.found not in (None, found):
                self.is_mixed(sketch)
        if sketch in self.mixed:
            known.spacing = 0
        known.hold(found)

    def keep_on_trial(self, sketch: Hashable, trial: Found, backwards: int) -> None:
        """Use a trial for the next backwards with a tape's sketch. A look takes as long as a small backward and
        displaces the engine's code in the caches, and no later backward will be looked at."""
        known = self.known.get(sketch)
        if known is not None and known.found not in (None, trial):
            self.is_mixed(sketch)
        if sketch in self.mixed or (known is not None and known.found is not trial):
            return
        if known is None:
            known = Known(trial)
            if len(self.known) < _MAX_KEPT:
                self.known[sketch] = known
        known.left, known.given, known.timed = backwards, backwards, True

    def is_mixed(self, sketch: Hashable) -> None:
        """Note that a sketch is ambiguous: a tape with this sketch was mistaken for another one."""
        if len(self.mixed) >= _MAX_KEPT:
            self.mixed.clear()
        self.mixed.add(sketch)
        known = self.known.get(sketch)
        if known is not None:
            known.given -= known.left
            known.left = 0

    def forget(self) -> None:
        """Drop all results, which may no longer hold."""
        for each in list(self.known.values()):  # threads may have some of it at hand
            each.left = 0
        self.known.clear()

    def clear(self) -> None:
        """Forget all."""
        self.forget()
        self.mixed.clear()


SKETCHES = Sketches()
PROCESS.register(SKETCHES, reset=SKETCHES.clear)
