"""What was found of tapes, found again by what their roots alone say. That takes a microsecond; a look at each node
takes longer than a small backward may lose."""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from typing import Protocol

from shadow_cache import Bypass

from ..process_state import PROCESS
from ..settings import Settings

FIRST_SPACING, LAST_SPACING = 16, 1024
"""After so many backwards a tape is looked at all the same: at first, and at last; the number doubles with each."""
_MAX_KEPT = 4096
_MAX_NUMBERS = 1024
_numbers = PROCESS.register(itertools.count(1))


class Found(Protocol):
    """What a look at the whole of a tape has found: ``verdict`` says why it is left to eager, None where it is not."""

    verdict: Bypass | None


class Known:
    """``left`` is for how many backwards it still holds, ``spacing`` for how many it held; 0 where it never will, since
    tapes of one sketch were two things. ``verdict`` is that of what was found."""

    __slots__ = ("found", "left", "spacing", "verdict")

    def __init__(self, found: Found | None) -> None:
        self.found = found
        self.verdict = None if found is None else found.verdict
        self.left = self.spacing = FIRST_SPACING


class Sketches:
    """By sketch (:func:`tape.sketch`) and settings, what a look at the whole tape has found. It only advises: tapes
    that are not the same may have one sketch."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Known] = {}
        self._numbers: dict[Hashable, int] = {}

    def number(self, settings: Settings) -> int:
        """That of settings under which the same is found: they are long to compare."""
        key = (settings.key, settings.tune, settings.compile_budget, settings.compiles)
        number = self._numbers.get(key)
        if number is None:
            if len(self._numbers) >= _MAX_NUMBERS:
                self._numbers.clear()
            number = self._numbers[key] = next(_numbers)
        return number

    def find(self, sketch: Hashable) -> Known | None:
        """What was found; None where the tape has to be looked at."""
        known = self._known.get(sketch)
        if known is None or known.left <= 0:
            return None
        known.left -= 1
        return known

    def before(self, sketch: Hashable) -> Known | None:
        """What was found, also where it does not hold any more; None where no tape with this sketch was looked at."""
        return self._known.get(sketch)

    def keep(self, sketch: Hashable, found: Found | None) -> None:
        """The tape was looked at."""
        known = self._known.get(sketch)
        if known is None:
            if len(self._known) >= _MAX_KEPT:
                self._known.clear()
            self._known[sketch] = Known(found)
        elif known.verdict is not (None if found is None else found.verdict):
            known.left = known.spacing = 0
        else:
            known.found = found
            known.left = known.spacing = min(2 * known.spacing, LAST_SPACING)

    def forget(self) -> None:
        """What was found may not hold any more."""
        self._known.clear()


SKETCHES = Sketches()
PROCESS.register(SKETCHES, reset=SKETCHES.forget)
