"""Operators that draw random numbers. Inductor has generators of its own for them (torch 2.13); here they stay as they
are, so that compiled code draws what eager would, and both can be compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

Table = Mapping[Any, Callable[..., Any]]
FALLBACK = "fallback_random"
"""The setting of Inductor's that has it call eager's operators, in the graph's order."""
_made: dict[int, tuple[Table, Table]] = {}
"""By identity of a table of decompositions: it, and what was made of it, which keeps an identity too."""


def draws(target: Any) -> bool:
    """Whether an operator draws from a generator."""
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())


def eagers_draws(table: Table) -> Table:
    """Inductor's table as it is with its own ``fallback_random``, and ``bernoulli`` as eager has it.

    Inductor decomposes that into a comparison with ``rand``, which draws something else.
    """
    if id(table) not in _made:
        _made[id(table)] = table, {**table, torch.ops.aten.bernoulli.default: _bernoulli}
    return _made[id(table)][1]


def _bernoulli(self: torch.Tensor, *, generator: torch.Generator | None = None) -> torch.Tensor:
    """``ATen/native/Distributions.cpp``: new memory, written by ``bernoulli_``."""
    return torch.ops.aten.bernoulli.Tensor(torch.empty_like(self), self, generator=generator)
