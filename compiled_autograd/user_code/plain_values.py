"""What code depends on beside its arguments: what functions consist of, and the plain values that they can reach."""

from __future__ import annotations

import types
from typing import Any

import torch

SCALARS = (
    *(bool, int, float, complex, str, bytes, type(None)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
_LONGEST = 256
"""What has more items, those of its items included, is no plain value: it is looked at in each backward."""
_DEEPEST = 8
"""Of values inside one another, and of functions."""


class NotPlainError(TypeError):
    """Marked code has to do with something that is no plain value, or does more than compute."""


class Code:
    """What functions consist of, each looked at once. With ``strictly``, what is not plain of closures and defaults
    raises :class:`NotPlainError`.
    """

    def __init__(self, strictly: bool) -> None:
        self.strictly = strictly
        self._seen: dict[int, int] = {}

    def of(self, function: Any, depth: int) -> Any:
        """A function's code with what is plain of its closure, its defaults and the variables of its module. The module
        itself is part of it: another one of the same text may have other functions under the same names."""
        if not isinstance(function, types.FunctionType) or depth == _DEEPEST:
            self._no(f"{function!r} is no function written in Python, or too deep in others")
            return type(function).__qualname__
        if id(function) in self._seen:
            return "again", self._seen[id(function)]
        self._seen[id(function)] = len(self._seen)
        parts: list[Any] = [*(function.__defaults__ or ())]
        parts += [part for pair in (function.__kwdefaults__ or {}).items() for part in pair]
        for cell in function.__closure__ or ():
            try:
                parts.append(cell.cell_contents)
            except ValueError:  # nothing was put into it yet
                parts.append(None)
        known = function.__globals__
        named = [(name, known.get(name)) for name in names(function.__code__, known)]
        plain = [(name, key(value)) for name, value in named if is_plain(value)]
        called = [(name, self._called(value, depth)) for name, value in named if isinstance(value, types.FunctionType)]
        inside = tuple(self._part(each, depth) for each in parts)
        return function.__code__, id(known), inside, tuple(plain), tuple(called)

    def _called(self, function: types.FunctionType, depth: int) -> Any:
        """A function of the module. PyTorch's own are what they are; with ``strictly`` whoever asks looks at it."""
        return function.__code__ if self.strictly or of_torch(function) else self.of(function, depth + 1)

    def _part(self, value: Any, depth: int) -> Any:
        if isinstance(value, types.FunctionType):
            return self.of(value, depth + 1)
        of_a_module = isinstance(getattr(value, "__self__", None), types.ModuleType)
        if isinstance(value, types.ModuleType) or (isinstance(value, types.BuiltinFunctionType) and of_a_module):
            return type(value).__name__, value.__name__
        if is_plain(value):
            return key(value)
        self._no(f"it has a {type(value).__name__} in its closure or defaults")
        return "other", type(value).__qualname__

    def _no(self, why: str) -> None:
        if self.strictly:
            raise NotPlainError(f"traceable: {why}")


def names(code: types.CodeType, known: dict[str, Any]) -> list[str]:
    """The module's variables that a function and those inside it name."""
    inside = [name for each in code.co_consts if isinstance(each, types.CodeType) for name in names(each, known)]
    return [*(name for name in code.co_names if name in known), *inside]


def of_torch(value: Any) -> bool:
    """Whether a function, a class or a module is PyTorch's own."""
    name = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
    return isinstance(name, str) and name.partition(".")[0] == "torch"


def is_plain(value: Any) -> bool:
    """Whether it is a number, a string, None, a dtype or the like, or a sequence or dictionary of these: no large one,
    and none with an end that is far."""
    left = [_LONGEST]

    def is_plain(value: Any, depth: int) -> bool:
        left[0] -= 1
        kind = type(value)
        if kind in SCALARS:
            return True
        if left[0] < 0 or depth == _DEEPEST:
            return False
        if kind in (tuple, list, torch.Size):
            return len(value) <= left[0] and all(is_plain(each, depth + 1) for each in tuple(value))
        if kind is not dict or len(value) > left[0]:
            return False
        return all(type(key) is str and is_plain(each, depth + 1) for key, each in tuple(value.items()))

    return is_plain(value, 0)


def key(value: Any) -> Any:
    """What stands for a plain value, with its type, since 1, 1.0 and True are equal. A NaN, and the sign of a zero, are
    told apart."""
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


def copied(value: Any) -> Any:
    """A plain value that may be changed without harm."""
    if type(value) is dict:
        return {name: copied(each) for name, each in value.items()}
    return type(value)(map(copied, value)) if type(value) in (tuple, list) else value
