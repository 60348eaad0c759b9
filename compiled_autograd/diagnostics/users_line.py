"""The user's line: the line of the innermost frame outside of this package and PyTorch. Warnings point there."""

from __future__ import annotations

import sys
import warnings
from contextvars import ContextVar
from types import CodeType
from typing import Any, NamedTuple

_NOT_USERS = {"compiled_autograd", "torch", "contextlib", "functools", "threading"}
"""Top-level modules whose frames are skipped. Code without a module, such as that of ``torch.fx``, is skipped too."""


class Line(NamedTuple):
    """A line of the user's code, with its module."""

    code: CodeType
    number: int
    module: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.code.co_filename}:{self.number} in {self.code.co_name}"

    def warn(self, text: str) -> None:
        """Issue a warning for this line, as ``warnings.warn`` does with the right ``stacklevel``.

        Raises:
            UserWarning: the user has turned warnings into errors.
        """
        registry = self.module.setdefault("__warningregistry__", {})
        name = self.module.get("__name__")
        warnings.warn_explicit(text, UserWarning, self.code.co_filename, self.number, name, registry)


_asked_at: ContextVar[Line | None] = ContextVar("asked_at", default=None)


def users_line() -> Line:
    """Return the user's line that is running; in a thread of this package, the line that requested the work. If no
    frame is the user's, return the line of the outermost frame."""
    if (line := _asked_at.get()) is not None:
        return line
    frame = sys._getframe()
    while str(frame.f_globals.get("__name__", "torch")).partition(".")[0] in _NOT_USERS and frame.f_back is not None:
        frame = frame.f_back
    return Line(frame.f_code, frame.f_lineno, frame.f_globals)


def program() -> str | None:
    """Return the file that this process runs as its program; None if there is none, as in a notebook."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    return file if isinstance(file, str) else None


def work_is_for(line: Line) -> None:
    """Make :func:`users_line` return ``line`` in the calling context, which works for another thread."""
    _asked_at.set(line)
