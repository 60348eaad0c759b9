"""The log of a session's backwards, in order, for the timeline of a report and the slices of a trace.

A backward that is no plain hit has a :class:`StepEvent`. The last hits have four numbers each, which C++ also writes
(``native/fast_path/serve.cpp``). The numbers of two successive events tell the number of hits between them.
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
"""Maximum number of kept events: the first ones, which compile most, and the last ones."""
MAX_HITS = 2048
"""Number of last hits whose times are kept; ``kMaxHits`` in C++."""
_HIT = struct.Struct("4d")


@dataclass(slots=True)
class StepEvent:
    """One backward, or successive backwards that were bypassed for the same reason.

    Attributes:
        number: the number of the last backward, counted from 1 in the session.
        count: the number of backwards.
        outcome: as in :class:`outcomes.Outcome`.
        graph: the number of the structure; None for a bypass without a structure.
        reasons: the reasons of the last backward.
        seconds: total seconds by stage.
        compiles, loads: the number of regions that were compiled, and that were loaded from disk.
        when: the end of the last backward, in seconds since the epoch.
        began: the start of the first backward, in seconds since the epoch, as far as its duration is known.
        timed: the number of backwards in ``seconds``.
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
    """Successive backwards that eager ran for the same reason, and that are not yet in the session's counts.

    Attributes:
        timed: the value of ``count`` at the last timed backward; 0 if none was timed.
        times: the number of timed backwards.
        last, seconds: seconds of the last timed backward, and of all timed backwards.
    """

    verdict: Bypass
    count: int = 1
    timed: int = 0
    times: int = 0
    last: float = 0.0
    seconds: float = 0.0


class Compile(NamedTuple):
    """A compile in the background, for the structure with the number ``graph``. It ended at ``when``, in seconds since
    the epoch."""

    graph: int
    seconds: float
    when: float


class Hit(NamedTuple):
    """The times of one hit: ``began`` is a value of ``time.perf_counter``, the others are durations in seconds."""

    number: int
    began: float
    capture: float
    run: float


def keep_hit(kept: bytearray | None, number: int, seconds: Mapping[str, float]) -> bytearray | None:
    """Keep the times of a finished hit in place of the oldest ones. The first backward of a session is not kept: with a
    session for each backward, every backward would allocate the memory.

    Args:
        kept: the result of the previous call.
        number: the number of the backward in its session, counted from 1.
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
    """Return the hits whose times are kept, oldest first."""
    found = [] if kept is None else [Hit(int(number), *times) for number, *times in _HIT.iter_unpack(kept) if number]
    return sorted(found)


class StepLog:
    """The events of a session.

    Attributes:
        left_out: the number of events that were dropped.
        beside: the compiles in the background.
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
        """Add backward ``number`` of the session, or the ``count`` backwards that end with it. ``timed`` is the number
        of backwards in ``seconds``; None means all if there are seconds, else none."""
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
        """Return the kept events, oldest first."""
        return sorted([*self._first, *self._last], key=lambda event: event.number)


def _same_bypass(before: StepEvent, reasons: Sequence[Bypass | Miss | Failure]) -> bool:
    """Return whether a backward was bypassed for the same reason as the previous one."""
    one, other = before.reasons[:1], reasons[:1]
    both = one and other and isinstance(one[0], Bypass) and isinstance(other[0], Bypass)
    return bool(both) and one[0].label == other[0].label  # type: ignore[union-attr]
