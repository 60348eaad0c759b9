"""The result of one backward, and the counts of a session."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .shadow_cache import Bypass, Failure, Miss
from .shadow_cache.amounts import plural, seconds
from .shadow_cache.safe_text import harmless, preformatted

TUNING = "tuning"
"""The reason of a backward that ran on eager to be timed against compiled code."""
HIT, SHAPE_MISS, STRUCTURE_MISS, BYPASS = "hit", "shape_miss", "structure_miss", "bypass"


@dataclass(slots=True, repr=False)
class Stats:
    """Counts of one session. Every backward is one of hit, shape miss, structure miss and bypass; bypasses of ``tune``
    are counted separately.

    Attributes:
        backwards: the number of backwards.
        captures: the number of tapes that the engine reported because their structure was new to it.
        bypasses: the number of backwards on the eager engine by reason, without ``tuning``.
        compiles: the number of compiled regions.
        compile_seconds: seconds of lowering and compiling, including the first run of each region.
        loads: the number of regions loaded from the store on disk, compiled by another process.
        failures: the number of failures of this package after which a slower way gave the right result.
        own_loop: the number of eager backwards that ran without the engine's ready queue.
        tuning: the number of backwards that ran on eager to be timed against compiled code.
    """

    backwards: int = 0
    captures: int = 0
    hits: int = 0
    shape_misses: int = 0
    structure_misses: int = 0
    bypasses: dict[str, int] = field(default_factory=dict)
    compiles: int = 0
    compile_seconds: float = 0.0
    loads: int = 0
    failures: int = 0
    own_loop: int = 0
    tuning: int = 0

    def copy(self) -> Stats:
        """Return a copy. Another thread's fast path takes no lock, and can intervene only at calls: there are none
        between the reads of the fields."""
        bypasses = dict(self.bypasses)
        return Stats(
            self.backwards,
            self.captures,
            self.hits,
            self.shape_misses,
            self.structure_misses,
            bypasses,
            self.compiles,
            self.compile_seconds,
            self.loads,
            self.failures,
            self.own_loop,
            self.tuning,
        )

    def parts(self) -> list[str]:
        """Return the counts in words, without those that are 0."""
        if not self.backwards:
            return ["no backward ran in this session"]
        missed, left = self.shape_misses + self.structure_misses, sum(self.bypasses.values())
        found = [f"{plural(self.backwards, 'backward')}: {plural(self.hits, 'hit')}"]
        found += [plural(missed, "miss", "misses")] if missed else []
        found += [f"{self.tuning:,} timed on eager"] if self.tuning else []
        return [*found, f"{left:,} left to eager"] if left else found

    def __repr__(self) -> str:
        text = ", ".join(self.parts())
        if self.bypasses:
            each = [f"{count:,} {label}" for label, count in self.bypasses.items()]
            text += f" ({', '.join(each if len(each) > 1 else self.bypasses)})"
        if self.compiles or self.loads:
            text += f"; {plural(self.compiles, 'region')} compiled in {seconds(self.compile_seconds)}"
            text += f", {self.loads:,} loaded" if self.loads else ""
        return harmless(text + (f"; {plural(self.failures, 'failure')}" if self.failures else ""))

    def _repr_html_(self) -> str:
        return preformatted(repr(self))


@dataclass(slots=True, repr=False)
class Outcome:
    """The outcome of one backward.

    Attributes:
        outcome: ``"hit"``, ``"shape_miss"``, ``"structure_miss"`` or ``"bypass"``.
        graph: the structure that ran, a ``CompiledGraph``; None for a bypass.
        reasons: why the backward was no hit, and the failures on the way.
        seconds: seconds by stage: ``capture`` (the engine's walk, and its report after a miss), ``lower``, ``compile``,
            ``load`` (from the store on disk), ``prove`` (comparing with the real calls), ``run`` (everything after the
            capture, including the other stages). A backward is not timed if its root alone decided that eager runs it,
            because eager is faster or the budget is spent.
    """

    outcome: str
    graph: Any = None
    reasons: tuple[Bypass | Miss | Failure, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)

    def __repr__(self) -> str:
        took = sum(self.seconds.get(stage, 0.0) for stage in ("capture", "run"))
        first = f"{self.outcome} in {1000 * took:.3g} ms" if took else self.outcome
        graph = "" if self.graph is None else f", {self.graph.title}"
        return "\n  ".join(map(harmless, [first + graph, *map(str, self.reasons)]))

    def _repr_html_(self) -> str:
        return preformatted(repr(self))
