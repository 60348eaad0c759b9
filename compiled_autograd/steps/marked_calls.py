"""Dependencies of a region's calls of marked functions and hooks, read when the region is reached."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .. import ir
from ..errors import UntraceableError
from ..shadow_cache import Failure
from .run_context import RunReport
from .steps import RegionStep, Slots

_MARKED = "marked"  # begins that part of a kind
_MAX_MEANWHILE = 8
"""Maximum number of forms that one region is compiled for, if users' code of the same backward changes dependencies."""


def depended_on(step: RegionStep, slots: Slots) -> tuple[Any, ...]:
    """Return the dependencies of each marked call, except tensors."""
    return tuple([marked.described(slots[slot]) for marked, slot in step.marked])


def with_depended_on(kind: tuple[Any, ...], step: RegionStep, slots: Slots) -> tuple[Any, ...]:
    """Return the kind that a region is compiled for, with the dependencies of its marked calls if they may have
    changed."""
    return (*kind, (_MARKED, *depended_on(step, slots))) if step.asks_again else kind


def meanwhile(kind: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Return the part of a kind that has the dependencies; None if there is none."""
    last = kind[-1] if kind else None
    return last[1:] if isinstance(last, tuple) and last and last[0] is _MARKED else None


def to_be_traced(step: RegionStep, slots: Slots) -> tuple[Any, ...]:
    """Return the dependencies of each marked call of a region that is about to be compiled.

    Raises:
        UntraceableError: naming the calls, if their dependencies change to new values again and again before they run,
            or if the mark was removed.
    """
    found, why = depended_on(step, slots), None
    if None in found:
        why = "it was marked, and is not any more"
    elif step.asks_again and len({meanwhile(kind) for kind in step.compiled}) >= _MAX_MEANWHILE:
        why = f"what it depends on was changed during the backward, to more than {_MAX_MEANWHILE} values"
    if why is None:
        return found
    calls = [node for node in step.region.nodes if isinstance(node.target, ir.Marked)]
    raise UntraceableError(calls, ValueError(f"traceable: {why}"))


def was_traced(
    step: RegionStep, slots: Slots, depends_on: tuple[Any, ...], state: Mapping[ir.Marked, Any], report: RunReport
) -> bool:
    """Return whether dependencies are unchanged since the trace and, unless they are read again, equal those of a
    variant's ``state``. Another thread, or a pass, may have changed them. Then the report has a failure."""
    now = depended_on(step, slots)
    if now == depends_on and (step.asks_again or now == tuple([state.get(marked) for marked, _ in step.marked])):
        return True
    found = "what it depends on was changed while it was traced"
    report.failures.append(Failure("lower", "a traceable function or hook", found, "a later backward tries again"))
    return False
