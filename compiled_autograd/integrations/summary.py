"""What trainers' callbacks share: one training after the other, each with a session of its own, and what it was worth,
in a line for people.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from .. import Session, Stats, enable

if TYPE_CHECKING:
    from ..report.summary import Summary

MISSES = "backward_misses"
"""The name in a trainer's log: how many backwards were no hits since it last logged."""


def misses(stats: Stats) -> int:
    """The number of backwards that were no hits: what was captured or compiled, and what was left to eager. What is
    timed on eager for ``tune`` is none of them."""
    return stats.backwards - stats.hits - stats.tuning


class _Training(threading.local):
    """The one that a thread is in: its session, how often that was turned on, and how many misses were logged."""

    def __init__(self) -> None:
        self.session: Session | None = None
        self.entered = self.logged = 0


class Trainings:
    """The trainings of one callback: one after the other, or several at once in threads of their own. A copy, and what
    is pickled, has the settings alone.

    Args:
        settings: those of :func:`compiled_autograd.enable`.

    Attributes:
        session: that of the training that began last, in any thread; None before the first.

    Raises:
        UnknownSettingError, InvalidSettingError: as ``enable`` does, at once.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        enable(**settings)
        self.session: Session | None = None
        self._settings = settings
        self._here = _Training()

    def __reduce__(self) -> tuple[Any, ...]:
        return Trainings, (self._settings,)

    @property
    def is_on(self) -> bool:
        """Whether the session is, in the calling thread."""
        return self._here.entered > 0

    def begin(self) -> None:
        """A new one of the calling thread, with a new session, which is not on yet. One that raised there may have left
        its own on."""
        self.leave_all()
        self.session = self._here.session = enable(**self._settings)
        self.session.may_be_idle = True
        self._here.logged = 0

    def enter(self) -> None:
        """Turn the session on."""
        here = self._here
        if here.session is not None:
            here.session.__enter__()
            here.entered += 1

    def leave(self) -> None:
        """Turn it off, if it is on."""
        here = self._here
        if here.entered and here.session is not None:
            here.entered -= 1
            here.session.__exit__(None, None, None)

    def leave_all(self) -> None:
        """Turn it off, however often it was turned on."""
        while self._here.entered:
            self.leave()

    def new_misses(self) -> int:
        """How many backwards were no hits since this was last asked."""
        here = self._here
        now = 0 if here.session is None else misses(here.session.stats())
        before, here.logged = here.logged, now
        return now - before

    def summary(self) -> Summary | None:
        """Return the summary of the calling thread's training; None if no backward was counted."""
        session = self._here.session
        return session.summary() if session is not None and session.stats().backwards else None


class InSession:
    """A callback of which each training has a session.

    Args:
        settings: those of :func:`compiled_autograd.enable`.

    Raises:
        UnknownSettingError, InvalidSettingError: as ``enable`` does.
    """

    def __init__(self, **settings: Any) -> None:
        self._trainings = Trainings(settings)

    @property
    def session(self) -> Session | None:
        """That of the last training; None before the first."""
        return self._trainings.session
