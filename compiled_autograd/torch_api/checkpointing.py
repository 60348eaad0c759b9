"""Saved-tensor hooks of checkpointing without reentrance, and their checkpointed calls.

Written against torch 2.13 (``_checkpoint_hook`` in ``torch/utils/checkpoint.py``): of the hooks of a checkpointed call,
the first that unpacks in a backward computes the forward again. Each of the others returns one of the tensors that this
forward saved, and does nothing else: it reads only the call's state, and runs no users' code.
"""

from __future__ import annotations

from types import CodeType, FunctionType

import torch.utils.checkpoint

_NAMES = ("unpack_hook", "unpack_hook_with_error_cb")
_FRAME = "frame"


def _places() -> dict[int, int]:
    """Id of the code of each such hook -> which of its cells has the frame."""
    made_by = torch.utils.checkpoint._checkpoint_hook.__init__.__code__
    inner = [each for each in made_by.co_consts if isinstance(each, CodeType) and each.co_name in _NAMES]
    return {id(each): each.co_freevars.index(_FRAME) for each in inner if _FRAME in each.co_freevars}


_PLACES = _places()


def frame_of(hook: object) -> object | None:
    """Return an object that identifies the checkpointed call of an unpack hook; None for another kind of hook."""
    if type(hook) is not FunctionType:
        return None
    place = _PLACES.get(id(hook.__code__))
    return None if place is None or hook.__closure__ is None else hook.__closure__[place].cell_contents
