"""A lower bound of what any policy can cost on a sequence: the future is known.

Each structure is decided alone. Code is there at the first backward for a wait, or later without one, whichever is
cheaper in all; a structure that widens may be compiled twice. With several cores, compiles do not wait for each other,
and the clock that they need runs as fast as the slower way allows. Deciding costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

from .sequence import Event
from .simulator import TWO_CORES, Machine, Result


def bound(
    events: Sequence[Event], widens: Sequence[int] = (), start: float = 0.0, machine: Machine = TWO_CORES
) -> Result:
    """Return the least seconds; only ``total``, ``eager`` and those of backwards are set.

    Args:
        widens, start: those of the sequence.
    """
    eager = [event.tape.eager * event.of_eager for event in events]
    hits = [_hit(event) for event in events]
    fast = [min(pair) for pair in zip(eager, hits, strict=True)]
    slow = [e if math.isinf(h) else max(e, h) for e, h in zip(eager, hits, strict=True)]
    steps = (gap + s for gap, s in zip((event.gap for event in events), slow, strict=True))
    clock = [0.0, *accumulate(machine.slows * step for step in steps)]
    least = _Least(events, eager, fast, clock, machine)
    structures: dict[int, list[int]] = {}
    for index, event in enumerate(events):
        structures.setdefault(event.tape.structure, []).append(index)
    saved = sum(least.saved(indices, structure in widens) for structure, indices in structures.items())
    gaps, on_eager = sum(event.gap for event in events), sum(eager)
    backward = on_eager - max(0.0, saved - start * (machine.imports if machine.cores > 1 else 1.0))
    return Result(gaps + backward, gaps + on_eager, backward, on_eager)


def _hit(event: Event) -> float:
    return math.inf if event.tape.refused else event.tape.hit * event.of_hit


class _Least:
    """Seconds that compiling can save of one structure's backwards."""

    def __init__(
        self, events: Sequence[Event], eager: list[float], fast: list[float], clock: list[float], machine: Machine
    ) -> None:
        self._events, self._eager, self._fast, self._clock = events, eager, fast, clock
        self._beside = machine.cores > 1

    def saved(self, indices: list[int], widens: bool) -> float:
        """Seconds saved at most, of the backwards with these indices; 0 if nothing is to be compiled."""
        shapes: dict[int, list[int]] = {}
        for index in indices:
            shapes.setdefault(self._events[index].tape.shape, []).append(index)
        capture = min(self._events[index].tape.capture for index in indices)
        best = sum(self._of_variant(alike, 0.0, self._cost(alike)) for alike in shapes.values()) - capture
        if widens and len(shapes) > 1:
            best = max(best, self._wide([*shapes.values()]) - capture)
        return max(best, 0.0)

    def _cost(self, indices: list[int]) -> float:
        tape = self._events[indices[0]].tape
        return tape.lower + tape.compile

    def _of_variant(self, indices: list[int], free: float, cost: float) -> float:
        """What one variant saves that is made at the first of these backwards or later.

        Args:
            free: seconds of earlier backwards that it saves in any case.
        """
        all_of_them = sum(self._gain(index) for index in indices)
        best = max(0.0, all_of_them + free - cost)
        if self._beside:
            wall = min(self._events[index].tape.beside for index in indices)
            there = self._clock[indices[0]] + wall
            best = max(best, free + sum(self._gain(index) for index in indices if self._clock[index + 1] >= there))
        return best

    def _wide(self, shapes: list[list[int]]) -> float:
        """One variant for all sizes, and one before it for any of them."""
        second = min(sorted(each[0] for each in shapes)[1:])
        indices = sorted(index for each in shapes for index in each)
        early = sum(self._gain(index) for index in indices if index < second)
        costs = sorted(map(self._cost, shapes))
        return self._of_variant([index for index in indices if index >= second], early, sum(costs[:2]))

    def _gain(self, index: int) -> float:
        return self._eager[index] - self._fast[index]
