"""What trainers' callbacks share: one training after the other, each with a session of its own, and what it was worth,
in a line for people.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..api import enable
from ..engine.session import Session, Stats

MISSES = "backward_misses"
"""The name in a trainer's log: how many backwards were no hits since it last logged."""


def misses(stats: Stats) -> int:
    """The number of backwards that were no hits: what was captured or compiled, and what was left to eager."""
    return stats.backwards - stats.hits


@dataclass(frozen=True, slots=True)
class Summary:
    """What became of the backwards of a training.

    Attributes:
        stats: the counts of the session.
        seconds_saved: what the hits took less than eager would have, where ``tune`` has timed both; negative where they
            took longer. What was spent compiling is not in it: that is ``stats.compile_seconds``.
        timed: the number of compiled variants that were timed, and so are in ``seconds_saved``; ``variants``, of all.
    """

    stats: Stats
    seconds_saved: float
    timed: int
    variants: int

    @classmethod
    def of(cls, session: Session) -> Summary:
        """That of a session so far; microseconds a structure."""
        variants = [variant for graph in session.graphs() for variant in graph.variants]
        timed = [(each.hits, each.timing) for each in variants if each.timing is not None]
        saved = sum(hits * (timing.eager - timing.compiled) for hits, timing in timed if not timing.on_eager) / 1e3
        return cls(session.stats(), saved, len(timed), len(variants))

    def __str__(self) -> str:
        stats = self.stats
        counts = [f"{stats.hits} hits", f"{misses(stats) - sum(stats.bypasses.values())} misses"]
        counts += [f"{count} left to eager ({reason})" for reason, count in sorted(stats.bypasses.items())]
        spent = f"{stats.compiles} regions compiled in {stats.compile_seconds:.1f} s"
        if stats.loads:
            spent += f", {stats.loads} loaded"
        worth = "not timed against eager yet"
        if self.timed:
            word = "saved" if self.seconds_saved >= 0 else "lost"
            worth = f"{abs(self.seconds_saved):.1f} s of backward {word} by hits"
            if self.timed < self.variants:
                worth += f" ({self.timed} of {self.variants} variants were timed)"
        return f"compiled_autograd: {stats.backwards} backwards: {', '.join(counts)}; {spent}; {worth}"


class Trainings:
    """The trainings of one callback.

    Args:
        settings: those of :func:`compiled_autograd.enable`.

    Attributes:
        session: that of the last training; None before the first.

    Raises:
        UnknownSettingError, InvalidSettingError: as ``enable`` does, at once.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        enable(**settings)
        self.session: Session | None = None
        self._settings = settings
        self._entered = self._logged = 0

    @property
    def is_on(self) -> bool:
        """Whether the session is."""
        return self._entered > 0

    def begin(self) -> None:
        """A new one, with a new session, which is not on yet. One that raised may have left its own on."""
        self.leave_all()
        self.session, self._logged = enable(**self._settings), 0

    def enter(self) -> None:
        """Turn the session on."""
        if self.session is not None:
            self.session.__enter__()
            self._entered += 1

    def leave(self) -> None:
        """Turn it off, if it is on."""
        if self._entered and self.session is not None:
            self._entered -= 1
            self.session.__exit__(None, None, None)

    def leave_all(self) -> None:
        """Turn it off, however often it was turned on."""
        while self._entered:
            self.leave()

    def new_misses(self) -> int:
        """How many backwards were no hits since this was last asked."""
        now = 0 if self.session is None else misses(self.session.stats())
        before, self._logged = self._logged, now
        return now - before
