"""The result of one backward, and the counts of a session."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .shadow_cache import Bypass, Failure, Miss
from .shadow_cache.amounts import plural, seconds
from .shadow_cache.safe_text import harmless, preformatted

TUNING = "tuning"
"""The reason of a backward that eager ran to be timed against compiled code."""
HIT, SHAPE_MISS, STRUCTURE_MISS, BYPASS = "hit", "shape_miss", "structure_miss", "bypass"


@dataclass(slots=True, repr=False)
class Stats:
    """Counts of one session. Every backward is one of hit, shape miss, structure miss and bypass; bypasses of ``tune``
    are counted apart.

    Attributes:
        backwards: how often a backward was asked for.
        captures: how often the engine reported a tape because it had not met its structure.
        bypasses: for each reason, how many backwards the eager engine ran, but for ``tuning``.
        compiles: how many regions were compiled.
        compile_seconds: seconds spent lowering and compiling, the first run of each region included.
        loads: how many regions were found in the store on disk, where another process had compiled them.
        failures: how often something of ours failed and a slower way was taken, with the right result.
        own_loop: how many of the backwards on eager ran without the engine's queue.
        tuning: how many backwards ran on eager to be timed against compiled code.
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
        """Return a copy. The fast path of another thread, which waits for nobody, comes in between at calls alone."""
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
        """The counts in words; those that are 0 are left out."""
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
    """What became of one backward.

    Attributes:
        outcome: ``"hit"``, ``"shape_miss"``, ``"structure_miss"`` or ``"bypass"``.
        graph: the structure that ran, a ``CompiledGraph``; None for a bypass.
        reasons: why it was no hit, and what failed on the way.
        seconds: by stage: ``capture`` (the engine's walk, and its report where it missed), ``lower``, ``compile``,
            ``load`` (from the store on disk), ``prove`` (comparing with the real calls), ``run`` (everything after the
            capture, all of these included). A backward that was left to eager for its own good, and was known from its
            root alone, is not timed.
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
