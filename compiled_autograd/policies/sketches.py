"""What was found of tapes, found again by what their roots alone say. That takes a microsecond; a look at each node
takes longer than a small backward may lose."""

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
"""After so many backwards a tape is looked at all the same: at first, and at last; each number is so many times the one
before. A look takes as long as two small backwards. One more than the last is a prime, so that of tapes that take turns
it is not always the same one."""
BELIEVED = 1030
"""What is not left to eager is looked at after so many at most, and so is what runs there until it has paid for being
compiled: policies count backwards at looks."""
LEFT_BEFORE_LOOKING_AWAY, LOOKS_AWAY, LOOKS_AWAY_OF, LOOKS_AWAY_FOR = 32, (16, 66), 4, 3e-3
"""Once so many tapes of a thread were left to eager one after the other, not even the roots of some more are read
before that of the next one: the least and the largest number. It takes ten microseconds to read one, a tenth of a small
backward: so it may be one for each so many that were left, as long as eager takes so many seconds for all of them. Else
hits that come in phases would be missed. It is up to three fewer, as by dice (:attr:`Looks.dice`): else of tapes that
take turns it would be always the same one that is read."""
SECONDS_FOR_A_ROOT, MOST_ROOTS, MOST_LET_GO = 2e-4, 1024, 255
"""Where another tape was among those whose roots were not read, those of the next ones are: as many as before the first
were not, or, where these have taken longer than usual, one for each so many seconds of that, up to so many. What a hit
saves is taken for a tenth of what its step takes: to read so many roots takes less than half of that. Where no hit is
among these, the next time is let go, then the next three, up to so many."""
PATIENCE_OF_ALL = 4096
"""A policy forgets what it knows of a tape that has not come again among so many backwards: while it knows something of
any, all tapes are looked at, which keeps small hits from the fast path."""
_MAX_KEPT = 4096
_MAX_NUMBERS = 1024
_numbers = PROCESS.register(itertools.count(1))


class Found(Protocol):
    """What a look at the whole of a tape has found: ``verdict`` says why it is left to eager, None where it is not;
    ``left`` for how many backwards at most; ``takes`` how many seconds each takes there, 0 where nobody knows."""

    verdict: Bypass | None
    left: int
    takes: float


class Known:
    """What a sketch has led to.

    Attributes:
        found: by the last look.
        verdict: that of what was found.
        left: for how many backwards it still holds; ``given`` is for how many it did at first.
        spacing: the number of backwards that it may hold for; 0 where it never will, since tapes of one sketch were two
            things.
        away: so many at most may be taken for the same without a sketch.
        timed: what was found is a trial that is under way.
        tries: when the own loop is asked to run one that is left to eager.
    """

    __slots__ = ("away", "found", "given", "left", "spacing", "timed", "tries", "verdict")

    def __init__(self, found: Found | None) -> None:
        self.spacing = FIRST_SPACING
        self.tries = Tries()
        self.hold(found)

    def hold(self, found: Found | None) -> None:
        """This was found."""
        self.found, self.timed = found, False
        self.verdict = None if found is None else found.verdict
        self.left = self.given = min(self.spacing, BELIEVED if found is None else found.left)
        least, most = LOOKS_AWAY
        takes = 0.0 if found is None else found.takes
        self.away = min(most, max(least, int(LOOKS_AWAY_FOR / takes))) if takes else least

    @property
    def used(self) -> int:
        """How many backwards it was believed for."""
        return self.given - self.left


def still_holds(found: Found, before: Known | None) -> bool:
    """Whether a verdict holds for one more backward, which is counted; and so are those since the last look, where
    ``before``, what the tape's sketch has led to until now, was that verdict."""
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
        """A tape is looked at, of which so far ``before`` is known: whether :data:`PATIENCE_OF_ALL` have come."""
        self._count += 1 + (0 if before is None else before.used)
        if self._count < PATIENCE_OF_ALL:
            return False
        self._count = 0
        return True


UNKNOWN = PROCESS.register(Known(None))
"""What is taken for what a sketch has led to that has led to nothing yet."""
UNKNOWN.left = 0


class Doubts:
    """Whether another tape was among those of a thread whose roots were not read, which may be a hit.

    Attributes:
        began: when the first of the last such came.
        usual: how many seconds each took, from one to the next, the last time that all were alike.
        first: what the streak (:attr:`Looks.streak`) begins at then, and after a tape that is not left.
        let_go, spared: how often another tape among them may come to be let go, and how often it has to be yet.
    """

    __slots__ = ("began", "first", "let_go", "spared", "usual")

    def __init__(self) -> None:
        self.began = self.usual = 0.0
        self.first = self.let_go = self.spared = 0

    def begin(self, alike: int) -> None:
        """The roots of the next ones are not read; those before were so many, all alike, or 0."""
        now = perf_counter()
        if alike:
            self.usual = (now - self.began) / alike
        self.began = now

    def looks_for_it(self, length: int) -> bool:
        """So many have made other numbers of nodes than one would think: whether the roots of the next ones are read.
        The streak begins at ``first`` then."""
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
        """A tape is not left: what the streak begins at. It may be another tape than the one that took long, or what
        took long was none: so the next one is looked for among fewer, until it is missed."""
        first, self.let_go, self.spared = self.first, 0, 0
        self.first = -(-3 * first // 4)
        return first


class Looks:
    """Which tapes of one thread are looked at.

    Attributes:
        last_root, away: see :func:`tape.sketch`.
        streak: how many tapes were taken for one that is left to eager, since the last that was not, nor was timed.
        known, verdict: what the last sketch has led to, under the settings of that ``number``.
        unseen: so many more are taken for the same without a sketch.
        length: how many these were, with the next one; 0 where something else has come since.
        looped: the own loop may be asked for some of these.
        dice: a number of 16 bits, another one each time that some are to be taken without a sketch.
        doubts: whether another was among them. It is an object of its own to keep this one, which each backward reads,
            in few lines of memory.
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
        """A tape was sketched under the settings of some number, which has led to that.

        Args:
            looks_away: those after it may be taken for the same without a sketch.

        Returns:
            Why it is left to eager; None where it is not known to be, or has to be looked at.
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
        """Those without a sketch and the next one have made other numbers of nodes."""
        length, self.length = self.length, 0
        if length and self.doubts.looks_for_it(length):
            self.streak = self.doubts.first

    def goes_on(self) -> None:
        """A tape is a hit, or on trial."""
        self.streak = self.doubts.found()


class Sketches:
    """By sketch (:func:`tape.sketch`) and settings, what a look at the whole tape has found. It only advises: tapes
    that are not the same may have one sketch.

    Attributes:
        known: what was found, by number of the settings and sketch; empty as long as no policy needs to know.
        mixed: the sketches that tapes had of which one is left to eager and another is not: they say nothing.
    """

    def __init__(self) -> None:
        self.known: dict[Hashable, Known] = {}
        self.mixed: set[Hashable] = set()
        self._numbers: dict[Hashable, int] = {}

    def number(self, settings: Settings) -> int:
        """That of settings under which the same is found: they are long to compare."""
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
        """The tape was looked at."""
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
        """The tape was looked at, and is timed: the next few with its sketch are taken for it, since a look takes as
        long as a small backward and puts the engine's code out of the caches, and no later backward is looked at."""
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
        """A tape with this sketch was taken for another, which is not to go the same way."""
        if len(self.mixed) >= _MAX_KEPT:
            self.mixed.clear()
        self.mixed.add(sketch)
        known = self.known.get(sketch)
        if known is not None:
            known.given -= known.left
            known.left = 0

    def forget(self) -> None:
        """What was found may not hold any more."""
        for each in list(self.known.values()):  # threads may have some of it at hand
            each.left = 0
        self.known.clear()

    def clear(self) -> None:
        """Forget all."""
        self.forget()
        self.mixed.clear()


SKETCHES = Sketches()
PROCESS.register(SKETCHES, reset=SKETCHES.clear)
