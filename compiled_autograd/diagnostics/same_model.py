"""Tapes of one model: told by names of parameters, and how one of them differs from the others."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Protocol

from .. import ir
from .node_names import parameters_at
from .users_line import users_line

LOSS_HINT = "another loss on the same model; each loss is compiled once"
_END_HINT = "another loss on the same model, or another end of the model itself; each is compiled once"
WAY_HINT = "the forward took another way here; each way that it takes is compiled once"
Known = tuple[ir.TapeGraph, str]
"""A tape that was captured before, and the user's line that called its backward."""


class HasTape(Protocol):
    """A structure."""

    tape: ir.TapeGraph


def may_be_of_model_of(tape: ir.TapeGraph) -> Callable[[HasTape], bool]:
    """Return what tells whether another tape of this process reaches parameters of an outermost module that ``tape``
    reaches too. Where no names are known of one of the two, the answer is yes."""
    models = functools.cache(lambda: _models(tape))  # names are not looked for where nothing else is known

    def may_be(other: HasTape) -> bool:
        others = _models(other.tape) if models() else None
        return not others or not models().isdisjoint(others)

    return may_be


def hint_at(tape: ir.TapeGraph, depth: int, others: Sequence[Known] = ()) -> str:
    """Say how a known model was used otherwise, where its tape parts from others at the node ``depth``.

    Args:
        others: tapes of this process from which it parts there.
    """
    if not _models(tape):
        return WAY_HINT
    line = str(users_line())
    elsewhere = bool(others) and all(line != at for _, at in others)
    if not any(parameters_at(tape, index) for index in range(1, depth)):  # before the last layer
        return LOSS_HINT if elsewhere or depth == 1 else _END_HINT
    for other, _ in others:
        same = _models(tape) == _models(other)
        if same and not (elsewhere and _parameters(tape) != _parameters(other)):
            return WAY_HINT
    return LOSS_HINT if others else WAY_HINT


def _models(tape: ir.TapeGraph) -> set[int]:
    return {id(call.model) for call in tape.calls if call.model is not None}


def _parameters(tape: ir.TapeGraph) -> set[str]:
    return {call.parameter for call in tape.calls if call.parameter is not None}
