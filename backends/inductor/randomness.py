"""Operators that draw random numbers. Inductor has generators of its own for them (torch 2.13); here they stay as they
are, so that compiled code draws what eager would, and both can be compared.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

FALLBACK = "fallback_random"
"""The setting of Inductor's that has it call eager's operators, in the graph's order."""


def draws(target: Any) -> bool:
    """Whether an operator draws from a generator."""
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())


@functools.cache
def decompositions() -> Mapping[Any, Callable[..., Any]]:
    """Inductor's table as it is with its own ``fallback_random``, and ``bernoulli`` as eager has it.

    Inductor decomposes that into a comparison with ``rand``, which draws something else.
    """
    from torch._inductor import config
    from torch._inductor.decomposition import select_decomp_table

    with config.patch({FALLBACK: True}):
        return {**select_decomp_table(), torch.ops.aten.bernoulli.default: _bernoulli}


def _bernoulli(self: torch.Tensor, *, generator: torch.Generator | None = None) -> torch.Tensor:
    """``ATen/native/Distributions.cpp``: new memory, written by ``bernoulli_``."""
    return torch.ops.aten.bernoulli.Tensor(torch.empty_like(self), self, generator=generator)
