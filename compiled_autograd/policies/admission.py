"""Structures that hardly ever come back: where every tape is another, or is met two or three times, none is worth what
it costs to capture and compile it, and all but one now and then are left to the eager engine.
"""

from __future__ import annotations

import weakref
from collections import deque

from ..cache.graphs import REUSES_WORTH_COMPILING, CompiledGraph
from ..process_state import PROCESS

WINDOW = 32
"""The number of latest structures that are looked at."""
FIRST_PROBE, LAST_PROBE = 16, 1024
"""One new structure in this many is captured all the same: at first, and at last; the number doubles with each."""


class Admission:
    """What became of the structures that were captured last."""

    def __init__(self) -> None:
        self.clear()

    def captured(self, graph: CompiledGraph) -> None:
        """A new structure was captured."""
        self._last.append(weakref.ref(graph))

    def refuses(self) -> bool:
        """Whether the structure that the engine is about to report shall be left to it."""
        pays = any((graph := each()) is not None and graph.met >= REUSES_WORTH_COMPILING for each in self._last)
        if pays or len(self._last) < WINDOW:
            self._left, self._spacing = 0, FIRST_PROBE
            return False
        self._left += 1
        if self._left < self._spacing:
            return True
        self._left, self._spacing = 0, min(2 * self._spacing, LAST_PROBE)
        return False

    def clear(self) -> None:
        """Forget all."""
        self._last: deque[weakref.ref[CompiledGraph]] = deque(maxlen=WINDOW)
        self._left, self._spacing = 0, FIRST_PROBE


ADMISSION = Admission()
PROCESS.register(ADMISSION, reset=ADMISSION.clear)
