"""Never slower than eager: a variant that has served for a while is timed against the eager engine, and the faster one
is used. Deterministic algorithms turn this off, since it would make rounding depend on the clock. CUDA devices are
synchronised before and after a timed backward. Nothing is timed on other devices that compute asynchronously.

A trial runs backwards of one tape on both in turn. The tape must be known before the engine is called, so tapes are
recognised by their fingerprint alone: variants of one structure for several shapes share a decision.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch

from ..cache.variants import Variant
from ..diagnostics.node_names import title
from ..diagnostics.reporting import tell_decision
from ..native.interface import Question
from ..outcomes import TUNING
from ..process_state import PROCESS
from ..settings import Settings
from ..shadow_cache import Bypass, Timing
from .medians import LEAST, is_wide, middle, out_of_a_trial, time_ratio
from .own_loop import OWN_LOOPS
from .sketches import SKETCHES, Known, Round, still_holds

SAMPLES_PER_SIDE = 8
"""Backwards that count, each way."""
CLOSE, SAMPLES_OF_CLOSE = (0.9, 1.15), 3
"""Range of the ratio, compiled by eager, that is close, and the factor of the number of samples then. Medians of eight
are off by a tenth now and then. The same number is taken if the times spread."""
IN_A_ROW, COLD = 5, 1
"""Number of consecutive backwards on one side, and how many of them do not count. The first finds the other side's data
in the caches, which costs a small backward more than the two sides differ by."""
PLAIN_SAMPLES, PLAINLY_SLOWER = 4, 1.25
"""Early decision for eager: the number of samples on each side, and the least ratio of the medians, if each compiled
backward took longer than each of eager's. A small model would lose time in more hits. One more compiled backward shows
that the order does not matter: else the machine or the sizes may have changed."""
MAX_TIME_RATIO = 1.02
"""A compiled backward may take this much of eager's: below, clocks tell nothing."""
PATIENCE = 32
"""Number of backwards without progress after which a trial ends, because its tape did not repeat."""
BACKWARDS_BEFORE_RETRIAL, LAST_BEFORE_RETRIAL = 2000, 32_000
"""Backwards after which a decision for eager is tried again, at first and at last: the number doubles with each trial
that says the same, which costs a small model as much as a hundred backwards. One for the compiled graph is tried again
after ten times the first."""
_TIMED_ON = frozenset({"cpu", "cuda"})
TIMED = Bypass(TUNING, hint="run on eager to time it against the compiled graph; tune=False turns this off")
_NOT_WORTH_IT = "not_worth_it"

_MAX_TRIALS = 4096
"""The largest number of tapes that are timed, or known to be better left to eager; then the oldest is forgotten."""


@dataclass(slots=True, eq=False)
class Trial:
    """One tape, timed both ways.

    Attributes:
        key: the tape's fingerprint, the settings, and whether the own loop runs what is left to eager.
        held: the variant that is timed against eager. A verdict for eager may outlive it.
        eager: seconds of the eager engine's backwards.
        compiled: seconds of the variant's backwards.
        verdict: the reason why eager runs the tape; None while both are timed.
        holds: the number of backwards that the last verdict is valid for; ``left`` is the rest.
        takes: seconds of eager's backward, after the decision.
        ratio: the compiled time by eager's, after the decision.
        turn: the number of timed backwards, including those that do not count.
        idle: the number of the tape's backwards since then.
        last_turn: ``turn`` at the last pass over all trials.
    """

    key: tuple[int, Any, bool]
    held: weakref.ref[Variant]
    eager: list[float] = field(default_factory=list)
    compiled: list[float] = field(default_factory=list)
    verdict: Bypass | None = None
    holds: int = 0
    left: int = 0
    takes: float = 0.0
    ratio: float = 1.0
    turn: int = 0
    idle: int = 0
    last_turn: int = -1

    def reason(self) -> Bypass | None:
        """Return why the next backward is eager's; None if it is compiled."""
        if self.verdict is not None:
            return self.verdict
        return TIMED if self.turn // IN_A_ROW % 2 else None

    def add(self, times: list[float], seconds: float) -> None:
        """Add the time of one more backward to ``times``."""
        if self.turn % IN_A_ROW >= COLD:
            times.append(seconds)
        self.turn += 1
        self.idle = 0

    def last_counts(self) -> bool:
        """Return whether the last timed backward counts."""
        return (self.turn - 1) % IN_A_ROW >= COLD

    def doubts(self, timed: Trial | None, reason: Bypass | None) -> bool:
        """Return whether to check, after its run, that a backward really was of this tape. ``reason`` says why eager
        ran it, and ``timed`` is the trial that it was timed for as a hit. If tapes alternate, one of two is another
        one. So the last two of eager's first five are checked. A check displaces data in the caches for the next
        backward."""
        if reason is None:
            return timed is not self
        return reason is TIMED and 2 * IN_A_ROW - 2 < self.turn <= 2 * IN_A_ROW

    def is_decided(self) -> bool:
        """Return whether both were timed often enough."""
        eager, compiled = self.eager, self.compiled  # another thread may decide, and begin other lists
        samples = min(len(eager), len(compiled))
        if samples >= SAMPLES_PER_SIDE:
            if samples >= SAMPLES_OF_CLOSE * SAMPLES_PER_SIDE:
                return True
            return not (CLOSE[0] < time_ratio(eager, compiled) < CLOSE[1] or is_wide(eager) or is_wide(compiled))
        again = len(compiled) > PLAIN_SAMPLES
        if not again or samples < PLAIN_SAMPLES or min(compiled) <= max(eager):
            return False
        return statistics.median(compiled) > PLAINLY_SLOWER * statistics.median(eager)

    def decide(self, before: float | None = None) -> Timing | None:
        """Decide for the faster side. None if another thread, or ``gc``, decided meanwhile.

        Args:
            before: the :attr:`ratio` of the trial before this one, which counts too.
        """
        timed = [each for each in (self.eager, self.compiled) if each]
        if len(timed) < 2:
            return None
        self.ratio = time_ratio(*timed)
        eager, compiled = 1e3 * out_of_a_trial(timed[0]), 1e3 * middle(timed[1])
        if before is not None:
            compiled *= math.sqrt(before / max(self.ratio, LEAST))
        goes_on = "compiled" if compiled <= MAX_TIME_RATIO * eager else "eager"
        timing = Timing(eager, compiled, min(map(len, timed)), time.time(), goes_on)
        if timing.on_eager:
            self.takes = eager / 1e3
            self.verdict = Bypass(_NOT_WORTH_IT, hint=f"{timing}; timed again from time to time")
            first, last = BACKWARDS_BEFORE_RETRIAL, LAST_BEFORE_RETRIAL
            again = self.holds and self.ratio > MAX_TIME_RATIO  # and not since the trial before had its say
            self.left = self.holds = min(2 * self.holds, last) if again else first
            self.eager, self.compiled = [], []
        return timing


class Autotune:
    """The trials of the process."""

    def __init__(self) -> None:
        self._trials: dict[tuple[int, Any, bool], Trial] = {}
        self._round = Round()

    @property
    def active(self) -> bool:
        """Return whether any tape must be recognised before the engine is called."""
        return bool(self._trials)

    def questions(self) -> list[Question]:
        """Return questions with which C++ checks that none must be."""
        return [(self._trials.__len__, None, 0), (SKETCHES.known.__len__, None, 0)]

    def find(self, fingerprint: int, settings: Settings, before: Known | None = None) -> Trial | None:
        """The trial of a tape under some settings. If it was decided for eager, this is one of the backwards for which
        that holds.

        Args:
            before: what the tape's sketch has led to until now.
        """
        if self._round.is_over(before):
            self._end_those_of_no_tape()
        trial = self._trials.get((fingerprint, settings.key, OWN_LOOPS.on(settings)))
        if trial is None or not settings.tune:
            return None
        if trial.verdict is None:
            trial.idle += 1
            if trial.idle <= PATIENCE:
                return trial
            self._change(trial.key, None)
            return None
        if still_holds(trial, before):
            return trial
        # Where its variant went, it is compiled again, and timed when it has served for a while.
        again = None if trial.held() is None else Trial(trial.key, trial.held, holds=trial.holds)
        self._change(trial.key, again)
        return again

    @staticmethod
    def keep(sketch: Hashable, trial: Trial) -> None:
        """Use a trial for the next backwards with the tape's sketch."""
        SKETCHES.keep_on_trial(sketch, trial, IN_A_ROW)

    @staticmethod
    def sent(reason: Bypass) -> bool:
        """Return whether a trial, or its verdict, left a backward to the eager engine."""
        return reason is TIMED or reason.kind == _NOT_WORTH_IT

    def hit(
        self,
        variant: Variant,
        seconds: float,
        tape: Callable[[], int],
        settings: Settings,
        known: Trial | None = None,
    ) -> Trial | None:
        """Count a hit of a variant. This takes microseconds, except when a trial begins.

        Args:
            tape: returns the tape's fingerprint.
            known: the trial that the tape was recognised for.

        Returns:
            The trial that this hit is timed for: :meth:`took` gets the whole time.
        """
        if known is not None and self._trials.get(known.key) is known:
            held = known.held()
            if held is not None and held.structure is variant.structure:  # eager's backwards have all sizes too
                return self._timed(known, seconds)
        if variant.hits < variant.next_trial and (
            not variant.timed_beside or OWN_LOOPS.on(settings) in variant.timed_beside
        ):
            return None
        OWN_LOOPS.find(settings)  # it is not to be found in the middle of a trial
        looped = OWN_LOOPS.on(settings)
        key = (tape(), variant.key.settings, looped)
        trial = self._trials.get(key)
        if trial is None:
            if torch.are_deterministic_algorithms_enabled() or variant.devices - _TIMED_ON:
                self._put_off(variant, looped)
                return None
            trial = Trial(key, weakref.ref(variant))
            self._change(key, trial)
            while len(self._trials) > _MAX_TRIALS:
                self._change(next(iter(self._trials)), None)
        if known is None and variant.devices - {"cpu"}:
            return None  # nothing was waited for before it began
        return self._timed(trial, seconds)

    def _timed(self, trial: Trial, seconds: float) -> Trial | None:
        if trial.verdict is not None:
            return None
        trial.add(trial.compiled, seconds)
        self._judge(trial)
        return trial

    @staticmethod
    def took(trial: Trial, seconds: float) -> None:
        """Set the time of the last timed hit, with the work before and after it, which is part of the cost: ten
        microseconds are a tenth of a small backward."""
        compiled = trial.compiled  # another thread may decide, and begin another list
        if compiled and trial.last_counts():
            compiled[-1] = seconds

    def eager(self, trial: Trial, seconds: float) -> None:
        """Count a backward of the eager engine on a tape that is on trial."""
        if self._trials.get(trial.key) is trial and trial.verdict is None:
            trial.add(trial.eager, seconds)
            self._judge(trial)

    def compare(self, trial: Trial, sketch: Hashable, fingerprint: int) -> None:
        """Check the fingerprint of a tape that was recognised for a trial. If it differs, its sketch is ambiguous, and
        the trial may have wrong times."""
        if fingerprint != trial.key[0]:
            SKETCHES.is_mixed(sketch)
            if self._trials.get(trial.key) is trial and trial.verdict is None:
                self._change(trial.key, None)

    def clear(self) -> None:
        """Forget all."""
        self._trials.clear()
        SKETCHES.forget()

    def _change(self, key: tuple[int, Any, bool], trial: Trial | None) -> None:
        """Set or remove the trial of a tape."""
        if trial is None:
            self._trials.pop(key, None)
        else:
            self._trials[key] = trial
        SKETCHES.forget()

    def _end_those_of_no_tape(self) -> None:
        for trial in [*self._trials.values()]:
            if trial.verdict is None and trial.turn == trial.last_turn:
                self._change(trial.key, None)
            trial.last_turn = trial.turn

    @staticmethod
    def _put_off(variant: Variant, looped: bool) -> None:
        """Schedule the variant's next trial, beside an eager engine with the own loop or without."""
        beside = variant.timed_beside if variant.hits < variant.next_trial else frozenset()
        variant.next_trial, variant.timed_beside = variant.hits + 10 * BACKWARDS_BEFORE_RETRIAL, beside | {looped}

    def _judge(self, trial: Trial) -> None:
        variant = trial.held()
        if variant is None:
            self._change(trial.key, None)
            return
        looped = trial.key[-1]
        if not trial.is_decided() or (timing := trial.decide(variant.timed_ratios.get(looped))) is None:
            return
        variant.timed_ratios[looped] = trial.ratio
        variant.timing = timing
        SKETCHES.forget()
        if not timing.on_eager:
            self._change(trial.key, None)
            self._put_off(variant, looped)
        tell_decision(functools.partial(title, variant.program.tape), timing)
        if variant.store_timing is not None:
            variant.store_timing(timing)


AUTOTUNE = Autotune()
PROCESS.register(AUTOTUNE, reset=AUTOTUNE.clear)
