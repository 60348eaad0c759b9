"""The rules of today's policies, each taken out alone."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

from compiled_autograd.policies import admission, autotune, medians, refusals, sketches, spending

from . import todays

_FOREVER = 10**9
Without = Callable[[], contextlib.AbstractContextManager[Any]]


def _constants(*modules: Any, **values: Any) -> Without:
    """Other values of constants, in each of the modules that has them."""

    @contextlib.contextmanager
    def changed() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for module in modules:
                for name, value in values.items():
                    if hasattr(module, name):
                        stack.enter_context(patch.object(module, name, value))
            yield

    return changed


def _function(owner: Any, name: str, function: Any) -> Without:
    return lambda: patch.object(owner, name, function)


def _decided_alone() -> Any:
    decide = autotune.Trial.decide
    return patch.object(autotune.Trial, "decide", lambda trial, before=None: decide(trial))


_ALL = (admission, autotune, medians, refusals, sketches, spending)
RULES: dict[str, Without] = {
    # autotune
    "retrials after a verdict": _constants(autotune, BACKWARDS_BEFORE_RETRIAL=_FOREVER, LAST_BEFORE_RETRIAL=_FOREVER),
    "doubling of the retrials": _constants(autotune, LAST_BEFORE_RETRIAL=2000),
    "24 samples where it is close": _constants(_ALL[1], _ALL[2], CLOSE=(1.0, 1.0), WIDE=math.inf),
    "8 samples (3)": _constants(autotune, SAMPLES_PER_SIDE=3),
    "5 in a row, the first not counted": _constants(autotune, IN_A_ROW=1, COLD=0),
    "early end of what is plainly slower": _constants(autotune, PLAINLY_SLOWER=math.inf),
    "4 hits before the trial": _constants(todays, HITS_BEFORE_TIMING=1),
    "patience of a trial": _constants(autotune, PATIENCE=_FOREVER),
    "15 us off eager in a trial": _constants(medians, COLDER=0.0),
    "the last trial's ratio": _decided_alone,
    # spending
    "30 s (5 s)": _constants(spending, SECONDS=5.0),
    "5 % of the time": _constants(spending, SHARE=0.0),
    "division of the budget": _constants(spending, UNRETURNED=_FOREVER),
    "first variants at any cost": _constants(spending, FIRST=0),
    "five times as often again": _constants(spending, AS_OFTEN_AGAIN=1),
    "untimed hits pay": _constants(spending, SAVED=0.0),
    "hits pay for their structure": _function(spending.Cost, "structure", property(lambda cost: None, lambda *_: None)),
    "end of long captures": _function(spending.Balance, "left", lambda balance, budget: math.inf),
    # admission
    "compiled after long enough on eager": _function(admission.Tape, "has_paid", lambda tape, likely: False),
    "dearer after a compile in vain": _constants(admission, DEARER=1),
    "sampling of unknown tapes": _constants(admission, LAST_LOOK=1),
    "captured tapes are asked again": _function(admission.Admission, "captured", lambda admission, fingerprint: None),
    # sketches
    "growing distance of looks": _constants(sketches, FURTHER=1),
    "looks at all (each tape)": _constants(sketches, FIRST_SPACING=1, LAST_SPACING=1),
    "looking away": _constants(sketches, LEFT_BEFORE_LOOKING_AWAY=_FOREVER),
    "search after looking away": _function(sketches.Doubts, "looks_for_it", lambda doubts, length: False),
    "forgetting of what does not come": _constants(sketches, PATIENCE_OF_ALL=_FOREVER),
    # refusals
    "refusals": _constants(refusals, TRIES=_FOREVER),
}
"""What is in force without each rule; in brackets, the value that takes its place."""
SETTINGS: dict[str, dict[str, Any]] = {
    "autotune": {"tune": False},
    "the budget": {"compile_budget": math.inf},
    "both": {"tune": False, "compile_budget": math.inf},
}
"""Whole policies that a setting switches off."""
