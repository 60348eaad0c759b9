"""Where the line can be shown that says what is being compiled: a terminal, a notebook, or lines of a file.

A display has ``draw(text)``, ``erase()`` and ``pause(seconds)``: how long until it wants to be drawn again, that many
seconds after the first compile began.
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
"""Of a terminal that does not say how many it has."""
_FEW, _SECONDS = 4, 0.05
"""After no more texts than these in so many seconds, as bars of rich are, the line comes back at once; a flood of them
has it wait until it is drawn again."""
# The line stands below the one that the user writes on, of which nothing is lost: a prompt, or a bar of tqdm's.
_ROOM_BELOW = "\x1bD\x1bM"
"""One line down, which scrolls at the end of the screen, and up again."""
_BELOW = "\x1b7\x1b[B\r\x1b[2K{}\x1b8"
"""Remember the place, go to the line below, empty and fill it, and go back."""


class Display(Protocol):
    def draw(self, text: str) -> None:
        """Show a text in place of the one before."""

    def erase(self) -> None:
        """Have it vanish."""

    def pause(self, seconds: float) -> float:
        """Seconds until it is drawn again."""


def display_for(setting: bool | None) -> Display | None:
    """Where to show it: None where nobody looks, and on all ranks but the first, unless the setting is True."""
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
    """The stream itself, where a display of rich's has put something before it that writes whole lines alone."""
    return getattr(stream, "rich_proxied_file", stream)


def _is_terminal(stream: Any) -> bool:
    """Whether it leads to one that moves its cursor as it is told. What somebody else has put in a stream's place may
    write to a file too, or change what it is given."""
    if os.name != "posix" or os.environ.get("TERM", "dumb") == "dumb" or not isinstance(stream, io.TextIOWrapper):
        return False
    try:
        return stream.isatty()
    except ValueError:  # it is closed, or was taken apart
        return False


class Terminal:
    """A line that moves, and makes room for whatever is written meanwhile, by whichever thread.

    While it is there, ``write`` of the two standard streams is ours, where they lead to a terminal: the line goes
    before their text comes, and comes back after it.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._stream = _behind(sys.stderr)
        self._drawn: str | None = None
        self._written: deque[float] = deque([0.0] * _FEW, _FEW)
        self._watched: dict[Any, Any] = {}

    def draw(self, text: str) -> None:
        """Show a text, as much of it as fits."""
        with self._lock:
            if not self._watched:
                self._watch()
            try:
                columns, rows = os.get_terminal_size(self._stream.fileno())
            except OSError:
                columns = rows = 0
            if rows == 1:
                return  # there is nothing below
            self._drawn = _fitting(text, (columns or _COLUMNS) - 1)
            self._send(_ROOM_BELOW + _BELOW.format(self._drawn))

    def erase(self) -> None:
        """Empty the line, and leave the streams alone."""
        with self._lock:
            self._clear()
            self.unwatch()

    def pause(self, seconds: float) -> float:
        """Ten times a second."""
        return 0.1

    def unwatch(self) -> None:
        """Give the streams their ``write`` back, unless somebody has put another one over ours."""
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
    """As much of a text as fits."""
    if text.isascii():
        return text[:columns]
    from rich.cells import set_cell_size  # which knows what is two columns wide

    return set_cell_size(text, columns).rstrip()


class Notebook:
    """An output of its own, which is changed; needs no widgets."""

    def __init__(self) -> None:
        self._id: str | None = None

    def draw(self, text: str) -> None:
        """Show a text."""
        from IPython.display import display, update_display  # who asked has found it imported

        if self._id is None:
            self._id = uuid.uuid4().hex
            display({"text/plain": text}, raw=True, display_id=self._id)
        else:
            update_display({"text/plain": text}, raw=True, display_id=self._id)

    def erase(self) -> None:
        """Leave nothing in it."""
        if self._id is not None:
            self.draw("")

    def pause(self, seconds: float) -> float:
        """Twice a second."""
        return 0.5


class Lines:
    """Whole lines, one now and then, for a file or a pipe."""

    def draw(self, text: str) -> None:
        """Write a line."""
        sys.stderr.write(f"[rank{_rank()}] {text}\n" if torch.distributed.is_initialized() else f"{text}\n")
        sys.stderr.flush()

    def erase(self) -> None:
        """They stay."""

    def pause(self, seconds: float) -> float:
        """Rarer and rarer, but once a minute."""
        return min(max(seconds, 2.0), 60.0)


def _forget_in_child() -> None:
    """The thread that draws is not in a forked child, and may have held the lock."""
    for terminal in list(SHOWN):
        terminal.unwatch()


SHOWN: list[Terminal] = []
PROCESS.register(SHOWN, after_fork=_forget_in_child)
"""Those whose line is there."""
