"""The own loop (``engine/own_loop``), as far as policies know of it: whether it runs what is left to eager."""

from __future__ import annotations

from collections.abc import Callable

from ..native.interface import Module
from ..process_state import PROCESS
from ..settings import Settings
from ..torch_api.version_differences import why_own_loop_is_unchecked


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


OWN_LOOPS = OwnLoops()
PROCESS.register(OWN_LOOPS, restart=OWN_LOOPS.clear)


def why_off(settings: Settings) -> str:
    """Return why a session with these settings does not use the own loop, in any case; empty if it may."""
    if not settings.may_compile:
        return "COMPILED_AUTOGRAD=0" if settings.turned_off else "this PyTorch was not tested"
    if settings.own_loop is False:
        return f"extension={settings.extension!r}"
    return why_own_loop_is_unchecked() if settings.own_loop is None else ""
