"""The steps of a session that were more than a hit, in order: what a report shows as its timeline.

Of a hit nothing is kept. How many there were between two events is the difference of their numbers.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..cache.graphs import CompiledGraph
from ..shadow_cache import Bypass, Failure, Miss

MAX_FIRST, MAX_LAST = 200, 1800
"""So many events are kept: the first ones, where nearly all is compiled, and the last ones."""


@dataclass(slots=True)
class StepEvent:
    """A backward, or several one after the other that were bypassed for one reason.

    Attributes:
        number: of the last of them, counted from 1 in the session.
        count: how many they are.
        outcome: as :class:`session.Outcome` has it.
        graph: the number of the structure; None where a bypass had none.
        reasons: those of the last of them.
        seconds: by stage, of all of them together.
        compiles, loads: regions that were compiled, and found on disk.
        when: the last of them was over, in seconds since the epoch.
    """

    number: int
    count: int
    outcome: str
    graph: int | None
    reasons: tuple[Bypass | Miss | Failure, ...]
    seconds: dict[str, float]
    compiles: int
    loads: int
    when: float


class StepLog:
    """The events of a session; ``left_out`` says how many of them are kept no more."""

    def __init__(self) -> None:
        self._first: list[StepEvent] = []
        self._last: deque[StepEvent] = deque(maxlen=MAX_LAST)
        self.left_out = 0

    def add(
        self,
        number: int,
        outcome: str,
        graph: CompiledGraph | None,
        reasons: Sequence[Bypass | Miss | Failure],
        seconds: Mapping[str, float],
        compiles: int,
        loads: int,
        count: int = 1,
    ) -> None:
        """One more backward: the one of that number in the session; or several, of which it is the last."""
        before = self._last[-1] if self._last else self._first[-1] if self._first else None
        structure = None if graph is None else graph.number
        goes_on = before is not None and (before.number, before.graph) == (number - count, structure)
        if before is not None and goes_on and _same_bypass(before, reasons):
            before.number, before.count, before.when = number, before.count + count, time.time()
            before.reasons = tuple(reasons)
            for stage, spent in seconds.items():
                before.seconds[stage] = before.seconds.get(stage, 0.0) + spent
            return
        event = StepEvent(
            number, count, outcome, structure, tuple(reasons), dict(seconds), compiles, loads, when=time.time()
        )
        if len(self._first) < MAX_FIRST:
            self._first.append(event)
            return
        self.left_out += len(self._last) == MAX_LAST
        self._last.append(event)

    def events(self) -> list[StepEvent]:
        """What is kept, oldest first."""
        return sorted([*self._first, *self._last], key=lambda event: event.number)


def _same_bypass(before: StepEvent, reasons: Sequence[Bypass | Miss | Failure]) -> bool:
    """Whether a backward was bypassed for the reason of the one before."""
    one, other = before.reasons[:1], reasons[:1]
    both = one and other and isinstance(one[0], Bypass) and isinstance(other[0], Bypass)
    return bool(both) and one[0].label == other[0].label  # type: ignore[union-attr]
