"""Decides whether a backward runs compiled or on the eager engine, and whether code is compiled for it.

Each tape has a record, found by a peek at its first nodes and by the settings. ``next_action`` in :mod:`decision`
decides about each backward, and nothing else does::

    new ---> compiling ---> timing ---> compiled
     |                       |  ^
     v                       v  |
    refused                 eager

- ``new``: there is no code.
- ``compiling``: it is being compiled beside the training, and runs on eager meanwhile.
- ``timing``: the clock compares compiled backwards with eager ones, which alternate.
- ``compiled``: the code serves.
- ``eager``: eager is faster, or a compile has not been worth its cost so far.
- ``refused``: the tape cannot be captured, or not be checked.

After some backwards in ``eager`` or ``refused`` there is another try. Their number doubles with each failure. A miss
(a backward for which there is no code) leads to a compile by the same rules in any state.

Under deterministic algorithms the clock decides nothing, since it would decide how gradients are rounded: no tape is
timed, and each compile, hit and miss counts as one second.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
import time
import weakref
from collections.abc import Callable, Hashable

from ..cache.variants import Variant
from ..diagnostics.bypass import COMPILING, NOT_YET, OVER_BUDGET, settings_change
from ..diagnostics.node_names import title
from ..diagnostics.reporting import tell_decision, warn_once
from ..outcomes import TUNING
from ..process_state import PROCESS
from ..settings import Settings
from ..shadow_cache import Bypass, Miss, Timing
from .clock import log_mean, row_of
from .decision import Action, Balance, Decision, Record, State, by_clock, next_action, waits

FIRST_SECONDS = 2.0
"""Likely seconds of the first compile, which imports the backend. Later ones are likely to take as long as the latest
ones."""
BESIDE = 0.25
"""Part of the seconds of a compile beside the training that the training loses."""
SECONDS, SHARE = 30.0, 0.05
"""Seconds that compiles may lose in any case, and part of the seconds since the start that is added."""
SAMPLES, MOST_SAMPLES = 24, 192
"""Minimum and maximum number of backwards timed each way. Sizes that vary need more than the minimum."""
ROWS = (5, 3, 7, 4, 8)
"""Timed backwards in a row one way, then the other way, and so on. The first of a row does not count, since it finds
the other way's data in the caches. The numbers differ, so that rows and sizes that alternate get out of step."""
WORTH = 1.02
"""Maximum time of a compiled backward by eager's: below, clocks tell nothing."""
REST = 256
"""Backwards on eager until another try, where a try costs several backwards: after a trial, and after gradients that
were all zero or hooks that came late."""
LEFT_UNSAID = 8
"""Misses left to eager over the budget before the warning."""
_MAX_RECORDS, _MAX_NUMBERS, _LATEST = 4096, 1024, 8
_TIMED_ON = frozenset({"cpu", "cuda"})
NOT_WORTH_IT = "not_worth_it"
TIMED = Bypass(TUNING, hint="run on eager to time it against the compiled graph; tune=False turns this off")


class Ledger:
    """The records of the process.

    Attributes:
        watched: the records of tapes that must be recognised before the walk, by key.
        clock: seconds of wall clock.
        has_other_keys: some records have keys that were made without the extension.
    """

    def __init__(self) -> None:
        self.has_other_keys = False
        self.clock: Callable[[], float] = time.monotonic
        self.watched: dict[Hashable, Record] = {}
        self._records: dict[Hashable, Record] = {}
        self._costly: dict[Record, None] = {}  # those that compiles were spent on: a few of thousands
        self._numbers: dict[Hashable, int] = {}
        self._next_number = itertools.count(1)
        self._costs: list[float] = []
        self.clear()

    def clear(self) -> None:
        """Forget all, and begin anew."""
        for record in [*self.watched.values()]:
            record.reason = None  # threads may hold the record to skip backwards
        self.watched.clear()
        self._records.clear()
        self._costly.clear()
        self._costs.clear()
        self._since = self.clock()
        self._forgotten = 0.0
        self._left, self._has_closed = 0, False

    def number(self, settings: Settings) -> int:
        """Return a number for settings whose sessions share records: settings take long to compare."""
        ways = (settings.on_miss, settings.on_unsupported, settings.tune, settings.check, settings.compile_budget)
        key = (settings.key, ways, settings.own_loop, settings.native is False, settings.cache_dir)
        number = self._numbers.get(key)
        if number is None:
            if len(self._numbers) >= _MAX_NUMBERS:
                self._numbers.clear()
            number = self._numbers[key] = next(self._next_number)
        return number

    def of(self, key: Hashable) -> Record:
        """Return the record with a key, a new one for an unknown tape."""
        record = self._records.get(key)
        if record is None:
            self.has_other_keys |= isinstance(key, tuple)
            if len(self._records) >= _MAX_RECORDS:
                self._forget_some()
            record = self._records[key] = Record(key)
        return record

    def _forget_some(self) -> None:
        """Forget the oldest records without code; if there are none, the oldest."""
        records = sorted([*self._records.values()], key=lambda each: bool(each.living()))
        for oldest in records[: max(1, _MAX_RECORDS // 16)]:
            for table in (self._records, self.watched):
                table.pop(oldest.key, None)
            self._costly.pop(oldest, None)
            self._forgotten += oldest.lost()

    @property
    def has_several_numbers(self) -> bool:
        """True if other settings than a record's may have compiled code for its tape."""
        return len(self._numbers) > 1

    def knows(self, key: Hashable) -> bool:
        """Return whether a record has a key."""
        return key in self._records

    def move(self, key: Hashable, new: Hashable) -> None:
        """Have the record with a key found by another key, which the extension has made. Hits are faster with it, so
        that the tape is timed again."""
        record = self._records.pop(key, None)
        if record is not None:
            record.key, self._records[new] = new, record
            if self.watched.pop(key, None) is not None:
                self.watched[new] = record
            if record.timing is not None and record.state in (State.COMPILED, State.EAGER):
                self._begin_trial(record)

    # ---- questions ----

    def balance(self, settings: Settings) -> Balance:
        """Return the balance for a session with these settings, in some microseconds for each compiled tape."""
        allowed = settings.compile_budget
        if allowed is None:
            allowed = SECONDS + (SHARE * (self.clock() - self._since) if by_clock() else 0.0)
        likely = statistics.median(self._costs) if self._costs else min(FIRST_SECONDS, allowed) or FIRST_SECONDS
        return Balance(self._lost(), likely if by_clock() else 1.0, allowed, waits(settings))

    def decide(self, record: Record, settings: Settings, has_store: bool = False) -> Decision:
        """Decide about a backward for which there is no code: see :func:`next_action`."""
        return next_action(record, self.balance(settings), has_store)

    def closing(self, settings: Settings) -> Miss | None:
        """Return a record for the store if this compile has spent the budget; one for each process."""
        if self._has_closed or not (balance := self.balance(settings)).is_over:
            return None
        self._has_closed = True
        new = f"{balance.lost:.1f} s are lost, and another compile is likely to take {balance.likely:.1f} s"
        allowed = f"{balance.allowed:.1f} s may be lost"
        return Miss("over_budget", "the next new structure", allowed, new, self._counted(balance.lost))

    def _lost(self) -> float:
        return self._forgotten + sum(each.lost() for each in [*self._costly])

    def _counted(self, lost: float) -> str:
        paid = sum(not each.lost() for each in [*self._costly])
        return f"compiling lost {lost:.1f} s on {len(self._costly)} tapes, {paid} of which have made up for it"

    def _warn(self, likely: float) -> None:
        costly = f"A compile is likely to take {likely:.1f} s, which is over the budget"
        why = self._counted(self._lost()) if self._costs else costly
        warn_once(
            f"{why}. From now on, new structures and shapes run on the eager engine unless "
            "they repeat for long (bypass 'over_budget'). If lengths differ, pad to a few lengths or mark them "
            "(torch._dynamo.mark_dynamic). Put ca.disable() around backwards that never repeat. "
            "compile_budget=SECONDS sets how much time may be lost; float('inf') compiles everything.",
            "over_budget",
        )

    # ---- what happened ----

    def missed(self, record: Record, decision: Decision, seconds: float) -> None:
        """Count a miss that eager has run, by a decision. The next ones are left to eager without a walk, until they
        have run for long enough. If there is code, it may serve others of them, and they are tried sooner."""
        self._pays(record, seconds, 1)
        record.owes = decision.owes
        record.asked |= decision.action is Action.ASK
        hits = sum(each.hits for each in record.living())
        if hits > record.hits:
            record.hits = hits
            record.rest.succeed()
        if decision.reason is OVER_BUDGET:
            self._left += 1
            if self._left == LEFT_UNSAID:
                self._warn(decision.owes)
        if record.rent < record.owes and decision.reason is not None:
            self._rest(record, State.EAGER, decision.reason, 0 if record.living() else 1)

    def asked_store(self, record: Record, seconds: float) -> None:
        """Count a search in the store that found nothing."""
        record.asked = True
        self.spent_more(record, seconds)

    def begins(self, record: Record, variant: Variant, job: object) -> None:
        """A region is being compiled beside the training: this job."""
        self._compiles(record, variant)
        record.compiling.add(job)
        self._change(record, State.COMPILING, COMPILING)

    def ended(
        self, record: Record, variant: Variant, job: object, seconds: float, settings: Settings, changed: str = ""
    ) -> None:
        """Count the end of that job after these seconds; 0 if it came to nothing. A second call changes nothing.

        Args:
            changed: names of settings that were changed meanwhile, so that the code was discarded.
        """
        if job not in record.compiling or self._records.get(record.key) is not record:
            return
        record.compiling.discard(job)
        if seconds:
            self._spend(record, BESIDE * seconds)
        if record.compiling:
            return
        if changed:
            self._change(record, State.NEW, None)
            self._rest(record, State.REFUSED, settings_change(changed), REST if seconds else 1)
        else:
            self._serves(record, variant, settings)

    def compiled(self, record: Record, variant: Variant, seconds: float, settings: Settings) -> None:
        """Code was compiled in these seconds, while the step waited."""
        self._spend(record, seconds)
        self.loaded(record, variant, 0.0, settings)

    def loaded(self, record: Record, variant: Variant, seconds: float, settings: Settings) -> None:
        """Code was loaded in these seconds, which say nothing about the next compile; or another tape's code serves."""
        self._compiles(record, variant)
        self.spent_more(record, seconds)
        if not record.compiling:
            self._serves(record, variant, settings)

    def spent(self, record: Record, seconds: float) -> None:
        """A capture or a trace was ended after these seconds, since it took too long."""
        record.misses, record.rent = 0, 0.0
        self._spend(record, seconds)

    def spent_more(self, record: Record, seconds: float) -> None:
        """Seconds were spent on a load, a proof, or a search in the store."""
        self._costs_more(record, seconds if by_clock() else 0.0)

    def refused(self, record: Record, reason: Bypass, is_costly: bool = False) -> None:
        """The tape could not be captured, or not be checked. After a costly try it rests for :data:`REST` backwards."""
        self._rest(record, State.REFUSED, reason, REST if is_costly else 0)

    def hit(self, record: Record, seconds: float) -> None:
        """Count a hit of a tape on trial; the seconds are of the whole backward."""
        if record.state is State.TIMING:
            self._time(record, record.compiled, seconds)

    def ran_on_eager(self, record: Record, reason: Bypass, seconds: float, times: int = 1) -> None:
        """Count backwards that were left to eager for a reason, in seconds each."""
        if reason is TIMED:
            if record.state is State.TIMING:
                self._time(record, record.eager, seconds)
        elif record.state in (State.EAGER, State.REFUSED) and reason is record.reason:
            is_over = record.rest.is_over(times)
            if reason in (NOT_YET, OVER_BUDGET):
                self._pays(record, seconds, times)
                is_over = record.rent >= record.owes or (is_over and bool(record.living()))
            if is_over:
                self._try_again(record)

    def time_again(self) -> None:
        """Time tapes again that were timed: eager has become faster."""
        for record in [*self._records.values()]:
            if record.timing is not None and record.state in (State.COMPILED, State.EAGER):
                self._begin_trial(record)

    def nothing_compiles(self) -> None:
        """Forget compiles that will not end, in a forked child."""
        for record in [*self._records.values()]:
            record.compiling.clear()
            if record.state is State.COMPILING:
                self._change(record, State.NEW, None)

    # ---- changes of state ----

    def _change(self, record: Record, state: State, reason: Bypass | None) -> None:
        record.state, record.reason = state, reason
        if reason is not None or state is State.TIMING:
            self.watched[record.key] = record
        else:
            self.watched.pop(record.key, None)

    def _rest(self, record: Record, state: State, reason: Bypass, least: int = 0) -> None:
        record.rest.fail(least)
        if record.rest.left:
            self._change(record, state, reason)

    @staticmethod
    def _pays(record: Record, seconds: float, times: int) -> None:
        record.misses += times
        record.rent += times * (seconds if by_clock() else 1.0)

    def _try_again(self, record: Record) -> None:
        if record.reason is not None and record.reason.kind == NOT_WORTH_IT and record.living():
            self._begin_trial(record)
        else:
            self._change(record, State.COMPILED if record.living() else State.NEW, None)

    def _compiles(self, record: Record, variant: Variant) -> None:
        """A compile begins."""
        living = record.living()
        if variant not in living:
            record.variants = [*map(weakref.ref, (*living, variant))]
        record.misses, record.rent = 0, 0.0

    def _spend(self, record: Record, seconds: float) -> None:
        cost = seconds if by_clock() else 1.0
        self._costs_more(record, cost)
        self._costs.append(cost)
        del self._costs[:-_LATEST]

    def _costs_more(self, record: Record, cost: float) -> None:
        record.spent += cost
        if cost:
            self._costly[record] = None

    def _serves(self, record: Record, variant: Variant, settings: Settings) -> None:
        """There is code now."""
        if not settings.tune or not by_clock() or variant.devices - _TIMED_ON:
            self._change(record, State.COMPILED, None)
        else:
            self._begin_trial(record)

    def _begin_trial(self, record: Record) -> None:
        record.turn, record.eager, record.compiled = 0, [], []
        self._change(record, State.TIMING, None)

    def _time(self, record: Record, times: list[float], seconds: float) -> None:
        """Count one backward of a trial, and decide if there were enough."""
        if not by_clock():
            self._change(record, State.COMPILED, None)
            return
        if not row_of(record.turn, ROWS)[1]:
            times.append(seconds)
        record.turn += 1
        on_eager, row_ended = row_of(record.turn, ROWS)
        record.reason = TIMED if on_eager else None
        enough = min(len(record.eager), len(record.compiled))
        if enough < SAMPLES or not row_ended:
            return
        (eager, error), (compiled, more) = log_mean(record.eager), log_mean(record.compiled)
        difference = compiled - eager - math.log(WORTH)
        if enough < MOST_SAMPLES and difference**2 < 4.0 * (error + more):  # less than two standard errors
            return
        goes_on = "compiled" if difference <= 0.0 else "eager"
        took = [round(1e3 * math.exp(each), 6) for each in (eager, compiled)]
        self._use(record, Timing(took[0], took[1], enough, time.time(), goes_on))

    def _use(self, record: Record, timing: Timing) -> None:
        """Use the faster way, and tell it."""
        record.timing = timing
        if timing.on_eager:
            hint = f"{timing}; timed again from time to time"
            self._rest(record, State.EAGER, Bypass(NOT_WORTH_IT, hint=hint), REST)
        else:
            record.rest.succeed()
            self._change(record, State.COMPILED, None)
        self._tell(record)

    def _tell(self, record: Record) -> None:
        timing = record.timing
        assert timing is not None
        living = record.living()
        for variant in living:
            variant.timing = timing
            if variant.store_timing is not None:
                variant.store_timing(timing)
        if living:
            tell_decision(functools.partial(title, living[-1].program.tape), timing)


LEDGER = Ledger()
PROCESS.register(LEDGER, reset=LEDGER.clear, after_fork=LEDGER.nothing_compiles)
