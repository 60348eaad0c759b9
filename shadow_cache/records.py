"""Why a backward was not a hit: one record, made where it is found, and shown alike wherever it is shown."""

from __future__ import annotations

import msgspec


class Bypass(msgspec.Struct, frozen=True):
    """The eager engine ran this backward. ``kind`` is one of the known reasons, ``what`` says which case of it."""

    kind: str
    what: str = ""
    hint: str = ""

    @property
    def label(self) -> str:
        """What bypasses are counted under: the kind, and the case where the kind has several."""
        return f"{self.kind}({self.what})" if self.what else self.kind

    def __str__(self) -> str:
        return f"{self.label}: {self.hint}" if self.hint else self.label


class Miss(msgspec.Struct, frozen=True):
    """Something was captured or compiled. ``old`` is what the nearest entry has, ``new`` what this backward has."""

    kind: str
    where: str = ""
    old: str = ""
    new: str = ""
    hint: str = ""
    seconds: float = 0.0
    """What it cost: capturing, lowering and compiling; 0 where that is not known yet."""
    node: int | None = None
    """The node of this backward's tape that ``where`` names, as its structure counts them; None where it names none."""

    def __str__(self) -> str:
        text = f"{self.kind} at {self.where}" if self.where else self.kind
        if self.old or self.new:
            text += f": {self.old} -> {self.new}"
        if self.seconds:
            text += f", {self.seconds:.1f} s" if self.seconds >= 1 else f", {1000 * self.seconds:.0f} ms"
        return f"{text} ({self.hint})" if self.hint else text


class Failure(msgspec.Struct, frozen=True):
    """Something of ours failed; the backward was run all the same, the slower way that ``instead`` names."""

    kind: str
    where: str
    error: str
    instead: str

    def __str__(self) -> str:
        return f"{self.kind} in {self.where}: {self.error}; {self.instead}"


class Mismatch(Failure, frozen=True, kw_only=True):
    """Compiled code gave something else than the calls that it was made of, whose results were used.

    Attributes:
        value: which of its results, as people know it; for one that becomes the gradient of a parameter, that is
            ``parameter``, and ``module`` is where it is from, as far as that is known.
        region: the number of the region among those of its tape, from 1 on; 0 where it is none of these any more.
        form: what of the compiled code ran.
        largest: the largest difference, at ``index``, where the calls gave ``eager`` and the compiled code ``found``;
            None where no two values can be compared.
        reproduction: the file that shows it again; None where none could be written.
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
    """A backward with something in it that cannot be captured."""
    return Bypass("unsupported", what, hint)
