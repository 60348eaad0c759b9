"""The first lines of a report: whether compiling pays, what it cost, and what to do next."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ..cache.variants import Variant
from ..settings import Settings
from ..shadow_cache import Bypass, Miss
from ..shadow_cache.amounts import plural, seconds
from ..shadow_cache.miss_kinds import NO_MISSES, explain
from ..shadow_cache.report import data
from .step_log import Hit, StepEvent

_EXPECTED = ("first_seen", "evicted")
"""Kinds of misses that nobody can do anything about."""
_REPEATED = 3
"""The number of misses of one kind from which on it is what to look into."""


class Worth(NamedTuple):
    """The hits of timed variants: the seconds that eager would have taken and those that they took, by the medians of
    the trials. ``slower`` variants go on eager."""

    eager: float
    compiled: float
    timed: int
    slower: int


def worth_of(variants: Iterable[Variant]) -> Worth:
    """What hits were worth, as far as ``tune`` has timed them."""
    timed = [(each.hits, each.timing) for each in variants if each.timing is not None]
    served = [(hits, timing) for hits, timing in timed if not timing.on_eager]
    return Worth(
        sum(hits * timing.eager for hits, timing in served) / 1e3,
        sum(hits * timing.compiled for hits, timing in served) / 1e3,
        len(timed),
        len(timed) - len(served),
    )


def verdict(
    stats: Mapping[str, Any],
    variants: Sequence[Variant],
    events: Sequence[StepEvent],
    left_out: int,
    hits: Sequence[Hit],
    settings: Settings,
) -> data.Verdict:
    """What a session came to. The arguments are those of :func:`session_report.session_report`."""
    if not stats["backwards"]:
        return data.Verdict(
            "No backward has run in this session.",
            "call backward inside the session's `with` block, in the same thread.",
        )
    spent = stats["compile_seconds"]
    beside = " beside the training" if settings.on_miss == "background" else ""
    cost = f"{seconds(spent)} compiling{beside}" if stats["compiles"] else "nothing compiled"
    if stats["loads"]:
        cost += f", {plural(stats['loads'], 'region')} loaded from disk"
    parts = [f"{_gain(worth_of(variants), stats, hits, settings)}, {cost}"]
    misses = stats["shape_misses"] + stats["structure_misses"]
    where = "explained below" if not left_out else "the last ones below"
    parts.append(f"{plural(misses, 'miss', 'misses')}, {where if misses == 1 or left_out else 'all ' + where}")
    if not misses:
        parts[-1] = "no misses"
    if bypassed := stats["bypasses"]:
        first = max(bypassed, key=lambda label: bypassed[label])
        parts.append(f"{sum(bypassed.values()):,} left to eager ({first}{' and others' if len(bypassed) > 1 else ''})")
    text = "; ".join(parts)
    return data.Verdict(f"{text[:1].upper()}{text[1:]}.", _next(stats, variants, events, settings))


def _gain(worth: Worth, stats: Mapping[str, Any], hits: Sequence[Hit], settings: Settings) -> str:
    if worth.eager:
        saved = worth.eager - worth.compiled
        ratio = worth.compiled / worth.eager
        return f"backward {ratio:.2f} of eager's, {seconds(abs(saved))} {'saved' if saved >= 0 else 'lost'}"
    if worth.slower:
        return "eager is faster here, and goes on: nothing saved"
    took = f"a hit takes {seconds(statistics.median(each.capture + each.run for each in hits))}, " if hits else ""
    why = "it was not timed yet" if settings.tune else "tune=False does not time it"
    return f"{took}eager's time is not known ({why})" if stats["hits"] else f"eager's time is not known ({why})"


def _next(
    stats: Mapping[str, Any], variants: Sequence[Variant], events: Sequence[StepEvent], settings: Settings
) -> str:
    """The one thing to do, the gravest first."""
    if stats["failures"]:
        return "see what failed below, and report it: gradients are right, but a slower way was taken."
    ((label, count),) = Counter[str](stats["bypasses"]).most_common(1) or [("", 0)]
    if 2 * count > stats["backwards"]:
        return _about_bypass(label, events)
    kinds = Counter(each.kind for event in events for each in event.reasons if isinstance(each, Miss))
    repeated = [(kind, times) for kind, times in kinds.most_common() if kind not in _EXPECTED and times >= _REPEATED]
    if repeated:
        kind, times = repeated[0]
        return f"{times:,} misses are of the kind {kind}. {explain(kind).do}"
    if not settings.tune:
        return "leave `tune` on to know what hits save."
    if not any(each.timing for each in variants):
        return "train on: after some hits they are timed against eager."
    return "nothing: train on."


def _about_bypass(label: str, events: Sequence[StepEvent]) -> str:
    for event in reversed(events):
        reason = event.reasons[0] if event.reasons else None
        if isinstance(reason, Bypass) and reason.label == label:
            kind = NO_MISSES.get(reason.kind)
            return f"see why most go to eager: {reason}." if kind is None else f"{kind.do[:1].lower()}{kind.do[1:]}"
    return f"see why most go to eager: {label}."
