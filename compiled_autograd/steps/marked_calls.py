"""What a region's calls of marked functions and hooks depend on, asked for when the region is reached."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shadow_cache import Failure

from .. import ir
from ..errors import UntraceableError
from .run_context import RunReport
from .steps import RegionStep, Slots

_MAX_MEANWHILE = 8
"""Of what users' code of the same backward changes it to, the number of forms that one region is compiled for."""


def depended_on(step: RegionStep, slots: Slots) -> tuple[Any, ...]:
    """For each of its marked calls, what it depends on beside tensors."""
    return tuple([marked.described(slots[slot]) for marked, slot in step.marked])


def to_be_traced(step: RegionStep, slots: Slots) -> tuple[Any, ...]:
    """The same, of a region that is to be compiled.

    Raises:
        UntraceableError: naming them, where what they depend on is changed, before they run, to ever new values.
    """
    count = len(step.marked)
    if not step.asks_again or len({kind[-count:] for kind in step.compiled}) < _MAX_MEANWHILE:
        return depended_on(step, slots)
    calls = [node for node in step.region.nodes if isinstance(node.target, ir.Marked)]
    why = f"traceable: what it depends on was changed during the backward, to more than {_MAX_MEANWHILE} values"
    raise UntraceableError(calls, ValueError(why))


def was_traced(
    step: RegionStep, slots: Slots, depends_on: tuple[Any, ...], state: Mapping[ir.Marked, Any], report: RunReport
) -> bool:
    """Whether that still is what they depend on, and, where nobody asks again, what a variant's ``state`` says of them.
    Another thread, or a pass, may have changed it: then the report says so."""
    now = depended_on(step, slots)
    if now == depends_on and (step.asks_again or now == tuple([state.get(marked) for marked, _ in step.marked])):
        return True
    found = "what it depends on was changed while it was traced"
    report.failures.append(Failure("lower", "a traceable function or hook", found, "a later backward tries again"))
    return False
