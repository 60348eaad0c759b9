"""``COMPILED_AUTOGRAD=1``: a session for all threads of the process, and a line about it at the end."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import sys
from pathlib import Path

from ..api import enable
from ..comparing.result import Comparison
from ..comparing.whole_program import ProgramComparison
from ..engine.session import Session
from ..process_state import PROCESS
from ..settings import switch
from .launch import Run, asked_of_this_process


def start_if_asked() -> None:
    """With ``COMPILED_AUTOGRAD=1``, have every backward of the process run in one session.

    Raises:
        UnknownSettingError, InvalidSettingError, UnknownBackendError: as :func:`~compiled_autograd.enable`.
    """
    if not switch(os.environ):
        return
    session = enable()
    session.serve_everywhere()
    run = asked_of_this_process()
    if run is not None and run.compare:
        COMPARISONS.append(ProgramComparison(session, run.seconds, run.go_on, _say_answer))
    atexit.register(_at_the_end, session, run, os.getpid())


COMPARISONS: list[ProgramComparison] = PROCESS.register([])
"""The comparison of this process with eager, where it was asked for."""


def _say_answer(found: Comparison) -> None:
    if (run := asked_of_this_process()) is not None and run.answer:
        Path(run.answer).write_text("yes" if found.worth_it else "no")
    if not _is_child():
        say("\n".join((f"compiled_autograd: {found}", *(f"compiled_autograd: also: {hint}." for hint in found.hints))))


def _is_child() -> bool:
    return multiprocessing.parent_process() is not None or os.environ.get("RANK", "0") != "0"


def _at_the_end(session: Session, run: Run | None, process: int) -> None:
    """Say what happened: in the process that the runner became, and in others that ran backwards, but in no child of
    ``multiprocessing`` or ``torchrun``."""
    if os.getpid() != process:
        return
    if COMPARISONS:
        COMPARISONS[0].conclude()
    if _is_child() or not (run or session.stats().backwards):
        return
    if run is not None and run.report:
        try:
            session.report(run.report)
        except OSError as error:
            say(f"the report cannot be written: {error}")
        return
    if not COMPARISONS:
        say(session.summary().line)


def say(text: str) -> None:
    """Write a line to standard error, where there is one."""
    with contextlib.suppress(AttributeError, OSError, ValueError):  # None, a closed pipe, a closed file
        sys.stderr.write(text + "\n")
        sys.stderr.flush()
