"""``traceable``: an ``autograd.Function`` whose author says that its ``backward`` may be traced instead of called.

What such a ``backward`` is taken to depend on is found anew at each run (:func:`described`), and is part of the state
that a variant is for. What it may not touch raises while it is traced; then it is called at each step, as any other.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch

from .functions import TRACEABLE, checked
from .hooks import Grad
from .inlined import InlinedBackward

F = TypeVar("F", bound=type[torch.autograd.Function])
_OWN = "_compiled_autograd"  # what begins so is ours
_SCALARS = (
    *(bool, int, float, complex, str, bytes, type(None)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
_LONGEST = 256
"""What has more items, those of its items included, is no plain value: it is looked at in each backward."""
_DEEPEST = 8
"""Of values inside one another, and of functions."""


def traceable(function: F) -> F:
    """Say that the ``backward`` of an ``autograd.Function`` may be traced into the compiled code around it.

    What is compiled stands in for all later calls: the ``backward`` is then called no more. So it must compute its
    results with PyTorch's operators from its gradients, from ``ctx.saved_tensors``, ``ctx.needs_input_grad`` and plain
    attributes of ``ctx`` (numbers, strings, None, dtypes, devices, sequences and dictionaries of these) alone, and must
    do nothing else: no printing, no counting, no communication, no writing into what it is given. Attributes of other
    kinds (tensors, modules) may be there, and may not be read.

    Plain values that change from step to step are compiled for once each. They are read when the backward of the whole
    loss begins, and must not be changed until it has ended. Other functions that it calls must not change. A
    ``backward`` that cannot be traced so is called at each step, and a `Failure` says why. As all compiled code, what
    was traced is compared with the real calls at its first runs.

    Args:
        function: the class. Its subclasses are not marked.

    Returns:
        The class itself.

    Raises:
        TypeError: it is no subclass of ``torch.autograd.Function``.
    """
    if not (isinstance(function, type) and issubclass(function, torch.autograd.Function)):
        raise TypeError(f"traceable marks a subclass of torch.autograd.Function, and {function!r} is none")
    setattr(function, TRACEABLE, True)
    return function


def traced_backward(ctx: Any) -> TracedBackward | None:
    """For the ``ctx`` of a function whose class was marked itself; None for others."""
    return TracedBackward() if TRACEABLE in type(ctx)._forward_cls.__dict__ else None


class NotPlainError(TypeError):
    """A marked ``backward`` has to do with something that is no plain value."""


class TracedBackward(InlinedBackward):
    """The ``backward`` of a marked function, at one place of a tape: no two places are taken for alike."""

    def __init__(self) -> None:
        super().__init__("traced_backward")

    def trace(
        self,
        ctx: Any,
        saved: Sequence[Grad],
        expected: Sequence[bool],
        defined: Sequence[bool | torch.layout],
        *grads: Grad,
    ) -> list[Grad]:
        own_class = type(ctx)
        if any(grad is None and wanted for grad, wanted in zip(grads, defined, strict=True)):
            raise NotPlainError("traceable: a gradient that the tape leads to it is undefined in this backward")
        backward = _backward_of(own_class._forward_cls)
        _Code(strictly=True).of(backward, 0)
        given = [each for each in (*saved, *grads) if each is not None]
        versions = [each._version for each in given]
        results = backward(_Context(ctx, saved), *grads)
        if versions != [each._version for each in given]:
            raise NotPlainError("traceable: the backward writes into what it is given")
        return checked(own_class.__name__, results, expected)


class _Context:
    """What a ``backward`` sees of its ``ctx`` while it is traced."""

    __slots__ = ("_others", "_values", "needs_input_grad", "saved_tensors")

    def __init__(self, ctx: Any, saved: Sequence[Grad]) -> None:
        plain = {name: value for name, value in _attributes(ctx) if _is_plain(value)}
        others = {name: type(value).__name__ for name, value in _attributes(ctx) if name not in plain}
        values = (others, plain, ctx.needs_input_grad, tuple(saved))
        for name, value in zip(self.__slots__, values, strict=True):
            object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        if name in self._values:
            return _copied(self._values[name])
        if name in self._others:
            raise NotPlainError(f"traceable: the backward reads ctx.{name}, a {self._others[name]}: no plain value")
        if name == "__dict__":
            raise NotPlainError("traceable: the backward looks through all that ctx has")
        raise AttributeError(f"ctx.{name} is not there, or not while a backward is traced")

    def __setattr__(self, name: str, value: Any) -> None:
        raise NotPlainError(f"traceable: the backward sets ctx.{name}")


def described(ctx: Any) -> tuple[Any, ...]:
    """What the ``backward`` of a marked function depends on beside tensors: its code with what is plain of closures and
    defaults, and numbers and the like among the module's variables that it names; which inputs need a gradient; plain
    attributes of ``ctx``.
    """
    attributes = sorted((name, _key(value)) for name, value in _attributes(ctx) if _is_plain(value))
    code = _Code(strictly=False).of(_backward_of(type(ctx)._forward_cls), 0)
    return code, ctx.needs_input_grad, tuple(attributes)


def _attributes(ctx: Any) -> Iterable[tuple[str, Any]]:
    return [(name, value) for name, value in tuple(ctx.__dict__.items()) if not name.startswith(_OWN)]


def _backward_of(function: Any) -> Callable[..., Any]:
    """As ``BackwardCFunction.apply`` chooses (``torch/autograd/function.py``, 2.13)."""
    base = torch.autograd.Function
    return function.vjp if function.backward is base.backward else function.backward


class _Code:
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
        named = [(name, known.get(name)) for name in _names(function.__code__, known)]
        plain = [(name, _key(value)) for name, value in named if type(value) in _SCALARS]
        called = [(name, value.__code__) for name, value in named if isinstance(value, types.FunctionType)]
        inside = tuple(self._part(each, depth) for each in parts)
        return function.__code__, id(known), inside, tuple(plain), tuple(called)

    def _part(self, value: Any, depth: int) -> Any:
        if isinstance(value, types.FunctionType):
            return self.of(value, depth + 1)
        of_a_module = isinstance(getattr(value, "__self__", None), types.ModuleType)
        if isinstance(value, types.ModuleType) or (isinstance(value, types.BuiltinFunctionType) and of_a_module):
            return type(value).__name__, value.__name__
        if _is_plain(value):
            return _key(value)
        self._no(f"the backward has a {type(value).__name__} in its closure or defaults")
        return "other", type(value).__qualname__

    def _no(self, why: str) -> None:
        if self.strictly:
            raise NotPlainError(f"traceable: {why}")


def _names(code: types.CodeType, known: dict[str, Any]) -> list[str]:
    """The module's variables that a function and those inside it name."""
    inside = [name for each in code.co_consts if isinstance(each, types.CodeType) for name in _names(each, known)]
    return [*(name for name in code.co_names if name in known), *inside]


def _is_plain(value: Any) -> bool:
    left = [_LONGEST]

    def is_plain(value: Any, depth: int) -> bool:
        left[0] -= 1
        kind = type(value)
        if kind in _SCALARS:
            return True
        if left[0] < 0 or depth == _DEEPEST:
            return False
        if kind in (tuple, list, torch.Size):
            return len(value) <= left[0] and all(is_plain(each, depth + 1) for each in tuple(value))
        if kind is not dict or len(value) > left[0]:
            return False
        return all(type(key) is str and is_plain(each, depth + 1) for key, each in tuple(value.items()))

    return is_plain(value, 0)


def _key(value: Any) -> Any:
    """Of a plain value, with its type: 1, 1.0 and True are equal. A NaN, and the sign of a zero, are told apart."""
    kind = type(value)
    if kind is float:
        return "float", value.hex()
    if kind is complex:
        return "complex", value.real.hex(), value.imag.hex()
    if kind in (tuple, list, torch.Size):
        return kind.__name__, tuple(map(_key, value))
    if kind is dict:
        return "dict", tuple((key, _key(each)) for key, each in value.items())
    return kind.__name__, value


def _copied(value: Any) -> Any:
    """A plain value that may be changed without harm."""
    if type(value) is dict:
        return {key: _copied(each) for key, each in value.items()}
    return [*map(_copied, value)] if type(value) is list else value
