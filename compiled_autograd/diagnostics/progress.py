"""The progress line: shows the stage and the seconds so far while a step waits for a long capture, trace or compile.

Compiles in the background show nothing.
"""

from __future__ import annotations

import contextvars
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..backends.signal_handlers import raise_what_a_handler_raised
from .displays import Display, display_for
from .reporting import warn_once

PATIENCE = 2.0
"""Seconds of capturing, or of tracing and compiling, in one backward, before the line appears."""
_TURNS = "|/-\\"


class Wait:
    """The wait of one backward, from its first compile on, or during its capture.

    Args:
        setting: the setting ``progress``. False shows nothing; True also writes to pipes and files, and on every rank.
    """

    def __init__(self, setting: bool | None) -> None:
        self._display: Display | None = display_for(setting)
        self._started = time.monotonic()
        self._lock = threading.RLock()  # reentrant: ``gc`` or a signal handler may compile inside, and shows that too

    @contextmanager
    def shown(self, what: Callable[[], tuple[str, str]]) -> Iterator[None]:
        """Show the line during one compile or capture, and remove it at the end, also after an exception. ``what``
        returns the stage and the name of the tape."""
        if self._display is None:
            yield
            return
        done = threading.Event()
        show = contextvars.copy_context().run  # by the context, a notebook finds the cell of an output
        thread = threading.Thread(target=show, args=(self._show, what, done), name="compiled_autograd", daemon=True)
        try:
            thread.start()
            yield
        finally:
            done.set()
            self._on_display(lambda display: display.erase(), done, wanted=True)

    def _show(self, what: Callable[[], tuple[str, str]], done: threading.Event) -> None:
        wait = max(PATIENCE - self._seconds(), 0.0)
        for turn in itertools.cycle(_TURNS):
            if done.wait(wait):
                return
            display = self._display
            if display is None:
                return
            doing, tape = what()
            text = f"{turn} compiled_autograd: {doing}, {self._seconds():.0f} s: {tape}"
            self._on_display(lambda display, text=text: display.draw(text), done, wanted=False)  # type: ignore[misc]
            wait = display.pause(self._seconds())

    def _seconds(self) -> float:
        return time.monotonic() - self._started

    def _on_display(self, act: Callable[[Display], None], done: threading.Event, wanted: bool) -> None:
        """Call ``act`` with the display if the compile is done (``wanted`` True) or not yet done (False).

        A failure must not fail the step: it gives a warning, and the line is not shown any more.
        """
        with self._lock:
            if self._display is None or done.is_set() is not wanted:
                return
            try:
                act(self._display)
            except Exception as error:  # noqa: BLE001  gives a warning, below
                raise_what_a_handler_raised(error)
                self._display, failed = None, error
            else:
                return
        warn_once(f"the progress line could not be shown ({type(failed).__name__}: {failed}).")
