"""The answers of a session: whether compiling pays, and what to do next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from ..backends.modes import WITH_MODES
from ..cache.variants import Variant
from ..outcomes import BYPASS, TUNING, Stats
from ..settings import Settings
from ..shadow_cache import Bypass, Miss
from ..shadow_cache.amounts import seconds
from ..shadow_cache.miss_kinds import NO_MISSES, explain
from .step_log import StepEvent

_COMPILING, _NOT_YET = "compiling", "not_yet"
_SAME_TAPE = frozenset({TUNING, _COMPILING})
"""Bypasses of a tape that hits as well."""
_OFTEN = 0.1
"""The part of all backwards from which on misses of a kind, or backwards on eager, are what to look into."""


class Worth(NamedTuple):
    """The worth of a session's hits.

    Attributes:
        eager, compiled: seconds that eager would have taken for these hits, and seconds that they took.
        timed, slower: the number of variants in these seconds, and of those that go on on eager.
        variants: the number of all variants.
    """

    eager: float
    compiled: float
    timed: int
    slower: int
    variants: int

    @property
    def saved(self) -> float | None:
        """Seconds saved; negative where hits took longer, None where eager's time is not known."""
        return self.eager - self.compiled if self.timed else None

    def text(self, settings: Settings) -> str:
        """Say it, as a part of a sentence."""
        ratio = ""
        if self.variants and self.timed == self.slower == self.variants:
            ratio = "eager is faster, and is used from now on"
        if self.saved is None or not self.eager:
            why = "not timed yet" if settings.tune else "tune=False does not time it"
            return ratio or f"eager's time is not known ({why})"
        ratio = ratio or f"backward {self.compiled / self.eager:.2f} of eager's"
        some = f" ({self.timed} of {self.variants} variants were timed)" if self.timed < self.variants else ""
        return f"{ratio}, {seconds(abs(self.saved))} {'saved' if self.saved >= 0 else 'lost'}{some}"


def worth_of(variants: Sequence[Variant], events: Sequence[StepEvent], hits: int) -> Worth:
    """Return what the hits of a session were worth: by the means of trials, or by what eager was timed for.

    Args:
        hits: those of the session; the variants have those of all sessions.
    """
    on_eager = [each for each in events if each.timed and each.outcome == BYPASS and label_of(each) in _SAME_TAPE]
    times = sum(each.timed for each in on_eager)
    all_hits = sum(each.hits for each in variants)
    part = min(1.0, hits / all_hits) if all_hits else 1.0
    eager = compiled = 0.0
    timed = slower = 0
    for each in variants:
        if each.timing is not None:
            eager, compiled = (
                eager + each.hits * each.timing.eager / 1e3,
                compiled + each.hits * each.timing.compiled / 1e3,
            )
            slower += each.timing.on_eager
        elif times and len(variants) == 1:  # else such a backward may be of another tape
            eager, compiled = each.hits * sum(event.seconds["run"] for event in on_eager) / times, each.ran
        else:
            continue
        timed += 1
    return Worth(part * eager, part * compiled, timed, slower, len(variants))


def label_of(event: StepEvent) -> str:
    """Return the label of a bypass; empty for what is none."""
    reason = event.reasons[0] if event.reasons else None
    return reason.label if isinstance(reason, Bypass) else ""


def what_next(stats: Stats, worth: Worth, spent: float, events: Sequence[StepEvent], settings: Settings) -> str:
    """Return the one thing to do next, for the gravest that is wrong; ``spent`` is in seconds."""
    if not stats.backwards:
        return "call backward() inside the session's `with` block, in the thread that entered it"
    if settings.turned_off:
        return "remove COMPILED_AUTOGRAD=0 from the environment"
    if not settings.may_compile:
        return "install a tested torch, or set untested_torch='try'"
    if stats.failures:
        return "report what failed: gradients are right, but a slower way was taken; see `shadow-cache env`"
    ((most, _),) = Counter(stats.bypasses).most_common(1) or [("", 0)]
    if most in (_COMPILING, _NOT_YET) and _COMPILING in stats.bypasses and not stats.hits:
        return "run on: compiling has not ended yet"
    left = Counter({label: count for label, count in stats.bypasses.items() if label != _COMPILING})
    if stats.hits:  # those before the first compile of what hits now
        del left[_NOT_YET]
    if left.total() > _OFTEN * stats.backwards:
        ((label, _),) = left.most_common(1)
        kind = NO_MISSES.get(label)
        return f"look up {label!r} in docs/bypasses.md" if kind is None else f"{kind.do[:1].lower()}{kind.do[1:-1]}"
    kinds = Counter(each.kind for event in events for each in event.reasons if isinstance(each, Miss))
    ((miss, count),) = kinds.most_common(1) or [("", 0)]
    if count > max(2, _OFTEN * stats.backwards):
        return f"{count:,} misses are of the kind {miss}. {explain(miss).do[:-1]}"
    if worth.saved is None:
        return "run on: hits are timed against eager" if settings.tune else "set tune=True to have hits timed"
    if worth.saved < 0:
        other = "" if settings.backend == WITH_MODES else f", or try backend={WITH_MODES!r}"
        return f"leave this model to eager{other}; session.report(path) shows where the time goes"
    if worth.saved < spent and settings.cache_dir is not False:
        return "run on, or again: what was compiled is on disk, and a second run starts with it"
    return "nothing"
