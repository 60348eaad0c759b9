"""Tapes that cannot be captured: after two tries they are left to the eager engine before it is asked to report them,
and are tried again from time to time.

Each try has the engine walk the tape until it finds what it cannot report, which takes as long as a small backward.
What a tape is, is told by its fingerprint, as for the other policies; one that was ever captured is always tried.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shadow_cache import Bypass

from ..native.interface import Question
from ..process_state import PROCESS
from ..settings import Settings
from .admission import ADMISSION
from .sketches import SKETCHES, Known, still_holds

TRIES = 2
"""Refusals of one tape before it is left to eager: some can be captured when they are met again."""
FIRST_SPACING, LAST_SPACING = 64, 4096
"""For so many backwards it is, at first and at last; the number doubles with each try that was in vain."""
_MAX_REFUSALS = 4096
_UNSUPPORTED = "unsupported"


@dataclass(slots=True, eq=False)
class Refusal:
    """Tapes with one fingerprint that were refused.

    Attributes:
        spacing: for how many backwards the next verdict will hold.
        refused: how often they were.
        verdict: why they are left to eager; None while they are tried.
        left: for how many backwards it still holds.
    """

    spacing: int
    refused: int = 0
    verdict: Bypass | None = None
    left: int = 0


class Refusals:
    """Those of the process."""

    def __init__(self) -> None:
        self._refusals: dict[tuple[int, Any], Refusal] = {}

    @property
    def active(self) -> bool:
        """Whether any tape must be told apart before the engine is asked."""
        return bool(self._refusals)

    def questions(self) -> list[Question]:
        """What tells without Python that none must be."""
        return [(self._refusals.__len__, None, 0)]

    def find(self, fingerprint: int, settings: Settings, before: Known | None = None) -> Refusal | None:
        """What leaves a tape to eager, of which this is one backward.

        Args:
            before: what the tape's sketch has led to until now.
        """
        refusal = self._refusals.get((fingerprint, settings.key))
        if refusal is None or refusal.verdict is None:
            return None
        if still_holds(refusal, before):
            return refusal
        refusal.verdict = None
        SKETCHES.forget()
        return None

    def refused(self, fingerprint: int, settings: Settings, reason: Bypass) -> None:
        """The engine, or the capture, could not have a tape."""
        if reason.kind != _UNSUPPORTED or ADMISSION.has_captured(fingerprint):
            return
        if len(self._refusals) >= _MAX_REFUSALS:
            self.clear()
        refusal = self._refusals.setdefault((fingerprint, settings.key), Refusal(FIRST_SPACING))
        refusal.refused += 1
        if refusal.refused >= TRIES:
            refusal.verdict, refusal.left = reason, refusal.spacing
            refusal.spacing = min(2 * refusal.spacing, LAST_SPACING)
            SKETCHES.forget()

    def clear(self) -> None:
        """Forget all."""
        self._refusals.clear()
        SKETCHES.forget()


REFUSALS = Refusals()
PROCESS.register(REFUSALS, reset=REFUSALS.clear)
