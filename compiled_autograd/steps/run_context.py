"""Settings and state of one run, and its side results."""

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
    from ..torch_api.hook_handles import HookChange
    from .profiling import Profile


@dataclass(slots=True)
class RunReport:
    """Side results of one run: seconds by stage, compiled regions, and failures."""

    seconds: dict[str, float] = field(default_factory=dict)
    compiles: int = 0
    background: int = 0
    """The number of regions that were compiled in the background before this run."""
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
    """``check`` compared the whole run, or each region: its time says nothing about a hit."""
    mismatches: list[Failure] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    misses: list[Miss] = field(default_factory=list)
    compile_id: CompileId | None = None
    """The run's id in the structured trace (:mod:`structured_trace`)."""

    def take(self, other: RunReport) -> None:
        """Add what was done in the background since the last run."""
        self.background += other.compiles
        self.join(other)

    def join(self, other: RunReport) -> None:
        """Add what was done for this run."""
        self.compiles += other.compiles
        self.loads += other.loads
        self.failures.extend(other.failures)
        self.misses.extend(other.misses)
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
        """Measure the block as a stage."""
        self.stage, started = stage, time.perf_counter()
        try:
            yield
        finally:
            self.add(stage, time.perf_counter() - started)


@dataclass(slots=True)
class RunContext:
    """Settings and state of one run, and its report."""

    report: RunReport = field(default_factory=RunReport)
    may_compile: bool = True
    """False: a region without compiled code for its values runs call by call."""
    left: Callable[[], float] = lambda: math.inf
    """Gives the seconds that tracing may take yet."""
    prove: bool = True
    """Compare code that was not yet compared with the real calls."""
    compare_all: bool = False
    """Compare every region with its real calls, also one that was compared before."""
    rounding: dict[int, float] = field(default_factory=dict)
    """If all regions are compared and right: the distance of each result from the real calls', by slot."""
    kept: dict[int, Any] | None = None
    """If leaves are not written: a record of the gradient that each leaf would get, by the leaf's slot."""
    outer: RunContext | None = None
    """The context of the compiled backward whose users' code calls this one."""
    nested: list[Failure] = field(default_factory=list)
    """Mismatches of nested backwards, raised at the end of this one."""
    call: int = 0
    """The node of the tape whose users' code runs now: an index into ``TapeGraph.calls``."""
    ends: Any = None
    """The ends of the tape: see ``runtime.running_backward.Ends``."""
    changes: list[HookChange] = field(default_factory=list)
    """Hooks that users' code has registered and removed, until their effect is determined."""
    late: Any = None
    """The effect of these changes: see ``runtime.late_hooks.LateHooks``."""
    added_to: frozenset[int | None] | None = None
    """The memory of each ``.grad`` that is added to, once something has asked for it."""
    profile: Profile | None = None
    """Under a profiler, the object that makes its events."""
    progress: bool | None = False
    """Show a line while the run waits for a compile; None: only on a terminal or in a notebook."""
    wait: Wait | None = None
    """The waits of the run so far."""
    log: NodeLog | None = None
    """If the log has each node as it runs, the writer of the log."""
    module: Module | None = None
    """The extension, where it has walked the tape: it tells of most results at once that they are the same."""
    submit: Callable[[Any, Any, list[Any]], None] | None = None
    """A function that takes a region without compiled code for its values, and the values; None if the run waits for
    compiles."""
