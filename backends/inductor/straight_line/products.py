"""Values of generated code that are tensors of known sizes, and products of them as BLAS computes them."""

from __future__ import annotations

import ctypes
import functools
import logging
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..kernels import address_in

_log = logging.getLogger(__name__)
_INT_MAX = 2**31 - 1
_SMALL = 64**3
"""Maximum number of multiplications of a product that one thread computes (``benchmarks/threads.py``). BLAS would wake
other threads, and wait for them longer than the product takes."""


@dataclass(frozen=True)
class Value:
    """The value of a name: a slot, or other sizes and strides over its memory.

    ``dtype`` is None if nothing but the slot is known; ``offset`` counts elements.
    """

    slot: int
    sizes: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    offset: int = 0
    dtype: torch.dtype | None = None

    @property
    def memory(self) -> tuple[int, int]:
        """Slot and offset in bytes."""
        assert self.dtype is not None
        return self.slot, self.offset * self.dtype.itemsize

    @property
    def bytes(self) -> int:
        """How much memory lies from its first element to its last."""
        assert self.dtype is not None
        if 0 in self.sizes:
            return 0
        pairs = zip(self.sizes, self.strides, strict=True)
        return self.dtype.itemsize * (1 + sum((size - 1) * stride for size, stride in pairs))


def is_dense(value: Value) -> bool:
    """Return whether a matrix lies in memory without gaps and without repetition."""
    (rows, columns), (down, right) = value.sizes, value.strides
    return (right, down) == (1, columns) or (down, right) == (1, rows)


@functools.cache
def products() -> dict[torch.dtype, int]:
    """The addresses of BLAS's products in PyTorch's library; none where it has them elsewhere, or asks oneDNN first."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return {}
    try:
        library = ctypes.CDLL(str(_library()))
        names = {torch.float32: "sgemm_", torch.float64: "dgemm_"}
        return {dtype: address_in(library, name) for dtype, name in names.items()}
    except (OSError, AttributeError) as error:
        _log.debug("products are called through torch: %s", error)
        return {}


@functools.cache
def limit_threads() -> int:
    """The address of MKL's function that limits the threads of products in the calling thread, and gives the limit
    before; 0 where PyTorch's library has none.
    """
    try:
        return address_in(ctypes.CDLL(str(_library())), "MKL_Set_Num_Threads_Local")
    except (OSError, AttributeError):
        return 0


def _library() -> Path:
    return Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"


def in_blas(to: Value, left: Value, right: Value, alpha: float, beta: float) -> tuple[Any, ...] | None:
    """Return the call of BLAS in ``torch.mm``, by the rules of ``addmm_impl_cpu_`` (``ATen/native/LinearAlgebra.cpp``).

    BLAS stores columns one after the other. If the result stores rows one after the other, its transpose is computed,
    from the transposed factors in the opposite order.

    Returns:
        The parts of the instruction ``product`` before its memory, and the two factors in their order. None if a factor
        would have to be copied, if nothing has to be computed, and for other types of numbers.
    """
    address = products().get(to.dtype) if to.dtype is not None else None
    if (
        address is None
        or 0 in (*to.sizes, *left.sizes)
        or not len(left.sizes) == len(right.sizes) == len(to.sizes) == 2
    ):
        return None
    if to.strides[0] == 1 and (to.sizes[1] == 1 or to.strides[1] >= to.sizes[0]):
        rows, columns, first, second = 0, 1, left, right
    elif to.strides[1] == 1 and (to.sizes[0] == 1 or to.strides[0] >= to.sizes[1]):
        rows, columns, first, second = 1, 0, right, left
    else:
        return None
    m, n, k = to.sizes[rows], to.sizes[columns], first.sizes[columns]
    found = [_leading(first, rows, columns, m, k), _leading(second, rows, columns, k, n)]
    if found[0] is None or found[1] is None:
        return None
    (transpose_a, lda), (transpose_b, ldb) = found[0], found[1]
    ldc = m if n == 1 else to.strides[columns]
    if max(m, n, k, lda, ldb, ldc) > _INT_MAX:
        return None
    in_double = to.dtype is torch.float64
    limit = limit_threads() if m * n * k <= _SMALL else 0
    return address, limit, in_double, transpose_a, transpose_b, m, n, k, lda, ldb, ldc, alpha, beta, first, second


def _leading(value: Value, rows: int, columns: int, height: int, width: int) -> tuple[bool, int] | None:
    """Return whether a factor of ``height`` by ``width`` is transposed for BLAS, and its leading dimension.

    A single row or column has any leading dimension: it gets the one of ``normalize_last_dims``
    (``ATen/native/CPUBlas.cpp``), which BLAS accepts.
    """
    if value.strides[rows] == 1 and value.strides[columns] >= height:
        return False, height if width == 1 else value.strides[columns]
    if value.strides[columns] == 1 and value.strides[rows] >= width:
        return True, width if height == 1 else value.strides[rows]
    return None
