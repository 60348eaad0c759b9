"""The lock of the engine's seam, which belongs to the process.

``docs/internals/threads.md`` says which thread waits for which, and which bypasses. A backward inside one that the
eager engine runs in the same thread is captured; one that Python runs while the engine walks a tape is left to eager.

**Nothing is stuck after Ctrl-C.** Python may raise ``KeyboardInterrupt`` in the main thread after any call, at the
beginning of any function of Python's, and at a jump back (the "eval breaker" of CPython 3.10 to 3.14), but nowhere
else: not between an assignment and what follows it, not within a function of C, nor between the beginning of a
``finally`` and the end of the first call of C in it. So a thread holds a *token*: its own lock, locked before any other
thread sees it. Unlocking the token, one call of C, releases all that the token stands for. Users of the gate unlock it
in the first call of a ``finally``. Unlocked tokens in the lists here belong to no thread: they are skipped, and dropped
at the next look.

**No lock is held while lists are read.** A signal's handler, a ``__del__`` or a finalizer of ``gc`` may run a backward
between any two calls here, in the same thread. The interrupted thread must not hold a lock for which this backward
would wait. So the first thread in a list has the seam, and only calls of C change the list. A thread that waits for
another waits for that thread's token, and holds only its own place in the line. A reader of a list takes ``[*list]``
first: ``list.copy()`` reads the size and then allocates memory, and until Python 3.11 ``gc`` may run in between.
"""

from __future__ import annotations

import sys
import traceback
from _thread import LockType, allocate_lock, get_ident
from collections.abc import Callable
from threading import local
from typing import Any

from ..diagnostics.bypass import FORKED, INSIDE_ENGINE_CALL, OTHER_THREAD
from ..process_state import PROCESS
from ..shadow_cache import Bypass

Token = LockType


def take() -> Token:
    """A new token. It stands for something from when it is given to the gate until it is released."""
    token = allocate_lock()
    token.acquire()
    return token


class Turn:
    """A place in the line of those who want the seam, of the thread that makes it.

    It is left by ``turn.over = True`` and ``turn.token.release()``: nothing comes between these two. In this order,
    since whoever waits for the token has it locked until that thread is let run. :meth:`Gate.leave` tidies up after
    that.
    """

    __slots__ = ("over", "thread", "token")

    def __init__(self) -> None:
        self.thread = get_ident()
        self.over = False
        self.token = take()

    def stands(self) -> bool:
        """Return whether the place was not left."""
        return not self.over and self.token.locked()


class _Forking(local):
    turns: tuple[Turn, Any] | None = None  # of the innermost fork, and those around it


class Gate:
    """Knows the threads in the eager engine, and lets one at a time set the seam.

    Attributes:
        in_eager: the threads that enter the eager engine by :meth:`enter_eager`, by token.
        idents: the threads that enter it directly, as ``execution.on_eager`` does, once for each nested call. A thread
            adds itself in the first call of a ``try``, and removes itself in the first call of the ``finally``. A token
            would take longer than the time that a small backward may lose.
        line: the threads that want the seam, in order of arrival. The first that :meth:`stands <Turn.stands>` has it. A
            thread may be there more than once: code that runs while it waits or walks shares its seam.
        after_entering: called by a thread that is counted as entering the eager engine.
    """

    def __init__(self) -> None:
        self.in_eager: dict[Token, int] = {}
        self.idents: list[int] = []
        self.line: list[Turn] = []
        self._in_call: dict[Token, int] = {}
        self._lost = False
        self._forking = _Forking()
        self._unseen: set[int] = set()
        self.after_entering: Callable[[], None] = lambda: None

    def expect_unseen(self, in_backward: Callable[[], set[int]]) -> None:
        """Threads that were in backward before there was a gate; ``in_backward`` says which still are."""
        self._find_unseen = in_backward
        self._unseen = in_backward()

    def enter_eager(self, token: Token) -> None:
        """The calling thread goes into the eager engine; waits while another one holds the seam."""
        me = self.in_eager[token] = get_ident()
        while not self.is_free(me):
            self.in_eager.pop(token, None)
            self._wait()
            self.in_eager[token] = me
        self.after_entering()

    def enter_again(self, me: int) -> None:
        """Wait, for a thread among :attr:`idents` that has found another thread that captures or writes leaves."""
        while not self.is_free(me):
            try:
                self.idents.remove(me)
                self._wait()
            finally:
                self.idents.append(me)
        self.after_entering()

    def is_free(self, me: int) -> bool:
        """Return whether no other thread holds the seam.

        The caller is registered first, then looks for a capture. A capturing thread registers first, then looks for
        threads in the engine (:meth:`enter_capture`). So at least one of two sees the other.
        """
        first = self._first()
        return first is None or first.thread == me

    def has_seam(self) -> bool:
        """Return whether the calling thread has the seam."""
        first = self._first() if self.line else None
        return first is not None and first.thread == get_ident()

    def stands_in_line(self) -> bool:
        """Return whether the calling thread has the seam or waits for it: then it may get it at any time."""
        if not self.line:
            return False
        me = get_ident()
        return any(turn.thread == me and turn.stands() for turn in [*self.line])

    def _first(self) -> Turn | None:
        for turn in [*self.line]:
            if turn.stands():
                return turn
            self._drop(turn)
        return None

    def _drop(self, turn: Turn) -> None:
        try:  # noqa: SIM105  to suppress it takes longer
            self.line.remove(turn)
        except ValueError:  # another thread was quicker, or what ran in this one meanwhile
            pass

    def _wait(self) -> None:
        first = self._first()
        if first is not None:
            with first.token:  # until it is unlocked
                pass

    def others_in_eager(self) -> bool:
        """Return whether another thread is in the eager engine."""
        return bool(self.idents or self.in_eager) and self._others_than(get_ident())

    def _others_than(self, me: int) -> bool:
        if self.idents and any(ident != me for ident in [*self.idents]):
            return True
        return bool(self.in_eager) and any(ident != me for ident in _holders(self.in_eager))

    def forget(self, token: Token) -> None:
        """Remove the calling thread, which has released the token, from the eager engine."""
        self.in_eager.pop(token, None)
        self._in_call.pop(token, None)

    def enter_capture(self, turn: Turn) -> Bypass | None:
        """Take the seam; return the reason if that is impossible, else None. Code that runs during this thread's walk
        shares the seam. The caller leaves its place in either case."""
        self._come_first(turn)  # before it is asked who is in the eager engine
        return self._reason(turn.thread)

    def _come_first(self, turn: Turn) -> Turn:
        """Wait until the turn's thread has the seam; gives the turn by which it has it."""
        self.line.append(turn)
        while (first := self._first()) is not None and first.thread != turn.thread:
            with first.token:
                pass
        return turn if first is None else first

    def leave(self, turn: Turn) -> None:
        """Leave the line."""
        self._drop(turn)

    def _reason(self, me: int) -> Bypass | None:
        if self._lost:
            return FORKED
        if self._unseen:
            self._unseen &= self._find_unseen()
        if self._in_call and me in _holders(self._in_call):
            return INSIDE_ENGINE_CALL
        if self._unseen - {me} or ((self.idents or self.in_eager) and self._others_than(me)):
            return OTHER_THREAD
        return None

    def enter_alone(self, turn: Turn) -> bool:
        """Take the seam while no thread, this one included, is inside a call of the engine's that we asked for; False
        where one is and stays there."""
        return self._come_first(turn) is turn and not _holders(self._in_call)

    def change_to_eager(self, token: Token) -> None:
        """Stay in the engine when the seam is given back: the calling thread runs users' code inside its call."""
        self.in_eager[token] = self._in_call[token] = get_ident()

    def idle(self) -> bool:
        """Return whether no thread captures, and none is in the eager engine."""
        return self._first() is None and not self.idents and not _holders(self.in_eager)

    def hold_over_fork(self) -> None:
        """Block walks of other threads during a fork: the engine's own lock would stay locked in the child."""
        turn = Turn()
        self._forking.turns = turn, self._forking.turns  # a signal's handler may fork in the midst of a fork
        self._come_first(turn)

    def release_after_fork(self) -> None:
        """Allow walks again, in the parent. (Python prints Ctrl-C during the callbacks before the fork, and ignores
        it.)"""
        turns = self._forking.turns
        if turns is not None:
            turn, self._forking.turns = turns  # no call: nothing comes between this and the release
            turn.over = True
            turn.token.release()
            self.leave(turn)

    def reset_after_fork(self) -> None:
        """Reset in a forked child, where only the calling thread exists and locks may be in any state."""
        self.release_after_fork()
        me = get_ident()
        self.line[:] = [turn for turn in self.line if turn.thread == me]  # the same list: C++ asks how long it is
        others_inside = any(ident != me for ident in _holders(self._in_call))
        self._lost = self._lost or others_inside  # the same lock: they had it
        self.idents[:] = [ident for ident in self.idents if ident == me]  # the same list: the calling thread has it
        self.in_eager = {token: ident for token, ident in self.in_eager.items() if ident == me}
        self._in_call = {token: ident for token, ident in self._in_call.items() if ident == me}
        self._unseen = set()


def _holders(tokens: dict[Token, int]) -> set[int]:
    """Return the threads whose tokens are locked, and drop the other tokens.

    Threads come and go meanwhile, without a lock. So the loop reads a copy, made by one call of C during which no other
    thread runs.
    """
    found = set()
    for token, ident in tokens.copy().items():
        if token.locked():
            found.add(ident)
        else:
            tokens.pop(token, None)
    return found


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
