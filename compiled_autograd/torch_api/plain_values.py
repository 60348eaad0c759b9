"""Plain values: numbers, strings, dtypes and the like, and sequences and dictionaries of these; their keys."""

from __future__ import annotations

from typing import Any

import torch

SCALARS = frozenset(
    [
        *(bool, int, float, complex, str, bytes, type(None)),
        *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    ]
)
_LONGEST = 256
"""Maximum number of items of a plain value, nested ones included: each backward reads them."""
_DEEPEST = 8
"""Maximum depth of nested values."""


def is_plain(value: Any) -> bool:
    """Return whether a value is a number, a string, None, a dtype or the like, or a small and shallow sequence or
    dictionary of these."""
    return type(value) in SCALARS or (
        type(value) in (tuple, list, dict, torch.Size) and _is_plain(value, 0, [_LONGEST])
    )


def _is_plain(value: Any, depth: int, left: list[int]) -> bool:
    left[0] -= 1
    kind = type(value)
    if kind in SCALARS:
        return True
    if left[0] < 0 or depth == _DEEPEST:
        return False
    if kind in (tuple, list, torch.Size):
        return len(value) <= left[0] and all(_is_plain(each, depth + 1, left) for each in tuple(value))
    if kind is not dict or len(value) > left[0]:
        return False
    return all(type(name) is str and _is_plain(each, depth + 1, left) for name, each in tuple(value.items()))


def key(value: Any) -> Any:
    """Return a key of a plain value, with its type, since 1, 1.0 and True are equal. NaNs and the signs of zeros are
    distinguished."""
    kind = type(value)
    if kind is float:
        return "float", value.hex()
    if kind is complex:
        return "complex", value.real.hex(), value.imag.hex()
    if kind in (tuple, list, torch.Size):
        return kind.__name__, tuple(map(key, value))
    if kind is dict:
        return "dict", tuple((name, key(each)) for name, each in value.items())
    return kind.__name__, value
