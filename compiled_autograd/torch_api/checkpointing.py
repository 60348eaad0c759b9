"""Which saved-tensor hooks are those of checkpointing without reentrance, and of which checkpointed call.

Written against torch 2.13 (``_checkpoint_hook`` in ``torch/utils/checkpoint.py``): of the hooks of a checkpointed call,
the first that unpacks in a backward computes the forward again. Each of the others gives one of the tensors that this
has saved, and does nothing else: it reads no state but that of the call, and runs no code of the user's.
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
    """What stands for the checkpointed call that an unpack hook belongs to; None where it is another kind of hook."""
    if type(hook) is not FunctionType:
        return None
    place = _PLACES.get(id(hook.__code__))
    return None if place is None or hook.__closure__ is None else hook.__closure__[place].cell_contents
