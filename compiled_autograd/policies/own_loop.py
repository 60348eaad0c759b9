"""The own loop (``engine/own_loop``), as far as policies know of it: whether it runs what is left to eager, and for
which tapes it is not asked again for a while, since to be refused takes some microseconds."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from ..native.interface import Module
from ..process_state import PROCESS
from ..settings import Settings
from ..torch_api.version_differences import why_own_loop_is_unchecked

FIRST_REST, LAST_REST = 16, 1030
"""Number of backwards without a try after a refusal, at first and at most. It doubles with each refusal. The largest
number plus one is a prime, so that for alternating tapes the try is not always of the same one."""
FIRST_REST_OF_NEW, LAST_REST_OF_NEW = 1 / 8, 64
"""The same for tapes with new sketches: no pause after the first refusals."""
_MAX_KEPT = 4096


class Tries:
    """Tries of the own loop on some tapes: ``rest`` is the number of backwards without a try. The result of the first
    try goes to ``of_new`` too."""

    __slots__ = ("first", "last", "next", "of_new", "rest")

    def __init__(self, first: float = FIRST_REST, last: int = LAST_REST, of_new: Tries | None = None) -> None:
        self.first = self.next = first
        self.last, self.of_new = last, of_new
        self.rest = 0

    def is_time(self) -> bool:
        """Return whether the own loop is tried on the next backward."""
        if not self.rest:
            return True
        self.rest -= 1
        return False

    def refused(self) -> None:
        """Count a refusal by the loop."""
        self.rest = int(self.next)
        self.next = min(2 * self.next, self.last)
        if self.of_new is not None:
            self.of_new.refused()
            self.of_new = None

    def served(self) -> None:
        """Count a run in the loop."""
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
        """Forget all, as in a new process."""
        self.module: Module | None = None
        self.wrong: Module | None = None
        self.reason = "it was not looked for yet"
        self.left = 0
        self._tries: dict[Hashable, Tries] = {}
        self._new: dict[int, Tries] = {}

    def on(self, settings: Settings) -> bool:
        """Return whether the own loop runs bypasses of a session whose tape allows it."""
        return self.module is not None and not why_off(settings)

    def state(self, settings: Settings) -> str:
        """``"on"``, or ``"off: "`` and why: it is looked for."""
        reason = why_off(settings)
        if not reason:
            self.find(settings)
            reason = "" if self.on(settings) else self.reason
        return f"off: {reason}" if reason else "on"

    def tries(self, session: int, sketch: Hashable) -> Tries | None:
        """Return the tries on tapes with one sketch, under the settings of a number. None for no try: once the loop
        refused some, it is not tried on all new sketches."""
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
    """Return why a session with these settings does not use the own loop, in any case; empty if it may."""
    if not settings.may_compile:
        return "COMPILED_AUTOGRAD=0" if settings.turned_off else "this PyTorch was not tested"
    if settings.own_loop is False:
        return f"extension={settings.extension!r}"
    return why_own_loop_is_unchecked() if settings.own_loop is None else ""
