"""The lock of the engine's seam, which belongs to the process.

``docs/internals/threads.md`` says which thread waits for which, and which bypasses. A backward inside one that the
eager engine runs in the same thread is captured; one that Python runs while the engine walks a tape is left to eager.

**Nothing is stuck after Ctrl-C.** Python may raise ``KeyboardInterrupt`` in the main thread after any call, at the
beginning of any function of Python's, and at a jump (the "eval breaker" of CPython: on 3.10 at each conditional jump
that is taken, from 3.11 on at a jump back). It does so nowhere else: not between an assignment and what follows it, not
within a function of C, nor between the beginning of a ``finally`` and the end of the first call of C in it, unless an
``if`` before it is false. ``with lock:`` is safe too (tried on 3.10 to 3.13). So a thread appends itself to a list in
the first call of a ``try``, and removes itself in the first call of the ``finally``.

**Backwards at any moment.** A signal's handler, a ``__del__`` or a finalizer of ``gc`` may run a backward between any
two calls here, in the same thread. So the lock is reentrant, and only calls of C change the lists. A reader takes
``[*list]`` first: ``list.copy()`` reads the size and then allocates memory, and until Python 3.11 ``gc`` may run in
between.
"""

from __future__ import annotations

import sys
import traceback
from _thread import get_ident
from collections.abc import Callable
from threading import RLock, local
from typing import Any

from ..diagnostics.bypass import FORKED, INSIDE_ENGINE_CALL, OTHER_THREAD
from ..process_state import PROCESS, OfThread, free
from ..shadow_cache import Bypass


class _Forking(local):
    held = OfThread(list[bool])  # one for each fork of the calling thread that has the lock


class Gate:
    """Knows the threads in the eager engine, and lets one at a time set the seam.

    Attributes:
        lock: held by the thread that has the seam. No thread waits for anything else meanwhile.
        idents: the threads in the eager engine, once for each nested call.
        in_call: the threads that run users' code inside a walk's own call of the engine. They have given back the seam.
        line: the threads that walk a tape or wait to do so, once for each nested walk.
        after_entering: called by a thread that is among ``idents`` and has waited.
    """

    def __init__(self) -> None:
        self.lock = RLock()
        self.idents: list[int] = []
        self.in_call: list[int] = []
        self.line: list[int] = []
        self._lost = False
        self._forking = _Forking()
        self._unseen: set[int] = set()
        self.after_entering: Callable[[], None] = lambda: None

    def expect_unseen(self, in_backward: Callable[[], set[int]]) -> None:
        """Threads that were in backward before there was a gate; ``in_backward`` says which still are."""
        self._find_unseen = in_backward
        self._unseen = in_backward()

    def enter_eager(self, me: int) -> None:
        """Wait until no other thread has the seam. ``me`` is the calling thread. It is among :attr:`idents`, but not
        while it waits, so that no other thread bypasses because of it.

        It appended itself before it looked at :attr:`line`. A capturing thread joins the line before it looks who is in
        the engine. So at least one of two sees the other.
        """
        lock, held = self.lock, list[bool]()
        try:
            self.idents.remove(me)
            held.extend(map(lock.acquire, (True,)))  # in one call of C: Ctrl-C cannot come before it is noted
        finally:
            try:
                self.idents.append(me)
            finally:
                if held:
                    lock.release()
        self.after_entering()

    def has_seam(self) -> bool:
        """Return whether the calling thread has the seam."""
        return self.lock._is_owned()  # type: ignore[attr-defined]  # as Condition asks

    def others_in_line(self) -> bool:
        """Return whether another thread walks a tape, or waits to do so."""
        return bool(self.line) and _others_in([*self.line])

    def others_in_eager(self) -> bool:
        """Return whether another thread is in the eager engine."""
        return bool(self.idents or self.in_call) and _others_in([*self.idents, *self.in_call])

    def why_not_walk(self) -> Bypass | None:
        """Return why no tape may be walked for the calling thread, though it has the seam and is in the line."""
        if self._lost:
            return FORKED
        if self.in_call and get_ident() in [*self.in_call]:
            return INSIDE_ENGINE_CALL
        return OTHER_THREAD if self.others_in_eager() or (self._unseen and self._others_unseen()) else None

    def _others_unseen(self) -> bool:
        self._unseen &= self._find_unseen()
        return _others_in([*self._unseen])

    def idle(self) -> bool:
        """Return whether no thread walks a tape or is in the eager engine, and the calling one has not the seam."""
        return not (self.line or self.idents or self.in_call or self.has_seam())

    def hold_over_fork(self) -> None:
        """Block walks of other threads during a fork: the engine's own lock would stay locked in the child."""
        self._forking.held.extend(map(self.lock.acquire, (True,)))

    def release_after_fork(self) -> None:
        """Allow walks again, in the parent. (Python prints Ctrl-C during the callbacks before the fork, and ignores
        it.)"""
        held, lock = self._forking.held, self.lock
        if held:
            del held[-1]  # no call: nothing comes between this and the release
            lock.release()

    def reset_after_fork(self) -> None:
        """Reset in a forked child, where only the calling thread exists. It may have the lock, or wait for it: a
        signal's handler may fork in the midst of a walk. So the lock stays the same."""
        me = get_ident()
        self.release_after_fork()
        free(self.lock)
        self._lost = self._lost or _others_in(self.in_call)  # the engine's own lock: they had it
        for threads in (self.line, self.idents, self.in_call):
            threads[:] = [ident for ident in threads if ident == me]  # the same list: other code holds it
        self._unseen = set()


def _others_in(threads: list[int]) -> bool:
    me = get_ident()
    return any(ident != me for ident in threads)


def threads_running(code: Any) -> set[int]:
    """Threads that have a frame of the given code object on their stack."""
    frames = sys._current_frames().items()
    return {ident for ident, top in frames if any(frame.f_code is code for frame, _ in traceback.walk_stack(top))}


GATE = Gate()
PROCESS.register(
    GATE,
    before_fork=GATE.hold_over_fork,
    after_fork_in_parent=GATE.release_after_fork,
    after_fork=GATE.reset_after_fork,
)
