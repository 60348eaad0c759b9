"""Work to do while an external compiler runs, at no cost of time.

Code that needs the work either finds it done, or does it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator

from .signal_handlers import raise_what_a_handler_raised

_log = logging.getLogger(__name__)


class _Thread(threading.local):
    def __init__(self) -> None:
        self.work: list[Callable[[], object]] = []


_thread = _Thread()


@contextlib.contextmanager
def meanwhile(*work: Callable[[], object]) -> Iterator[None]:
    """Inside, in this thread, this is done when a compiler is waited for, once; or it is not."""
    outer, _thread.work = _thread.work, list(work)
    try:
        yield
    finally:
        _thread.work = outer


def do_other_work() -> None:
    """Do other work, in a thread that would wait for a compiler."""
    work, _thread.work = _thread.work, []
    for each in work:
        try:
            each()
        except Exception as error:  # noqa: BLE001  whoever needs it does it again, and has the error then
            raise_what_a_handler_raised(error)
            _log.debug("%r failed while a compiler was waited for: %s: %s", each, type(error).__name__, error)
