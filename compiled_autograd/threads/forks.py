"""Whether a thread may compile now.

Of all threads, only the one that forked lives on in a forked child, and a lock that another one held would never be
free again.

A lock that guards a few lines is made free in the child: at worst such a line was half done, and these are written so
that nothing needs the other half. Compiling takes too long for that: Inductor, fake tensors and the modules that are
imported meanwhile have state and locks of their own (:data:`bypass.FORKED`). For the same reason nothing is compiled by
what Python runs in the midst of it (:data:`bypass.INSIDE_COMPILE`); nor in the midst of waiting for the engine's seam,
which others wait for that compile.
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
    """Why this thread may compile nothing now; None where it may."""
    return INSIDE_COMPILE if GATE.stands_in_line() else why_not_capture()


def why_not_capture() -> Bypass | None:
    """Why it may not capture what would then be compiled, asked while it has the seam for that."""
    if _forked.while_compiling:
        return FORKED
    return INSIDE_COMPILE if _compiles() else None


def _compiles() -> bool:
    for lock in _forked.locks:  # noqa: SIM110  a generator takes longer, and each bypass asks
        if lock._is_owned():
            return True
    return False


def unless_inside(lock: Any) -> Any:
    """A lock that guards a few lines; nothing in its place in the midst of a walk, of compiling or of writing leaves.
    Who has the lock may be waiting for the end of these, in what Python runs there, and must not be waited for: two
    threads in those lines are the lesser evil."""
    inside = (GATE.line and GATE.stands_in_line()) or (CLAIMS.made and CLAIMS.made_here()) or _compiles()
    return _NOTHING if inside else lock


def compiles_under(lock: Any) -> Any:
    """Register the ``RLock`` that is held while something is compiled. Gives the lock."""
    _forked.locks.append(lock)
    return PROCESS.register(lock, after_fork=functools.partial(_free, lock))


def _free(lock: Any) -> None:
    _forked.while_compiling |= free(lock)
