"""From the turns and the counts of a session to an answer with its reason."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np

from ..compiling.queue import QUEUE
from ..engine.session import Session
from ..outcomes import Stats
from ..shadow_cache.amounts import plural
from .backward_times import BackwardTimes
from .result import Comparison
from .turns import Turns

_SMALL = 0.2
"""A backward that takes less than this part of a step hardly matters to it."""
PROFILED_STEPS = 2
"""Steps on eager that say what a backward consists of."""
_MISSED = 0.1
"""With more misses than this part of the backwards, nothing is worth it."""


class Watch:
    """Sees by the counts of a session whether a step was like the ones to come."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._before = self._of(session.stats())
        self._at_start: Stats | None = None
        self._has_begun = False

    @staticmethod
    def _of(stats: Stats) -> tuple[int, ...]:
        missed = stats.shape_misses + stats.structure_misses
        left = sum(stats.bypasses.get(kind, 0) for kind in ("not_yet", "compiling"))
        return missed, stats.compiles, stats.loads, stats.tuning, left

    def is_calm(self) -> bool:
        """Return whether nothing was captured, compiled, loaded or timed since this was last asked, or is now."""
        stats = self._session.stats()
        now, before = self._of(stats), self._before
        self._before = now
        if not self._has_begun:
            self._at_start = stats
        return now == before and not QUEUE.busy

    def is_compiling(self) -> bool:
        """Return whether something is being compiled in the background; asked once the turns have begun."""
        self._has_begun = True
        return QUEUE.busy

    def since_settled(self) -> tuple[int, int, Counter[str]]:
        """Return the numbers of hits, of misses, and of each bypass since the turns began."""
        now, then = self._session.stats(), self._at_start or Stats()
        missed = now.shape_misses + now.structure_misses - then.shape_misses - then.structure_misses
        return now.hits - then.hits, missed, Counter(now.bypasses) - Counter(then.bypasses)


def answer(
    session: Session, turns: Turns, times: BackwardTimes, watch: Watch, hints: tuple[str, ...] = ()
) -> Comparison:
    """Return the answer that the turns so far allow."""
    stats, settings = session.stats(), session.settings
    beside = settings.on_miss == "background"
    if not turns.pairs or (times.count and times.stepping not in (None, *times.threads)):
        return Comparison(False, compile_seconds=stats.compile_seconds, beside=beside, reason=_unmeasured(turns, times))
    ratio, (low, high) = float(np.median(turns.step_ratios())), turns.step_interval()
    worth_it = high < 1 and not _keeps_missing(watch)
    eager = float(np.median([block.step for block, _ in turns.pairs]))
    return Comparison(
        worth_it=worth_it,
        step_ratio=ratio,
        step_interval=(low, high),
        backward_ratio=turns.backward_ratio(),
        compile_seconds=stats.compile_seconds,
        beside=beside,
        stored=settings.cache_dir is not False and bool(stats.compiles + stats.loads),
        paid_back_after=math.ceil(stats.compile_seconds / (eager * (1 - ratio))) if worth_it else None,
        reason="" if worth_it else _why_not(turns, times, watch),
        hints=hints,
    )


def _unmeasured(turns: Turns, times: BackwardTimes) -> str:
    if not times.count:
        return "no backward ran in this process"
    if not turns.count:
        return (
            f"{plural(times.count, 'backward')} ran, but the steps were not found: no optimizer of torch.optim stepped"
        )
    if times.stepping not in (None, *times.threads):
        return "backwards run in other threads than the steps, in which the sides are switched"
    if turns.is_settling:
        return f"after {plural(turns.count, 'step')} there was still something new to compile"
    return f"it ended after {plural(turns.count, 'step')}, before both sides had their turns"


def depends_on_products(turns: Turns, watch: Watch) -> bool:
    """Return whether the backwards ran compiled and were not faster: what they consist of is the reason then."""
    hits, missed, bypasses = watch.since_settled()
    return bool(turns.pairs) and turns.step_interval()[1] >= 1 and hits > missed + bypasses.total()


def _keeps_missing(watch: Watch) -> bool:
    """Return whether more misses come than the lower quartile of the steps would show."""
    hits, missed, bypasses = watch.since_settled()
    return missed > _MISSED * (hits + missed + bypasses.total())


def _why_not(turns: Turns, times: BackwardTimes, watch: Watch) -> str:
    hits, missed, bypasses = watch.since_settled()
    total = hits + missed + bypasses.total()
    if not total:
        return "backwards ran in an enable() or disable() of the program's own" if times.count else "no backward ran"
    if bypasses.total() > total / 2:
        label, _ = bypasses.most_common(1)[0]
        if label == "not_worth_it":
            return "compiled backwards were timed, and eager's are as fast"
        return f"{bypasses.total() / total:.2f} of the backwards were left to eager ({label})"
    if _keeps_missing(watch):
        return f"{missed / total:.2f} of the backwards had a new structure or new shapes"
    share = float(np.median([eager.backward / max(eager.step, 1e-9) for eager, _ in turns.pairs]))
    if times.is_timed and share < _SMALL:
        return f"the backward is only {share:.2f} of a step"
    if times.share_of_products() > 0.5:
        return f"{times.share_of_products():.2f} of the backward is matrix products and convolutions"
    low, high = turns.step_interval()
    if low < 1 < high and high - low > 0.04:
        return f"the figures were not sure after {turns.spent:.0f} s"
    return "compiled backwards take as long as eager's"
