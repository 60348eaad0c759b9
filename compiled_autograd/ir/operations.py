"""The vocabulary of the tape graph: the engine's functions, bound as they were reported, and the calls beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..torch_api import attributes
from ..user_code.functions import Packed, call_backward
from ..user_code.hooks import cpp_hook, post_accumulate_hook, post_hook, pre_hook, tensor_hook, unpack_hook
from ..user_code.inlined import Marked
from ..user_code.reducers import reducer_hooks
from ..user_code.split_gradients import FITTED
from ..user_code.traced_hooks import TracedHook

PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
"""Types whose operators are the tensor's own; any other subclass may do anything."""


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor can be traced: a strided tensor of a class with PyTorch's own operators."""
    return type(tensor) in PLAIN_TENSORS and attributes.layout(tensor) is torch.strided


PLACEHOLDERS = ("input", "size", "scalar", "object", "packed")
"""Kinds of placeholders: tensors, sizes (int), scalars (int or float), Python objects (a function's ``ctx``, a hook),
and what saved-tensor hooks packed."""


class OpaqueOp:
    """One function of the engine, bound at the first capture that met it.

    ``function(grads, *saved)`` takes gradients (``None`` where undefined) and saved values, and gives a list of
    gradients, one for each edge to a next node. It reads nothing else, so it can be run later, or under fake tensors.
    """

    __slots__ = ("__name__", "custom", "fitted", "function", "traceable")

    def __init__(self, name: str, function: Callable[..., Any], traceable: bool = True, custom: bool = False) -> None:
        self.__name__ = name
        self.function = function
        self.traceable = traceable
        self.custom = custom  # of a user's C++, which another process may have in another version
        self.fitted = FITTED.get(name)

    __module__ = "compiled_autograd.ops"

    def __call__(self, *args: Any) -> Any:
        return self.function(*(args if self.fitted is None else self.fitted(*args)))

    def __repr__(self) -> str:
        return f"ops.{self.__name__}"


def sum_gradients(*gradients: torch.Tensor | None) -> torch.Tensor | None:
    """The sum of what several edges bring to one input, in the engine's order; undefined ones (None) do not count."""
    total = None
    for gradient in gradients:
        if gradient is None:
            continue
        if total is None:
            total = gradient
        elif total.layout is not torch.strided and gradient.layout is torch.strided:
            total = gradient + total  # a sparse buffer becomes dense; the engine adds in this order
        else:
            total = total + gradient
    return total


def accumulate_grad(leaf: torch.Tensor, old: torch.Tensor | None, gradient: torch.Tensor | None) -> torch.Tensor:
    """Name the call only: :mod:`compiled_autograd.steps.accumulate` runs it for all leaves of a region at once.

    The result is the gradient. The leaf keeps it if it can.
    """
    raise NotImplementedError


def copy_slices_prologue(
    grads: Sequence[torch.Tensor | None],
    base_sizes: Sequence[int],
    base_strides: Sequence[int],
    base_offset: int,
    view_sizes: Sequence[int],
    view_strides: Sequence[int],
    view_offset: int,
) -> list[torch.Tensor | None]:
    """The first half of a write into a view: a copy of the base's gradient, the slice in it, and that slice's copy.

    Only the copies are used: a write into the slice would have to be seen in the first.

    The rule is ``CopySlices::apply`` (``torch/csrc/autograd/functions/tensor.cpp``, 2.13).
    """
    (grad,) = grads
    if grad is None:
        return [None, None, None]
    result = grad.new_empty_strided(base_sizes, base_strides)
    result.copy_(grad)
    grad_slice = result.as_strided(view_sizes, view_strides, view_offset - base_offset)
    return [result, grad_slice, grad_slice.clone(memory_format=torch.contiguous_format)]


def copy_slices_epilogue(
    needs_input_grad: Sequence[bool],
    result: torch.Tensor | None,
    inner: Sequence[torch.Tensor | None],
    view_sizes: Sequence[int],
    view_strides: Sequence[int],
    view_offset: int,
    base_offset: int,
) -> list[torch.Tensor | None]:
    """Run the second half: the written slice gets the written function's gradient, the rest keeps the base's.

    If the written function's gradient is undefined, the base's becomes undefined too, as in the engine. The slice is
    written out of place, since the written function may lie in another region than the prologue.
    """
    gradients: list[torch.Tensor | None] = [None] * len(needs_input_grad)
    for index, needed in enumerate(needs_input_grad):
        value = inner[index] if needed and index < len(inner) else None
        if value is None:
            continue
        if index > 0:
            gradients[index] = value
        elif result is not None:
            value = value.to(result.dtype).expand(view_sizes)
            offset = result.storage_offset() + view_offset - base_offset  # it need not be the first in its memory
            gradients[0] = result.as_strided_scatter(value, view_sizes, view_strides, offset)
    return gradients


def zeros(size: Sequence[int], options: dict[str, Any]) -> torch.Tensor:
    """The zeros that the engine gives a Python function in place of an undefined gradient."""
    return torch.zeros(size, **options)


class NaNFoundError(Exception):
    """A node gave a NaN. Within a run only: the user sees the engine's own words."""

    def __init__(self, call: int, index: int) -> None:
        super().__init__(call, index)
        self.call, self.index = call, index


def check_nan(given: Sequence[torch.Tensor | None], call: int) -> None:
    """Look at what a node of the tape gave.

    Raises:
        NaNFoundError: there is a NaN in it.
    """
    with torch._C.DisableTorchFunctionSubclass():
        found = [*map(_has_nan, given)]
    if True in found:
        raise NaNFoundError(call, found.index(True))


def _has_nan(value: torch.Tensor | None) -> bool:
    return isinstance(value, torch.Tensor) and bool(torch.ops.aten._is_any_true(torch.isnan(value)))


USERS_CODE = frozenset(
    {
        call_backward,
        Packed,
        tensor_hook,
        cpp_hook,
        pre_hook,
        post_hook,
        post_accumulate_hook,
        reducer_hooks,
        unpack_hook,
    }
)
"""Calls that run what a user wrote: never traced, never run twice, and never moved but for what
:mod:`compiled_autograd.ir.checkpoints` says."""


def runs_users_code(target: Any) -> bool:
    """Return whether a call runs a user's function uncompiled. A marked function may be compiled."""
    return target in USERS_CODE or isinstance(target, Marked)


def hook_kind(target: Any) -> Any:
    """Return the kind of a hook's call, also of a traceable one; other targets unchanged."""
    return target.kind if isinstance(target, TracedHook) else target
