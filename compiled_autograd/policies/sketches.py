"""What was found of tapes, found again by what their roots alone say. That takes a microsecond; a look at each node
takes longer than a small backward may lose."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

FIRST_SPACING, LAST_SPACING = 16, 1024
"""After so many backwards a tape is looked at all the same: at first, and at last; the number doubles with each."""
_MAX_KEPT = 4096

_Found = TypeVar("_Found")


@dataclass(slots=True)
class _Known(Generic[_Found]):
    """``left`` is for how many backwards it still holds, ``spacing`` for how many it held; 0 where it never will, since
    tapes of one sketch were two things."""

    found: _Found
    left: int = FIRST_SPACING
    spacing: int = FIRST_SPACING


class Sketches(Generic[_Found]):
    """By sketch (:func:`tape.sketch`), what a look at the whole tape has found. It only advises: tapes that are not the
    same may have one sketch."""

    def __init__(self) -> None:
        self._known: dict[Hashable, _Known[_Found]] = {}

    def find(self, sketch: Hashable) -> tuple[_Found] | None:
        """What was found, in a tuple; None where the tape has to be looked at."""
        known = self._known.get(sketch)
        if known is None or known.left <= 0:
            return None
        known.left -= 1
        return (known.found,)

    def keep(self, sketch: Hashable, found: _Found) -> None:
        """The tape was looked at."""
        known = self._known.get(sketch)
        if known is None:
            if len(self._known) >= _MAX_KEPT:
                self._known.clear()
            self._known[sketch] = _Known(found)
        elif known.found is not found:
            known.left = known.spacing = 0
        else:
            known.left = known.spacing = min(2 * known.spacing, LAST_SPACING)

    def forget(self) -> None:
        """What was found may not hold any more."""
        self._known.clear()
