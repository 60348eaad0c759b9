"""A session in a few lines for a person, and as numbers for a training's log."""

from __future__ import annotations

import contextlib
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..cache.graphs import CompiledGraph
from ..outcomes import TUNING, Stats
from ..process_state import PROCESS
from ..settings import Settings
from ..shadow_cache import Bypass
from ..shadow_cache.amounts import plural, seconds
from ..shadow_cache.safe_text import harmless, preformatted
from .step_log import StepEvent
from .verdict import label_of, what_next, worth_of


@dataclass(frozen=True, slots=True)
class Summary:
    """A session so far. ``print`` shows it in a few lines.

    Attributes:
        stats: the counts.
        seconds_saved: seconds that the hits took less than eager would have; negative where they took longer. None
            where no backward of such a tape was timed on eager.
        seconds_spent: seconds that steps waited for compiling, for the store on disk and for comparisons. With
            ``on_miss="background"`` most compiling is beside the steps, and not in it.
        timed: the number of compiled variants that are in ``seconds_saved``; ``variants``, of all.
        compiled_since: the first backward, from 1 on, from which each one was a hit or timed for ``tune``; None where
            the last one was neither.
        left_to_eager: for each reason how many backwards, the most first; and for each label what can be done about it,
            as far as that is known, in ``hints``.
        worth: whether compiling pays, in words.
        next: what to do next.
    """

    stats: Stats
    seconds_saved: float | None
    seconds_spent: float
    timed: int
    variants: int
    compiled_since: int | None
    left_to_eager: dict[str, int]
    hints: dict[str, str]
    worth: str
    next: str

    @staticmethod
    def of(stats: Stats, events: Sequence[StepEvent], graphs: Sequence[CompiledGraph], settings: Settings) -> Summary:
        """Sum up what a session has; microseconds for each structure and event.

        Args:
            events: its steps that were more than a hit, oldest first.
        """
        variants = [variant for graph in graphs for variant in graph.variants]
        worth = worth_of(variants, events, stats.hits)
        waited = sum(event.seconds.get(stage, 0.0) for event in events for stage in ("load", "prove"))
        spent = waited + (stats.compile_seconds if settings.on_miss != "background" else 0.0)
        last = max((event.number for event in events if not _is_steady(event)), default=0)
        reasons = [reason for event in events for reason in event.reasons if isinstance(reason, Bypass)]
        return Summary(
            stats,
            worth.saved,
            spent,
            worth.timed,
            worth.variants,
            last + 1 if last < stats.backwards else None,
            dict(sorted(stats.bypasses.items(), key=lambda item: (-item[1], item[0]))),
            {reason.label: reason.hint for reason in reasons},
            worth.text(settings),
            what_next(stats, worth, spent, events, settings),
        )

    @property
    def line(self) -> str:
        """All of it in one line."""
        return f"compiled_autograd: {self.stats!r}" + (f"; {self.worth}" if self.stats.backwards else "")

    def __str__(self) -> str:
        stats = self.stats
        since = "" if self.compiled_since is None else f"; all hits since backward {self.compiled_since:,}"
        loaded = f", {stats.loads:,} loaded" if stats.loads else ""
        lines = [f"compiled_autograd: {', '.join(stats.parts())}"]
        lines += [f"  compiled  {plural(stats.compiles, 'region')}{loaded}{since if stats.hits else ''}"]
        lines += [f"  time      {self.worth}; steps waited {seconds(self.seconds_spent)} for compiling"]
        for label, count in self.left_to_eager.items():
            hint = self.hints.get(label, "")
            lines.append(f"  on eager  {count:,} {label}" + (f": {hint}" if hint else ""))
        if stats.failures:
            lines.append(f"  failed    {plural(stats.failures, 'time')}, with right gradients: session.last.reasons")
        return "\n".join(map(harmless, [*lines, f"  next      {self.next}"]))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return preformatted(str(self))

    def metrics(self) -> dict[str, float]:
        """Return the numbers by name. What is unknown is left out."""
        stats = self.stats
        found: dict[str, float] = {
            "backwards": stats.backwards,
            "hits": stats.hits,
            "misses": stats.shape_misses + stats.structure_misses,
            "left_to_eager": sum(stats.bypasses.values()),
            "tuning": stats.tuning,
            "compiles": stats.compiles,
            "loads": stats.loads,
            "failures": stats.failures,
            "compile_seconds": stats.compile_seconds,
            "seconds_spent": self.seconds_spent,
        }
        if self.seconds_saved is not None:
            found["seconds_saved"] = self.seconds_saved
        return {f"compiled_autograd/{name}": value for name, value in found.items()}


def _is_steady(event: StepEvent) -> bool:
    """Return whether nothing was missing: something failed beside a hit, or it is timed."""
    return event.outcome == "hit" or label_of(event) == TUNING


class AtExit:
    """Summaries that are printed when the process ends: of the sessions that began last."""

    def __init__(self) -> None:
        self._sessions: deque[Callable[[], Summary]] = deque(maxlen=16)
        self._registered = False

    def add(self, summary: Callable[[], Summary]) -> None:
        """Print a summary at the end, if a backward was counted by then."""
        if not self._registered:
            import atexit

            self._registered = True
            atexit.register(self._print)
        self._sessions.append(summary)

    def forget(self) -> None:
        """Print none of those so far: they are the parent's."""
        self._sessions.clear()

    def _print(self) -> None:
        for summary in self._sessions:
            found = summary()
            if found.stats.backwards:
                with contextlib.suppress(OSError, ValueError):  # stderr may be closed
                    print(found, file=sys.stderr)  # noqa: T201  it was asked for


AT_EXIT = AtExit()
PROCESS.register(AT_EXIT, restart=AT_EXIT.forget, after_fork=AT_EXIT.forget)
