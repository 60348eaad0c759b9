"""Python's search for reference cycles, made rare while a graph is captured, traced or compiled.

Graphs are many small objects that live on. To make them sets off the search again and again, which finds nothing,
takes longer the more lives in the process, and for its length no other thread runs.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Callable

RARE_THRESHOLDS = (200_000, 20, 100)
"""Thresholds of ``gc.set_threshold``: the number of new objects before the young generation is searched, and the
numbers of such searches before the older ones are."""
_YOUNG, _ALL = 1, 2
"""The oldest generation that is searched. Those up to the first were not yet searched twice."""
_MANY_BLOCKS = 4_000_000
"""Number of blocks of memory, some four for each object, that a search takes about a second for."""


_PATIENCE = 0.2
"""Seconds after which a thread does without: whoever is in the midst of a change may be waiting for this thread, in
what a signal's handler runs there."""


class _Rarely:
    """A context with rare garbage collection; several threads may enter it, each several times.

    Attributes:
        entered: the number of entries, by thread. After Ctrl-C a thread leaves the rest by :meth:`leave_all`.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # what a signal or ``gc`` runs in its midst may compile too
        self.entered: dict[int, int] = {}
        self._before = self._set = gc.get_threshold()

    def __enter__(self) -> None:
        self._alone(self._enter)

    def __exit__(self, *exception: object) -> None:
        self._alone(lambda me: self._leave(me, self.entered.get(me, 0) - 1))

    def leave_all(self) -> None:
        """Leave all entries of the calling thread."""
        self._alone(lambda me: self._leave(me, 0))

    def _alone(self, change: Callable[[int], None]) -> None:
        """Change something while no other thread does, or not at all."""
        lock, acquired = self._lock, list[bool]()
        try:
            acquired += map(lock.acquire, (True,), (_PATIENCE,))  # in one go: Ctrl-C could come before an assignment
            if acquired[0]:
                change(threading.get_ident())
        finally:
            if acquired and acquired[0]:
                lock.release()

    def _enter(self, me: int) -> None:
        first = not self.entered
        self.entered[me] = self.entered.get(me, 0) + 1
        if first:
            self._before = self._set = gc.get_threshold()
            if self._before[0] > 0:  # else the user has turned it off
                self._set = tuple(max(pair) for pair in zip(RARE_THRESHOLDS, self._before, strict=True))  # type: ignore[assignment]
                gc.set_threshold(*self._set)

    def _leave(self, thread: int, left: int) -> None:
        if left > 0:
            self.entered[thread] = left
        elif thread in self.entered:
            if len(self.entered) == 1:
                self._restore()  # before it is known to have left: Ctrl-C may come between
            self.entered.pop(thread, None)  # what runs in the midst of this may have done both

    def _restore(self) -> None:
        if gc.get_threshold() == self._set:  # else somebody else has set it meanwhile
            gc.set_threshold(*self._before)

    def search_now(self) -> None:
        """Search for cycles, as Python would in one of the next steps: tracing and generating code leave hundreds of
        thousands of objects behind, whose search takes as long as many steps. After that Python would search all that
        lives, since so much was added; that is done too, unless a lot lives.
        """
        before = self._before if self.entered else gc.get_threshold()
        if gc.isenabled() and before[0] > 0:
            gc.collect(_YOUNG if sys.getallocatedblocks() > _MANY_BLOCKS else _ALL)

    def reset_after_fork(self) -> None:
        """Reset in a forked child, where nothing is being compiled."""
        self._lock = threading.RLock()
        if self.entered:
            self.entered.clear()
            self._restore()


RARELY = _Rarely()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=RARELY.reset_after_fork)
