"""The ledger: one record for each fingerprint, one back-off, one function that decides.

    new -> compiling -> timing -> compiled
     |                   |  ^
     v                   v  |
    refused              eager

`new`: runs on eager until it has come back and the balance allows a compile. `compiling`: the same, and nothing more is
requested. `timing`: hits and backwards on eager are timed by turns. `compiled`, `eager`: the faster one. `refused`: it
cannot be captured. The last two are tried again after a number of backwards that doubles with each failure.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

import msgspec

from .sequence import Tape
from .simulator import Action, Happened, Way

NEW, COMPILING, TIMING, COMPILED, EAGER, REFUSED = "new", "compiling", "timing", "compiled", "eager", "refused"


class Constants(msgspec.Struct, frozen=True):
    """The numbers of the ledger.

    Attributes:
        sightings: misses of a fingerprint before one of them is compiled.
        rent: part of the likely cost of a compile that these misses must have spent on eager.
        dearer: factor of that part after a compile that served nothing.
        share: part of the time of the process that may be lost on compiles.
        start: likely seconds that the first compile costs, beside those for its nodes.
        node: likely seconds that a compile costs for each node, before one is known.
        tax: part of a compile beside the training that the training loses; 1 on a single core.
        samples: backwards timed each way.
        row: backwards in a row one way; the first one does not count.
        plainly: ratio of medians at which half of the samples decide.
        worth: maximum ratio of a compiled backward to one on eager.
        first: backwards before a verdict for eager is tried again.
        last: maximum of that number, which doubles each time.
    """

    sightings: int = 1
    rent: float = 0.1
    dearer: float = 4.0
    share: float = 0.05
    start: float = 2.5
    node: float = 0.01
    tax: float = 0.1
    samples: int = 8
    row: int = 5
    plainly: float = 1.25
    worth: float = 1.02
    first: int = 2000
    last: int = 32_000


@dataclass(slots=True)
class Backoff:
    """A number of backwards that doubles with each failure, up to ``last``. ``left`` of them are to come."""

    first: int
    last: int
    left: int = 0
    next: int = 0

    def fail(self) -> None:
        """Begin to wait."""
        self.left = self.next or self.first
        self.next = min(2 * self.left, self.last)

    def passes(self) -> bool:
        """Count one backward; True if it was the last one."""
        self.left -= 1
        return self.left <= 0


@dataclass(slots=True)
class Record:
    """What is known of the tapes with one fingerprint.

    Attributes:
        misses, rent: backwards without code since the last compile, and their seconds on eager.
        hits: backwards that ran compiled, since the last compile.
        served: code is there for some of its shapes.
        dearer: factor of the rent that is due.
        turn: backwards of the trial so far.
        eager, compiled: their latest times.
    """

    backoff: Backoff
    state: str = NEW
    misses: int = 0
    rent: float = 0.0
    hits: int = 0
    served: bool = False
    dearer: float = 1.0
    turn: int = 0
    eager: list[float] = field(default_factory=list)
    compiled: list[float] = field(default_factory=list)


class Ledger:
    """A policy.

    Args:
        way: BESIDE or COMPILE.
        peek: seconds of reading the first nodes of a tape.
    """

    def __init__(self, constants: Constants | None = None, way: Way = Way.BESIDE, peek: float = 1e-6) -> None:
        self.constants = constants or Constants()
        self._way, self._peek = way, peek
        self._records: dict[int, Record] = {}
        self._lost = 0.0
        self._nodes, self._seconds = 0, 0.0
        self._has_missed = False

    # ---- the decision ----

    def next_action(self, record: Record, balance: float, likely: float, missed: bool = False) -> Way:
        """Decide about one backward; nothing else does, and this changes nothing.

        Args:
            balance: seconds that may still be lost.
            likely: seconds that a compile would cost.
            missed: there is no code for this shape.
        """
        if record.state in (EAGER, REFUSED):
            return Way.EAGER
        if record.served and not missed:
            rests = record.state == TIMING and record.turn // self.constants.row % 2
            return Way.EAGER if rests else Way.SERVE
        is_due = record.misses >= self.constants.sightings and record.state != COMPILING
        is_paid = record.rent >= self.constants.rent * record.dearer * likely
        return self._way if is_due and is_paid and likely <= balance else Way.EAGER

    # ---- the policy ----

    def action(self, tape: Tape, now: float) -> Action:
        return Action(self._decided(tape, now), self._peek)

    def missed(self, tape: Tape, now: float) -> Action:
        return Action(self._decided(tape, now, missed=True))

    def told(self, tape: Tape, happened: Happened) -> None:
        record, missed = self._record(tape), self._has_missed
        self._lost += happened.compiling + happened.start
        self._seconds += happened.compiling
        if happened.compiling:
            self._nodes += tape.nodes
        if happened.failed:
            record.state = REFUSED
            record.backoff.fail()
        elif happened.ran is Way.SERVE:
            self._hit(record, happened.seconds)
        elif happened.ran is not Way.EAGER:
            record.dearer = 1.0 if record.hits or not record.served else record.dearer * self.constants.dearer
            record.misses, record.rent, record.hits = 0, 0.0, 0
            record.state = COMPILING
            if happened.ran is Way.COMPILE:
                self.arrived(tape, 0.0)
        elif record.state in (EAGER, REFUSED):
            record.eager = [*record.eager, happened.seconds][-self.constants.samples :]
            if record.backoff.passes():
                self._begin(record, TIMING if record.state == EAGER else NEW)
        elif missed or not record.served:
            record.misses += 1
            record.rent += happened.seconds
            record.eager = [*record.eager, happened.seconds][-self.constants.samples :]
        else:
            self._time(record, record.eager, happened.seconds)

    def arrived(self, tape: Tape, seconds: float) -> None:
        record, cost = self._record(tape), self.constants.tax * seconds
        self._lost += cost
        self._seconds += cost
        if record.state == COMPILING:
            record.served = True
            self._begin(record, TIMING)

    # ---- what it counts ----

    def _decided(self, tape: Tape, now: float, missed: bool = False) -> Way:
        record, self._has_missed = self._record(tape), missed
        constants = self.constants
        balance = constants.share * now - self._lost
        rate, start = (self._seconds / self._nodes, 0.0) if self._nodes else (constants.node, constants.start)
        likely = start + rate * tape.nodes
        return self.next_action(record, balance, likely, missed)

    def _record(self, tape: Tape) -> Record:
        record = self._records.get(tape.fingerprint)
        if record is None:
            record = self._records[tape.fingerprint] = Record(Backoff(self.constants.first, self.constants.last))
        return record

    def _hit(self, record: Record, seconds: float) -> None:
        record.hits += 1
        if record.eager:
            saved = statistics.median_low(record.eager) - seconds
            self._lost = max(0.0, self._lost - saved)
        if record.state == TIMING:
            self._time(record, record.compiled, seconds)

    def _begin(self, record: Record, state: str) -> None:
        record.state, record.turn, record.compiled = state, 0, []

    def _time(self, record: Record, times: list[float], seconds: float) -> None:
        """One backward of a trial."""
        constants = self.constants
        if record.turn % constants.row:
            times.append(seconds)
            del times[: -constants.samples]
        record.turn += 1
        enough = min(len(record.eager), len(record.compiled))
        if enough < constants.samples // 2:
            return
        ratio = statistics.median_low(record.compiled) / statistics.median_low(record.eager)
        if enough < constants.samples and 1 / constants.plainly < ratio < constants.plainly:
            return
        if ratio <= constants.worth:
            record.state = COMPILED
        else:
            record.state = EAGER
            record.backoff.fail()
