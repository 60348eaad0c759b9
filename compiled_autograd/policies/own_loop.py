"""The own loop (``engine/own_loop``), as far as policies know of it: whether it runs what is left to eager, and for
which tapes it is not asked again for a while, since to be refused takes some microseconds."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from ..native.interface import Module
from ..process_state import PROCESS
from ..settings import Settings
from ..torch_api.version_differences import why_own_loop_is_unchecked

FIRST_REST, LAST_REST = 16, 1030
"""Tapes of a sketch that was refused are not tried for so many backwards, at first and at last; the number doubles with
each refusal. One more than the last is a prime, so that of tapes that take turns it is not always the same one."""
FIRST_REST_OF_NEW, LAST_REST_OF_NEW = 1 / 8, 64
"""The same of tapes whose sketches are new: none for the first refusals."""
_MAX_KEPT = 4096


class Tries:
    """Of some tapes: for how many backwards more (``rest``) the own loop is not asked. What becomes of the first one
    that it is asked for is told to ``of_new`` too."""

    __slots__ = ("first", "last", "next", "of_new", "rest")

    def __init__(self, first: float = FIRST_REST, last: int = LAST_REST, of_new: Tries | None = None) -> None:
        self.first = self.next = first
        self.last, self.of_new = last, of_new
        self.rest = 0

    def is_time(self) -> bool:
        """Whether it is asked for the next one."""
        if not self.rest:
            return True
        self.rest -= 1
        return False

    def refused(self) -> None:
        """One of them was refused."""
        self.rest = int(self.next)
        self.next = min(2 * self.next, self.last)
        if self.of_new is not None:
            self.of_new.refused()
            self.of_new = None

    def served(self) -> None:
        """One of them was run."""
        self.next = self.first
        if self.of_new is not None:
            self.of_new.served()
            self.of_new = None


class OwnLoops:
    """The own loop of a process.

    Attributes:
        module: the extension, once it was found to run tapes as the engine does.
        wrong: the extension, where it was found to do something else.
        reason: why there is none.
        left: how many backwards were left to eager for which it was looked for.
        find: looks for it, for a session with these settings.
    """

    def __init__(self) -> None:
        self.find: Callable[[Settings], Module | None] = lambda settings: None
        self.clear()

    def clear(self) -> None:
        """As in a new process."""
        self.module: Module | None = None
        self.wrong: Module | None = None
        self.reason = "it was not looked for yet"
        self.left = 0
        self._tries: dict[Hashable, Tries] = {}
        self._new: dict[int, Tries] = {}

    def on(self, settings: Settings) -> bool:
        """Whether it runs what a session leaves to eager, where the tape allows it."""
        return self.module is not None and not why_off(settings)

    def state(self, settings: Settings) -> str:
        """``"on"``, or ``"off: "`` and why: it is looked for."""
        reason = why_off(settings)
        if not reason:
            self.find(settings)
            reason = "" if self.on(settings) else self.reason
        return f"off: {reason}" if reason else "on"

    def tries(self, session: int, sketch: Hashable) -> Tries | None:
        """Those of the tapes with one sketch, under settings of some number. None where the own loop is not asked: of
        sketches that are new not all are tried, once it was refused for some."""
        tries = self._tries.get((session, sketch))
        if tries is None:
            new = self._new.setdefault(session, Tries(FIRST_REST_OF_NEW, LAST_REST_OF_NEW))
            if not new.is_time():
                return None
            if len(self._tries) >= _MAX_KEPT:
                self._tries.clear()
            tries = self._tries[session, sketch] = Tries(of_new=new)
        return tries if tries.is_time() else None


OWN_LOOPS = OwnLoops()
PROCESS.register(OWN_LOOPS, restart=OWN_LOOPS.clear)


def why_off(settings: Settings) -> str:
    """Why a session with these settings does without, whatever is there; empty where it does not."""
    if not settings.may_compile:
        return "COMPILED_AUTOGRAD=0" if settings.turned_off else "this PyTorch was not tested"
    if settings.own_loop is False:
        return f"extension={settings.extension!r}"
    return why_own_loop_is_unchecked() if settings.own_loop is None else ""
