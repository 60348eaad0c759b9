"""Calls the ``backward`` of a Python ``autograd.Function`` with its real ``ctx``, after the engine let go of the tape.

By the time a region before it has run, the engine has released what ``ctx`` saved. So for the length of one call the
real ``ctx`` gets a class of its own, a subclass of the one it has, whose ``saved_tensors`` are those that the capture
lifted. Everything else about it is what the user made it: identity, attributes, ``needs_input_grad``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch

_SAVED = "_compiled_autograd_saved"
_classes: WeakKeyDictionary[type, type] = WeakKeyDictionary()


def call_backward(
    ctx: Any, saved: Sequence[torch.Tensor | None], expected: Sequence[bool], *grads: torch.Tensor | None
) -> list[torch.Tensor | None]:
    """Run a function's ``backward`` or ``vjp``.

    Args:
        ctx: the function's context, an instance of a subclass of ``torch.autograd.function.BackwardCFunction``.
        saved: its saved tensors.
        expected: for each argument of ``forward``, whether it was a tensor.
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
        results = ctx.apply(*grads)
    finally:
        ctx.__class__ = own_class
        ctx.__dict__.pop(_SAVED, None)
    return _checked(own_class.__name__, results, expected)


def _class_with_saved(own_class: type) -> type:
    made = _classes.get(own_class)
    if made is None:
        saved = property(lambda self: self.__dict__[_SAVED])
        body = {"saved_tensors": saved, "saved_variables": saved, "maybe_clear_saved_tensors": _clear, "__slots__": ()}
        made = _classes[own_class] = type(own_class.__name__, (own_class,), body)
    return made


def _clear(ctx: Any) -> None:
    ctx.__dict__[_SAVED] = ()


def _checked(name: str, results: Any, expected: Sequence[bool]) -> list[torch.Tensor | None]:
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
