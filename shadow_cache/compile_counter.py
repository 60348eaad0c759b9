"""Counts compiles while a piece of code runs: for people's own tests."""

from __future__ import annotations

import contextlib
import functools
import operator
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field


class TooManyCompilesError(AssertionError):
    """More was compiled than :func:`assert_max_compiles` allowed.

    Attributes:
        compiles: how many regions were compiled.
        reasons: why, a line for each record.
    """

    def __init__(self, allowed: int, compiles: int, reasons: Sequence[str]) -> None:
        lines = "".join(f"\n  {reason}" for reason in reasons)
        super().__init__(f"{compiles} regions were compiled where at most {allowed} were allowed; why:{lines}")
        self.compiles = compiles
        self.reasons = tuple(reasons)


@dataclass
class Compiles:
    """What was compiled so far."""

    count: int = 0
    reasons: list[str] = field(default_factory=list)


_watching: list[Compiles] = []
_lock = threading.RLock()
if hasattr(os, "register_at_fork"):  # held for microseconds
    os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


def note(compiles: int, reasons: Sequence[str]) -> None:
    """Tell everybody who counts how many regions a backward compiled, and why."""
    if not compiles or not _watching:
        return
    with _lock:
        for each in _watching:
            each.count += compiles
            each.reasons.extend(reasons)


@contextlib.contextmanager
def assert_max_compiles(allowed: int) -> Iterator[Compiles]:
    """Inside, at most ``allowed`` regions may be compiled, by all threads together.

    Gives the account so far. Where the code inside raises, nothing is asserted.

    Raises:
        TooManyCompilesError: at the end, with the reason of each miss.
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
