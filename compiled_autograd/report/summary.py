"""A session in a few lines for a person, and as numbers for a training's log."""

from __future__ import annotations

import contextlib
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..cache.graphs import CompiledGraph
from ..cache.variants import Variant
from ..outcomes import BYPASS, TUNING, Stats
from ..process_state import PROCESS
from ..settings import Settings
from ..shadow_cache import Bypass
from ..shadow_cache.amounts import plural, seconds
from ..shadow_cache.safe_text import harmless, preformatted
from .step_log import StepEvent

_SAME_TAPE = frozenset({TUNING, "compiling"})
"""Bypasses of a tape that hits as well."""
_OFTEN = 0.1
"""From this part of all backwards on, backwards that were left to eager are what to look into."""


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
    next: str

    @staticmethod
    def of(stats: Stats, events: Sequence[StepEvent], graphs: Sequence[CompiledGraph], settings: Settings) -> Summary:
        """Sum up what a session has; microseconds for each structure and event.

        Args:
            events: its steps that were more than a hit, oldest first.
        """
        variants = [variant for graph in graphs for variant in graph.variants]
        saved = [each for each in (_saved(variant, events, variants) for variant in variants) if each is not None]
        hits = sum(variant.hits for variant in variants)  # of all sessions
        part = min(1.0, stats.hits / hits) if hits else 1.0
        waited = sum(event.seconds.get(stage, 0.0) for event in events for stage in ("load", "prove"))
        last = max((event.number for event in events if not _is_steady(event)), default=0)
        reasons = [reason for event in events for reason in event.reasons if isinstance(reason, Bypass)]
        found = Summary(
            stats,
            part * sum(saved) if saved else None,
            stats.compile_seconds + waited,
            len(saved),
            len(variants),
            last + 1 if last < stats.backwards else None,
            dict(sorted(stats.bypasses.items(), key=lambda item: (-item[1], item[0]))),
            {reason.label: reason.hint for reason in reasons},
            "",
        )
        object.__setattr__(found, "next", _next(found, settings))
        return found

    @property
    def line(self) -> str:
        """All of it in one line."""
        stats, spent = self.stats, f"{plural(self.stats.compiles, 'region')} compiled in "
        left = [f"{count:,} left to eager ({reason})" for reason, count in self.left_to_eager.items()]
        spent += f"{stats.compile_seconds:.1f} s" + (f", {stats.loads:,} loaded" if stats.loads else "")
        return "; ".join([f"compiled_autograd: {', '.join([*stats.parts(), *left])}", spent, self._worth()])

    def _worth(self) -> str:
        saved = self.seconds_saved
        if saved is None:
            return "seconds saved unknown: not timed against eager yet"
        text = f"{abs(saved):.1f} s of backward {'saved' if saved >= 0 else 'lost'} by hits"
        some = f" ({self.timed} of {self.variants} variants were timed)" if self.timed < self.variants else ""
        return text + some

    def __str__(self) -> str:
        stats = self.stats
        since = "" if self.compiled_since is None else f"; all hits since backward {self.compiled_since:,}"
        loaded = f", {stats.loads:,} loaded" if stats.loads else ""
        lines = [f"compiled_autograd: {', '.join(stats.parts())}"]
        lines += [f"  compiled  {plural(stats.compiles, 'region')}{loaded}{since if stats.hits else ''}"]
        lines += [f"  time      {self._worth()}; {seconds(self.seconds_spent)} spent compiling and comparing"]
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


def _saved(variant: Variant, events: Sequence[StepEvent], variants: Sequence[Variant]) -> float | None:
    """Return the seconds that the hits of a variant have saved; None where eager's time is not known."""
    if variant.timing is not None:
        return variant.hits * (variant.timing.eager - variant.timing.compiled) / 1e3
    on_eager = [event for event in events if event.timed and event.outcome == BYPASS and _label(event) in _SAME_TAPE]
    timed = sum(event.timed for event in on_eager)
    if not timed or len(variants) > 1:  # such a backward may be of another tape
        return None
    return variant.hits * sum(event.seconds["run"] for event in on_eager) / timed - variant.ran


def _label(event: StepEvent) -> str:
    reason = event.reasons[0] if event.reasons else None
    return reason.label if isinstance(reason, Bypass) else ""


def _is_steady(event: StepEvent) -> bool:
    """Return whether nothing was missing: something failed beside a hit, or it is timed."""
    return event.outcome == "hit" or _label(event) == TUNING


def _next(found: Summary, settings: Settings) -> str:
    """Say what to do next, for the largest thing that is wrong."""
    stats = found.stats
    left = sum(stats.bypasses.values())
    if not stats.backwards:
        return "call backward() inside the session"
    if not settings.may_compile:
        return "install a tested torch, or set untested_torch='try'"
    if stats.failures:
        return "report the failure: shadow-cache env says what a report needs"
    if left > _OFTEN * stats.backwards:
        most = next(iter(found.left_to_eager))
        if most == "not_worth_it":
            return "leave these backwards to eager: it is the faster one here"
        return f"look up {most!r} in docs/bypasses.md"
    if found.seconds_saved is not None and found.seconds_saved < 0:
        return "leave this model to eager, or try backend='inductor'; session.report(path) shows where the time goes"
    misses = stats.shape_misses + stats.structure_misses
    if misses > max(2, _OFTEN * stats.backwards):
        what = "shapes change: dynamic=True" if stats.shape_misses > stats.structure_misses else "tapes differ"
        return f"{what}; session.report(path) and shadow-cache why show how"
    if found.seconds_saved is None:
        return "run on: hits are timed against eager" if settings.tune else "set tune=True to have hits timed"
    if found.seconds_saved < found.seconds_spent and settings.cache_dir is not False:
        return "run on, or again: what was compiled is on disk, and a second run starts with it"
    return "nothing"


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
