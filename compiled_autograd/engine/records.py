"""A backward's record in the ledger, and what the ledger decides about it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from ..cache.stores import disk_for
from ..capture import tape
from ..diagnostics.bypass import NOT_YET, OVER_BUDGET
from ..native.library import Library
from ..policies.decision import Action, Decision, Record
from ..policies.ledger import LEDGER
from ..settings import Settings
from ..shadow_cache import Bypass
from .call import Call


def key_of(number: int, outputs: Sequence[Any], inputs: Sequence[Any]) -> Hashable:
    """Return the key of a tape's record, under settings with a number: by the extension, in a microsecond, if it is
    loaded."""
    library = Library.LATEST
    module = None if library is None else library.loaded
    found = None if module is None else module.peek(outputs, len(inputs), number)
    if found is None:
        return number, tape.peek(outputs, inputs)
    if LEDGER.has_other_keys and not LEDGER.knows(found):  # it came before the extension
        LEDGER.move((number, tape.peek(outputs, inputs)), found)
    return found


def record_of(call: Call) -> Record:
    """Return the record of a backward's tape, a new one for an unknown tape."""
    if call.key is None:
        call.key = key_of(call.number, call.outputs, call.inputs)
    return LEDGER.of(call.key)


def watched(call: Call) -> Record | None:
    """Return the record of a tape that must be recognised before the engine is called; None for any other tape."""
    if call.key is None:
        call.key = key_of(call.number, call.outputs, call.inputs)
    return LEDGER.watched.get(call.key)


def decided(call: Call, settings: Settings) -> Decision:
    """Return what happens if there is no code for a backward. It is decided once."""
    if call.decision is None:
        call.decision = LEDGER.decide(record_of(call), settings, disk_for(settings) is not None)
    return call.decision


def held(call: Call, settings: Settings) -> Bypass | None:
    """Return why a tape is left to eager without a walk, since the walk could find no code for it."""
    if not settings.compiles or (record := record_of(call)).living():
        return None
    if not record.misses and LEDGER.has_several_numbers:  # there may be code that other settings share
        return None
    decision = decided(call, settings)
    return decision.reason if decision.action is Action.EAGER else None


def missed(call: Call, reason: Bypass, seconds: float) -> None:
    """Tell the ledger of a backward for which there was no code, and which eager, or its calls one by one, have run."""
    if call.decision is not None and reason in (NOT_YET, OVER_BUDGET):
        LEDGER.missed(record_of(call), call.decision, seconds)
