"""Shared parts of the callbacks: a session for each training, its misses and its summary."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from .. import Session, Stats, enable

if TYPE_CHECKING:
    from ..report.summary import Summary

MISSES = "backward_misses"
"""The name, in a trainer's log, of the number of misses since the last log."""


def misses(stats: Stats) -> int:
    """Return the number of backwards that were no hits: misses and bypasses, without the backwards that ``tune`` timed
    on eager."""
    return stats.backwards - stats.hits - stats.tuning


class _Training(threading.local):
    """The training of the current thread: its session, how often that was entered, and the number of logged misses."""

    def __init__(self) -> None:
        self.session: Session | None = None
        self.entered = self.logged = 0


class Trainings:
    """The trainings of one callback: in sequence, or several at once, each in its own thread. Copies and pickles have
    only the settings.

    Args:
        settings: the settings of :func:`compiled_autograd.enable`.

    Attributes:
        session: the session of the training that began last, in any thread; None before the first.

    Raises:
        UnknownSettingError, InvalidSettingError: see :func:`compiled_autograd.enable`; raised at once.
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
        """True if the session is entered in the calling thread."""
        return self._here.entered > 0

    def begin(self) -> None:
        """Begin a training of the calling thread, with a new session, not yet entered. Leave the session of an earlier
        training that raised in this thread."""
        self.leave_all()
        self.session = self._here.session = enable(**self._settings)
        self.session.may_be_idle = True
        self._here.logged = 0

    def enter(self) -> None:
        """Enter the session."""
        here = self._here
        if here.session is not None:
            here.session.__enter__()
            here.entered += 1

    def leave(self) -> None:
        """Leave the session once, if it is entered."""
        here = self._here
        if here.entered and here.session is not None:
            here.entered -= 1
            here.session.__exit__(None, None, None)

    def leave_all(self) -> None:
        """Leave the session as often as it was entered."""
        while self._here.entered:
            self.leave()

    def new_misses(self) -> int:
        """Return the number of misses since the last call."""
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
        """The session of the last training; None before the first."""
        return self._trainings.session
