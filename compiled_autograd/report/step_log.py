"""The backwards of a session, in order: what a report shows as its timeline, and a trace as slices.

Of those that were more than a hit there is a :class:`StepEvent`. Of the last hits there are four numbers each, which
C++ writes too (``native/fast_path/serve.cpp``). How many hits there were between two events is the difference of their
numbers.
"""

from __future__ import annotations

import struct
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..cache.graphs import CompiledGraph
from ..shadow_cache import Bypass, Failure, Miss

MAX_FIRST, MAX_LAST = 200, 1800
"""So many events are kept: the first ones, where nearly all is compiled, and the last ones."""
MAX_HITS = 2048
"""The number of hits whose times are kept, the last ones; ``kMaxHits`` in C++."""
_HIT = struct.Struct("4d")


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
        began: the first of them began, as far as its seconds are known.
        timed: how many of them ``seconds`` is of.
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
    began: float
    timed: int = 1


@dataclass(slots=True)
class LeftToEager:
    """Consecutive backwards that were left to eager for one reason, and are not among the counts yet.

    Attributes:
        timed: the value of ``count`` at the last backward that was timed; 0 where none was. ``times`` were.
        last, seconds: seconds of that backward, and of all that were timed.
    """

    verdict: Bypass
    count: int = 1
    timed: int = 0
    times: int = 0
    last: float = 0.0
    seconds: float = 0.0


class Compile(NamedTuple):
    """Something that was compiled beside the backwards, for the structure with this number; it ended at ``when``."""

    graph: int
    seconds: float
    when: float


class Hit(NamedTuple):
    """The times of one hit: ``began`` is of ``time.perf_counter``, the others are seconds."""

    number: int
    began: float
    capture: float
    run: float


def keep_hit(kept: bytearray | None, number: int, seconds: Mapping[str, float]) -> bytearray | None:
    """Keep the times of a hit that is over; the oldest ones go. A session's first backward is not kept: who makes a
    session for each backward would pay for the memory each time.

    Args:
        kept: what this gave for the hit before.
        number: of the backward in its session, counted from 1.
    """
    if kept is None:
        if number == 1:
            return None
        kept = bytearray(MAX_HITS * _HIT.size)
    capture, run = seconds.get("capture", 0.0), seconds.get("run", 0.0)
    began = time.perf_counter() - capture - run
    _HIT.pack_into(kept, number % MAX_HITS * _HIT.size, number, began, capture, run)
    return kept


def hits_in(kept: bytearray | None) -> list[Hit]:
    """The hits whose times are kept, oldest first."""
    found = [] if kept is None else [Hit(int(number), *times) for number, *times in _HIT.iter_unpack(kept) if number]
    return sorted(found)


class StepLog:
    """The events of a session; ``left_out`` says how many of them are kept no more.

    Attributes:
        beside: what was compiled in the background.
    """

    def __init__(self) -> None:
        self._first: list[StepEvent] = []
        self._last: deque[StepEvent] = deque(maxlen=MAX_LAST)
        self.left_out = 0
        self.beside: deque[Compile] = deque(maxlen=MAX_LAST)

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
        timed: int | None = None,
    ) -> None:
        """One more backward: the one of that number in the session; or several, of which it is the last. ``timed`` of
        them were; all, if it is None and there are seconds."""
        now = time.time()
        timed = (count if seconds else 0) if timed is None else timed
        before = self._last[-1] if self._last else self._first[-1] if self._first else None
        structure = None if graph is None else graph.number
        goes_on = before is not None and (before.number, before.graph) == (number - count, structure)
        if before is not None and goes_on and _same_bypass(before, reasons):
            before.number, before.count, before.when = number, before.count + count, now
            before.timed += timed
            before.reasons = tuple(reasons)
            for stage, spent in seconds.items():
                before.seconds[stage] = before.seconds.get(stage, 0.0) + spent
            return
        began = now - seconds.get("capture", 0.0) - seconds.get("run", 0.0)
        what = (outcome, structure, tuple(reasons), dict(seconds), compiles, loads)
        event = StepEvent(number, count, *what, when=now, began=began, timed=timed)
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
