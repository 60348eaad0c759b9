"""State of the process that outlives a backward. Each module registers its own state here.

No other object at module level changes (``tests/test_process_state.py``).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar


class WeaklyReferred:
    """Base of classes with slots that need weak references. Python 3.11 has ``dataclass(weakref_slot=True)``."""

    __slots__ = ("__weakref__",)


_T = TypeVar("_T")
_Do = Callable[[], object]


class ProcessState:
    """The registered objects, in order of registration. Modules register at import, so that a module comes after the
    modules that it uses.

    **Forks.** Each hook is registered separately with ``os.register_at_fork``, and not called by a loop of this class.
    Python reports an exception of a hook, also Ctrl-C, and calls the next hook; an interrupted loop would leave locks
    held. Hooks before a fork run in reverse order, hooks after it in order: a child repairs a module after the modules
    that it uses.
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
            reset: drops captured and compiled graphs.
            restart: drops the rest too, so that tests find the object as in a new process.
            before_fork, after_fork_in_parent: called by the forking thread.
            after_fork: called in the child, where only the forking thread exists.

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
        """Drop what was captured and compiled, from the top down: the engine first, as it uses the others."""
        for forget in reversed(self._reset):
            forget()

    def restart(self) -> None:
        """:meth:`reset`, and forget actions and warnings that happen once per process. For tests."""
        self.reset()
        for forget in reversed(self._restart):
            forget()


PROCESS = ProcessState()


def free_in_child(lock: Any) -> Any:
    """Register an ``RLock`` that is free in a forked child unless the forking thread holds it. Returns the lock.

    Only for a lock that guards a few lines; :mod:`compiled_autograd.threads.compile_thread` says why.
    """
    return PROCESS.register(lock, after_fork=functools.partial(free, lock))


def free(lock: Any) -> bool:
    """In a forked child, free an ``RLock`` unless the calling thread holds it. Return whether another thread held it.

    Python's own modules use ``_at_fork_reinit`` and ``_is_owned`` for their locks (3.10 to 3.14).
    """
    if lock._is_owned():
        return False
    if lock.acquire(blocking=False):
        lock.release()
        return False
    lock._at_fork_reinit()
    return True


class OfThread(Generic[_T]):
    """An attribute of a ``threading.local``, created in each thread on first access. With an ``__init__`` of the
    ``local``, code that ``gc`` or a signal handler runs during the ``__init__`` would find the attribute missing."""

    def __init__(self, make: Callable[[], _T]) -> None:
        self._make = make

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, thread: Any, owner: type | None = None) -> _T:
        found: _T = thread.__dict__.setdefault(self._name, self._make())
        return found
