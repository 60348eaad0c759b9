"""Start a program in this process's place, with an environment in which its backwards are compiled.

The interpreter starts anew, so that ``__main__``, ``sys.argv``, tracebacks, exit status and signals are those of
``python script.py``: the program sees nothing of the runner but environment variables.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import msgspec

from ..errors import InvalidSettingError
from ..settings import PREFIX, SWITCH, overridden_by, parse, resolve, switch

RUN = "_COMPILED_AUTOGRAD_RUN"
"""The variable with what the runner was asked, for the process with the number that it begins with."""
_CHILDREN = Path(__file__).parent / "children"


@dataclass(frozen=True, slots=True)
class Run:
    """The options of one call of the runner.

    Attributes:
        report: path of the page to write at the end; empty for a line on standard error.
        compare: whether to alternate with eager.
        seconds: limit of the comparison, in seconds.
        go_on: whether the program goes on once the answer is sure.
        answer: path of the file for ``"yes"`` or ``"no"``; empty without ``compare``.
    """

    report: str = ""
    compare: bool = False
    seconds: float = 0.0
    go_on: bool = False
    answer: str = ""


def asked_of_this_process() -> Run | None:
    """Return what the runner was asked of this very process; None in any other."""
    number, _, text = os.environ.get(RUN, "").partition(" ")
    return msgspec.json.decode(text, type=Run) if number == str(os.getpid()) else None


def environment(texts: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for settings given as text, by name.

    Raises:
        InvalidSettingError: a setting cannot take its value.
        UnknownSettingError: a variable with this package's prefix names no setting.
        UnknownBackendError: no backend has the name.
    """
    for name, text in texts.items():
        parse(name, text, f"--{name.replace('_', '-')}")
    # An empty variable is as if not set.
    variables = {PREFIX + name.upper(): texts.get(name, "") for name in overridden_by(texts)}
    variables[SWITCH] = "0" if switch(os.environ) is False else "1"
    resolve({}, {**os.environ, **variables}, texts).require_backend()
    return variables


def launch(program: Sequence[str], variables: Mapping[str, str], run: Run) -> None:
    """Run ``python PROGRAM`` in this process's place. Does not return.

    To compare, it runs in a child: this process waits, and ends as the child did, or with 1 where the answer is "no".

    Raises:
        InvalidSettingError: Python's flags or the environment turn off what the runner needs.
    """
    if sys.flags.ignore_environment or sys.flags.no_site:
        raise InvalidSettingError("flags", " ".join(flags()), "without -E, -I and -S, which hide PYTHONPATH", "python")
    paths = os.environ.get("PYTHONPATH", "")  # an empty entry of it is the current folder
    if str(_CHILDREN) not in paths.split(os.pathsep):
        paths = os.pathsep.join([str(_CHILDREN), *([paths] if paths else [])])
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if run.compare:
        opened, path = tempfile.mkstemp(prefix="compiled_autograd_")
        os.close(opened)
        run = dataclasses.replace(run, answer=path)
        if child := os.fork():
            _end_as(child, Path(path))
    asked = f"{os.getpid()} {msgspec.json.encode(run).decode()}"
    environ = {**os.environ, "PYTHONPATH": paths, **variables, RUN: asked}
    os.execve(sys.executable, [sys.executable, *flags(), *program], environ)


def _end_as(child: int, answer: Path) -> NoReturn:
    """Wait for the program, and end as it did; with 1 where it ended well and the answer is not "yes"."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to both
    for each in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, lambda number, _: os.kill(child, number))
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    is_worth_it = answer.read_text() == "yes"
    answer.unlink()
    if status < 0:
        if -status not in (signal.SIGKILL, signal.SIGSTOP):  # which cannot be caught
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status or (0 if is_worth_it else 1))


def flags() -> list[str]:
    """Return the arguments of the interpreter that come before ``-m compiled_autograd``."""
    *before, last = sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv) + 1]
    if last == "compiled_autograd" and before:
        last = before.pop()
        last = last[:-1] if last.endswith("m") else last
    elif last.startswith("-"):  # -mcompiled_autograd
        last = last.removesuffix("mcompiled_autograd")
    else:  # the path of __main__.py, or of its folder
        last = ""
    return [*before, last] if last not in ("", "-") else before
