"""What one run is told, and what it did besides computing."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..shadow_cache import Failure, Miss

if TYPE_CHECKING:
    from torch._guards import CompileId

    from ..diagnostics.node_log import NodeLog
    from ..diagnostics.progress import Wait
    from ..native.interface import Module
    from ..threads.claims import Claim
    from ..torch_api.hook_handles import HookChange
    from .profiling import Profile


@dataclass(slots=True)
class RunReport:
    """What one run did besides computing: seconds by stage, regions compiled, and what failed on the way."""

    seconds: dict[str, float] = field(default_factory=dict)
    compiles: int = 0
    background: int = 0
    """How many of them were compiled in the background before this run."""
    loads: int = 0
    """Regions found in the store on disk."""
    uncompiled: int = 0
    """Regions that ran call by call, since they are not compiled for what they were given and must not be."""
    over_budget: bool = False
    """True once the compile budget is spent: regions that are not compiled stay so."""
    stage: str = ""
    """The stage that began last."""
    zeros: int = 0
    """Regions that gave zeros alone where they were to be compared with the real calls."""
    compared: bool = False
    """``check`` had it compared, be it whole or region by region: what it took says nothing of a hit."""
    mismatches: list[Failure] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    misses: list[Miss] = field(default_factory=list)
    compile_id: CompileId | None = None
    """What the structured trace has it under (:mod:`structured_trace`)."""

    def take(self, other: RunReport) -> None:
        """Add what was done in the background since the last run."""
        self.compiles += other.compiles
        self.background += other.compiles
        self.failures.extend(other.failures)
        self.compile_id = self.compile_id or other.compile_id
        for stage, seconds in other.seconds.items():
            self.add(stage, seconds)

    def mismatched(self, failure: Failure) -> None:
        """Compiled code has given something else than the real calls."""
        self.mismatches.append(failure)
        self.failures.append(failure)

    def add(self, stage: str, seconds: float) -> None:
        """Seconds spent in a stage."""
        self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds

    @contextlib.contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """What is done inside is a stage."""
        self.stage, started = stage, time.perf_counter()
        try:
            yield
        finally:
            self.add(stage, time.perf_counter() - started)


@dataclass(slots=True)
class RunContext:
    """What one run is told, where it is, and its report."""

    report: RunReport = field(default_factory=RunReport)
    may_compile: bool = True
    """Else a region that is not compiled for what it is given runs call by call."""
    left: Callable[[], float] = lambda: math.inf
    """Gives the seconds that tracing may take yet."""
    prove: bool = True
    """What was not yet compared with the real calls is."""
    compare_all: bool = False
    """Every region is compared with its real calls, whatever was compared before."""
    rounding: dict[int, float] = field(default_factory=dict)
    """Where all are compared and found to be right, how far from the real calls' each result is, by its slot."""
    kept: dict[int, Any] | None = None
    """Where leaves are not to be written, what is told of the gradient that each would be given, by the leaf's slot."""
    outer: RunContext | None = None
    """That of the compiled backward whose users' code calls this one."""
    nested: list[Failure] = field(default_factory=list)
    """Mismatches of backwards inside this one, which are raised when it has run."""
    call: int = 0
    """Which node of the tape runs users' code now: an index into ``TapeGraph.calls``."""
    ends: Any = None
    """Of the tape: see ``runtime.running_backward.Ends``."""
    changes: list[HookChange] = field(default_factory=list)
    """Which hooks users' code has registered and removed, until somebody looks what that changes."""
    late: Any = None
    """What it has changed: see ``runtime.late_hooks.LateHooks``."""
    added_to: frozenset[int | None] | None = None
    """The memory of each ``.grad`` that is added to, once something has asked for it."""
    claim: Claim | None = None
    """On the leaf whose post-accumulate hooks run now."""
    profile: Profile | None = None
    """Where a profiler looks on, what shows it the events."""
    progress: bool | None = False
    """Whether a line says what is being compiled while this run waits for it; None where somebody looks."""
    wait: Wait | None = None
    """What it has waited for so far."""
    log: NodeLog | None = None
    """Where the log has each node as it runs, what writes them there."""
    module: Module | None = None
    """The extension, where it has walked the tape: it tells of most results at once that they are the same."""
    submit: Callable[[Any, Any, list[Any]], None] | None = None
    """With ``on_miss="background"``, what is told of a program's region that is not compiled for the values in hand."""
