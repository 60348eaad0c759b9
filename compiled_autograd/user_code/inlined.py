"""Users' code that is traced into the region around it, and not called."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .functions import call_backward
from .hooks import Grad


class Inlined:
    """A call of such code. The call does for real what :meth:`trace` does operator by operator."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, *args: Any) -> Any:
        raise NotImplementedError

    def trace(self, *args: Any) -> Any:
        """Run the call operator by operator."""
        raise NotImplementedError


class InlinedBackward(Inlined):
    """A function's ``backward``. Called like :func:`call_backward`, and run by it where nothing is traced."""

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
        """Run the call operator by operator; the arguments are those of :func:`call_backward`."""
        raise NotImplementedError


class Marked(Inlined):
    """A call of code marked as traceable.

    Attributes:
        called: why it is called from now on; None while it may be traced.
    """

    called: str | None = None

    def described(self, owner: Any) -> tuple[Any, Any, tuple[Any, ...]] | None:
        """Return the dependencies beside tensors; None if it is not marked, and so is called.

        Args:
            owner: the function's ``ctx``, or the hook.
        """
        raise NotImplementedError
