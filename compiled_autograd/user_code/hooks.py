"""Calls users' hooks as the engine does: same arguments, same checks of what they give back, same words for mistakes.

The rules are those of ``torch/csrc/autograd/python_hook.cpp`` and ``saved_variable.cpp`` (2.13).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..torch_api import attributes

Grad = torch.Tensor | None


def tensor_hook(hook: Callable[[Grad], Any], grad: Grad) -> Grad:
    """``Tensor.register_hook``: sees the gradient (None where undefined) and may give another in its place."""
    result = hook(grad)
    if result is None:
        return grad
    _check_single(grad, result, hook)
    return result


def cpp_hook(index: int, grad: Grad) -> Grad:
    """A hook that C++ registered, as ``retain_grad`` does; only callable while the engine's call is under way.

    Of an undefined gradient ``retain_grad`` takes no notice (``VariableHooks::retain_grad``), and no hook may put
    another in its place; the seam, asked to call one with ``None``, ends the process (2.13).
    """
    if grad is None:
        return None
    return torch._C._dynamo.compiled_autograd.call_cpp_tensor_pre_hooks(index, grad)


def pre_hook(hook: Callable[..., Any], grads: Sequence[Grad]) -> tuple[Grad, ...]:
    """``Node.register_prehook``: sees all gradients that enter a node, and may give others."""
    return _replaced(tuple(grads), hook(tuple(grads)), hook)


def post_hook(hook: Callable[..., Any], outputs: Sequence[Grad], inputs: Sequence[Grad]) -> tuple[Grad, ...]:
    """``Node.register_hook``: sees what a node gives and what it got, and may replace what it gives."""
    return _replaced(tuple(outputs), hook(tuple(outputs), tuple(inputs)), hook)


def post_accumulate_hook(hook: Callable[[torch.Tensor], Any], leaf: torch.Tensor) -> None:
    """``Tensor.register_post_accumulate_grad_hook``: sees the leaf, whose ``.grad`` is new, and has nothing to give."""
    result = hook(leaf)
    if result is None or result is leaf:
        return
    if not isinstance(result, torch.Tensor):
        raise TypeError(f"expected Variable, but hook returned '{type(result).__name__}'")
    raise RuntimeError("Tensor post accumulate grad hooks should return None.")


def unpack_hook(hook: Callable[[Any], Any], packed: Any) -> torch.Tensor:
    """A saved tensor that ``saved_tensors_hooks`` packed, unpacked when the built-in node that saved it is to run.

    Whether it required grad is what the engine remembers and does not report. Some nodes leave out the gradient of what
    does not (``linalg_solve_backward`` in ``FunctionsManual.cpp``): so all do, and what is too much is not used.
    """
    return with_requires_grad(unpacked(hook, packed), True)


def with_requires_grad(value: torch.Tensor, required: bool) -> torch.Tensor:
    """``value``, or a tensor in its memory that requires grad, or does not."""
    required = required and not attributes.is_inference(value)
    required = required and (attributes.is_floating_point(value) or attributes.is_complex(value))
    if attributes.requires_grad(value) == required:
        return value
    with torch._C.DisableTorchFunctionSubclass():
        return attributes.detach(value).requires_grad_(required)


def unpacked(hook: Callable[[Any], Any], packed: Any) -> torch.Tensor:
    """Call the user's unpack hook on a packed value, and check the result."""
    result = hook(packed)
    if not isinstance(result, torch.Tensor):
        raise TypeError(
            f"Output of saved tensor unpack_hook expected to be a Tensor but got result of type {type(result).__name__}"
        )
    return result


def _replaced(before: tuple[Grad, ...], result: Any, hook: Any) -> tuple[Grad, ...]:
    if result is None:
        return before
    if not isinstance(result, tuple):
        raise TypeError(f"expected tuple, but hook returned '{type(result).__name__}'")
    if len(result) != len(before):
        raise RuntimeError(
            f"hook '{_name(hook)}' has returned an incorrect number of values "
            f"(got {len(result)}, but expected {len(before)})"
        )
    for old, new in zip(before, result, strict=True):
        _check_single(old, new, hook)
    return result


def _check_single(old: Grad, new: Any, hook: Any) -> None:
    if new is None:
        return
    if old is None:
        raise RuntimeError("can't replace a None gradient with a non-None value")
    if not isinstance(new, torch.Tensor):
        raise TypeError(f"expected Variable, but hook returned '{type(new).__name__}'")
    if _kind(old) != _kind(new):
        raise RuntimeError(f"hook '{_name(hook)}' has changed the type of value (was {old.type()} got {new.type()})")
    if attributes.shape(old) != attributes.shape(new):
        raise RuntimeError(f"hook '{_name(hook)}' has changed the size of value")


def _kind(tensor: torch.Tensor) -> tuple[torch.dtype, str, torch.layout]:
    return attributes.dtype(tensor), attributes.device(tensor).type, attributes.layout(tensor)


def _name(hook: Any) -> str:
    name = getattr(hook, "__name__", None)
    return name if isinstance(name, str) else "<unknown>"
