"""What a program of a client gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Training:
    """A training of a library, ready for its first step.

    `step` does forward, backward and optimizer, and gives the loss, a number or a tensor of one element. `trained`
    gives the tensors that it trains, always in the same order.
    """

    step: Callable[[], Tensor | float]
    trained: Callable[[], list[Tensor]]
