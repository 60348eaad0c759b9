"""Tapes of one model, recognized by their parameters, and hints on how one of them differs from the others."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Protocol

from .. import ir
from .node_names import parameters_at
from .users_line import users_line

LOSS_HINT = "another loss on the same model; each loss is compiled once"
_END_HINT = "another loss on the same model, or another end of the model itself; each is compiled once"
WAY_HINT = "the forward took another branch here; each branch is compiled once"
Known = tuple[ir.TapeGraph, str]
"""A tape captured earlier, and the user's line that called its backward."""


class HasTape(Protocol):
    """A structure."""

    tape: ir.TapeGraph


def may_be_of_model_of(tape: ir.TapeGraph) -> Callable[[HasTape], bool]:
    """Return a function that says whether another tape of this process has parameters of the same outermost module as
    ``tape``. The answer is True if the names of one of the two tapes are unknown."""
    models = functools.cache(lambda: _models(tape))  # lazily: without other tapes, names are not looked up

    def may_be(other: HasTape) -> bool:
        others = _models(other.tape) if models() else None
        return not others or not models().isdisjoint(others)

    return may_be


def hint_at(tape: ir.TapeGraph, depth: int, others: Sequence[Known] = ()) -> str:
    """Return a hint on how a known model was used differently, given the first node ``depth`` that differs.

    Args:
        others: tapes of this process that agree up to this node.
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
