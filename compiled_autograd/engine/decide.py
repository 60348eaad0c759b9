"""Policies that leave a backward to the eager engine before the engine walks its tape, in order."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..cache.selection import find_variant
from ..cache.stores import disk_for
from ..capture.tape import all_freed_at_the_end, freed_at_the_end
from ..diagnostics.bypass import (
    BATCHED_GRADS,
    COMPILING,
    FORKED,
    INSIDE_COMPILE,
    INTERMEDIATE_INPUT,
    ON_MISS,
    OVER_BUDGET,
    ROOTS_APART,
    TRACING,
    TURNED_OFF,
    UNTESTED_TORCH,
    before_capture,
    is_batched,
    tracing_context,
)
from ..diagnostics.structure_misses import with_title
from ..errors import CacheMissError
from ..policies.admission import ADMISSION, Tape
from ..policies.autotune import AUTOTUNE, Trial
from ..policies.background import BACKGROUND, BEING_COMPILED
from ..policies.refusals import REFUSALS
from ..policies.sketches import SKETCHES, Found
from ..settings import Settings
from ..shadow_cache import Bypass
from ..threads.gate import GATE
from .call import Call, HandedOver, Refused
from .cuda.devices import lie_apart
from .cuda.streams import STREAMS
from .execution import depth
from .handles import KEPT
from .seam import hand_over
from .session import Session, thread

_NOT_UNSUPPORTED = (TRACING, ON_MISS, TURNED_OFF, UNTESTED_TORCH, COMPILING, OVER_BUDGET, FORKED, INSIDE_COMPILE)


def look(call: Call, session: Session) -> Found | None:
    """Look up a tape that may be better left to the eager engine, before its walk. Most tapes are not looked at."""
    settings, sketch = session.settings, call.sketch(thread.here)
    key = None if sketch is None else (session.number, sketch)
    before = None if key is None else SKETCHES.known.get(key)
    if before is not None and before.left > 0:
        before.left -= 1
        call.taken_from = key
        return _taken_for(call, before.found)
    trial = tape = refusal = None
    found: Found | None
    if AUTOTUNE.active:
        trial = call.trial = AUTOTUNE.find(call.fingerprint(), settings, before)
        if trial is not None and trial.verdict is None:
            if key is not None:
                AUTOTUNE.keep(key, trial)
            return trial
    if trial is None and ADMISSION.closed and settings.compiles:
        unknown = before is None and key is not None and key not in SKETCHES.mixed
        if unknown and ADMISSION.is_closed_for(settings) and (skipped := ADMISSION.skips()) is not None:
            return skipped
        has_store = disk_for(settings) is not None
        tape, call.admitted = ADMISSION.look(call.fingerprint(), settings, has_store, before)
        call.known, call.looked_at = tape, True
    if REFUSALS.active and trial is None and tape is None:
        refusal = REFUSALS.find(call.fingerprint(), settings, before)
    found = trial or tape or refusal
    goes_on = found is None or found.verdict is None
    compiling = goes_on and _compiles_beside(settings) and BACKGROUND.busy_with(call.fingerprint())
    if compiling:
        found = BEING_COMPILED
    if key is not None:
        SKETCHES.keep(key, found)
    if compiling and not BACKGROUND.busy_with(call.fingerprint()):  # it ended meanwhile, and what it forgot is kept
        SKETCHES.forget()
    return found


def looks(settings: Settings) -> bool:
    """Return whether tapes have to be recognised before the engine is called."""
    return AUTOTUNE.active or ADMISSION.closed or REFUSALS.active or _compiles_beside(settings)


def _compiles_beside(settings: Settings) -> bool:
    return settings.on_miss == "background" and BACKGROUND.busy


def _taken_for(call: Call, found: Found | None) -> Found | None:
    """Return the result that a sketch had before, and note it in the call."""
    if isinstance(found, Trial):
        call.trial = found
        found.idle += 1
    elif isinstance(found, Tape):
        call.known = found
    return found


def by_arguments(
    grads: Sequence[torch.Tensor | None], keep_graph: bool, inputs: Sequence[Any], accumulate_grad: bool
) -> Bypass | None:
    """Decide by some arguments of a backward alone, before anything is made of them: each call in here counts.

    Returns:
        The reason to leave the backward to eager; None if :func:`decide` has to be asked.
    """
    for grad in grads:
        if grad is not None and is_batched(grad):
            return BATCHED_GRADS
    freed = not keep_graph and not accumulate_grad and all_freed_at_the_end(inputs)
    return INTERMEDIATE_INPUT if freed and tracing_context() is None else None


def decide(call: Call, settings: Settings) -> Bypass | None:
    """The first reason to leave a backward to the eager engine; None where it is to be handed over.

    Raises:
        CacheMissError: ``on_miss="raise"``, and it would be no hit.
    """
    for policy in POLICIES[settings.on_miss]:
        reason = policy(call, settings)
        if reason is not None:
            return reason
    return None


def is_policy(reason: Bypass) -> bool:
    """Return whether a backward is left to eager by choice, and not because it cannot be captured."""
    return reason in _NOT_UNSUPPORTED or AUTOTUNE.sent(reason)


def _cannot_be_captured(call: Call, settings: Settings) -> Bypass | None:
    if not settings.may_compile:
        return TURNED_OFF if settings.turned_off else UNTESTED_TORCH
    if GATE.stands_in_line():  # Python runs it in the midst of a walk, or of waiting for one: see why_not_compile
        return INSIDE_COMPILE
    return before_capture(call.create_graph, call.grads, depth())


def _frees_what_does_not_run(call: Call, settings: Settings) -> Bypass | None:
    """The seam frees each node that the engine walks over, also one at whose end the walk is over since its gradient
    was asked for (``python_compiled_autograd.cpp``, 2.13). The eager engine leaves that one as it is."""
    if call.accumulate_grad or call.keep_graph:
        return None
    return INTERMEDIATE_INPUT if freed_at_the_end(call.inputs) else None


def _on_other_streams(call: Call, settings: Settings) -> Bypass | None:
    if not STREAMS.in_use:
        return None
    return ROOTS_APART if len(call.outputs) > 1 and lie_apart(call.outputs) else STREAMS.reason(call.outputs)


def _must_be_a_hit(call: Call, settings: Settings) -> Bypass | None:
    """Let the engine walk the tape, and keep it, to see whether it would be a hit."""
    given = hand_over(dataclasses.replace(call, keep_graph=True), settings, None)
    if not isinstance(given, HandedOver):
        if isinstance(given, Refused) and given.miss is not None:
            raise CacheMissError([given.miss])
        return None  # what refused this walk refuses the next one
    graph, ambient_state = given.graph, given.graph.state(given.handover, settings)
    variant, other = find_variant(settings, graph, ambient_state, given.handover)
    if variant is not None:
        return None
    misses = [] if given.miss is None else [given.miss]
    new = bool(misses) or not graph.variants  # to this process: then the store knows more
    explained = graph.explain(settings, ambient_state, given.handover)
    told = [other] if other is not None and new else misses or explained
    raise CacheMissError([with_title(each, graph.tape) for each in told])


def _is_being_compiled(call: Call, settings: Settings) -> Bypass | None:
    on_trial = call.trial is not None  # of the others :func:`look` has found it
    return COMPILING if on_trial and BACKGROUND.busy and BACKGROUND.busy_with(call.fingerprint()) else None


def _is_on_trial(call: Call, settings: Settings) -> Bypass | None:
    return None if call.trial is None else call.trial.reason()


def _is_known_not_to_be_kept(call: Call, settings: Settings) -> Bypass | None:
    return ON_MISS if call.description() in KEPT.left_to_eager else None


Policy = Callable[[Call, Settings], Bypass | None]
POLICIES: dict[str, tuple[Policy, ...]] = {
    "compile": (_cannot_be_captured, _frees_what_does_not_run, _on_other_streams, _is_on_trial),
    "background": (_cannot_be_captured, _frees_what_does_not_run, _on_other_streams, _is_being_compiled, _is_on_trial),
    "eager": (_cannot_be_captured, _frees_what_does_not_run, _on_other_streams, _is_on_trial, _is_known_not_to_be_kept),
    "raise": (_cannot_be_captured, _frees_what_does_not_run, _on_other_streams, _must_be_a_hit, _is_on_trial),
}
"""For each ``on_miss``, those that are asked, one after the other; the first that gives a reason decides."""
