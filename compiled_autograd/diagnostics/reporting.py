"""Logs and warnings: a log line for each backward that was no hit, and a warning if one reason repeats.

The log is the one of ``TORCH_LOGS``. INFO has a line for each backward that was no hit, and for each tuning decision.
DEBUG also has a line for each node as it runs (:mod:`node_log`).
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
"""Number of misses of one kind at one node that triggers a warning."""
_MAX_WARNED = 1000
"""Maximum number of remembered warnings. Beyond it the oldest is forgotten, and may be issued again."""
_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]+")
_warned: dict[str, None] = {}
PROCESS.register(_warned, restart=_warned.clear)
_NOT_REPEATING = ("first_seen", "evicted")

_NAME = "compiled_autograd"
"""The log's name. PyTorch's own compiled autograd has it too: ``TORCH_LOGS="+compiled_autograd"`` turns both on."""
_LEVELS = {"+": logging.DEBUG, "": logging.INFO, "-": logging.ERROR}
_LOG_SETTING = re.compile(rf"(?:^|[,\s\"'])([+-]?){_NAME}(?=$|[,\s\"'])")
_log = torch._logging.getArtifactLogger(__name__, _NAME)
is_told_at = _log.isEnabledFor
"""Returns whether the log takes lines of a level."""


def level_in(setting: str) -> int | None:
    """Return the level of this log in a value of ``TORCH_LOGS``; None if the value does not name this log.

    For PyTorch the name is an artifact without levels: DEBUG with "+", without a sign and with "-"
    (``torch/_logging/_internal.py``, 2.13).
    """
    signs = _LOG_SETTING.findall(setting)
    return _LEVELS[signs[-1]] if signs else None


_level = level_in(os.environ.get("TORCH_LOGS", ""))
if _level is not None:
    _log.setLevel(_level)


Reasons = Iterable[Bypass | Miss | Failure]


def tell(outcome: str, reasons: Reasons, seconds: Mapping[str, float], compiles: int) -> None:
    """Log a backward that was no hit or had a failure, and add its compiles to the counters."""
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
"""Returns whether to log each node as it runs; called at each hit."""


def questions_about_log() -> list[Question]:
    """Return the question by which C++ checks that :func:`logs_nodes` is still False. A logger caches its answers until
    a level is set (``Logger.isEnabledFor`` in ``logging/__init__.py``, 3.10 to 3.14)."""
    kept = getattr(_log, "_cache", None)
    if logs_nodes() or not isinstance(kept, dict):
        return [(logs_nodes, None, False)]
    return [(functools.partial(kept.get, logging.DEBUG), None, False)]


def tell_decision(what: Callable[[], str], timing: Timing) -> None:
    """Log the tuning decision of a tape. ``what`` returns the tape's name, and is called only if the log is on."""
    if _log.isEnabledFor(logging.INFO):
        _write(logging.INFO, f"timed {what()}: {timing}; {timing.winner} is used")


def tell_of_nodes(text: str) -> None:
    """Log nodes that are about to run, in one or several lines."""
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
    """Warn once if misses of one kind repeat at the same place.

    Args:
        counts: the number of misses so far, by kind and place; updated in place.
        reasons: the reasons of one more backward.
    """
    for miss in reasons:
        if not isinstance(miss, Miss) or miss.kind in _NOT_REPEATING:
            continue
        counts[miss.kind, miss.where] += 1
        if counts[miss.kind, miss.where] == REPEATS_BEFORE_WARNING:
            warn_once(
                f"{REPEATS_BEFORE_WARNING} backwards missed for the same reason, the last one: {miss}. "
                "Each such miss compiles again."
            )


def warn_of(failure: Failure) -> None:
    """Warn of a failure, once per process."""
    warn_once(f"{failure}. {what_follows(failure)}")


def what_follows(failure: Failure) -> str:
    """Return in words the effect of a failure on gradients."""
    if failure.kind == "mismatch":
        return "Gradients are right: those of the real calls were used. Compiled code was wrong; please report the bug."
    if failure.kind == "unproved":
        return "Gradients are right: those of the real calls were used."
    return "Gradients are right; the backward is only slower."


def warn_once(text: str, key: str = "") -> None:
    """Issue a warning at the user's line, once per process. Texts that differ only in addresses of objects count as
    one, and so do texts with the same ``key``. The text ends with a full stop, or with a path to paste.

    If the user has turned warnings into errors, the warning goes to the log instead. These warnings say only that a
    step is slower, and come in the middle of a step, after the tape was freed. Raised there, a warning would lose
    gradients that are right and cannot be computed again. The session has the reason too.
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
    """Suppress warnings of this process inside. Warnings suppressed in :func:`warn_once` may be issued again later."""
    before = dict(_warned)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        _warned.clear()
        _warned.update(before)


def tell_of_own_error(own: BaseException, users: BaseException) -> None:
    """Log an error of this package in the account of a backward that raised an error itself; that error is raised."""
    _write(logging.ERROR, f"{type(own).__name__}: {own}, after {type(users).__name__}. Please report it as a bug.")


def failure_of(stage: str, backend: str, region: Region, error: BaseException) -> Failure:
    """Return the failure of a stage, from a region to its compiled code, that raised an error."""
    where = f"backend {backend!r}, a region of {len(region.nodes)} calls"
    what = text_of(error).partition("\n")[0]
    return Failure(stage, where, what[:300], "the region's calls run one by one")


def text_of(error: BaseException) -> str:
    """Return an error's class and message."""
    name = type(error).__name__
    try:
        return f"{name}: {error}"
    except Exception as own:  # noqa: BLE001  the step goes on also if ``str`` of a backend's error raises
        return f"{name}: (its message raised {type(own).__name__})"
