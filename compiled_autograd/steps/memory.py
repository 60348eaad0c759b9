"""Memory of tensors and their layout in it, copies with another layout, and errors for lack of memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from .. import ir
from ..torch_api import attributes


def memory_of(value: Any) -> int | None:
    """Return the id of the memory of a tensor; None for a value without memory."""
    if not isinstance(value, torch.Tensor) or not ir.is_plain(value):
        return None
    if value.numel() == 0 or value._is_zerotensor():  # zeros without memory
        return None
    return value.untyped_storage().data_ptr()


_NO_MEMORY = ("can't allocate memory", "CUDA error: out of memory", "STATUS_ALLOC_FAILED")
"""Parts of the errors of the CPU's allocator, of CUDA, and of cuBLAS and cuDNN, which allocate memory themselves."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation failed, on any device."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(each in str(error) for each in _NO_MEMORY)


def give_back_if_tight(values: Iterable[Any]) -> None:
    """Have CUDA's allocator return unused memory of the devices of some tensors, if these devices are rather full.

    A comparison needs more memory for a moment than a step allocates. Small results that are made next would lie in
    these pieces of memory, and keep all of them from the next step.
    """
    for device in {value.device for value in values if isinstance(value, torch.Tensor) and attributes.is_cuda(value)}:
        free, total = torch.cuda.mem_get_info(device)
        reserved = torch.cuda.memory_reserved(device)
        allowed = int(torch.cuda.get_per_process_memory_fraction(device) * total)
        if min(free, allowed - reserved) < reserved:
            torch.cuda.empty_cache()
            return


def extent(tensor: torch.Tensor) -> int:
    """Return the number of elements from the first to the last of a tensor in memory, both included."""
    if not tensor.numel():
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def has_bit(value: object) -> bool:
    """Return whether a value is a tensor that :func:`made_plain` replaces."""
    return isinstance(value, torch.Tensor) and (value.is_conj() or value.is_neg() or value._is_zerotensor())


def repeated(tensor: torch.Tensor) -> list[int]:
    """Return the dimensions along which a strided tensor repeats its memory, as ``expand`` makes them."""
    return [dim for dim in range(tensor.dim()) if tensor.shape[dim] > 1 and tensor.stride(dim) == 0]


def first_along(tensor: torch.Tensor, dims: Iterable[int]) -> torch.Tensor:
    """Return the tensor with one element in each of these dimensions."""
    for dim in dims:
        tensor = tensor.narrow(dim, 0, 1)
    return tensor


def laid_out(tensor: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """A copy whose dimensions lie in memory in this order, outermost first; those that are not named are repeated."""
    again = [dim for dim in range(tensor.dim()) if dim not in order]
    first = first_along(tensor, again)
    copy = torch.empty_permuted(first.shape, (*again, *order), dtype=first.dtype, device=first.device).copy_(first)
    return copy.expand(tensor.shape) if again else copy


def in_own_memory(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides, gaps and repetitions included."""
    if not tensor.numel():
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    whole = tensor.as_strided((extent(tensor),), (1,)).clone()
    return whole.as_strided(tensor.shape, tensor.stride())


def made_plain(tensor: torch.Tensor) -> torch.Tensor:
    """A copy, with the same strides, of a tensor that has a conjugate or negative bit, or zeros without memory: with
    memory, and without bits."""
    if tensor._is_zerotensor() or not tensor.numel():
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).zero_()
    whole = tensor.as_strided((extent(tensor),), (1,)).resolve_conj().resolve_neg()
    return whole.as_strided(tensor.shape, tensor.stride())
