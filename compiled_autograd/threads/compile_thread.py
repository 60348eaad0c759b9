"""Decides whether a thread may have code compiled now.

One thread of the process lowers and compiles (:mod:`compiled_autograd.compiling.queue`). Code that Python runs inside
it compiles nothing, for it would wait for itself. Nor does code that runs while its thread has the engine's seam, for
which the compiling thread waits too (:data:`bypass.INSIDE_COMPILE`).

In a forked child only the thread that forked exists. If another one was compiling, Inductor, fake tensors and imports
may have locks of theirs held for ever, and the child compiles nothing (:data:`bypass.FORKED`). Locks of this package
guard a few lines and are made free in the child: at worst such a line was half done, and the code is written so that
nothing needs the other half.
"""

from __future__ import annotations

from _thread import get_ident
from dataclasses import dataclass

from ..diagnostics.bypass import FORKED, INSIDE_COMPILE
from ..process_state import PROCESS
from ..shadow_cache import Bypass
from .gate import GATE


@dataclass(slots=True)
class _Compiler:
    """The compiling thread; ``is_broken``: it was forked away while it compiled."""

    thread: int = 0
    is_broken: bool = False


COMPILER = PROCESS.register(_Compiler())


def why_not_compile() -> Bypass | None:
    """Return why this thread may compile nothing now; None if it may."""
    return INSIDE_COMPILE if GATE.has_seam() else why_not_capture()


def why_not_capture() -> Bypass | None:
    """Return why this thread may not capture a tape to compile it. It has the seam."""
    if COMPILER.is_broken:
        return FORKED
    return INSIDE_COMPILE if COMPILER.thread == get_ident() else None
