"""The state of a thread: its sessions, its running backward, and what it leaves to eager without a look."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from ..policies.decision import Backoff, Record
from ..runtime.running_backward import Running
from ..shadow_cache import Bypass

ALIKE_BEFORE_A_SKIP, MOST_SKIPPED = 16, 64
"""After 16 consecutive backwards that were left to eager after a peek, one is skipped after each peek: it runs on eager
without a peek at its tape. After 32 two are skipped, and so on, up to 64."""


class Here:
    """State of one thread, in one object, since each access to thread-local data takes a while.

    Attributes:
        stack: the sessions that the thread is in, None for ``disable``.
        running: its innermost compiled backward; None where an eager one was called inside it.
        depth: the number of compiled backwards that the thread is in.
        ident: the thread's identifier in ``threading``.
        streak: consecutive backwards that were left to eager after a peek.
        unseen: next backwards that are skipped.
        record, verdict, number: the record of the last tape that was left to eager, why, and the session's number.
        tries: tries of the own loop on the current tape.
        looped: the own loop is tried on some of the skipped ones.
    """

    __slots__ = (
        "depth",
        "ident",
        "looped",
        "number",
        "record",
        "running",
        "stack",
        "streak",
        "tries",
        "unseen",
        "verdict",
    )

    def __init__(self, everywhere: Sequence[Any]) -> None:
        self.stack: list[Any] = list(everywhere)
        self.running: Running | None = None
        self.depth = self.streak = self.unseen = self.number = 0
        self.ident = threading.get_ident()
        self.record = Record(None)
        self.verdict: Bypass | None = None
        self.tries = Backoff()
        self.looped = False

    def leave(self, record: Record, verdict: Bypass, number: int, may_loop: bool) -> int:
        """Count a backward that was left to eager. Return how many of the next ones are skipped."""
        self.streak += 1
        unseen = min(self.streak // ALIKE_BEFORE_A_SKIP, MOST_SKIPPED)
        self.record, self.verdict, self.number = record, verdict, number
        self.looped = may_loop and record.loop.left < unseen
        if not self.looped:
            record.loop.left = max(0, record.loop.left - unseen)
        self.unseen = unseen
        return unseen
