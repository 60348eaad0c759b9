"""What compiling has cost this process, and how much of it hits have made up for: in seconds.

Under deterministic algorithms the clock decides nothing: what is compiled counts as one second, and
:data:`RETURNS` hits make up for it.
"""

from __future__ import annotations

import statistics
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..cache.variants import Variant
from ..process_state import PROCESS

SECONDS, SHARE = 30.0, 0.05
"""By default so many seconds may be lost on what does not come back, or this part of the time that the process has run,
whichever is more."""
UNRETURNED = 4
"""With each variant more that has not come back the seconds become fewer: a half, a third, and so on."""
RETURNS = 3
"""A variant that served so often has come back."""
FIRST = 2
"""So many variants are compiled whatever they take, and one more for each of as many that came back."""
SAVED, AS_OFTEN_AGAIN = 0.2, 5
"""A hit that nobody has timed is taken to save this part of the time that it takes; and what came back, to come back so
many times as often in all. So hits have made up for a compile when they have run for as long as it took."""
_LATEST = 8
_MAX_KEPT = 512


@dataclass(slots=True, eq=False)
class Cost:
    """Of one variant, which may be gone by now.

    Attributes:
        seconds: what it took to capture, lower, compile and prove it, or to load it.
        stored: it was loaded.
        hits: how often it served.
        made_up: seconds that these hits have saved and may save, ``seconds`` at most.
    """

    variant: weakref.ref[Variant]
    seconds: float = 0.0
    by_clock: bool = True
    stored: bool = False
    hits: int = 0
    made_up: float = 0.0

    @property
    def lost(self) -> float:
        """Seconds that nothing has made up for yet."""
        return self.seconds - self.made_up

    def update(self) -> None:
        """Look at what became of it since."""
        variant = self.variant()
        if variant is not None:
            self.hits = variant.hits
            self.made_up = min(self.seconds, worth(variant) if self.by_clock else variant.hits / RETURNS)


@dataclass(frozen=True, slots=True)
class Balance:
    """Where the process stands.

    Attributes:
        made: how many variants were compiled whose cost is not made up for; ``returned`` of them have come back.
        lost: seconds that nothing has made up for.
        likely: what it is likely to take to compile one more.
        allowed: seconds that may be lost by default.
    """

    made: int
    returned: int
    lost: float
    likely: float
    allowed: float

    def is_over(self, budget: float | None) -> bool:
        """Whether one more variant would be too much; ``budget`` is in seconds, None for the default."""
        if self.made < FIRST + min(self.returned, FIRST):
            return False
        return self.lost + self.likely > (self.allowed if budget is None else budget)


class Spending:
    """The account of the process.

    Attributes:
        clock: seconds of wall clock.
    """

    def __init__(self) -> None:
        self.clock: Callable[[], float] = time.monotonic
        self.clear()

    def clear(self) -> None:
        """Forget all, and begin anew."""
        self._costs: list[Cost] = []
        self._of: weakref.WeakKeyDictionary[Variant, Cost] = weakref.WeakKeyDictionary()
        self._forgotten = 0.0
        self._since = self.clock()

    def charge(self, variant: Variant, seconds: float, stored: bool = False) -> None:
        """Something was compiled for a variant, or loaded."""
        cost = self._of.get(variant)
        if cost is None:
            cost = self._of[variant] = Cost(weakref.ref(variant), by_clock=by_clock(), stored=stored)
            self._costs.append(cost)
            while len(self._costs) > _MAX_KEPT:
                self._forgotten += self._costs.pop(0).lost
        cost.seconds = cost.seconds + seconds if cost.by_clock else 1.0
        cost.stored = cost.stored and stored

    @property
    def elapsed(self) -> float:
        """Seconds since the beginning."""
        return self.clock() - self._since

    def balance(self) -> Balance:
        """Where the process stands now; microseconds for each variant."""
        for each in self._costs:
            each.update()
        made = [each for each in self._costs if each.lost and not each.stored]
        returned = sum(each.hits >= RETURNS for each in made)
        lost = self._forgotten + sum(each.lost for each in self._costs)
        latest = [each.seconds for each in self._costs if not each.stored][-_LATEST:]
        allowed = SECONDS / max(1, len(made) - returned - UNRETURNED + 1)
        if by_clock():
            allowed = max(allowed, SHARE * self.elapsed)
        return Balance(len(made), returned, lost, statistics.median(latest) if latest else 0.0, allowed)


def by_clock() -> bool:
    """Whether seconds are those of the clock."""
    return not torch.are_deterministic_algorithms_enabled()


def worth(variant: Variant) -> float:
    """Seconds that the hits of a variant have saved, and that it may save."""
    timing = variant.timing
    if timing is None:
        return AS_OFTEN_AGAIN * SAVED * variant.ran
    return AS_OFTEN_AGAIN * variant.hits * max(0.0, timing.eager - timing.compiled) / 1e3


SPENDING = Spending()
PROCESS.register(SPENDING, reset=SPENDING.clear)
