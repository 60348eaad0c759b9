"""Calls the ``backward`` of a Python ``autograd.Function`` with its real ``ctx``, after the engine let go of the tape.

By the time a region before it has run, the engine has released what ``ctx`` saved. So for the length of one call the
real ``ctx`` gets a class of its own, a subclass of the one it has, whose ``saved_tensors`` are those that the capture
lifted. Everything else about it is what the user made it: identity, attributes, ``needs_input_grad``.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch

from .hooks import Grad, unpacked, with_requires_grad

_SAVED = "_compiled_autograd_saved"
_OUR_REFERENCES = 2  # that of a list, and the one of sys.getrefcount
_FIRST_NUMBER = 1 << 40  # far above those that PyTorch counts
_numbers: dict[tuple[str, str], int] = {}
_classes: WeakKeyDictionary[type, type] = WeakKeyDictionary()


def number_of(ctx: Any) -> int:
    """What stands for a function's class in the engine's key: a number of its name.

    PyTorch numbers the classes themselves, so that one which is made anew at each step would never be met again. A
    capture needs no more than the name: it gets the ``ctx`` at each run, and its class with it.
    """
    function = type(ctx)._forward_cls
    return _numbers.setdefault((function.__module__, function.__qualname__), _FIRST_NUMBER + len(_numbers))


@dataclass(frozen=True, slots=True)
class Packed:
    """A saved tensor that the user packed: unpacked each time the function asks for it, as the engine does."""

    hook: Callable[[Any], Any]
    packed: Any

    def unpack(self) -> torch.Tensor:
        """Call the user's hook."""
        return unpacked(self.hook, self.packed)


def call_backward(
    ctx: Any, saved: Sequence[Grad | Packed], expected: Sequence[bool], defined: Sequence[bool], *grads: Grad
) -> list[Grad]:
    """Run a function's ``backward`` or ``vjp``.

    Args:
        ctx: the function's context, an instance of a subclass of ``torch.autograd.function.BackwardCFunction``.
        saved: its saved tensors.
        expected: for each argument of ``forward``, whether it was a tensor.
        defined: for each output of ``forward``, whether the tape leads a gradient to it. Where it does, but the
            gradient is undefined in this backward, the function sees zeros.
        grads: for each output of ``forward``, its gradient, or None.

    Returns:
        For each argument of ``forward`` its gradient, or None.

    Raises:
        RuntimeError: another number of gradients than ``forward`` has arguments, or a gradient for an argument that
            was no tensor, in the words of ``PyNode::apply`` (``torch/csrc/autograd/python_function.cpp``).
    """
    own_class = type(ctx)
    ctx.__dict__[_SAVED] = tuple(saved)
    ctx.__class__ = _class_with_saved(own_class)
    try:
        results = own_class.apply(ctx, *materialised(own_class, ctx, defined, grads))
    finally:
        ctx.__class__ = own_class
        ctx.__dict__.pop(_SAVED, None)
    return checked(own_class.__name__, results, expected)


def materialised(own_class: Any, ctx: Any, defined: Sequence[bool], grads: Sequence[Grad]) -> list[Grad]:
    """Zeros for gradients that turned out undefined; those that the capture saw as undefined it has dealt with."""
    result = list(grads)
    for index, (grad, known) in enumerate(zip(grads, defined, strict=True)):
        if grad is None and known:
            metadata = own_class._input_metadata.__get__(ctx)[index]
            result[index] = torch.zeros(metadata.shape, dtype=metadata.dtype, device=metadata.device)
    return result


def _class_with_saved(own_class: type) -> type:
    made = _classes.get(own_class)
    if made is None:
        body = {
            "saved_tensors": property(_saved),
            "saved_variables": property(_saved_deprecated),
            "maybe_clear_saved_tensors": _clear,
            "__slots__": (),
        }
        made = _classes[own_class] = type(own_class.__name__, (own_class,), body)
    return made


def _saved(ctx: Any) -> tuple[Grad, ...]:
    saved = ctx.__dict__[_SAVED]
    if not any(isinstance(value, Packed) for value in saved):
        return tuple(saved)
    values = [value.unpack() if isinstance(value, Packed) else value for value in saved]
    for index, required in enumerate(_required_grad(ctx, values)):
        packed = saved[index]
        if not isinstance(packed, Packed):
            continue
        of_somebody_else = packed.packed is not values[index] and sys.getrefcount(values[index]) > _OUR_REFERENCES
        if not of_somebody_else:  # a tensor of the user's that comes back as it was saved stays the object that it is
            values[index] = with_requires_grad(values[index], required)
    return tuple(values)


def _required_grad(ctx: Any, values: Sequence[Grad]) -> list[bool]:
    """Which saved tensors required grad when they were saved, where users' hooks gave them back without it.

    The engine remembers it (``SavedVariable::unpack``, ``torch/csrc/autograd/saved_variable.cpp``) and does not report
    it. A function that saved its arguments in their order tells by its edges; of another, what looks like an argument
    or output that requires grad is taken for one. Reentrant checkpointing goes by it.
    """
    inputs = [None if node is None else node._input_metadata[index] for node, index in ctx.next_functions]
    if len(inputs) == len(values) and all(
        metadata is None or _looks_like(value, metadata) for value, metadata in zip(values, inputs, strict=True)
    ):
        return [metadata is not None for metadata in inputs]
    likely = [metadata for metadata in (*inputs, *ctx._input_metadata) if metadata is not None]
    return [any(_looks_like(value, metadata) for metadata in likely) for value in values]


def _looks_like(value: Grad, metadata: Any) -> bool:
    return value is not None and value.dtype == metadata.dtype and tuple(value.shape) == tuple(metadata.shape)


def _saved_deprecated(ctx: Any) -> tuple[Grad, ...]:
    warnings.warn("'saved_variables' is deprecated; use 'saved_tensors'", DeprecationWarning, stacklevel=2)
    return _saved(ctx)


def _clear(ctx: Any) -> None:
    ctx.__dict__[_SAVED] = ()


def checked(name: str, results: Any, expected: Sequence[bool]) -> list[Grad]:
    """What a function gave, as the engine takes it; see :func:`call_backward` for what it refuses."""
    grads = list(results) if isinstance(results, tuple) else [results]
    if len(grads) > len(expected) and all(grad is None for grad in grads[len(expected) :]):
        grads = grads[: len(expected)]
    if len(grads) != len(expected):
        raise RuntimeError(
            f"function {name} returned an incorrect number of gradients (expected {len(expected)}, got {len(grads)})"
        )
    for index, (grad, is_tensor) in enumerate(zip(grads, expected, strict=True)):
        if grad is not None and not is_tensor:
            raise RuntimeError(
                f"function {name} returned a gradient different than None at position {index + 1}, "
                "but the corresponding forward input was not a Variable"
            )
        if grad is not None and not isinstance(grad, torch.Tensor):
            raise RuntimeError(f"expected Variable or None (got {type(grad).__name__})")
    return grads
