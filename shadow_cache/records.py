"""The reasons why a backward was no hit, as records. All displays show a record in the same words."""

from __future__ import annotations

import msgspec


class Bypass(msgspec.Struct, frozen=True):
    """The eager engine ran this backward. ``kind`` is the reason, ``what`` the case of it."""

    kind: str
    what: str = ""
    hint: str = ""

    @property
    def label(self) -> str:
        """The name under which bypasses are counted: the kind, and the case if the kind has several."""
        return f"{self.kind}({self.what})" if self.what else self.kind

    def __str__(self) -> str:
        return f"{self.label}: {self.hint}" if self.hint else self.label


class Miss(msgspec.Struct, frozen=True):
    """A structure was captured or a variant compiled. ``old`` is the nearest known value, ``new`` this backward's."""

    kind: str
    where: str = ""
    old: str = ""
    new: str = ""
    hint: str = ""
    seconds: float = 0.0
    """Seconds of capturing, lowering and compiling; 0 if not known yet."""
    node: int | None = None
    """The index, in the structure, of the node that ``where`` names; None if ``where`` names no node."""

    def __str__(self) -> str:
        text = f"{self.kind} at {self.where}" if self.where else self.kind
        if self.old or self.new:
            text += f": {self.old} -> {self.new}"
        if self.seconds:
            text += f", {self.seconds:.1f} s" if self.seconds >= 1 else f", {1000 * self.seconds:.0f} ms"
        return f"{text} ({self.hint})" if self.hint else text


class Failure(msgspec.Struct, frozen=True):
    """A part of this package failed. The backward gave the right result in a slower way, which ``instead`` names."""

    kind: str
    where: str
    error: str
    instead: str

    def __str__(self) -> str:
        return f"{self.kind} in {self.where}: {self.error}; {self.instead}"


class Mismatch(Failure, frozen=True, kw_only=True):
    """Compiled code gave other results than the real calls. The results of the real calls were used.

    Attributes:
        value: the name of the wrong result for people.
        parameter: the parameter whose gradient the result becomes, if known; ``module`` is its module.
        region: the number of the region on its tape, counted from 1; 0 if the region is no longer part of the tape.
        form: the form of the compiled code that ran.
        largest: the largest difference, at ``index``. The real calls gave ``eager`` there, the compiled code ``found``.
            None if no two values can be compared.
        reproduction: the file that reproduces the difference; None if none could be written.
    """

    value: str = ""
    parameter: str | None = None
    module: str | None = None
    region: int = 0
    form: str = ""
    largest: float | None = None
    index: tuple[int, ...] = ()
    eager: float | complex | None = None
    found: float | complex | None = None
    reproduction: str | None = None


def unsupported(what: str, hint: str = "the eager engine runs it") -> Bypass:
    """Return the bypass of a backward that cannot be captured."""
    return Bypass("unsupported", what, hint)
