"""Back-off for failed tries: such tapes are left to the eager engine before it is called, and are tried again from time
to time.

Three kinds of tries fail. Some tapes cannot be captured: in each try the engine walks the tape to a node that it cannot
report, which takes as long as a small backward. Some tapes have only zero gradients, as of a loss with a margin that is
reached, while their code is still to be compared with the real calls: these runs prove nothing. And some tapes run call
by call, since hooks that are called in the backward register others.

A tape is recognised by its fingerprint, as for the other policies. A fingerprint that was ever captured is always
tried, except after zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

from ..diagnostics.bypass import ALL_ZERO_GRADIENTS, CALL_BY_CALL, DDP_CPP_REDUCER
from ..native.interface import Question
from ..process_state import PROCESS
from ..settings import Settings
from ..shadow_cache import Bypass
from .admission import ADMISSION
from .sketches import SKETCHES, Known, Round, still_holds

TRIES = 2
"""Refusals of one tape before it is left to eager: some can be captured when they are met again."""
FIRST_SPACING, LAST_SPACING = 256, 4096
"""Number of backwards on eager after failed tries, at first and at most. It doubles with each failed try."""
FIRST_SPACING_OF_ZEROS = 32
"""At first, after gradients that were all zero: the next ones may be others, and eager may be slower then. And where
DDP's reducer has hooks: the extension that can call them may have been built meanwhile."""
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
        takes: see :class:`Found`.
        tried: one was since the last refusal.
        came: one was met since all were last gone through.
    """

    spacing: int
    refused: int = 0
    verdict: Bypass | None = None
    left: int = 0
    takes: float = 0.0
    tried: bool = False
    came: bool = True


class Refusals:
    """The refusals of the process."""

    def __init__(self) -> None:
        self._refusals: dict[Hashable, Refusal] = {}
        self._round = Round()

    @property
    def active(self) -> bool:
        """Return whether any tape must be recognised before the engine is called."""
        return bool(self._refusals)

    def questions(self) -> list[Question]:
        """Return questions with which C++ checks that none must be."""
        return [(self._refusals.__len__, None, 0)]

    def find(self, fingerprint: int, settings: Settings, before: Known | None = None) -> Refusal | None:
        """Return the refusal that leaves a tape to eager, and count this backward.

        Args:
            before: the result of the tape's sketch until now.
        """
        if self._round.is_over(before):
            self._forget_those_of_no_tape()
        if settings.on_unsupported != "eager":
            return None
        key = _key(fingerprint, settings)
        refusal = self._refusals.get(key)
        if refusal is None:
            return None
        refusal.came = True
        if refusal.verdict is not None:
            if still_holds(refusal, before):
                return refusal
            refusal.verdict = None
            SKETCHES.forget()
        elif refusal.tried:  # successfully
            self._refusals.pop(key, None)
        refusal.tried = True
        return None

    def refused(self, tape: Callable[[], int], settings: Settings, reason: Bypass) -> None:
        """Count a bypass, if the engine or the capture refused the tape.

        Args:
            tape: returns the tape's fingerprint, which takes as long as a small backward.
        """
        if reason.kind in (_UNSUPPORTED, DDP_CPP_REDUCER.kind) and not ADMISSION.has_captured(fingerprint := tape()):
            spacing = FIRST_SPACING if reason.kind == _UNSUPPORTED else FIRST_SPACING_OF_ZEROS
            self._leave(fingerprint, settings, reason, spacing, TRIES)

    def gave_zeros(self, tape: Callable[[], int], settings: Settings) -> None:
        """Count a run that gave only zeros, which prove nothing.

        Args:
            tape: returns the tape's fingerprint, which takes as long as a small backward.
        """
        if settings.tune and settings.on_unsupported == "eager":
            self._leave(tape(), settings, ALL_ZERO_GRADIENTS, FIRST_SPACING_OF_ZEROS, 1)

    def ran_call_by_call(self, tape: Callable[[], int], settings: Settings) -> None:
        """Leave a tape to eager of which the calls ran one by one, more than once: users' code changed it as it ran.

        Args:
            tape: gives the tape's fingerprint, and takes as long as a small backward.
        """
        if settings.tune and settings.on_unsupported == "eager":
            self._leave(tape(), settings, CALL_BY_CALL, FIRST_SPACING, 1)

    def clear(self) -> None:
        """Forget all."""
        self._refusals.clear()
        SKETCHES.forget()

    def _leave(self, fingerprint: int, settings: Settings, reason: Bypass, spacing: int, tries: int) -> None:
        """Count a failed try, and leave the tapes to eager after enough of them."""
        if len(self._refusals) >= _MAX_REFUSALS:
            self.clear()
        refusal = self._refusals.setdefault(_key(fingerprint, settings), Refusal(spacing))
        refusal.refused += 1
        refusal.tried = False
        if refusal.refused >= tries:
            refusal.verdict, refusal.left = reason, refusal.spacing
            refusal.spacing = min(2 * refusal.spacing, LAST_SPACING)
            SKETCHES.forget()

    def _forget_those_of_no_tape(self) -> None:
        for key, refusal in self._refusals.copy().items():
            if not refusal.came:
                self._refusals.pop(key, None)
                SKETCHES.forget()
            refusal.came = False


def _key(fingerprint: int, settings: Settings) -> Hashable:
    return fingerprint, settings.key, settings.tune, settings.check


REFUSALS = Refusals()
PROCESS.register(REFUSALS, reset=REFUSALS.clear)
