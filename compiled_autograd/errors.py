"""One class for each thing that can go wrong in here. A message says what was found, where, and what to do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any


class CompiledAutogradError(Exception):
    """Base class of this package's own errors."""


def import_failed(error: Exception) -> str:
    """Say that an import of this package failed, since something private of PyTorch's has moved."""
    return f"This PyTorch does not work with this package: {type(error).__name__}: {error}"


def nearest(word: str, known: Iterable[str]) -> str:
    """`` Did you mean 'x'?`` for the nearest known word, or the list of known words."""
    words = sorted(known)
    close = get_close_matches(word, words, n=1)
    return f" Did you mean {close[0]!r}?" if close else f" Known: {', '.join(words)}."


class UnknownSettingError(CompiledAutogradError, TypeError):
    """A setting that does not exist."""

    def __init__(self, name: str, known: Iterable[str]) -> None:
        super().__init__(f"there is no setting {name!r}.{nearest(name, known)}")


class InvalidSettingError(CompiledAutogradError, ValueError):
    """A setting with a value that it cannot take."""

    def __init__(self, name: str, value: object, allowed: str, where: str) -> None:
        super().__init__(f"{where}: {name}={value!r} is not possible; {name} is {allowed}.")


class WrongUseError(CompiledAutogradError, TypeError):
    """A function of this package given something of another kind, or a session pickled. The text says what to write."""


class UnsupportedBackwardError(CompiledAutogradError, RuntimeError):
    """A backward had to bypass, and ``on_unsupported="raise"`` was asked for. No gradient was written."""

    def __init__(self, reason: Any) -> None:
        super().__init__(
            f"this backward cannot be captured: {reason}. "
            'With on_unsupported="eager" (the default) the eager engine would have run it.'
        )
        self.reason = reason


class CacheMissError(CompiledAutogradError, RuntimeError):
    """A backward was no hit, and ``on_miss="raise"`` was asked for.

    Attributes:
        reasons: the records that say why.
    """

    def __init__(self, reasons: Sequence[Any], ran: bool = False) -> None:
        what = "; ".join(map(str, reasons))
        untouched = "No gradient was written, and the tape is whole."
        written = "Its gradients were computed, call by call." if ran else untouched
        super().__init__(f"a backward was not in the cache: {what}. {written} on_miss='compile' would compile it.")
        self.reasons = tuple(reasons)


class GradientMismatchError(CompiledAutogradError, RuntimeError):
    """Compiled code gave something else than the calls that it was made of. The gradients are those of the calls.

    Raised where ``check`` is True or a number; and always where compiled code has overwritten what was given to it.

    Attributes:
        mismatches: a :class:`shadow_cache.Mismatch` for each region in which it did.
    """

    def __init__(self, mismatches: Sequence[Any], written: str = "The right gradients were written.") -> None:
        super().__init__(f"{'; '.join(map(str, mismatches))}. {written}")
        self.mismatches = tuple(mismatches)


class ReproductionError(CompiledAutogradError, ValueError):
    """A file that is no reproduction, or one that cannot be used here; or a backward of which none can be written."""

    def __init__(self, what: str) -> None:
        super().__init__(f"a reproduction cannot be used: {what}")


class IllegalGraphError(CompiledAutogradError, AssertionError):
    """A tape graph that breaks a rule of :mod:`compiled_autograd.ir`: always a bug of the pass that made it."""


class BrokenCaptureError(CompiledAutogradError, RuntimeError):
    """The engine failed in the middle of reporting a node, whose saved tensors may be lost with that.

    Running the backward on the eager engine could then give wrong gradients, so it is not run at all.
    """

    def __init__(self, node: str) -> None:
        super().__init__(
            f"the engine failed while it reported {node}, and what that node saved may be lost: "
            "no gradient was written. Run the forward again, and this backward inside compiled_autograd.disable(); "
            "please report it as a bug."
        )


class CaptureRefusedError(CompiledAutogradError):
    """Raised into the engine's seam to give up a capture while the tape is still whole. Never reaches the user.

    ``mistake`` says that it is one of the user's, if it is anything: the eager engine has the word then.
    """

    def __init__(self, reason: Any, mistake: bool = False) -> None:
        super().__init__(str(reason))
        self.reason = reason
        self.mistake = mistake


class OverBudgetError(CompiledAutogradError):
    """The compile budget was spent while a region was traced: its calls run one by one. Never reaches the user."""


class UntraceableError(CompiledAutogradError):
    """Calls of the tape graph that cannot be run under fake tensors; they stay opaque. Never reaches the user.

    Attributes:
        nodes: the calls.
        cause: why.
        always: whether that holds for whatever the calls are given, and not only for what they were given now.
    """

    def __init__(self, nodes: Sequence[Any], cause: BaseException, always: bool = True) -> None:
        super().__init__(f"{nodes[0].name} cannot be traced: {type(cause).__name__}: {cause}")
        self.nodes = nodes
        self.cause = cause
        self.always = always
