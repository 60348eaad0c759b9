"""Start a program in this process's place, with an environment in which its backwards are compiled.

The interpreter starts anew, so that ``__main__``, ``sys.argv``, tracebacks, exit status and signals are those of
``python script.py``: the program sees nothing of the runner but environment variables.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ..errors import InvalidSettingError
from ..settings import PREFIX, SWITCH, parse, resolve, switch

RUN = "_COMPILED_AUTOGRAD_RUN"
"""The variable with what the runner was asked, for the process with the number that it begins with."""
_CHILDREN = Path(__file__).parent / "children"


@dataclass(frozen=True, slots=True)
class Run:
    """What the runner was asked.

    Attributes:
        report: path of the page to write at the end; empty for a line on standard error.
        compare: whether to take turns with eager.
        seconds: limit of the comparison, in seconds.
        go_on: whether the program goes on once the answer is sure.
    """

    report: str = ""
    compare: bool = False
    seconds: float = 0.0
    go_on: bool = False


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
    variables = {PREFIX + name.upper(): text for name, text in texts.items()}
    variables[SWITCH] = "0" if switch(os.environ) is False else "1"
    resolve({}, {**os.environ, **variables}).require_backend()
    return variables


def launch(program: Sequence[str], variables: Mapping[str, str], run: Run) -> None:
    """Run ``python PROGRAM`` in this process's place. Does not return.

    Raises:
        InvalidSettingError: Python's flags or the environment turn off what the runner needs.
    """
    if sys.flags.ignore_environment or sys.flags.no_site:
        raise InvalidSettingError("flags", " ".join(flags()), "without -E, -I and -S, which hide PYTHONPATH", "python")
    paths = [str(_CHILDREN), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    os.environ.update({"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)), **variables})
    os.environ[RUN] = f"{os.getpid()} {msgspec.json.encode(run).decode()}"
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.execv(sys.executable, [sys.executable, *flags(), *program])


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
