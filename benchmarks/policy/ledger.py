"""The product's ledger in a replay, with stand-ins for variants and the replay's clock."""

from __future__ import annotations

import weakref
from typing import Any, Literal, cast

from compiled_autograd.policies.decision import Action as Decided
from compiled_autograd.policies.decision import Decision, Record, next_action, skips
from compiled_autograd.policies.ledger import TIMED, Ledger
from compiled_autograd.settings import resolve
from compiled_autograd.shadow_cache import Bypass

from .sequence import Tape
from .simulator import Action, Happened, Way

PEEK, SLOW_PATH, LOOK, SKIP = 1e-6, 25e-6, 60e-6, 1e-6
"""Seconds of reading the first nodes of a tape; of a hit that Python serves since some tape is watched; and of a
backward that is left to eager, beyond what eager takes: after a look at its tape, and without one."""
_UNSUPPORTED = Bypass("unsupported")


class StandIn:
    """Stands for a variant, with the fields that the ledger reads."""

    def __init__(self) -> None:
        self.hits, self.ran = 0, 0.0
        self.devices = frozenset({"cpu"})
        self.timing = self.store_timing = None
        self.program = weakref.proxy(self)
        self.tape = None


class Replayed:
    """A session with default settings but ``on_miss``."""

    def __init__(self, on_miss: Literal["compile", "background"] = "background", **settings: Any) -> None:
        given = {"on_miss": on_miss, "tune": True, "cache_dir": False, "backend": "eager", "untested_torch": "try"}
        self.settings = resolve({**given, **settings}, {})
        self._now = 0.0
        self._ledger = Ledger()
        self._ledger.clock = lambda: self._now
        self._ledger.clear()
        self._way = Way.BESIDE if on_miss == "background" else Way.COMPILE
        self._variants: dict[tuple[int, int], StandIn] = {}
        self._missed: Decision | None = None
        self._streak = self._skips = self._unseen = 0
        self._skipped = False

    # ---- the policy ----

    def action(self, tape: Tape, now: float) -> Action:
        self._now, self._missed = now, None
        self._skipped = self._unseen > 0
        if self._skipped:
            self._unseen -= 1
            return Action(Way.EAGER, SKIP)
        record = self._record(tape)
        spent = PEEK if self._ledger.watched else 0.0
        decided = next_action(record, None)
        if decided.reason is not None:
            return Action(Way.EAGER, LOOK)
        self._streak = self._skips = 0
        if not record.living():  # no walk can find code
            return self._decide(record, spent)
        return Action(Way.SERVE, spent + SLOW_PATH * bool(self._ledger.watched))

    def missed(self, tape: Tape, now: float) -> Action:
        self._now = now
        return self._decide(self._record(tape), 0.0)

    def _decide(self, record: Record, spent: float) -> Action:
        decided = self._missed = self._ledger.decide(record, self.settings)
        if decided.action is Decided.COMPILE:
            return Action(self._way, spent, decided.seconds)
        return Action(Way.EAGER, spent)

    def told(self, tape: Tape, happened: Happened) -> None:
        record, ledger = self._record(tape), self._ledger
        if self._skipped:
            return
        if happened.ran is Way.SERVE:
            variant = self._variant(tape)
            variant.hits += 1
            variant.ran += happened.seconds
            ledger.hit(record, happened.seconds)
        elif happened.failed == "limit":
            ledger.spent(record, happened.compiling)
        elif happened.failed:
            ledger.refused(record, _UNSUPPORTED)
        elif happened.ran is Way.EAGER:
            if self._missed is not None:
                ledger.missed(record, self._missed, happened.seconds)
            else:
                self._left(record, happened.seconds)
        else:
            variant = self._variants[tape.structure, tape.shape] = StandIn()
            if happened.ran is Way.BESIDE:
                ledger.begins(record, cast(Any, variant), variant)
                ledger._spend(record, happened.compiling + happened.start)
            else:
                seconds = happened.compiling + happened.start
                ledger.compiled(record, cast(Any, variant), seconds, self.settings)

    def arrived(self, tape: Tape, seconds: float) -> None:
        variant = self._variants[tape.structure, tape.shape]
        self._ledger.ended(self._record(tape), cast(Any, variant), variant, seconds, self.settings)

    def _left(self, record: Record, seconds: float) -> None:
        reason = record.reason or TIMED
        self._streak += 1
        self._ledger.ran_on_eager(record, reason, seconds, 1 + self._skips)
        self._skips = self._unseen = 0 if reason is TIMED else skips(self._streak, seconds, record.rest.left)

    # ---- stand-ins ----

    def _record(self, tape: Tape) -> Record:
        return self._ledger.of(tape.fingerprint)

    def _variant(self, tape: Tape) -> StandIn:
        variant = self._variants.get((tape.structure, tape.shape))
        if variant is None:  # one for all sizes
            variant = [each for (structure, _), each in self._variants.items() if structure == tape.structure][-1]
            self._variants[tape.structure, tape.shape] = variant
        return variant
