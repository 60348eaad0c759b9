"""Decides whether a thread may compile now.

In a forked child only the thread that forked exists. A lock that another thread held would stay locked forever.

A lock that guards a few lines is made free in the child. At worst such a line was half done, and the code is written so
that nothing needs the other half. Compiling takes too long for that: Inductor, fake tensors and imports have state and
locks of their own (:data:`bypass.FORKED`). For the same reason, code that Python runs inside a compile compiles nothing
(:data:`bypass.INSIDE_COMPILE`). Nor does code that runs inside a wait for the engine's seam, for which other threads
wait too.
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass, field
from typing import Any

from ..diagnostics.bypass import FORKED, INSIDE_COMPILE
from ..process_state import PROCESS, free
from ..shadow_cache import Bypass
from .claims import CLAIMS
from .gate import GATE

_NOTHING = contextlib.nullcontext()


@dataclass(slots=True)
class _Forked:
    while_compiling: bool = False
    locks: list[Any] = field(default_factory=list)


_forked = PROCESS.register(_Forked())


def why_not_compile() -> Bypass | None:
    """Return why this thread may compile nothing now; None if it may."""
    return INSIDE_COMPILE if GATE.stands_in_line() else why_not_capture()


def why_not_capture() -> Bypass | None:
    """Return why this thread, which has the seam, may not capture a tape to compile it."""
    if _forked.while_compiling:
        return FORKED
    return INSIDE_COMPILE if _compiles() else None


def _compiles() -> bool:
    for lock in _forked.locks:  # noqa: SIM110  a generator takes longer, and each bypass asks
        if lock._is_owned():
            return True
    return False


def unless_inside(lock: Any) -> Any:
    """Return a lock that guards a few lines; a null context inside a walk, a compile or a write of leaves. Another
    thread may hold the lock and wait for the end of these, so waiting for it would be a deadlock. Two threads in those
    lines are less harmful."""
    inside = (GATE.line and GATE.stands_in_line()) or (CLAIMS.made and CLAIMS.made_here()) or _compiles()
    return _NOTHING if inside else lock


def compiles_under(lock: Any) -> Any:
    """Register the ``RLock`` that is held while something is compiled. Gives the lock."""
    _forked.locks.append(lock)
    return PROCESS.register(lock, after_fork=functools.partial(_free, lock))


def _free(lock: Any) -> None:
    _forked.while_compiling |= free(lock)
