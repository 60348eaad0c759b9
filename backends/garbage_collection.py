"""Python's search for reference cycles, made rare while a graph is captured, traced or compiled.

Graphs are many small objects that live on. To make them sets off the search again and again, which finds nothing,
takes longer the more lives in the process, and for its length no other thread runs.
"""

from __future__ import annotations

import gc
import os
import sys
import threading

RARE_THRESHOLDS = (200_003, 20, 100)
"""Thresholds of ``gc.set_threshold``: the number of new objects before the young generation is searched, and the
numbers of such searches before the older ones are. It is no round number, so that no user sets the same."""
_YOUNG, _ALL = 1, 2
"""The oldest generation that is searched. Those up to the first were not yet searched twice."""
_MANY_BLOCKS = 4_000_000
"""Number of blocks of memory, some four for each object, that a search takes about a second for."""


class _Rarely:
    """A context with rare garbage collection; several threads may enter it, each several times.

    There is no lock, for what a signal or ``gc`` runs in its midst may compile too. If two threads enter and leave at
    the same time, one may run without it; the last one to leave puts back what was there.

    Attributes:
        entered: the threads inside, once for each entry. After Ctrl-C a thread leaves the rest by :meth:`leave_all`.
    """

    def __init__(self) -> None:
        self.entered: list[int] = []
        self._before: tuple[int, ...] = gc.get_threshold()
        self._set: tuple[int, ...] = ()

    def __enter__(self) -> None:
        self.entered.append(threading.get_ident())
        now = gc.get_threshold()
        if now != self._set and now[0] > 0:  # else another entry has set it, or the user has turned it off
            self._before = now
            self._set = tuple(max(pair) for pair in zip(RARE_THRESHOLDS, now, strict=True))
            gc.set_threshold(*self._set)

    def __exit__(self, *exception: object) -> None:
        self._leave(1)

    def leave_all(self) -> None:
        """Leave all entries of the calling thread."""
        self._leave(len(self.entered))

    def _leave(self, times: int) -> None:
        me = threading.get_ident()
        try:
            for _ in range(min(times, self.entered.count(me))):
                self.entered.remove(me)
        except ValueError:  # code that ran in the midst of this left all entries
            pass
        finally:
            if not self.entered:
                self._restore()

    def _restore(self) -> None:
        if gc.get_threshold() == self._set:  # else somebody else has set it meanwhile
            gc.set_threshold(*self._before)

    def search_now(self) -> None:
        """Search for cycles, as Python would in one of the next steps: tracing and generating code leave hundreds of
        thousands of objects behind, whose search takes as long as many steps. After that Python would search all that
        lives, since so much was added; that is done too, unless a lot lives.
        """
        if gc.isenabled() and gc.get_threshold()[0] > 0:
            gc.collect(_YOUNG if sys.getallocatedblocks() > _MANY_BLOCKS else _ALL)

    def reset_after_fork(self) -> None:
        """Reset in a forked child, where nothing is being compiled."""
        if self.entered:
            self.entered.clear()
            self._restore()


RARELY = _Rarely()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=RARELY.reset_after_fork)
