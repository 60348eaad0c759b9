"""The product's own policies in a replay: the objects of `compiled_autograd/policies`, asked as the engine asks them.

Variants and calls are stand-ins, and clocks are the replay's. Left out are the own loop, gradients that are all zero,
late hooks, forks and several threads.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Hashable, Iterator
from types import SimpleNamespace
from typing import Any, Literal, cast
from unittest.mock import patch

from compiled_autograd.cache.variants import HITS_BEFORE_TIMING
from compiled_autograd.engine import decide, engine
from compiled_autograd.engine.session import Here, thread
from compiled_autograd.policies import sketches
from compiled_autograd.policies.admission import ADMISSION
from compiled_autograd.policies.admission import Tape as Admitted
from compiled_autograd.policies.autotune import AUTOTUNE, Trial
from compiled_autograd.policies.own_loop import OWN_LOOPS
from compiled_autograd.policies.refusals import REFUSALS
from compiled_autograd.policies.sketches import SKETCHES
from compiled_autograd.policies.spending import SPENDING
from compiled_autograd.settings import resolve
from compiled_autograd.shadow_cache import Bypass

from .sequence import Tape
from .simulator import Action, Happened, Way

SKETCH, SLOW_PATH = 2e-6, 25e-6
"""Seconds of reading a root, and of a hit that Python serves since a policy looks at all tapes."""
_UNSUPPORTED = Bypass("unsupported")


class Structure:
    """Stands for the graph of a structure."""


class StandIn:
    """Stands for a variant, with the fields that policies read."""

    def __init__(self, structure: Structure, settings: Hashable) -> None:
        self.structure = structure
        self.key = SimpleNamespace(settings=settings)
        self.program = SimpleNamespace(tape=None)
        self.hits, self.ran, self.next_trial = 0, 0.0, HITS_BEFORE_TIMING
        self.timed_beside: frozenset[bool] = frozenset()
        self.timed_ratios: dict[bool, float] = {}
        self.devices = frozenset({"cpu"})
        self.timing: Any = None
        self.store_timing = None


class StandInCall:
    """Stands for the call of one backward, with the fields that policies read and write."""

    def __init__(self, tape: Tape, sketched: Hashable, sketch: Callable[[Tape, Any], Hashable]) -> None:
        self.tape, self._sketch, self.sketched = tape, sketch, sketched
        self.trial: Trial | None = None
        self.timed: Trial | None = None
        self.known: Admitted | None = None
        self.admitted = self.looked_at = False
        self.taken_from: Hashable = None
        self.found: Any = None
        self.reason: Bypass | None = None
        self.python = False
        self.spent = 0.0
        self._read = False

    def fingerprint(self) -> int:
        if not self._read:
            self._read = True
            self.spent += self.tape.look
        return self.tape.fingerprint

    def sketch(self, here: Any) -> Hashable:
        if self.sketched is None:
            self.sketched = self._sketch(self.tape, here)
            self.spent += SKETCH
        return self.sketched


class Busy:
    """Stands for the thread that compiles beside the training."""

    def __init__(self) -> None:
        self.tapes: list[int] = []

    @property
    def busy(self) -> bool:
        return bool(self.tapes)

    def busy_with(self, fingerprint: int) -> bool:
        return fingerprint in self.tapes


class Today:
    """A session with default settings but ``on_miss``. Use it inside :meth:`playing`."""

    def __init__(self, on_miss: Literal["compile", "background"] = "compile", **settings: Any) -> None:
        given = {"on_miss": on_miss, "tune": True, "cache_dir": False, "own_loop": False, "backend": "eager"}
        self.settings = resolve({**given, "untested_torch": "try", **settings}, {})
        self.session = cast(Any, SimpleNamespace(settings=self.settings, number=0, looks_away=True))
        self._way = Way.BESIDE if on_miss == "background" else Way.COMPILE
        self._variants: dict[tuple[int, int], StandIn] = {}
        self._structures: dict[int, Structure] = {}
        self._busy = Busy()
        self._made = 0
        self._now = 0.0
        self._call: Any = None

    @contextlib.contextmanager
    def playing(self) -> Iterator[Today]:
        """Have the policies forget everything, and read the replay's clock; afterwards they forget it again."""
        kept = thread.here
        with contextlib.ExitStack() as stack:
            stack.enter_context(patch.object(decide, "BACKGROUND", self._busy))
            stack.enter_context(patch.object(engine, "sketch", lambda tape, _, here: self._sketch(tape, here)))
            stack.enter_context(patch.object(sketches, "perf_counter", lambda: self._now))
            stack.enter_context(patch.object(SPENDING, "clock", lambda: self._now))
            stack.enter_context(patch.object(OWN_LOOPS, "find", lambda settings: None))
            stack.enter_context(patch("compiled_autograd.policies.admission.warn_once", lambda *words: None))
            stack.callback(thread.__dict__.__setitem__, "here", kept)
            stack.callback(_forget)
            thread.__dict__["here"] = Here()
            _forget()
            self.session.number = SKETCHES.number(self.settings)
            yield self

    # ---- the policy ----

    def action(self, tape: Tape, now: float) -> Action:
        """As ``Engine.run_backward``, ``backward.run`` and ``decide.decide`` ask."""
        self._now = now
        self._made += tape.nodes
        here, sketched, verdict, spent = thread.here, None, None, 0.0
        if here.unseen or SKETCHES.known:
            before = here.last_root
            verdict, sketched = engine._by_its_root(here, self.session, cast(Any, tape), ())
            spent = SKETCH * (here.last_root != before)
        call = self._call = StandInCall(tape, sketched, self._sketch)
        if verdict is not None:
            call.reason = verdict
            return Action(Way.EAGER, spent)
        call.python = decide.looks(self.settings)
        if call.python:
            call.found = decide.look(cast(Any, call), self.session)
            if call.found is not None and call.found.verdict is not None:
                call.reason = call.found.verdict
                return Action(Way.EAGER, spent + call.spent)
        if call.trial is not None:
            compiling = self._busy.busy and self._busy.busy_with(call.fingerprint())
            call.reason = decide.COMPILING if compiling else call.trial.reason()
        if call.python and (call.reason is None or call.trial is not None):
            here.goes_on()
        spent += call.spent + SLOW_PATH * call.python
        return Action(Way.SERVE if call.reason is None else Way.EAGER, spent)

    def missed(self, tape: Tape, now: float) -> Action:
        """As the seam and the selection ask."""
        call = self._call
        if not call.admitted and ADMISSION.refuses(self.settings):
            call.reason = decide.OVER_BUDGET
            return Action(Way.EAGER)
        return Action(self._way, 0.0, math.inf if call.admitted else ADMISSION.left(self.settings))

    def told(self, tape: Tape, happened: Happened) -> None:
        """As the account and the end of ``backward.run`` tell."""
        call, fingerprint = self._call, tape.fingerprint
        if happened.ran is Way.SERVE:
            self._hit(tape, happened.seconds)
        elif happened.failed == "limit":
            ADMISSION.end(self.settings, happened.compiling)
        elif happened.failed:
            REFUSALS.refused(call.fingerprint, self.settings, _UNSUPPORTED)
        elif happened.ran is Way.EAGER:
            self._on_eager(happened.seconds)
        else:
            ADMISSION.captured(fingerprint)
            if happened.ran is Way.BESIDE:
                self._busy.tapes.append(fingerprint)
                SKETCHES.forget()
                self._charge(tape, happened.compiling)
            else:
                self._charge(tape, happened.compiling + happened.start)
        trial = call.trial
        if trial is not None and call.taken_from is not None and trial.doubts(call.timed, call.reason):
            AUTOTUNE.compare(trial, call.taken_from, fingerprint)

    def arrived(self, tape: Tape, seconds: float) -> None:
        """As the thread that compiles tells."""
        self._busy.tapes.remove(tape.fingerprint)
        SKETCHES.forget()
        self._charge(tape, seconds)

    def _hit(self, tape: Tape, seconds: float) -> None:
        call = self._call
        variant: Any = self._variants.get((tape.structure, tape.shape))
        if variant is None:  # one for all sizes
            variant = [each for (structure, _), each in self._variants.items() if structure == tape.structure][-1]
            self._variants[tape.structure, tape.shape] = variant
        variant.hits += 1
        variant.ran += seconds
        if self.settings.tune:
            call.timed = AUTOTUNE.hit(variant, seconds, call.fingerprint, self.settings, call.trial)
        if call.timed is not None:
            AUTOTUNE.took(call.timed, seconds + SLOW_PATH * call.python)

    def _on_eager(self, seconds: float) -> None:
        call = self._call
        if call.looked_at and isinstance(call.found, Admitted) and call.found.verdict is not None:
            call.found.ran_on_eager(seconds)
        elif call.reason is decide.OVER_BUDGET:
            ADMISSION.missed(call.known, call.taken_from)
        elif call.trial is not None and call.reason is not None and AUTOTUNE.sent(call.reason):
            AUTOTUNE.eager(call.trial, seconds)

    def _charge(self, tape: Tape, seconds: float) -> None:
        key = (tape.structure, tape.shape)
        if key not in self._variants:
            structure = self._structures.setdefault(tape.structure, Structure())
            self._variants[key] = StandIn(structure, self.settings.key)
        SPENDING.charge(cast(Any, self._variants[key]), seconds)
        ADMISSION.review(self.settings)

    def _sketch(self, tape: Tape, here: Any) -> Hashable:
        """As ``capture.tape.sketch`` computes it, with a count of the nodes in the place of sequence numbers."""
        made, here.last_root = self._made - here.last_root, self._made
        others, here.away = here.away - here.unseen, here.unseen
        return tape.root, made / (1 + others), 1, 0


def _forget() -> None:
    for each in (SPENDING, ADMISSION, AUTOTUNE, REFUSALS, SKETCHES):
        each.clear()
