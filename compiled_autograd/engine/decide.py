"""What leaves a backward to the eager engine before the engine is asked to walk its tape: policies, in order."""

from __future__ import annotations

import dataclasses

from shadow_cache import Bypass

from ..cache.selection import find_variant
from ..diagnostics.bypass import COMPILING, EVERY_TAPE_NEW, FORKED, ON_MISS, TRACING, before_capture
from ..errors import CacheMissError
from ..guards.ambient import ambient
from ..policies.autotune import AUTOTUNE
from ..policies.background import BACKGROUND
from ..settings import Settings
from .call import Call, HandedOver, Refused
from .execution import depth
from .handles import KEPT
from .seam import hand_over
from .streams import STREAMS

_NOT_UNSUPPORTED = (TRACING, ON_MISS, COMPILING, EVERY_TAPE_NEW, FORKED)


def decide(call: Call, settings: Settings) -> Bypass | None:
    """The first reason to leave a backward to the eager engine; None where it is to be handed over.

    Raises:
        CacheMissError: ``on_miss="raise"``, and it would be no hit.
    """
    reason = before_capture(call.create_graph, call.grads, depth())
    if reason is None and STREAMS.in_use:
        reason = STREAMS.reason(call.outputs)
    if reason is not None:
        return reason
    if settings.on_miss == "raise":
        _raise_unless_a_hit(call, settings)
    if settings.on_miss == "background" and BACKGROUND.busy and BACKGROUND.busy_with(call.fingerprint()):
        return COMPILING
    if settings.tune and AUTOTUNE.active:
        trial = AUTOTUNE.find(call.fingerprint(), settings.key)
        if trial is not None and (reason := trial.reason()) is not None:
            return reason
    return ON_MISS if settings.on_miss == "eager" and call.description() in KEPT.left_to_eager else None


def is_policy(reason: Bypass) -> bool:
    """Whether a backward is left to eager by choice, and not since it cannot be captured."""
    return reason in _NOT_UNSUPPORTED or AUTOTUNE.sent(reason)


def _raise_unless_a_hit(call: Call, settings: Settings) -> None:
    """Let the engine walk the tape, and keep it, to see whether it would be a hit."""
    given = hand_over(dataclasses.replace(call, keep_graph=True), settings, None)
    if not isinstance(given, HandedOver):
        if isinstance(given, Refused) and given.miss is not None:
            raise CacheMissError([given.miss])
        return  # what refused this walk refuses the next one
    graph, ambient_state = given.graph, ambient()
    variant, other = find_variant(settings, graph, ambient_state, given.handover)
    if variant is not None:
        return
    misses = [] if given.miss is None else [given.miss]
    new = bool(misses) or not graph.variants  # to this process: then the store knows more
    explained = graph.explain(settings, ambient_state, given.handover)
    raise CacheMissError([other] if other is not None and new else misses or explained)
