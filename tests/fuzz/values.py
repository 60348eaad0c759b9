"""Tensors in every layout, with values that depend on a name alone; memory that holds junk; who shares memory."""

from __future__ import annotations

import contextlib
import ctypes
import sys
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

LEFT_OUT: set[str] = set()
"""Layouts and operators that programs do without, so that what is known does not hide the rest."""


@dataclass
class Place:
    """Where tensors lie."""

    device: str = "cpu"


PLACE = Place()
LAYOUTS = (
    "contiguous",
    "channels_last",
    "transposed",
    "permuted",
    "expanded",
    "sliced",
    "every_other",
    "offset",
    "negative",
    "conjugate",
    "backwards",
)
"""Of a ``gradient=`` argument also ``alternating`` (transposed in every second step), and ``row`` (a part of something
larger, another one at each step)."""


def generator(*names: object) -> torch.Generator:
    """Random numbers that depend on nothing but the names."""
    return torch.Generator().manual_seed(zlib.crc32(repr(names).encode()))


def plain(shape: Sequence[int], dtype: torch.dtype, *names: object) -> torch.Tensor:
    """A contiguous tensor of normal values."""
    wide = torch.complex128 if dtype.is_complex else torch.float64
    return torch.randn(tuple(shape), dtype=wide, generator=generator(*names)).to(PLACE.device, dtype)


def lay_out(value: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values (of an expanded tensor, those of its first row), lying in memory as ``layout`` says."""
    dims = value.dim()
    if layout in LEFT_OUT:
        return value.contiguous()
    if layout == "channels_last" and dims in (4, 5):
        return value.contiguous(memory_format=torch.channels_last if dims == 4 else torch.channels_last_3d)
    if layout == "transposed" and dims >= 2:
        return value.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "permuted" and dims >= 2:
        order = [*range(1, dims), 0]
        back = sorted(range(dims), key=order.__getitem__)
        return value.permute(order).contiguous().permute(back)
    if layout == "backwards" and dims >= 2:
        order = list(reversed(range(dims)))
        return value.permute(order).contiguous().permute(order)
    if layout == "expanded" and dims and value.shape[0] > 0:
        return value[:1].clone().expand(value.shape)
    if layout == "sliced" and dims:
        larger = value.new_full([size + 2 for size in value.shape], 7.0)
        inner = larger[tuple(slice(1, size + 1) for size in value.shape)]
        return inner.copy_(value)
    if layout == "every_other" and dims:
        larger = value.new_full((*value.shape[:-1], 2 * value.shape[-1]), 7.0)
        return larger[..., ::2].copy_(value)
    if layout == "offset":
        larger = value.new_full((value.numel() + 3,), 7.0)
        return larger[3:].view(value.shape).copy_(value)
    if layout == "negative" and value.dtype in (torch.float32, torch.float64):
        return torch.complex(torch.zeros_like(value), -value).conj().imag
    if layout == "conjugate" and value.is_complex():
        return value.conj().resolve_conj().clone().conj()
    return value.contiguous()


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Memory that is allocated or freed holds junk, so that what is read before it was written shows.

    glibc's ``mallopt(M_PERTURB, byte)``; elsewhere only ``spoil`` remains. The byte and its complement are both numbers
    of a size that shows beside gradients, in float32 and float64.
    """
    change = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if change is not None:
        change(-6, 0x40)
    try:
        yield
    finally:
        if change is not None:
            change(-6, 0)


def spoil(counts: Sequence[int], step: int) -> None:
    """Fill and free memory of the sizes in use: what is allocated next is likely to be one of these."""
    junk = float("nan") if step % 2 else 1e30
    sizes = [count for count in counts if 0 < count < 1 << 16]
    dtypes = (torch.float64, torch.float32)
    held = [torch.full((count,), junk, dtype=dtype, device=PLACE.device) for dtype in dtypes for count in sizes]
    del held


def elements(value: torch.Tensor) -> torch.Tensor:
    """Where in its storage each element lies."""
    reach = value.untyped_storage().nbytes() // value.element_size()
    return torch.as_strided(torch.arange(reach), value.shape, value.stride(), value.storage_offset()).flatten()


def share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether some element of one is also an element of the other."""
    for value in (one, other):
        if value.layout is not torch.strided or not value.numel():
            return False
    if one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr():
        return False
    if one.element_size() != other.element_size():
        return True
    return bool(torch.isin(elements(one), elements(other)).any())
