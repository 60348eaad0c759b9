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
"""A sequence or dictionary with more items is no plain value: it is looked at in each backward."""
_DEEPEST = 8


def traceable(function: F) -> F:
    """Say that the ``backward`` of an ``autograd.Function`` may be traced into the compiled code around it.

    What is compiled stands in for all later calls: the ``backward`` is then called no more. So it must compute its
    results with PyTorch's operators from its gradients, from ``ctx.saved_tensors``, ``ctx.needs_input_grad`` and plain
    attributes of ``ctx`` (numbers, strings, None, dtypes, devices, sequences and dictionaries of these) alone, and must
    do nothing else: no printing, no counting, no communication, no writing into what it is given. Attributes of other
    kinds (tensors, modules) may be there, and may not be read.

    Plain values that change from step to step are compiled for once each. Other functions that it calls must not
    change. A ``backward`` that cannot be traced so is called at each step, and a `Failure` says why. As all compiled
    code, what was traced is compared with the real calls at its first runs.

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
        described(ctx, strictly=True)
        given = [each for each in (*saved, *grads) if each is not None]
        versions = [each._version for each in given]
        results = _backward_of(own_class._forward_cls)(_Context(ctx, saved), *grads)
        if versions != [each._version for each in given]:
            raise NotPlainError("traceable: the backward writes into what it is given")
        return checked(own_class.__name__, results, expected)


class _Context:
    """What a ``backward`` sees of its ``ctx`` while it is traced."""

    def __init__(self, ctx: Any, saved: Sequence[Grad]) -> None:
        plain = {name: value for name, value in _attributes(ctx) if _is_plain(value)}
        others = {name: type(value).__name__ for name, value in _attributes(ctx) if name not in plain}
        vars(self).update(_values=plain, _others=others, needs_input_grad=ctx.needs_input_grad)
        vars(self).update(saved_tensors=tuple(saved))

    def __getattr__(self, name: str) -> Any:
        if name in self._values:
            return _copied(self._values[name])
        if name in self._others:
            raise NotPlainError(f"traceable: the backward reads ctx.{name}, a {self._others[name]}: no plain value")
        raise AttributeError(f"ctx.{name} is not there, or not while a backward is traced")

    def __setattr__(self, name: str, value: Any) -> None:
        raise NotPlainError(f"traceable: the backward sets ctx.{name}")


def described(ctx: Any, strictly: bool = False) -> tuple[Any, ...]:
    """What the ``backward`` of a marked function depends on beside tensors: its code with what is plain of closures and
    defaults, and numbers and the like among the module's variables that it names; which inputs need a gradient; plain
    attributes of ``ctx``.

    Args:
        strictly: look whether anything of the closure or the defaults is not plain.

    Raises:
        NotPlainError: something is.
    """
    attributes = sorted((name, _key(value)) for name, value in _attributes(ctx) if _is_plain(value))
    code = _code(_backward_of(type(ctx)._forward_cls), strictly, 0)
    return code, ctx.needs_input_grad, tuple(attributes)


def _attributes(ctx: Any) -> Iterable[tuple[str, Any]]:
    return [(name, value) for name, value in tuple(ctx.__dict__.items()) if not name.startswith(_OWN)]


def _backward_of(function: Any) -> Callable[..., Any]:
    """As ``BackwardCFunction.apply`` chooses (``torch/autograd/function.py``, 2.13)."""
    base = torch.autograd.Function
    return function.vjp if function.backward is base.backward else function.backward


def _code(function: Any, strictly: bool, depth: int) -> Any:
    if not isinstance(function, types.FunctionType) or depth == _DEEPEST:
        if strictly:
            raise NotPlainError(f"traceable: {function!r} is no function written in Python")
        return type(function).__qualname__
    parts: list[Any] = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).items()]
    for cell in function.__closure__ or ():
        try:
            parts.append(cell.cell_contents)
        except ValueError:  # nothing was put into it yet
            parts.append(None)
    variables = [(name, function.__globals__.get(name)) for name in _names(function.__code__, function.__globals__)]
    plain = tuple((name, _key(value)) for name, value in variables if type(value) in _SCALARS)
    return function.__code__, tuple(_part(each, strictly, depth) for each in parts), plain


def _names(code: types.CodeType, known: dict[str, Any]) -> list[str]:
    """The module's variables that a function and those inside it name."""
    inside = [name for each in code.co_consts if isinstance(each, types.CodeType) for name in _names(each, known)]
    return [*(name for name in code.co_names if name in known), *inside]


def _part(value: Any, strictly: bool, depth: int) -> Any:
    if isinstance(value, types.FunctionType):
        return _code(value, strictly, depth + 1)
    if isinstance(value, (type, types.ModuleType, types.BuiltinFunctionType)):
        return type(value).__name__, value.__name__
    if _is_plain(value):
        return _key(value)
    if strictly:
        raise NotPlainError(f"traceable: the backward has a {type(value).__name__} in its closure or defaults")
    return "other", type(value).__qualname__


def _is_plain(value: Any) -> bool:
    kind = type(value)
    if kind in _SCALARS:
        return True
    if kind in (tuple, list, torch.Size):
        return len(value) <= _LONGEST and all(map(_is_plain, value))
    return (
        kind is dict
        and len(value) <= _LONGEST
        and all(type(key) is str and _is_plain(each) for key, each in value.items())
    )


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
