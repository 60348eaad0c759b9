"""The errors of this package, and warnings at the user's line. A message says what was found, where, and what to do."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any


class CompiledAutogradError(Exception):
    """Base class of this package's own errors."""


def import_failed(error: Exception) -> str:
    """Return the message for an import of this package that failed, as a private name of PyTorch has moved."""
    return f"compiled_autograd does not work with this PyTorch: {type(error).__name__}: {error}"


def nearest(word: str, known: Iterable[str]) -> str:
    """Return `` Did you mean 'x'?`` for the nearest known word, or the list of known words."""
    words = sorted(known)
    close = get_close_matches(word, words, n=1)
    return f" Did you mean {close[0]!r}?" if close else f" Known: {', '.join(words)}."


class UnknownSettingError(CompiledAutogradError, TypeError):
    """A setting that does not exist."""

    def __init__(self, name: str, known: Iterable[str]) -> None:
        super().__init__(f"the setting {name!r} does not exist.{nearest(name, known)}")


class InvalidSettingError(CompiledAutogradError, ValueError):
    """A setting with an invalid value."""

    def __init__(self, name: str, value: object, allowed: str, where: str) -> None:
        super().__init__(f"{where}: {name}={value!r} is not possible; {name} is {allowed}.")


class WrongUseError(CompiledAutogradError, TypeError):
    """A function of this package given something of another kind, or a session pickled. The text says what to write."""


class UnsupportedBackwardError(CompiledAutogradError, RuntimeError):
    """A backward cannot be captured, and ``on_unsupported="raise"`` was set. No gradient was written."""

    def __init__(self, reason: Any) -> None:
        super().__init__(
            f"this backward cannot be captured: {reason}. "
            'Set on_unsupported="eager" (the default) to run such backwards on the eager engine.'
        )
        self.reason = reason


class CacheMissError(CompiledAutogradError, RuntimeError):
    """A backward was no hit, and ``on_miss="raise"`` was set.

    Attributes:
        reasons: the misses.
    """

    def __init__(self, reasons: Sequence[Any], ran: bool = False) -> None:
        what = "; ".join(map(str, reasons))
        untouched = "No gradient was written, and the tape is whole."
        written = "Its gradients were computed, call by call." if ran else untouched
        super().__init__(f"a backward was not in the cache: {what}. {written} Set on_miss='compile' to compile it.")
        self.reasons = tuple(reasons)


class GradientMismatchError(CompiledAutogradError, RuntimeError):
    """Compiled code gave other results than the real calls. The written gradients are those of the real calls.

    Raised if ``check`` is True or a number, and always if compiled code has overwritten its inputs.

    Attributes:
        mismatches: a :class:`shadow_cache.Mismatch` for each region with a difference.
    """

    def __init__(self, mismatches: Sequence[Any], written: str = "The right gradients were written.") -> None:
        super().__init__(f"{'; '.join(map(str, mismatches))}. {written}")
        self.mismatches = tuple(mismatches)


class ReproductionError(CompiledAutogradError, ValueError):
    """A file is no reproduction, or cannot be used here; or a backward cannot be stored as a reproduction."""

    def __init__(self, what: str) -> None:
        super().__init__(f"a reproduction cannot be used: {what}")


class IllegalGraphError(CompiledAutogradError, AssertionError):
    """A tape graph violates a rule of :mod:`compiled_autograd.ir`: always a bug of the pass that made the graph."""


class BrokenCaptureError(CompiledAutogradError, RuntimeError):
    """The engine failed while it reported a node, and the saved tensors of the node may be lost.

    The eager engine could then compute wrong gradients, so the backward is not run at all.
    """

    def __init__(self, node: str) -> None:
        super().__init__(
            f"the engine failed while it reported {node}, and the saved tensors of this node may be lost: "
            "no gradient was written. Run the forward again, and its backward inside compiled_autograd.disable(); "
            "please report this as a bug."
        )


class CaptureRefusedError(CompiledAutogradError):
    """Raised inside the engine's walk to abandon a capture while the tape is intact. Never reaches the user.

    Attributes:
        reason: the bypass.
        mistake: probably the user's mistake; the eager engine runs the backward and raises the error.
    """

    def __init__(self, reason: Any, mistake: bool = False) -> None:
        super().__init__(str(reason))
        self.reason = reason
        self.mistake = mistake


class OverBudgetError(CompiledAutogradError):
    """The compile budget ran out while a region was traced: its calls run one by one. Never reaches the user."""


class UntraceableError(CompiledAutogradError):
    """Calls of the tape graph cannot run under fake tensors; they stay opaque. Never reaches the user.

    Attributes:
        nodes: the calls.
        cause: the error.
        always: True if the calls fail with any arguments, False if only with the current ones.
    """

    def __init__(self, nodes: Sequence[Any], cause: BaseException, always: bool = True) -> None:
        super().__init__(f"{nodes[0].name} cannot be traced: {type(cause).__name__}: {cause}")
        self.nodes = nodes
        self.cause = cause
        self.always = always


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """Issue a warning for the line outside of this package that called it."""
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and str(frame.f_globals.get("__package__")).partition(".")[0] == __package__:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
