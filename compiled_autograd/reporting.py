"""Tells people what became of a backward: a line in the log, a warning when one reason comes again and again."""

from __future__ import annotations

import logging
import sys
import warnings
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from shadow_cache import Bypass, Failure, Miss, Timing, watch

if TYPE_CHECKING:
    from .session import Outcome

MANY = 8
"""So many misses of one kind at one place are worth a warning."""
_warned: set[str] = set()
_NOT_REPEATING = ("first_seen", "evicted")

# PyTorch registers the name for its own compiled autograd; TORCH_LOGS="+compiled_autograd" turns both on.
_log = torch._logging.getArtifactLogger(__name__, "compiled_autograd")


def tell(outcome: Outcome, compiles: int) -> None:
    """One line for a backward that was no hit, or on which something failed; and who counts compiles is told."""
    watch.note(compiles, [str(reason) for reason in outcome.reasons])
    if not outcome.reasons or not _log.isEnabledFor(logging.INFO):
        return
    took = ", ".join(f"{stage} {seconds:.3g} s" for stage, seconds in outcome.seconds.items())
    _say(f"{outcome.outcome}: {'; '.join(map(str, outcome.reasons))} [{took}]")


def tell_decision(what: str, timing: Timing) -> None:
    """One line for a tape that was timed against eager."""
    if _log.isEnabledFor(logging.INFO):
        _say(f"timed {what}: {timing}; {timing.winner} goes on")


def _say(line: str) -> None:
    if not _log.hasHandlers():
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("[compiled_autograd] %(message)s"))
        _log.addHandler(handler)
    _log.info("%s", line)


def count_repeats(counts: Counter[tuple[str, str]], reasons: Iterable[Bypass | Miss | Failure]) -> None:
    """Warn once of a reason that comes back at the same place.

    Args:
        counts: how often each kind of miss was met so far, by kind and place; is brought up to date.
        reasons: of one more backward.
    """
    for miss in reasons:
        if not isinstance(miss, Miss) or miss.kind in _NOT_REPEATING:
            continue
        counts[miss.kind, miss.where] += 1
        if counts[miss.kind, miss.where] == MANY:
            warn_once(
                f"{MANY} backwards missed for the same reason, the last one: {miss}. Each such miss is compiled anew"
            )


def warn_of(failure: Failure) -> None:
    """Once in a process for each."""
    warn_once(f"{failure}. Gradients are right; this is only slower")


def warn_once(text: str) -> None:
    """Warn of something once in a process."""
    if text not in _warned:
        _warned.add(text)
        warnings.warn(f"compiled_autograd: {text}.", stacklevel=2)
