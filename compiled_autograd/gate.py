"""Who may use the engine's seam, and when: it belongs to the process.

It is set only while no other thread is in backward. A thread that captures holds it for the length of the engine's
walk; other threads that come to a backward then wait, some milliseconds at most. A thread that finds another in
backward does not wait for it: it bypasses. A backward inside one that the eager engine runs in the same thread is
captured: while the engine walks its tape, nothing else of that thread runs.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import Any

from shadow_cache import Bypass

from .bypass import INSIDE_ENGINE_CALL, OTHER_THREAD


class Gate:
    """Counts the threads that are in the eager engine, and lets one at a time set the seam."""

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._in_eager: dict[int, int] = {}
        self._capturing: int | None = None
        self._in_call: set[int] = set()
        self._unseen: set[int] = set()
        self.after_entering: Callable[[], None] = lambda: None

    def expect_unseen(self, in_backward: Callable[[], set[int]]) -> None:
        """Threads that were in backward before there was a gate; ``in_backward`` says which still are."""
        self._find_unseen = in_backward
        self._unseen = in_backward()

    def enter_eager(self) -> None:
        """The calling thread goes into the eager engine; waits while another one holds the seam."""
        me = threading.get_ident()
        with self._changed:
            while self._capturing not in (None, me):
                self._changed.wait()
            self._in_eager[me] = self._in_eager.get(me, 0) + 1
        self.after_entering()

    def others_in_eager(self) -> bool:
        """Whether another thread is in the eager engine."""
        return bool(self._in_eager) and any(ident != threading.get_ident() for ident in list(self._in_eager))

    def leave_eager(self) -> None:
        """The calling thread is out again."""
        me = threading.get_ident()
        with self._changed:
            left = self._in_eager[me] - 1
            if left:
                self._in_eager[me] = left
            else:
                del self._in_eager[me]

    def enter_capture(self) -> Bypass | None:
        """Take the seam; gives the reason where it cannot be had, else None."""
        me = threading.get_ident()
        with self._changed:
            while self._capturing not in (None, me):
                self._changed.wait()
            if self._unseen:
                self._unseen &= self._find_unseen()
            if me in self._in_call:
                return INSIDE_ENGINE_CALL
            if self._unseen or any(ident != me for ident in self._in_eager):
                return OTHER_THREAD
            self._capturing = me
            return None

    def change_to_eager(self) -> None:
        """Give the seam back, and stay in the engine: the calling thread runs users' code inside the engine's call."""
        me = threading.get_ident()
        with self._changed:
            self._capturing = None
            self._in_eager[me] = self._in_eager.get(me, 0) + 1
            self._in_call.add(me)
            self._changed.notify_all()

    def leave_call(self) -> None:
        """The engine's call that went on after :meth:`change_to_eager` is over."""
        with self._changed:
            self._in_call.discard(threading.get_ident())
        self.leave_eager()

    def leave_capture(self) -> None:
        """Give the seam back."""
        with self._changed:
            self._capturing = None
            self._changed.notify_all()

    def reset_after_fork(self) -> None:
        """In a forked child only the calling thread lives on, and no lock may be trusted."""
        self._changed = threading.Condition(threading.Lock())
        me = threading.get_ident()
        self._in_eager = {ident: count for ident, count in self._in_eager.items() if ident == me}
        self._capturing = None
        self._in_call &= {me}
        self._unseen = set()


def threads_running(code: Any) -> set[int]:
    """Threads that have a frame of the given code object on their stack."""
    found = set()
    for ident, frame in sys._current_frames().items():
        walking: Any = frame
        while walking is not None:
            if walking.f_code is code:
                found.add(ident)
                break
            walking = walking.f_back
    return found


GATE = Gate()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=GATE.reset_after_fork)
