"""Which leaves each thread is writing, so that two threads that give to one leaf lose nothing.

The engine's node for a leaf has a lock in C++, held while it adds and while the leaf's post-accumulate hooks run
(``AccumulateGrad::apply``, ``torch/csrc/autograd/functions/accumulate_grad.cpp``, 2.13). It cannot be had from Python.
So between threads that run compiled, a claim takes its place, for all leaves of a step at once: whoever comes later
waits while an earlier claim of another thread has one of its leaves. With threads that are in the eager engine the node
itself settles it: while there are such, we give gradients to nodes (:attr:`Claim.through_nodes`), and who enters the
eager engine meanwhile waits for those who write by themselves.

A claim that meets no other costs two operations on a list. Both kinds of waiting are for as long as additions take:
claims held while hooks run are waited for only by those who want the same leaf, as under eager.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .gate import GATE


@dataclass(slots=True, eq=False)
class Claim:
    """The leaves that a thread writes: ``slots[index]`` for each of ``indices``.

    ``through_nodes`` says that no thread that enters the eager engine need wait for it.
    """

    thread: int
    slots: Sequence[Any]
    indices: Sequence[int]
    through_nodes: bool = False

    def leaves(self) -> set[int]:
        """Ids of the leaves."""
        return {id(self.slots[index]) for index in self.indices}


class Claims:
    """All claims of the process, in the order in which they were made."""

    def __init__(self) -> None:
        self._made: list[Claim] = []
        self._waiting = 0
        self._changed = threading.Condition(threading.Lock())

    def take(self, slots: Sequence[Any], indices: Sequence[int]) -> Claim:
        """Claim leaves, once no other thread has any of them."""
        claim = Claim(threading.get_ident(), slots, indices)
        try:
            self._enter(claim)
        except BaseException:  # an interrupt: nothing was written yet
            self.release(claim)
            raise
        if GATE.others_in_eager():
            self._let_pass(claim)
        return claim

    def change(self, claim: Claim, indices: Sequence[int]) -> None:
        """Claim other leaves instead."""
        self.release(claim)
        claim.indices = indices
        self._enter(claim)

    def hold(self, claim: Claim, index: int) -> None:
        """Give up all leaves but one, whose hooks are about to run."""
        claim.indices = (index,)
        self._let_pass(claim)

    def release(self, claim: Claim) -> None:
        """The leaves are written."""
        self._made.remove(claim)
        self._tell()

    def _enter(self, claim: Claim) -> None:
        self._made.append(claim)
        if len(self._made) > 1:  # else whoever comes now sees this one before its own
            self._wait(lambda: not self._before(claim))

    def wait_for_writers(self) -> None:
        """The calling thread is counted as one that enters the eager engine: wait for those who did not know it."""
        if not self._made:
            return
        me = threading.get_ident()
        earlier = list(self._made)
        self._wait(lambda: all(each.thread == me or each.through_nodes or each not in self._made for each in earlier))

    def _before(self, claim: Claim) -> bool:
        """Whether an earlier claim of another thread has a leaf of this one."""
        made = list(self._made)
        others = [each for each in made[: made.index(claim)] if each.thread != claim.thread]
        leaves = claim.leaves() if others else set()
        return any(not leaves.isdisjoint(each.leaves()) for each in others)

    def _let_pass(self, claim: Claim) -> None:
        claim.through_nodes = True
        self._tell()

    def _wait(self, over: Callable[[], bool]) -> None:
        with self._changed:
            self._waiting += 1  # before it is asked again: who changes something after that tells us
            try:
                while not over():
                    self._changed.wait()
            finally:
                self._waiting -= 1

    def _tell(self) -> None:
        if self._waiting:
            with self._changed:
                self._changed.notify_all()

    def reset_after_fork(self) -> None:
        """In a forked child only the calling thread lives on, and no lock may be trusted."""
        self._changed = threading.Condition(threading.Lock())
        self._waiting = 0
        me = threading.get_ident()
        self._made = [each for each in self._made if each.thread == me]


CLAIMS = Claims()
GATE.after_entering = CLAIMS.wait_for_writers
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=CLAIMS.reset_after_fork)
