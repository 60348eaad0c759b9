"""Policies that leave a backward to the eager engine before the engine walks its tape, in order."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..cache.selection import find_variant
from ..capture.tape import all_freed_at_the_end, freed_at_the_end
from ..diagnostics.bypass import (
    BATCHED_GRADS,
    COMPILING,
    FORKED,
    INSIDE_COMPILE,
    INTERMEDIATE_INPUT,
    NOT_YET,
    ON_MISS,
    OTHER_THREAD,
    OVER_BUDGET,
    ROOTS_APART,
    TRACING,
    TURNED_OFF,
    UNTESTED_TORCH,
    before_capture,
    is_batched,
    settings_change,
    tracing_context,
)
from ..diagnostics.structure_misses import with_title
from ..errors import CacheMissError
from ..policies.ledger import NOT_WORTH_IT, TIMED
from ..settings import Settings
from ..shadow_cache import Bypass, Miss
from ..threads.gate import GATE
from .call import Call, HandedOver, Refused
from .cuda.devices import lie_apart
from .cuda.streams import STREAMS
from .execution import depth
from .handles import KEPT
from .seam import hand_over

_LEFT = (NOT_YET, COMPILING, OVER_BUDGET)
_CHOICES = (NOT_WORTH_IT, TIMED.kind, settings_change("").kind)
_NOT_UNSUPPORTED = (OTHER_THREAD, TRACING, ON_MISS, TURNED_OFF, UNTESTED_TORCH, *_LEFT, FORKED, INSIDE_COMPILE)


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
    return reason in _NOT_UNSUPPORTED or reason.kind in _CHOICES


def _cannot_be_captured(call: Call, settings: Settings) -> Bypass | None:
    if not settings.may_compile:
        return TURNED_OFF if settings.turned_off else UNTESTED_TORCH
    if GATE.has_seam():  # Python runs it in the midst of a walk: see why_not_compile
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
        missing = variant.missing()
        if not missing:
            return None
        miss = Miss("guard", f"{len(missing)} regions", hint="they are not compiled yet")
        raise CacheMissError([with_title(miss, graph.tape)])
    misses = [] if given.miss is None else [given.miss]
    new = bool(misses) or not graph.variants  # to this process: then the store knows more
    explained = graph.explain(settings, ambient_state, given.handover)
    told = [other] if other is not None and new else misses or explained
    raise CacheMissError([with_title(each, graph.tape) for each in told])


def _is_known_not_to_be_kept(call: Call, settings: Settings) -> Bypass | None:
    return ON_MISS if call.description() in KEPT.left_to_eager else None


Policy = Callable[[Call, Settings], Bypass | None]
_ALWAYS: tuple[Policy, ...] = (_cannot_be_captured, _frees_what_does_not_run, _on_other_streams)
POLICIES: dict[str, tuple[Policy, ...]] = {
    "compile": _ALWAYS,
    "background": _ALWAYS,
    "eager": (*_ALWAYS, _is_known_not_to_be_kept),
    "raise": (*_ALWAYS, _must_be_a_hit),
}
"""For each ``on_miss``, those that are asked, one after the other; the first that gives a reason decides."""
