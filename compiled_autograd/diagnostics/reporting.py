"""Tells people what became of a backward: a line in the log, a warning when one reason comes again and again.

The log is that of ``TORCH_LOGS``: INFO has a line for each backward that was no hit, and for each decision; DEBUG has
each node as it runs too (:mod:`node_log`).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch

from ..ir.partition import Region
from ..native.interface import Question
from ..process_state import PROCESS
from ..shadow_cache import Bypass, Failure, Miss, Timing, compile_counter
from .users_line import users_line

REPEATS_BEFORE_WARNING = 8
"""Misses of one kind at one node before a warning."""
_MAX_WARNED = 1000
"""The largest number of texts kept of what was warned of; then the oldest goes, and may be warned of once more."""
_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]+")
_warned: dict[str, None] = {}
PROCESS.register(_warned, restart=_warned.clear)
_NOT_REPEATING = ("first_seen", "evicted")

_NAME = "compiled_autograd"
"""PyTorch has registered it for its own compiled autograd; ``TORCH_LOGS="+compiled_autograd"`` turns both on."""
_LEVELS = {"+": logging.DEBUG, "": logging.INFO, "-": logging.ERROR}
_LOG_SETTING = re.compile(rf"(?:^|[,\s\"'])([+-]?){_NAME}(?=$|[,\s\"'])")
_log = torch._logging.getArtifactLogger(__name__, _NAME)
is_told_at = _log.isEnabledFor
"""Whether the log takes lines of a level."""


def level_in(setting: str) -> int | None:
    """The level that a value of ``TORCH_LOGS`` asks of this log; None where it does not name it.

    To PyTorch the name is that of an artifact, which has no levels: with "+", without it and with "-", it is at DEBUG
    (``torch/_logging/_internal.py``, 2.13).
    """
    signs = _LOG_SETTING.findall(setting)
    return _LEVELS[signs[-1]] if signs else None


_level = level_in(os.environ.get("TORCH_LOGS", ""))
if _level is not None:
    _log.setLevel(_level)


Reasons = Iterable[Bypass | Miss | Failure]


def tell(outcome: str, reasons: Reasons, seconds: Mapping[str, float], compiles: int) -> None:
    """One line for a backward that was no hit, or on which something failed; and who counts compiles is told."""
    is_logged = bool(reasons) and _log.isEnabledFor(logging.INFO)
    if not is_logged and not compiles:
        return
    texts = [str(reason) for reason in reasons]
    compile_counter.note(compiles, texts)
    if not is_logged:
        return
    took = ", ".join(f"{stage} {spent:.3g} s" for stage, spent in seconds.items())
    _write(logging.INFO, f"{outcome}: {'; '.join(texts)} [{took}]")


logs_nodes = functools.partial(_log.isEnabledFor, logging.DEBUG)
"""Whether each node is to be shown as it runs; asked at each hit."""


def questions_about_log() -> list[Question]:
    """What tells without Python that :func:`logs_nodes` still says no: a logger keeps its answers until some level is
    set (``Logger.isEnabledFor`` in ``logging/__init__.py``, 3.10 to 3.14)."""
    kept = getattr(_log, "_cache", None)
    if logs_nodes() or not isinstance(kept, dict):
        return [(logs_nodes, None, False)]
    return [(functools.partial(kept.get, logging.DEBUG), None, False)]


def tell_decision(what: Callable[[], str], timing: Timing) -> None:
    """One line for a tape that was timed against eager; ``what`` says which, and looks for names."""
    if _log.isEnabledFor(logging.INFO):
        _write(logging.INFO, f"timed {what()}: {timing}; {timing.winner} goes on")


def tell_of_nodes(text: str) -> None:
    """What is about to run, in one line or several."""
    _write(logging.DEBUG, text)


def _write(level: int, text: str) -> None:
    if not _log.hasHandlers():
        handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr)]
        file = os.environ.get("TORCH_LOGS_OUT")
        handlers += [logging.FileHandler(file)] if file else []
        for handler in handlers:
            handler.setFormatter(torch._logging._internal.DEFAULT_FORMATTER)
            _log.addHandler(handler)
    _log.log(level, "%s", text, stacklevel=3)


def count_repeats(counts: Counter[tuple[str, str]], reasons: Reasons) -> None:
    """Warn once of a reason that comes back at the same place.

    Args:
        counts: how often each kind of miss was met so far, by kind and place; is brought up to date.
        reasons: of one more backward.
    """
    for miss in reasons:
        if not isinstance(miss, Miss) or miss.kind in _NOT_REPEATING:
            continue
        counts[miss.kind, miss.where] += 1
        if counts[miss.kind, miss.where] == REPEATS_BEFORE_WARNING:
            warn_once(
                f"{REPEATS_BEFORE_WARNING} backwards missed for the same reason, the last one: {miss}. "
                "Each such miss is compiled anew."
            )


def warn_of(failure: Failure) -> None:
    """Once in a process for each."""
    warn_once(f"{failure}. {what_follows(failure)}")


def what_follows(failure: Failure) -> str:
    """Say what a failure means for gradients."""
    if failure.kind == "mismatch":
        return "Gradients are right: those of the real calls were used. Compiled code was wrong; please report it."
    if failure.kind == "unproved":
        return "Gradients are right: those of the real calls were used."
    return "Gradients are right; this is only slower."


def warn_once(text: str, key: str = "") -> None:
    """Warn of something once in a process, at the user's line. Two texts that differ in addresses of objects alone are
    one, and so are two with one ``key``. The text ends in a full stop, or in a path to paste.

    Where the user has made errors of warnings, a line of the log takes its place. All that is warned of in here is what
    makes a step slower, and it comes in the middle of one, when the tape is released: raised there, it would take along
    gradients that are right and cannot be had again. The session has it among its reasons too.
    """
    key = key or _ADDRESS.sub("0x...", text)
    if key in _warned:
        return
    _warned[key] = None
    while len(_warned) > _MAX_WARNED:
        _warned.pop(next(iter(_warned)), None)
    try:
        users_line().warn(f"compiled_autograd: {text}")
    except Warning:
        _write(logging.WARNING, text)


@contextlib.contextmanager
def not_warning() -> Iterator[None]:
    """Inside, no warning is printed in this process; what :func:`warn_once` would have said may be said again."""
    before = dict(_warned)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        _warned.clear()
        _warned.update(before)


def tell_of_own_error(own: BaseException, users: BaseException) -> None:
    """Something of ours failed in the account of a backward that ended with an error of its own, which goes first."""
    _write(logging.ERROR, f"{type(own).__name__}: {own}, after {type(users).__name__}. Please report it as a bug.")


def failure_of(stage: str, backend: str, region: Region, error: BaseException) -> Failure:
    """A step of the way from a region to compiled code has raised."""
    where = f"backend {backend!r}, a region of {len(region.nodes)} calls"
    what = text_of(error).partition("\n")[0]
    return Failure(stage, where, what[:300], "the region's calls run one by one")


def text_of(error: BaseException) -> str:
    """Its class, and what it says."""
    name = type(error).__name__
    try:
        return f"{name}: {error}"
    except Exception as own:  # noqa: BLE001  the step goes on whatever the class of a backend's error does
        return f"{name}: (its text cannot be had: {type(own).__name__})"
