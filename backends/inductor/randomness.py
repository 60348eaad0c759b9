"""Random numbers: compiled code draws what eager would, and compiling draws nothing of the user's.

Inductor has generators of its own for operators that draw (torch 2.13); here they stay as they are, so that both can be
compared.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from .workarounds.instead import Instead

FALLBACK = "fallback_random"
"""The setting of Inductor's that has it call eager's operators, in the graph's order."""


def draws(target: Any) -> bool:
    """Return whether an operator draws from a generator."""
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())


@functools.cache
def decompositions() -> Mapping[Any, Callable[..., Any]]:
    """Return Inductor's table as with its own ``fallback_random``, and with eager's ``bernoulli``.

    Inductor decomposes ``bernoulli`` into a comparison with ``rand``, which draws other numbers.
    """
    from torch._inductor import config
    from torch._inductor.decomposition import select_decomp_table

    with config.patch({FALLBACK: True}):
        return {**select_decomp_table(), torch.ops.aten.bernoulli.default: _bernoulli}


def _bernoulli(self: torch.Tensor, *, generator: torch.Generator | None = None) -> torch.Tensor:
    """``ATen/native/Distributions.cpp``: new memory, written by ``bernoulli_``."""
    return torch.ops.aten.bernoulli.Tensor(torch.empty_like(self), self, generator=generator)


# ---- while something is compiled -----------------------------------------------------------------------------------


class _Thread(threading.local):
    is_beside = False


_thread = _Thread()
_INSTEAD = Instead("torch._dynamo.utils", "preserve_rng_state", lambda before: contextlib.nullcontext())


def compiles_beside(is_beside: bool) -> None:
    """Set whether the calling thread compiles while others train."""
    _thread.is_beside = is_beside


@contextlib.contextmanager
def generators_kept(device: int | None) -> Iterator[None]:
    """Leave the generators of the process as whoever trains has them.

    Inductor sets them back to what they were when it began (``preserve_rng_state`` in ``_dynamo/utils.py``). Where
    others go on meanwhile, they would draw the same numbers once more: here it does not. On the CPU, compiling draws
    nothing. On CUDA, benchmarks of products do, also before Inductor has noted the state: there the generator is set
    back, unless others go on.

    Args:
        device: the index of the CUDA device that is compiled for; None for none.
    """
    keeps = torch.cuda.is_initialized() and not _thread.is_beside
    state = torch.cuda.get_rng_state(device) if device is not None and keeps else None
    try:
        with _INSTEAD.inside():
            yield
    finally:
        if state is not None:
            assert device is not None
            torch.cuda.set_rng_state(state, device)
