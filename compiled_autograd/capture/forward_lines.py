"""The lines of the forward, noted while it runs: ``ca.trace_sources()``.

A function mode sees each call of PyTorch's, and asks for the number that the next node will have before and after it.
If nodes were made, their numbers and the caller's line are noted: a few integers, no frame, no text, and no node, which
would get a Python object by it. Anomaly mode writes down the whole stack of each node instead.

Numbers of nodes are counted in each thread by itself, and a node does not tell its thread. Where two threads have noted
a line for one number, it has none.
"""

from __future__ import annotations

import bisect
import os
import sys
import threading
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..process_state import PROCESS, free_in_child

_MOST_CALLS = 1 << 20
_NOT_THE_CALLERS = (f"{Path(torch.__file__).parent}{os.sep}", __file__)  # this file too, where it is entered twice


_LOCK = free_in_child(threading.RLock())


class _Lines:
    """Lines of one thread's calls. Each call that made nodes has the number of the first node, the number after the
    last, in ascending order, and its line."""

    def __init__(self) -> None:
        self.first, self.end, self.line = array("q"), array("q"), array("i")

    def note(self, first: int, end: int, line: int) -> None:
        if self.end and first < self.end[-1]:
            if first == self.first[-1]:  # entered twice: the outer mode has noted it
                return
            self.__init__()  # type: ignore[misc]  # a new thread that has a former one's identity
        if len(self.line) >= _MOST_CALLS:
            for each in (self.first, self.end, self.line):
                del each[: _MOST_CALLS // 2]
        self.line.append(line)
        self.end.append(end)
        self.first.append(first)  # the last of the three: another thread may look meanwhile

    def find(self, number: int) -> int | None:
        at = bisect.bisect_right(self.first, number) - 1
        return self.line[at] if at >= 0 and number < self.end[at] else None


class _Noted:
    """Lines of all threads."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self.of_thread: dict[int, _Lines] = {}
        self.numbers: dict[tuple[int, int], int] = {}
        self.places: list[tuple[CodeType, int]] = []

    def number_of(self, code: CodeType, line: int) -> int:
        key = (id(code), line)  # the code lives as long as `places`
        number = self.numbers.get(key)
        if number is None:
            with _LOCK:
                number = self.numbers.setdefault(key, len(self.places))
                if number == len(self.places):
                    self.places.append((code, line))
        return number


_noted = _Noted()
PROCESS.register(_noted, restart=_noted.forget)


def trace_sources() -> AbstractContextManager[Any]:
    """Note the lines of the forward, for :func:`inspect` and for the texts of captured graphs.

    >>> with ca.trace_sources():
    ...     loss = model(x).mean()
    >>> print(ca.inspect(loss))

    It costs a few microseconds for each call of PyTorch's, and holds in the thread that enters it. The line of a node
    is that of the innermost call outside PyTorch. Nodes of Python functions have none. The last half million calls are
    kept, at least.
    """
    return _TraceSources()


class _TraceSources(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        before = torch._C._autograd._get_sequence_nr()
        result = func(*args, **(kwargs or {}))
        after = torch._C._autograd._get_sequence_nr()
        if after > before:
            frame: FrameType | None = sys._getframe(1)
            while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_CALLERS):
                frame = frame.f_back
            if frame is not None:
                _lines_of_this_thread().note(before, after, _noted.number_of(frame.f_code, frame.f_lineno))
        return result


def _lines_of_this_thread() -> _Lines:
    key = threading.get_ident()
    lines = _noted.of_thread.get(key)
    if lines is None:
        lines = _noted.of_thread[key] = _Lines()
    return lines


def line_of(number: int) -> str | None:
    """``file:line in function`` of the forward that made the node with a sequence number, where it was noted."""
    if not _noted.of_thread:
        return None
    found = [line for lines in list(_noted.of_thread.values()) if (line := lines.find(number)) is not None]
    if len(found) != 1:
        return None
    code, line = _noted.places[found[0]]
    return f"{code.co_filename}:{line} in {code.co_name}"
