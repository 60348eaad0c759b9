"""What a forked child may do with what its parent had: of all threads, only the one that forked lives on there, and a
lock that another one held would never be free again.

A lock that guards a few lines is made free in the child: at worst such a line was half done, and these are written so
that nothing needs the other half. What takes long, compiling, cannot be treated so. Inductor, fake tensors and the
modules that are imported meanwhile have state and locks of their own, so a child that was forked while another thread
compiled compiles nothing: it runs what its parent had compiled, and leaves the rest to the eager engine
(:data:`bypass.FORKED`).
"""

from __future__ import annotations

import functools
import os
from typing import Any

_can_compile = True


def can_compile() -> bool:
    """Whether this process may compile."""
    return _can_compile


def free_in_child(lock: Any) -> Any:
    """Have an ``RLock`` that lives as long as the process be free in a forked child, unless it is the forking thread's.

    Gives the lock. ``_at_fork_reinit`` and ``_is_owned`` are what Python's own modules use for theirs (3.10 to 3.14).
    """
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=functools.partial(_free, lock))
    return lock


def compiles_under(lock: Any) -> Any:
    """The same for the ``RLock`` that is held while something is compiled. Gives the lock."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=functools.partial(_look, lock))
    return lock


def _free(lock: Any) -> bool:
    """Gives whether another thread held it."""
    if lock._is_owned():
        return False
    if lock.acquire(blocking=False):
        lock.release()
        return False
    lock._at_fork_reinit()
    return True


def _look(lock: Any) -> None:
    global _can_compile
    if _free(lock):
        _can_compile = False
