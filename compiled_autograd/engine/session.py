"""Sessions: what a user enables, and the account of what happened inside."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import Counter
from logging import INFO
from pathlib import Path
from typing import NoReturn

from ..cache.graphs import CompiledGraph
from ..compiling.queue import QUEUE
from ..diagnostics.reporting import count_repeats, is_told_at, tell, warn_of, warn_once
from ..errors import WrongUseError
from ..native.library import Library, why_unsupported
from ..outcomes import BYPASS, HIT, SHAPE_MISS, STRUCTURE_MISS, TUNING, Outcome, Stats
from ..policies.ledger import LEDGER
from ..policies.own_loop import OWN_LOOPS, why_off
from ..process_state import PROCESS, OfThread, free_in_child
from ..report.step_log import Compile, Hit, LeftToEager, StepEvent, StepLog, hits_in, keep_hit
from ..report.summary import AT_EXIT, Summary
from ..settings import Settings
from ..shadow_cache import Bypass, Failure
from ..shadow_cache.safe_text import preformatted
from .here import Here

_EVERYWHERE: list[Session] = PROCESS.register([])
"""The sessions that each new thread starts in."""
_RECORDING = free_in_child(threading.RLock())  # microseconds


class Session:
    """A context manager around ``backward``. It nests, can be entered again, and holds only in the thread it is in.

    As a lock or a file, it is not copied: ``copy`` and ``deepcopy`` of what has a session give the same session.

    Attributes:
        may_be_idle: whether it may end without a backward; else it warns then, once.
    """

    __slots__ = (
        "__dict__",  # of what others put there
        "__weakref__",
        "_graphs",
        "_last",
        "_missed",
        "_stats",
        "_steps",
        "hit_times",
        "leaves_at_once",
        "left",
        "looks_away",
        "may_be_idle",
        "may_loop",
        "number",
        "settings",
    )

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.number = LEDGER.number(settings)
        self.may_loop = not why_off(settings)
        self.looks_away = settings.looks_away
        self.leaves_at_once = settings.may_compile and settings.on_unsupported != "raise"
        self._last: Outcome | tuple[CompiledGraph, float, float] | None = None
        self.left: LeftToEager | None = None
        self.may_be_idle = False
        self._stats = Stats()
        self._graphs: weakref.WeakValueDictionary[int, CompiledGraph] = weakref.WeakValueDictionary()
        self._missed: Counter[tuple[str, str]] = Counter()
        self._steps = StepLog()
        self.hit_times: bytearray | None = None  # C++ writes into it too
        if settings.summary:
            AT_EXIT.add(self.summary)

    def __enter__(self) -> Session:
        stack = thread.here.stack
        if stack and (outer := stack[-1]) is not None:
            outer.may_be_idle = True  # backwards in here count for this one
        stack.append(self)
        return self

    def __exit__(self, *exception: object) -> None:
        _leave(self)
        if self._last is self.left is None and not self.may_be_idle and exception[:1] == (None,):
            self.may_be_idle = True
            warn_once(_IDLE)

    def __copy__(self, memo: object = None) -> Session:
        return self

    __deepcopy__ = __copy__

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise WrongUseError(
            "a session holds what its process has compiled, and cannot be pickled: leave it out of what is saved or "
            "sent to another process, and call enable() there."
        )

    def serve_everywhere(self) -> None:
        """Enter the session in the calling thread, and in each thread that asks for its first backward after this."""
        self.__enter__()  # first: a stack that is made by that must not have it twice
        _EVERYWHERE.append(self)

    def serve_here(self, on: bool) -> None:
        """Have the calling thread start in the session or on eager, after :meth:`serve_everywhere`."""
        thread.here.stack[0] = self if on else None

    @property
    def last(self) -> Outcome | None:
        """The outcome of the last backward; None if there was none."""
        self.count_left()
        return self._latest()

    def _latest(self) -> Outcome | None:
        """Return the last outcome. For a hit of the fast path it is made now, from the structure and the seconds of
        walk and run."""
        last = self._last
        if not isinstance(last, tuple):
            return last
        graph, capture, run = last
        outcome = Outcome(HIT, graph, (), {"capture": capture, "run": run})
        if self._last is last:  # else another thread's backward came after it
            self._last = outcome
        return outcome

    def stats(self) -> Stats:
        """A copy of the counts so far."""
        self.count_left()
        with _RECORDING:
            return self._stats.copy()

    @property
    def own_loop(self) -> str:
        """``"on"`` if the own loop runs bypasses whose tape allows it; else the reason why not."""
        return OWN_LOOPS.state(self.settings)

    @property
    def native(self) -> str:
        """``"on"`` if hits run with the extension in C++; else ``"off: "`` and the reason."""
        if self.settings.native is False:
            return "off: extension='off'"
        library = Library.LATEST
        reason = why_unsupported() or "it was not looked for yet" if library is None else library.reason
        return f"off: {reason}" if reason else "on"

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until nothing is being compiled in the background.

        Args:
            timeout: seconds; None for as long as it takes.

        Returns:
            False where it took longer.
        """
        return QUEUE.wait(timeout)

    def graphs(self) -> list[CompiledGraph]:
        """Return the structures that this session captured or compiled, in the order in which it met them.

        Structures that the process has evicted since are not among them, see :data:`graphs.MAX_STRUCTURES`.
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
        from ..report.session_report import session_report
        from ..shadow_cache.report import page

        stats, events, hits, graphs = self._all()
        summary = Summary.of(stats, events, graphs, self.settings)
        return page.write(session_report(summary, events, self._steps.left_out, hits, graphs, self.settings), path)

    def trace(self, path: str | os.PathLike[str]) -> Path:
        """Write the session's times so far as a trace that https://ui.perfetto.dev and ``chrome://tracing`` open.

        Each backward is a slice with its outcome and reasons; the seconds of its stages are slices inside it: the walk
        of the tape (``capture``), tracing, compiling, loading, comparing, and the whole ``run``. Background compiles
        have a track of their own. The trace has the last 2048 hits, but no hit that is a session's first backward.

        Takes, returns and raises what :meth:`report` does.
        """
        from ..report.trace import trace_of
        from ..shadow_cache.report import page

        _, events, hits, graphs = self._all()
        return page.write_file(trace_of(events, hits, list(self._steps.beside), graphs), path)

    def summary(self) -> Summary:
        """Return a summary of the backwards so far: counts, seconds saved and lost, bypasses with reasons, and a next
        step. ``print`` shows it in a few lines. Nothing is run for it."""
        stats, events, _, graphs = self._all()
        return Summary.of(stats, events, graphs, self.settings)

    def metrics(self) -> dict[str, float]:
        """Return the numbers of :meth:`summary` as a flat dict for a training's log, with names such as
        ``compiled_autograd/hits``. ``seconds_saved`` is there once it is known."""
        return self.summary().metrics()

    def _all(self) -> tuple[Stats, list[StepEvent], list[Hit], list[CompiledGraph]]:
        self.count_left()
        with _RECORDING:
            stats, events, latest = self._stats.copy(), self._steps.events(), self._latest()
            hits = hits_in(self.hit_times)
        graphs, last = self.graphs(), None if latest is None else latest.graph
        if last is not None and last not in graphs:  # another session captured it
            graphs.append(last)
        return stats, events, hits, graphs

    def __str__(self) -> str:
        return str(self.summary())

    def __repr__(self) -> str:
        return f"<session with {self.settings.backend_in_mode!r}: {', '.join(self.stats().parts())}>"

    def _repr_html_(self) -> str:
        return preformatted(str(self))

    def compiled_beside(self, graph: CompiledGraph, seconds: float) -> None:
        """Count a compile in the background."""
        self._steps.beside.append(Compile(graph.number, seconds, time.time()))

    def left_to_eager(self, verdict: Bypass, seconds: float | None = None) -> None:
        """Count a backward that was left to eager, as :meth:`record` does. Those that follow are counted in
        ``left.count``, as long as the log does not want to know of them, and nothing else comes between: the next
        one that is looked at does.

        Args:
            seconds: what the eager engine took; None if it was not timed.
        """
        if is_told_at(INFO):
            self.record(Outcome(BYPASS, reasons=(verdict,), seconds={} if seconds is None else {"run": seconds}))
            return
        left = self.left
        if left is not None and left.verdict is verdict:  # no call before it is counted: see record
            left.count += 1
            if seconds is not None:
                left.timed, left.last, left.seconds = left.count, seconds, left.seconds + seconds
                left.times += 1
            return
        first = LeftToEager(verdict)
        if seconds is not None:
            first.timed = first.times = 1
            first.last = first.seconds = seconds
        with _RECORDING:
            while True:  # no condition ends a loop in here: Ctrl-C would find a way past the lock on 3.12 and 3.13
                if self.left is None:  # no call after that: what ``gc`` runs may leave some too
                    self.left = first
                    return
                self.count_left()

    def in_own_loop(self) -> None:
        """Count a bypass that the own loop runs."""
        with _RECORDING:
            self._stats.own_loop += 1

    def count_left(self) -> None:
        """Have those among the counts that :meth:`left_to_eager` was told of."""
        if self.left is None:
            return
        with _RECORDING:
            if (left := self.left) is None:
                return
            last = {"run": left.last} if left.timed == left.count else {}
            outcome = Outcome(BYPASS, reasons=(left.verdict,), seconds=last)
            stats, label, seconds = self._stats, left.verdict.label, {"run": left.seconds} if left.timed else {}
            if label != TUNING:
                stats.bypasses.setdefault(label, 0)
            if self.left is not left:  # what ``gc`` runs has counted it
                return
            self.left = None  # no call until all is counted: see record
            if label == TUNING:
                stats.tuning += left.count
            else:
                stats.bypasses[label] += left.count
            stats.backwards += left.count
            self._last = outcome
            self._steps.add(stats.backwards, BYPASS, None, (left.verdict,), seconds, 0, 0, left.count, left.times)

    def record(self, outcome: Outcome, captured: bool = False, compiles: int = 0, loads: int = 0) -> None:
        """Count one backward."""
        if self.left is not None:
            self.count_left()
        failures = [reason for reason in outcome.reasons if isinstance(reason, Failure)] if outcome.reasons else ()
        failed, kind = len(failures), outcome.outcome
        seconds = outcome.seconds.get("lower", 0.0) + outcome.seconds.get("compile", 0.0)
        label = outcome.reasons[0].label if kind == BYPASS and isinstance(outcome.reasons[0], Bypass) else ""
        with _RECORDING:
            stats = self._stats
            if label and label != TUNING:
                stats.bypasses.setdefault(label, 0)
            # No call from here on: Ctrl-C finds all of a backward counted, or nothing of it.
            if kind == HIT:
                stats.hits += 1
            elif kind == SHAPE_MISS:
                stats.shape_misses += 1
            elif kind == STRUCTURE_MISS:
                stats.structure_misses += 1
            elif label == TUNING:
                stats.tuning += 1
            else:
                stats.bypasses[label] += 1
            stats.backwards += 1
            stats.captures += captured
            stats.compiles += compiles
            stats.loads += loads
            stats.failures += failed
            stats.compile_seconds += seconds
            self._last = outcome
            if outcome.graph is not None and (captured or outcome.outcome != HIT):
                self._graphs.setdefault(id(outcome.graph), outcome.graph)
        tell(outcome.outcome, outcome.reasons, outcome.seconds, compiles)
        if not compiles and not outcome.reasons:
            self.hit_times = keep_hit(self.hit_times, stats.backwards, outcome.seconds)
            return
        with _RECORDING:
            self._steps.add(stats.backwards, kind, outcome.graph, outcome.reasons, outcome.seconds, compiles, loads)
        if compiles:
            count_repeats(self._missed, outcome.reasons)
        for failure in failures:
            warn_of(failure)


_IDLE = (
    "a session ended that saw no backward. Call backward() or torch.autograd.grad() inside `with enable():`, in the "
    "thread that entered it; a forward alone needs no session."
)


class Disabled:
    """A context manager in which every ``backward`` runs on the eager engine, uncounted."""

    def __enter__(self) -> None:
        thread.here.stack.append(None)

    def __exit__(self, *exception: object) -> None:
        _leave(None)


class _Thread(threading.local):
    here = OfThread(lambda: Here(_EVERYWHERE))


thread = _Thread()
PROCESS.register(thread, reset=lambda: thread.here.skip_none())


def _leave(session: Session | None) -> None:
    """Take the innermost entry of ``session`` away, whatever was entered after it."""
    stack = thread.here.stack
    position = max(index for index, entry in enumerate(stack) if entry is session)
    del stack[position]


def current() -> Session | None:
    """Return the session of the calling thread; None outside of sessions, and inside ``disable``."""
    stack = thread.here.stack
    return stack[-1] if stack else None
