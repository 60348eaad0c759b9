"""What the process keeps from one backward to the next: all of it is registered here by the module that keeps it.

Nothing else at module level changes (``tests/test_process_state.py``).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar


class WeaklyReferred:
    """What has slots, and that others refer to weakly. From Python 3.11 on ``dataclass`` has a word for it."""

    __slots__ = ("__weakref__",)


_T = TypeVar("_T")
_Do = Callable[[], object]


class ProcessState:
    """The registered objects, in the order of their registration: modules register when they are imported, so what is
    used by others comes before them.

    **Forks.** Each hook is handed to ``os.register_at_fork`` by itself, and is not called by a loop of ours: Python
    reports what a hook raises, Ctrl-C too, and goes on to the next one, whereas an interrupted loop would leave locks
    taken. Hooks before a fork run in reverse order, those after it in order: a child puts right what is used by others
    before the others.
    """

    def __init__(self) -> None:
        self._kept: list[Any] = []
        self._reset: list[_Do] = []
        self._restart: list[_Do] = []

    def register(
        self,
        kept: _T,
        *,
        reset: _Do | None = None,
        restart: _Do | None = None,
        before_fork: _Do | None = None,
        after_fork_in_parent: _Do | None = None,
        after_fork: _Do | None = None,
    ) -> _T:
        """Register an object that changes while the process runs.

        Args:
            kept: the object.
            reset: forgets what was captured or compiled.
            restart: forgets the rest too, so that tests find the object as in a new process.
            before_fork, after_fork_in_parent: called by the thread that forks.
            after_fork: called in the child, where this thread alone lives on.

        Returns:
            ``kept``.
        """
        self._kept.append(kept)
        self._reset += [reset] if reset else []
        self._restart += [restart] if restart else []
        hooks = {"before": before_fork, "after_in_parent": after_fork_in_parent, "after_in_child": after_fork}
        given = {when: hook for when, hook in hooks.items() if hook}
        if given and hasattr(os, "register_at_fork"):
            os.register_at_fork(**given)
        return kept

    def __iter__(self) -> Iterator[Any]:
        return iter(self._kept)

    def reset(self) -> None:
        """Forget what was captured and compiled, from the top down: the engine first, which hands it to the others."""
        for forget in reversed(self._reset):
            forget()

    def restart(self) -> None:
        """:meth:`reset`, and forget what a process does or says only once. For tests."""
        self.reset()
        for forget in reversed(self._restart):
            forget()


PROCESS = ProcessState()


def free_in_child(lock: Any) -> Any:
    """Register an ``RLock`` that is free in a forked child, unless it is the forking thread's. Gives the lock.

    For one that guards a few lines; :mod:`compiled_autograd.threads.forks` says why.
    """
    return PROCESS.register(lock, after_fork=functools.partial(free, lock))


def free(lock: Any) -> bool:
    """In a forked child, have an ``RLock`` be free, unless it is the calling thread's; whether another thread held it.

    ``_at_fork_reinit`` and ``_is_owned`` are what Python's own modules use for theirs (3.10 to 3.14).
    """
    if lock._is_owned():
        return False
    if lock.acquire(blocking=False):
        lock.release()
        return False
    lock._at_fork_reinit()
    return True


class OfThread(Generic[_T]):
    """An attribute of a ``threading.local`` that each thread has made for it when it first asks. In the midst of an
    ``__init__`` of the ``local``'s, what ``gc`` or a signal runs there would ask for what is not there yet."""

    def __init__(self, make: Callable[[], _T]) -> None:
        self._make = make

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, thread: Any, owner: type | None = None) -> _T:
        found: _T = thread.__dict__.setdefault(self._name, self._make())
        return found
