"""Self-check of the walk: the extension, as built here, walks as the engine does, on a small known tape."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def why_wrong(module: Any) -> str:
    """Return what it does wrong, or an empty text.

    The tapes of the check are the process's first: hooks and modes of the calling thread do not meet them
    (``torch.autograd.graph.node_creation_hook`` of 2.14 would show their nodes to the user). The default dtype is the
    process's, so each tensor names its own.

    Raises:
        OSError: no thread could be started.
    """
    return str(module.apart(lambda: _why_wrong(module, *(_zeros(2, 3).requires_grad_() for _ in range(2)))))


def _zeros(*sizes: int) -> Tensor:
    return torch.zeros(sizes, dtype=torch.float32, device="cpu")


def _why_wrong(module: Any, one: Tensor, other: Tensor) -> str:
    gradient = _zeros() + 1
    saved: list[Tensor] = []

    def hook(gradient: Tensor) -> None: ...

    def forward(exponent: int = 3, first: Tensor = one, second: Tensor = other, hooked: bool = True) -> Tensor:
        product = first * second
        saved[:] = [product]
        if hooked:
            product.register_hook(hook)
        return (product.pow(exponent) - one).sum()

    def walk(act: Callable[..., Any], tape: Tensor, *more: Any) -> Any:
        return act((tape,), (gradient,), *more)

    plan = walk(module.learn, forward(), True)
    if isinstance(plan, str):
        return f"it refused its own tape: {plan}"
    found = walk(plan.compare, forward())
    if isinstance(found, str):
        return f"it did not know a tape again: {found}"
    variant, tensors, sizes, scalars, objects = found
    expected = [gradient, *saved, other, one]  # in the order of the engine's walk
    if len(tensors) != len(expected) or any(map(operator.is_not, tensors, expected)):
        return "it found other tensors than the engine would"
    if (variant, sizes, scalars, objects) != (0, [2, 3] * 7, [], [hook]):
        return "it found other values than the engine would"
    others = [forward(2), forward(first=other, second=one), forward(hooked=False)]
    others += [forward(first=_zeros(2, 3)), forward(second=one), gradient * forward()]
    if not all(isinstance(walk(plan.compare, tape), str) for tape in others):
        return "it took a tape for another one"
    if module.unlike([one, one, None, one], [one, one + 1, None, None], 0.5) != [1, 3]:
        return "it took other values for the same"
    return ""
