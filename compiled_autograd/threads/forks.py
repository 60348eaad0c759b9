"""What a forked child may do with what its parent had: of all threads, only the one that forked lives on there, and a
lock that another one held would never be free again.

A lock that guards a few lines is made free in the child: at worst such a line was half done, and these are written so
that nothing needs the other half. Compiling takes too long for that: Inductor, fake tensors and the modules that are
imported meanwhile have state and locks of their own (:data:`bypass.FORKED`).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from ..process_state import PROCESS, free


@dataclass(slots=True)
class _Forked:
    while_compiling: bool = False


_forked = PROCESS.register(_Forked())


def can_compile() -> bool:
    """Whether this process may compile."""
    return not _forked.while_compiling


def compiles_under(lock: Any) -> Any:
    """Register the ``RLock`` that is held while something is compiled. Gives the lock."""
    return PROCESS.register(lock, after_fork=functools.partial(_free, lock))


def _free(lock: Any) -> None:
    _forked.while_compiling |= free(lock)
