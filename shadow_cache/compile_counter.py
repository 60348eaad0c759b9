"""Count compiles while a piece of code runs, for users' own tests."""

from __future__ import annotations

import contextlib
import functools
import operator
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field


class TooManyCompilesError(AssertionError):
    """More regions were compiled than :func:`assert_max_compiles` allowed.

    Attributes:
        compiles: the number of compiled regions.
        reasons: the reasons of the misses, one line each.
    """

    def __init__(self, allowed: int, compiles: int, reasons: Sequence[str]) -> None:
        lines = "".join(f"\n  {reason}" for reason in reasons)
        super().__init__(f"{compiles} regions were compiled, and at most {allowed} were allowed. The reasons:{lines}")
        self.compiles = compiles
        self.reasons = tuple(reasons)


@dataclass
class Compiles:
    """The number of regions compiled so far, and the reasons."""

    count: int = 0
    reasons: list[str] = field(default_factory=list)


_watching: list[Compiles] = []
_lock = threading.RLock()
if hasattr(os, "register_at_fork"):  # held for microseconds
    os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


def note(compiles: int, reasons: Sequence[str]) -> None:
    """Add a backward's compiled regions, and the reasons, to all running counters."""
    if not compiles or not _watching:
        return
    with _lock:
        for each in _watching:
            each.count += compiles
            each.reasons.extend(reasons)


@contextlib.contextmanager
def assert_max_compiles(allowed: int) -> Iterator[Compiles]:
    """Fail if more than ``allowed`` regions are compiled inside, by all threads together.

    Yields the :class:`Compiles` so far. If the code inside raises, nothing is asserted.

    Raises:
        TooManyCompilesError: raised at the end, with the reason of each miss.
    """
    account = Compiles()
    with _lock:
        _watching.append(account)
    try:
        yield account
    finally:
        with _lock:
            _watching[:] = filter(functools.partial(operator.is_not, account), _watching)
    if account.count > allowed:
        raise TooManyCompilesError(allowed, account.count, account.reasons)
