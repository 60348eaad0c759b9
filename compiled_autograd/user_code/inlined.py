"""Functions whose ``backward`` is traced into the region around it, and not called."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .functions import call_backward
from .hooks import Grad


class InlinedBackward:
    """One such function. Called like :func:`call_backward`, and run by it where nothing is traced."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, ctx: Any, *args: Any) -> list[Grad]:
        return call_backward(ctx, *args)

    def trace(
        self,
        ctx: Any,
        saved: Sequence[Grad],
        expected: Sequence[bool],
        defined: Sequence[bool | torch.layout],
        *grads: Grad,
    ) -> list[Grad]:
        """The same, operator by operator; the arguments are those of :func:`call_backward`."""
        raise NotImplementedError
