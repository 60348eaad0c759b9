"""Balance of compiling in this process: the seconds spent, and those that hits have made up for.

Under deterministic algorithms the clock decides nothing: a compile counts as one second, and :data:`RETURNS` hits make
up for it.
"""

from __future__ import annotations

import statistics
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from ..cache.variants import Variant
from ..process_state import PROCESS

SECONDS, SHARE = 30.0, 0.05
"""Default limit of the seconds lost on variants that do not repeat, and the fraction of the process's time that
replaces it if it is more."""
UNRETURNED = 4
"""Number of unrepeated variants from which the limit falls: to a half with one more, to a third with two more, and so
on."""
RETURNS = 3
"""Number of hits after which a variant counts as repeated."""
FIRST = 2
"""Number of variants that are compiled at any cost, and maximum number of further ones: one for each repeated variant.
Both are void once a capture or a trace was ended for the budget."""
GRACE = 1.0
"""Seconds of capturing and tracing that each of these may take under a smaller budget."""
SAVED, AS_OFTEN_AGAIN = 0.2, 5
"""Fraction of its time that an untimed hit is assumed to save, and the factor by which hits are assumed to repeat. So
hits make up for a compile when they have run for as long as the compile took."""
_LATEST = 8
_MAX_KEPT = 512


@dataclass(slots=True, eq=False)
class Cost:
    """The cost of one variant, which may no longer exist.

    Attributes:
        structure: the graph of its tape, which other variants have too; None if nothing was made.
        seconds: of capturing, lowering, compiling and proving it, or of loading it.
        stored: it was loaded.
        hits: the number of its hits.
        worth: seconds that these hits have saved and may save.
        lost: seconds that nothing has made up for yet.
        returned: it counts as repeated.
        ended: nothing was made, since its capture or trace was ended for the budget.
    """

    variant: weakref.ref[Variant] | None = None
    structure: weakref.ref[fx.Graph] | None = None
    seconds: float = 0.0
    by_clock: bool = True
    stored: bool = False
    hits: int = 0
    worth: float = 0.0
    lost: float = 0.0
    returned: bool = False
    ended: bool = False

    def update(self) -> None:
        """Look at what became of it since."""
        variant = self.variant() if self.variant is not None else None
        if variant is not None:
            self.hits = variant.hits
            self.worth = worth(variant) if self.by_clock else variant.hits / RETURNS


@dataclass(frozen=True, slots=True)
class Balance:
    """The balance of the process.

    Attributes:
        made: the number of compiled variants whose cost is not made up for; ``returned`` of them count as repeated.
        lost: seconds that nothing has made up for.
        likely: the likely seconds of one more compile; the largest recent ones if no variant was repeated.
        allowed: the default limit of lost seconds.
        ended: the number of captures and traces that were ended for the budget.
    """

    made: int
    returned: int
    lost: float
    likely: float
    allowed: float
    ended: int = 0

    @property
    def is_compiled_anyway(self) -> bool:
        """True if one more variant is compiled at any cost."""
        return not self.ended and self.made < FIRST + min(self.returned, FIRST)

    def is_over(self, budget: float | None) -> bool:
        """Return whether one more variant would exceed ``budget``, in seconds; None for the default."""
        return not self.is_compiled_anyway and self.lost + self.likely > (self.allowed if budget is None else budget)

    def left(self, budget: float | None) -> float:
        """Return the seconds that capturing and tracing one more variant may take."""
        allowed = self.allowed if budget is None else budget
        return max(allowed, GRACE) if self.is_compiled_anyway else max(allowed - self.lost, 0.0)


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
        """Count the seconds of a compile or load for a variant."""
        cost = self._of.get(variant)
        if cost is None:
            structure = weakref.ref(variant.structure)
            hash(structure)  # once it is gone it has only the hash that was asked for before
            cost = self._of[variant] = Cost(weakref.ref(variant), structure, by_clock=by_clock(), stored=stored)
            self._add(cost)
        cost.seconds = cost.seconds + seconds if cost.by_clock else 1.0
        cost.stored = cost.stored and stored

    def end(self, seconds: float) -> None:
        """Count a capture or a trace that was ended after these seconds."""
        self._add(Cost(seconds=seconds, ended=True))

    def _add(self, cost: Cost) -> None:
        self._costs.append(cost)
        if len(self._costs) > _MAX_KEPT:
            _settle(self._costs)
            self._forgotten += self._costs.pop(0).lost

    @property
    def elapsed(self) -> float:
        """Seconds since the beginning."""
        return self.clock() - self._since

    def balance(self) -> Balance:
        """Return the balance now. This takes microseconds for each variant."""
        _settle(self._costs)
        made = [each for each in self._costs if each.lost and not each.stored]
        returned = sum(each.returned for each in made)
        lost = self._forgotten + sum(each.lost for each in self._costs)
        compiled = [each for each in self._costs if not each.stored]
        latest = [each.seconds for each in compiled[-_LATEST:]] or [0.0]
        likely = statistics.median(latest) if any(each.returned for each in compiled) else max(latest)
        allowed = SECONDS / max(1, len(made) - returned - UNRETURNED + 1)
        if by_clock():
            allowed = max(allowed, SHARE * self.elapsed)
        return Balance(len(made), returned, lost, likely, allowed, sum(each.ended for each in made))


def _settle(costs: Sequence[Cost]) -> None:
    """Set the lost seconds of each cost, and whether its variant counts as repeated.

    Savings of hits beyond the cost of their variant make up for other variants of the structure, and such hits count
    for these too. So the last, smaller batch of an epoch, with its own variant, pays although it occurs once where the
    others occur a hundred times.
    """
    of_structures: dict[object, list[Cost]] = {}
    for each in costs:
        each.update()
        of_structures.setdefault(each.structure or each, []).append(each)
    for alike in of_structures.values():
        left_over = sum(max(0.0, each.worth - each.seconds) for each in alike)
        have_returned = sum(each.hits for each in alike) >= RETURNS * len(alike)
        for each in alike:
            missing = max(0.0, each.seconds - each.worth)
            each.lost = max(0.0, missing - left_over)
            left_over = max(0.0, left_over - missing)
            each.returned = have_returned or each.hits >= RETURNS


def by_clock() -> bool:
    """Return whether seconds are those of the clock."""
    return not torch.are_deterministic_algorithms_enabled()


def worth(variant: Variant) -> float:
    """Seconds that the hits of a variant have saved, and that it may save."""
    timing = variant.timing
    if timing is None:
        return AS_OFTEN_AGAIN * SAVED * variant.ran
    return AS_OFTEN_AGAIN * variant.hits * max(0.0, timing.eager - timing.compiled) / 1e3


SPENDING = Spending()
PROCESS.register(SPENDING, reset=SPENDING.clear)
