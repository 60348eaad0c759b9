"""The ways in which a program asks for gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

MODES = {
    "sum": 6,
    "mean_square": 3,
    "gradient": 9,
    "grad": 4,
    "inputs": 2,
    "twice": 3,
    "two_losses": 3,
    "freed": 3,
    "penalty": 3,
}
"""How often each is drawn."""
See = Callable[[str, Any], None]


class NoTapeError(Exception):
    """Nothing in the program requires a gradient."""


def real(value: torch.Tensor) -> torch.Tensor:
    """A number to differentiate."""
    return value.abs().sum() if value.is_complex() else value.sum()


def ask(
    mode: str,
    outputs: list[torch.Tensor],
    gradient: list[torch.Tensor],
    inputs: list[torch.Tensor],
    see: See,
    session: Any,
    outcomes: list[tuple[str, tuple[Any, ...]]],
) -> None:
    """Run the backwards of one step inside ``session``, and write down what became of each."""
    if not outputs or not inputs:
        raise NoTapeError

    def note() -> None:
        last = getattr(session, "last", None)
        if last is not None:
            outcomes.append((last.outcome, last.reasons))

    with session:
        if mode == "sum":
            total = sum(real(each) for each in outputs)
            torch.autograd.backward([total])  # type: ignore[list-item]
        elif mode == "mean_square":
            total = sum(real(each * each.conj()) / max(each.numel(), 1) for each in outputs)
            total.backward()  # type: ignore[union-attr]
        elif mode == "gradient":
            torch.autograd.backward(outputs, gradient)
        elif mode == "grad":
            see("grad", torch.autograd.grad(outputs, inputs[-4:], gradient, allow_unused=True))
        elif mode == "inputs":
            leaves = [each for each in inputs if each.is_leaf]
            torch.autograd.backward(outputs, gradient, inputs=leaves[::2] or inputs[:1])
        elif mode == "twice":
            torch.autograd.backward(outputs, gradient, retain_graph=True)
            note()
            torch.autograd.backward(outputs, gradient)
        elif mode == "two_losses":
            real(outputs[0]).backward(retain_graph=True)
            note()
            (real(outputs[-1]) * 2).backward()
        elif mode == "freed":
            torch.autograd.backward(outputs, gradient)
            note()
            torch.autograd.backward(outputs, gradient)
        elif mode == "penalty":
            total = sum(real(each) for each in outputs)
            first = torch.autograd.grad(total, inputs[:2], create_graph=True, allow_unused=True)  # type: ignore[arg-type]
            note()
            squares = [real(each * each) for each in first if each is not None and each.requires_grad]
            if squares:
                sum(squares).backward()  # type: ignore[union-attr]
            else:
                return
        note()
