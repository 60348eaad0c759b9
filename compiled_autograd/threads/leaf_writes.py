"""The lock on leaves, so that no gradient is lost if two threads give to one leaf (``docs/internals/threads.md``).

Compiled backwards write their leaves one after the other, under one lock. While another thread is in the eager engine,
they give to the engine's node of each leaf instead, which has a lock of its own (``AccumulateGrad::apply``,
``torch/csrc/autograd/functions/accumulate_grad.cpp``, 2.13).

The lock is reentrant: ``gc``, a ``__del__`` or a handler of a signal may run a backward inside a write. :mod:`gate`
says where Ctrl-C can arrive.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import RLock, get_ident

from ..process_state import PROCESS, free
from .gate import GATE


class LeafWrites:
    """The lock of the process for leaves.

    Attributes:
        writing: the threads that write leaves, or wait to do so, once for each write.
    """

    def __init__(self) -> None:
        self.writing: list[int] = []
        self._lock = RLock()
        self._through_nodes: list[int] = []

    def none_needed(self) -> bool:
        """Return whether leaves may be written without a lock. The caller must let no other thread run meanwhile.

        No thread runs between the checks, or before the return: no function is called.
        """
        return not (self.writing or self._through_nodes or GATE.idents or GATE.in_call)

    def in_turn(self, write: Callable[[], None], beside_eager: bool = False) -> bool:
        """Write leaves while no other thread does. Return False, and write nothing, if another thread is in the eager
        engine or gives to nodes, unless ``beside_eager``."""
        me = get_ident()
        try:
            self.writing.append(me)
            with self._lock:
                if not beside_eager and (GATE.others_in_eager() or any(each != me for each in [*self._through_nodes])):
                    return False
                write()
                return True
        finally:
            self.writing.remove(me)

    def through_nodes(self, write: Callable[[], None]) -> None:
        """Give to the nodes of leaves. Other threads do so too meanwhile."""
        me = get_ident()
        try:
            self._through_nodes.append(me)
            self.wait_for_writers()
            write()
        finally:
            self._through_nodes.remove(me)

    def wait_for_writers(self) -> None:
        """Wait for a write that began before the calling thread was counted as one that gives to nodes, or as one in
        the eager engine: later ones see it."""
        me = get_ident()
        if any(each != me for each in [*self.writing]):
            with self._lock:
                pass

    def writes_here(self) -> bool:
        """Return whether the calling thread writes leaves: Python runs other code inside that."""
        return bool(self.writing) and get_ident() in [*self.writing]

    def reset_after_fork(self) -> None:
        """Reset in a forked child, where only the calling thread exists, and the lock may be in any state."""
        me = get_ident()
        free(self._lock)
        self.writing[:] = [each for each in self.writing if each == me]
        self._through_nodes[:] = [each for each in self._through_nodes if each == me]


LEAF_WRITES = LeafWrites()
PROCESS.register(LEAF_WRITES, after_fork=LEAF_WRITES.reset_after_fork)
GATE.after_entering = LEAF_WRITES.wait_for_writers
