"""Displays of the progress line: a terminal, a notebook, or lines of a file.

A display has ``draw(text)``, ``erase()`` and ``pause(seconds)``, which returns the seconds until the next drawing,
given the seconds since the first compile began.
"""

from __future__ import annotations

import io
import os
import sys
import threading
import time
import uuid
from collections import deque
from typing import Any, Protocol

import torch

from ..process_state import PROCESS

_COLUMNS = 80
"""Assumed width of a terminal whose size is unknown."""
_FEW, _SECONDS = 4, 0.05
"""If the program wrote at most ``_FEW`` texts in the last ``_SECONDS`` seconds, as rich's progress bars do, the line is
redrawn at once; after more, at the next regular drawing."""
# The line stands below the cursor's line, so that a prompt or a tqdm bar there stays intact.
_ROOM_BELOW = "\x1bD\x1bM"
"""Move one line down, which scrolls at the end of the screen, and up again."""
_BELOW = "\x1b7\x1b[B\r\x1b[2K{}\x1b8"
"""Save the cursor, go to the line below, clear and fill it, and restore the cursor."""


class Display(Protocol):
    def draw(self, text: str) -> None:
        """Show a text in place of the previous one."""

    def erase(self) -> None:
        """Remove the text."""

    def pause(self, seconds: float) -> float:
        """Return the seconds until the next drawing."""


def display_for(setting: bool | None) -> Display | None:
    """Return the display for the setting ``progress``. None without a terminal or notebook, and on all ranks but the
    first, unless the setting is True."""
    first = _rank() == 0
    if setting is False or (setting is None and not first):
        return None
    if _in_notebook():
        return Notebook()
    if first and _is_terminal(_behind(sys.stderr)):
        return Terminal()
    return Lines() if setting else None


def _rank() -> int:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    rank = os.environ.get("RANK", "")
    return int(rank) if rank.isdecimal() else 0


def _in_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None


def _behind(stream: Any) -> Any:
    """Return the real stream behind the proxy of a rich display, which writes only whole lines."""
    return getattr(stream, "rich_proxied_file", stream)


def _is_terminal(stream: Any) -> bool:
    """Return whether a stream is a terminal that can move its cursor. A stream replaced by other code does not count:
    it may write to a file too, or change the text."""
    if os.name != "posix" or os.environ.get("TERM", "dumb") == "dumb" or not isinstance(stream, io.TextIOWrapper):
        return False
    try:
        return stream.isatty()
    except ValueError:  # the stream is closed or detached
        return False


class Terminal:
    """A moving line that makes room for other output of any thread.

    While the line is shown, ``write`` of the two standard streams is wrapped, if they are terminals: the line is
    cleared before other text, and drawn again after it.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._stream = _behind(sys.stderr)
        self._drawn: str | None = None
        self._written: deque[float] = deque([0.0] * _FEW, _FEW)
        self._watched: dict[Any, Any] = {}

    def draw(self, text: str) -> None:
        """Show a text, cut to the width of the terminal."""
        with self._lock:
            if not self._watched:
                self._watch()
            try:
                columns, rows = os.get_terminal_size(self._stream.fileno())
            except OSError:
                columns = rows = 0
            if rows == 1:
                return  # no line below the cursor
            self._drawn = _fitting(text, (columns or _COLUMNS) - 1)
            self._send(_ROOM_BELOW + _BELOW.format(self._drawn))

    def erase(self) -> None:
        """Clear the line, and unwrap the streams."""
        with self._lock:
            self._clear()
            self.unwatch()

    def pause(self, seconds: float) -> float:
        """Ten times a second."""
        return 0.1

    def unwatch(self) -> None:
        """Restore the streams' ``write``, unless other code has wrapped it again since."""
        while self._watched:
            stream, (ours, before) = self._watched.popitem()
            if vars(stream).get("write") is ours:
                del stream.write
                if before is not None:
                    stream.write = before
        if self in SHOWN:
            SHOWN.remove(self)

    def _watch(self) -> None:
        SHOWN.append(self)
        for stream in {self._stream, _behind(sys.stdout)}:
            if not _is_terminal(stream):
                continue
            before, write = vars(stream).get("write"), stream.write

            def ours(text: str, write: Any = write) -> Any:
                with self._lock:
                    shown, before = self._drawn, self._written[0]
                    self._clear()
                    self._written.append(time.monotonic())
                    try:
                        return write(text)
                    finally:
                        if shown is not None and self._written[-1] - before > _SECONDS:
                            self._drawn = shown
                            self._send(_ROOM_BELOW + _BELOW.format(shown))

            self._watched[stream] = ours, before
            stream.write = ours

    def _clear(self) -> None:
        if self._drawn is not None:
            self._drawn = None
            self._send(_BELOW.format(""))

    def _send(self, text: str) -> None:
        type(self._stream).write(self._stream, text)
        self._stream.flush()


def _fitting(text: str, columns: int) -> str:
    """Cut a text to the width of the terminal."""
    if text.isascii():
        return text[:columns]
    from rich.cells import set_cell_size  # knows characters of two columns

    return set_cell_size(text, columns).rstrip()


class Notebook:
    """One output of a notebook cell, updated in place; needs no widgets."""

    def __init__(self) -> None:
        self._id: str | None = None

    def draw(self, text: str) -> None:
        """Show a text."""
        from IPython.display import display, update_display  # imported already, see _in_notebook

        if self._id is None:
            self._id = uuid.uuid4().hex
            display({"text/plain": text}, raw=True, display_id=self._id)
        else:
            update_display({"text/plain": text}, raw=True, display_id=self._id)

    def erase(self) -> None:
        """Empty the output."""
        if self._id is not None:
            self.draw("")

    def pause(self, seconds: float) -> float:
        """Twice a second."""
        return 0.5


class Lines:
    """Whole lines at growing intervals, for a file or a pipe."""

    def draw(self, text: str) -> None:
        """Write a line."""
        sys.stderr.write(f"[rank{_rank()}] {text}\n" if torch.distributed.is_initialized() else f"{text}\n")
        sys.stderr.flush()

    def erase(self) -> None:
        """Do nothing: written lines stay."""

    def pause(self, seconds: float) -> float:
        """Return a growing interval of 2 to 60 seconds."""
        return min(max(seconds, 2.0), 60.0)


def _forget_in_child() -> None:
    """Unwrap the streams in a forked child: it lacks the drawing thread, perhaps the holder of the lock at the fork."""
    for terminal in list(SHOWN):
        terminal.unwatch()


SHOWN: list[Terminal] = []
PROCESS.register(SHOWN, after_fork=_forget_in_child)
"""The terminals whose line is shown."""
