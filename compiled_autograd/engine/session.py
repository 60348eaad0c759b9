"""Sessions: what a user enables, and the account of what happened inside."""

from __future__ import annotations

import os
import threading
import weakref
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from shadow_cache import Bypass, Failure, Miss

from ..cache.graphs import CompiledGraph
from ..diagnostics.reporting import count_repeats, tell, warn_of
from ..policies.background import BACKGROUND
from ..policies.sketches import SKETCHES
from ..process_state import PROCESS, free_in_child
from ..report.step_log import StepLog
from ..settings import Settings

HIT, SHAPE_MISS, STRUCTURE_MISS, BYPASS = "hit", "shape_miss", "structure_miss", "bypass"
_RECORDING = free_in_child(threading.RLock())  # microseconds


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


@dataclass(slots=True)
class Outcome:
    """What became of one backward.

    Attributes:
        outcome: ``"hit"``, ``"shape_miss"``, ``"structure_miss"`` or ``"bypass"``.
        graph: the structure that ran; None for a bypass.
        reasons: why it was no hit, and what failed on the way.
        seconds: by stage: ``capture`` (the engine's walk, and its report where it missed), ``lower``, ``compile``,
            ``load`` (from the store on disk), ``prove`` (comparing with the real calls), ``run`` (everything after the
            capture, all of these included).
    """

    outcome: str
    graph: CompiledGraph | None = None
    reasons: tuple[Bypass | Miss | Failure, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)


class Session:
    """A context manager around ``backward``. It nests, can be entered again, and holds only in the thread it is in."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.number = SKETCHES.number(settings)
        self.last: Outcome | None = None
        self._stats = Stats()
        self._graphs: weakref.WeakValueDictionary[int, CompiledGraph] = weakref.WeakValueDictionary()
        self._missed: Counter[tuple[str, str]] = Counter()
        self._steps = StepLog()

    def __enter__(self) -> Session:
        _thread.stack.append(self)
        return self

    def __exit__(self, *exception: object) -> None:
        _leave(self)

    def stats(self) -> Stats:
        """A copy of the counts so far."""
        with _RECORDING:
            return replace(self._stats, bypasses=dict(self._stats.bypasses))

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until nothing is being compiled in the background.

        Args:
            timeout: seconds; None for as long as it takes.

        Returns:
            False where it took longer.
        """
        return BACKGROUND.wait(timeout)

    def graphs(self) -> list[CompiledGraph]:
        """The structures that this session captured or compiled, in the order in which it met them.

        Those that the process has let go of since are not among them, see :data:`graphs.MAX_STRUCTURES`.
        """
        return list(self._graphs.values())

    def report(self, path: str | os.PathLike[str]) -> Path:
        """Write one HTML file that shows the session so far, and opens in a browser without a network.

        It has the totals, the steps that were no hits with what they cost, how the tapes differ, and of each structure
        (those of :meth:`graphs`, and the one that ran last) a drawing, its stages beside each other, its regions, its
        memory, and how it was timed against eager. Time per region is of backwards that ran under ``torch.profiler``.
        Nothing is run or compiled for it.

        Args:
            path: of the file; one that is there is replaced.

        Returns:
            The file.

        Raises:
            OSError: it cannot be written.
        """
        from shadow_cache.report import page

        from ..report.session_report import session_report

        with _RECORDING:
            stats, events, left_out = asdict(self._stats), self._steps.events(), self._steps.left_out
            last = None if self.last is None else self.last.graph
        graphs = self.graphs()
        if last is not None and last not in graphs:  # another session captured it
            graphs.append(last)
        return page.write(session_report(stats, events, left_out, graphs, self.settings), path)

    def record(self, outcome: Outcome, captured: bool = False, compiles: int = 0, loads: int = 0) -> None:
        """Count one backward."""
        failures = [reason for reason in outcome.reasons if isinstance(reason, Failure)] if outcome.reasons else ()
        failed, kind = len(failures), outcome.outcome
        seconds = outcome.seconds.get("lower", 0.0) + outcome.seconds.get("compile", 0.0)
        label = outcome.reasons[0].label if kind == BYPASS and isinstance(outcome.reasons[0], Bypass) else ""
        with _RECORDING:
            stats = self._stats
            if label:
                stats.bypasses.setdefault(label, 0)
            # No call from here on: Ctrl-C finds all of a backward counted, or nothing of it.
            if kind == HIT:
                stats.hits += 1
            elif kind == SHAPE_MISS:
                stats.shape_misses += 1
            elif kind == STRUCTURE_MISS:
                stats.structure_misses += 1
            else:
                stats.bypasses[label] += 1
            stats.backwards += 1
            stats.captures += captured
            stats.compiles += compiles
            stats.loads += loads
            stats.failures += failed
            stats.compile_seconds += seconds
            self.last = outcome
            if outcome.graph is not None and (captured or outcome.outcome != HIT):
                self._graphs.setdefault(id(outcome.graph), outcome.graph)
        tell(outcome.outcome, outcome.reasons, outcome.seconds, compiles)
        if not compiles and not outcome.reasons:
            return
        with _RECORDING:
            number = stats.backwards
            self._steps.add(number, kind, outcome.graph, outcome.reasons, outcome.seconds, compiles, loads)
        if compiles:
            count_repeats(self._missed, outcome.reasons)
        for failure in failures:
            warn_of(failure)


class Disabled:
    """A context manager in which every ``backward`` runs on the eager engine, uncounted."""

    def __enter__(self) -> None:
        _thread.stack.append(None)

    def __exit__(self, *exception: object) -> None:
        _leave(None)


class _Thread(threading.local):
    def __init__(self) -> None:
        self.stack: list[Session | None] = []


_thread = PROCESS.register(_Thread())


def _leave(session: Session | None) -> None:
    """Take the innermost entry of ``session`` away, whatever was entered after it."""
    stack = _thread.stack
    position = max(index for index, entry in enumerate(stack) if entry is session)
    del stack[position]


def current() -> Session | None:
    """The session that the calling thread is in; None outside of any, and inside ``disable``."""
    stack = _thread.stack
    return stack[-1] if stack else None
