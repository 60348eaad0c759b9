"""Whether two tapes are of one model, as far as names of parameters tell; and what a tape of the same model does."""

from __future__ import annotations

from collections.abc import Sequence

from .. import ir
from ..torch_api.users_line import users_line
from .node_names import parameters_at

LOSS_HINT = "another loss on the same model; each loss is compiled once"
_END_HINT = "another loss on the same model, or another end of the model itself; each is compiled once"
WAY_HINT = "the forward took another way here; each way that it takes is compiled once"
Known = tuple[ir.TapeGraph, str]
"""A tape that was captured before, and the user's line that called its backward."""


def may_be_of_one_model(tape: ir.TapeGraph, other: ir.TapeGraph) -> bool:
    """Whether two tapes of this process reach parameters of one outermost module. Where no names are known of one of
    them, the answer is yes."""
    one, two = _models(tape), _models(other)
    return not one or not two or not one.isdisjoint(two)


def hint_at(tape: ir.TapeGraph, depth: int, others: Sequence[Known] = ()) -> str:
    """What a model that is known did otherwise, where its tape parts from others at the node ``depth``.

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
