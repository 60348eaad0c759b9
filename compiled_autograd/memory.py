"""Which memory a tensor lies in, and whether there was none left."""

from __future__ import annotations

from typing import Any

import torch

from . import ir


def memory_of(value: Any) -> int | None:
    """Which memory a tensor lies in; None for one without any."""
    if not isinstance(value, torch.Tensor) or not ir.is_plain(value):
        return None
    if value.numel() == 0 or value._is_zerotensor():  # zeros without memory
        return None
    return value.untyped_storage().data_ptr()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on whatever device."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)
