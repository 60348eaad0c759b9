"""Write locks on leaves, so that no gradient is lost if two threads give to one leaf.

Between compiled threads, a claim replaces the C++ lock of the engine's node for a leaf (``AccumulateGrad::apply``,
``torch/csrc/autograd/functions/accumulate_grad.cpp``, 2.13; ``docs/internals/threads.md``).

An undisputed claim costs two operations on a list. Both kinds of waiting last as long as additions take. Claims held
while hooks run block only threads that want the same leaf, as under eager.
"""

from __future__ import annotations

import threading
from _thread import LockType
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..process_state import PROCESS
from .gate import GATE, Token, take

_SECONDS = 0.02
"""Seconds after which who waits looks whether a claim was left by Ctrl-C."""


@dataclass(slots=True, eq=False)
class Claim:
    """The leaves that a thread writes: ``slots[index]`` for each of ``indices``.

    ``through_nodes`` says that threads that enter the eager engine need not wait for this claim. ``waiting`` says that
    the claim has no leaves yet. No thread waits for such a claim: two threads that each have the other's leaves would
    wait forever.

    A claim is valid while its token is locked, as in :mod:`gate`. Its thread unlocks the token in the first call of a
    ``finally``, so Ctrl-C leaves no claim behind. Waiting threads check again from time to time, as no notification may
    come. Each waits for its own lock: Python functions lock a ``Condition``, and after Ctrl-C it would stay locked.
    """

    slots: Sequence[Any]
    indices: Sequence[int]
    through_nodes: bool = False
    waiting: bool = False
    thread: int = field(default_factory=threading.get_ident)
    token: Token = field(default_factory=take)

    def leaves(self) -> set[int]:
        """Ids of the leaves."""
        return {id(self.slots[index]) for index in self.indices}


class Claims:
    """All claims of the process, in the order in which they were made.

    Their list changes without a lock, only by calls of C, during which no other thread runs. So readers take a copy
    first, and a claim to be removed may be gone already.

    Attributes:
        made: the list.
    """

    def __init__(self) -> None:
        self.made: list[Claim] = []
        self._bells: dict[LockType, None] = {}  # of those who wait: unlocked where something has changed
        self._entering: dict[int, list[Claim]] = {}  # threads that enter the eager engine, and whom they wait for

    def enter(self, claim: Claim) -> None:
        """Claim leaves, once no other thread has any of them. The caller unlocks the claim's token whatever comes."""
        if self.made:
            for each in [*self.made]:
                if not each.token.locked():
                    self._remove(each)
        self.made.append(claim)
        if len(self.made) > 1:  # else whoever comes now sees that this one has its leaves
            claim.waiting = True
            self._tell()
            self._wait(lambda: self._obtains(claim))
        if GATE.others_in_eager():
            self._let_pass(claim)

    def made_here(self) -> bool:
        """Return whether the calling thread has claims, while Python runs other code inside its writes."""
        me = threading.get_ident()
        return any(each.thread == me and each.token.locked() for each in [*self.made]) if self.made else False

    def none_needed(self) -> bool:
        """Return whether leaves may be written without a claim. The caller must let no other thread run meanwhile.

        No thread runs between the checks, or before the return: no function is called.
        """
        return not self.made and not GATE.idents and not GATE.in_eager

    def change(self, claim: Claim, indices: Sequence[int]) -> None:
        """Claim other leaves instead."""
        self._remove(claim)
        self._tell()
        claim.indices = indices
        self.enter(claim)

    def hold(self, claim: Claim, index: int) -> None:
        """Give up all leaves but one, whose hooks are about to run."""
        claim.indices = (index,)
        self._let_pass(claim)

    def release(self, claim: Claim) -> None:
        """Release a claim, after its leaves are written."""
        if claim.token.locked():
            claim.token.release()
        self._remove(claim)
        self._tell()

    def _remove(self, claim: Claim) -> None:
        try:  # noqa: SIM105  to suppress it takes longer
            self.made.remove(claim)
        except ValueError:  # another thread was quicker: one that found it unlocked
            pass

    def wait_for_writers(self) -> None:
        """Wait, for a thread that is counted as entering the eager engine, for writers that did not see it."""
        if not self.made:
            return
        me = threading.get_ident()
        earlier = [each for each in [*self.made] if each.thread != me]
        try:
            self._entering[me] = earlier
            self._wait(lambda: self._may_enter(me, earlier))
        finally:
            self._entering.pop(me, None)

    def _may_enter(self, me: int, earlier: list[Claim]) -> bool:
        """Return whether a thread need not wait for these writers any more."""
        self._entering.pop(me, None)  # before it is asked: see :meth:`_obtains`
        for each in earlier:
            written = each.through_nodes or each.waiting or each not in self.made or not each.token.locked()
            if not written and not self._waits_for(each.thread, me):
                self._entering[me] = earlier
                return False
        return True

    def _obtains(self, claim: Claim) -> bool:
        """Return whether a waiting claim has its leaves now: no other thread has one of them.

        The claim is first marked as valid, then compared with the others. So of two concurrent claims at least one sees
        the other. If both do, both wait, and try again.
        """
        claim.waiting = False
        others = [
            each for each in [*self.made] if each.thread != claim.thread and not each.waiting and each.token.locked()
        ]
        leaves = claim.leaves() if others else set()
        in_the_way = {each.thread for each in others if not leaves.isdisjoint(each.leaves())}
        claim.waiting = any(not self._waits_for(each, claim.thread) for each in in_the_way)
        return not claim.waiting

    def _waits_for(self, thread: int, me: int) -> bool:
        """Return whether ``thread`` waits for ``me`` to write its leaves or to release the seam, inside a write of its
        own. Then ``me`` must not wait for ``thread``. That is safe, as ``thread`` reads its leaves again before it
        writes them."""
        made = [each for each in [*self.made] if each.token.locked()]
        found, worklist = {thread}, [thread]
        while worklist:
            waiting = worklist.pop()
            leaves = set().union(*(each.leaves() for each in made if each.thread == waiting and each.waiting))
            writers = [each for each in self._entering.get(waiting, ()) if not each.through_nodes]
            others = [
                each.thread
                for each in made
                if not each.waiting and (each in writers or not leaves.isdisjoint(each.leaves()))
            ]
            if (walks := GATE.waited_for_by(waiting)) is not None:
                others.append(walks)
            for other in others:
                if other not in found:
                    found.add(other)
                    worklist.append(other)
        return me in found

    def _let_pass(self, claim: Claim) -> None:
        claim.through_nodes = True
        self._tell()

    def _wait(self, over: Callable[[], bool]) -> None:
        bell = take()
        try:
            self._bells[bell] = None  # before it is asked again: who changes something after that rings
            while True:  # not a condition: see Ctrl-C in docs/internals/threads.md
                if over():
                    break
                bell.acquire(timeout=_SECONDS)
        finally:
            self._bells.pop(bell, None)

    def _tell(self) -> None:
        for bell in self._bells.copy() if self._bells else ():
            try:  # noqa: SIM105
                bell.release()
            except RuntimeError:  # it is unlocked already
                pass

    def reset_after_fork(self) -> None:
        """Reset in a forked child, where only the calling thread exists and locks may be in any state."""
        self._bells, self._entering = {}, {}
        me = threading.get_ident()
        self.made = [each for each in self.made if each.thread == me]


CLAIMS = Claims()
PROCESS.register(CLAIMS, after_fork=CLAIMS.reset_after_fork)
GATE.after_entering = CLAIMS.wait_for_writers
