"""The result of one backward, and the counts of a session."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .shadow_cache import Bypass, Failure, Miss

HIT, SHAPE_MISS, STRUCTURE_MISS, BYPASS = "hit", "shape_miss", "structure_miss", "bypass"


@dataclass(slots=True)
class Stats:
    """Counts of one session. Every backward is one of hit, shape miss, structure miss and bypass.

    Attributes:
        backwards: how often a backward was asked for.
        captures: how often the engine reported a tape because it had not met its structure.
        bypasses: for each reason, how many backwards the eager engine ran.
        compiles: how many regions were compiled.
        compile_seconds: seconds spent lowering and compiling, the first run of each region included.
        loads: how many regions were found in the store on disk, where another process had compiled them.
        failures: how often something of ours failed and a slower way was taken, with the right result.
        own_loop: how many of the bypasses ran without the engine's queue.
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


@dataclass(slots=True)
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
