"""Selection of the backwards that ``check`` compares: every Nth one of each variant."""

from __future__ import annotations

import weakref

from ...cache.variants import Variant
from ...process_state import PROCESS
from ...settings import Settings

_PATIENCE = 64
"""Maximum number of backwards whose tape is kept for a variant whose next run has to be compared. Afterwards that run
is compared region by region, without the tape."""


class Checks:
    """Counts what variants serve, and knows of which the next run is to be compared."""

    def __init__(self) -> None:
        self._next: weakref.WeakSet[Variant] = weakref.WeakSet()
        self._waited = 0

    def forget(self) -> None:
        """Forget which these are."""
        self._next.clear()

    def may_be_next(self, settings: Settings) -> bool:
        """Return whether a backward may have to be compared, before the variant that serves it is known."""
        every = settings.check_every
        if every <= 1:
            return every == 1
        if not self._next:
            return False
        self._waited += 1
        if self._waited > _PATIENCE:
            self.forget()
        return True

    def is_next(self, variant: Variant, settings: Settings) -> bool:
        """Return whether the next run of a variant has to be compared."""
        every = settings.check_every
        return every > 0 and (variant.served + 1) % every == 0

    def count(self, variant: Variant, settings: Settings) -> bool:
        """A variant serves. Whether this run is to be compared."""
        every = settings.check_every
        if not every:
            return False
        variant.served += 1
        self._next.discard(variant)
        if every > 1 and self.is_next(variant, settings):
            self._next.add(variant)
            self._waited = 0
        return variant.served % every == 0


CHECKS = Checks()
PROCESS.register(CHECKS, reset=CHECKS.forget)
