"""Other ways to make steps faster: measured on copies, never applied to the program's own objects."""

from __future__ import annotations

import inspect
import statistics
from time import perf_counter, thread_time
from typing import Any

import torch
from torch import optim
from torch.optim import Optimizer

from .turns import Turns

_LARGE_SHARE = 0.1
"""An optimizer that takes less than this part of a step gains nothing by being faster."""
_MAX_BYTES = 512 << 20
"""Parameters that are copied to try an optimizer, in bytes."""
_TRIALS = 5
_FUSED = (optim.Adam, optim.AdamW, optim.SGD, optim.Adagrad)
_PAGE = "docs/try_it.md#what-else-helps"


class OptimizerTimes:
    """Seconds in the steps of the program's optimizers."""

    def __init__(self) -> None:
        self._began = 0.0
        self._seconds: list[float] = []

    def begin(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """A hook before each step."""
        self._began = perf_counter()

    def end(self, args: Any, kwargs: Any) -> None:
        """After a step. With a closure, backwards are in it, and it is not taken."""
        if not any(map(callable, (*args, *kwargs.values()))):
            self._seconds.append(perf_counter() - self._began)

    def median(self) -> float:
        """The median step of an optimizer in seconds; 0 where none was seen."""
        return statistics.median(self._seconds) if self._seconds else 0.0


def hints_of(optimizer: Optimizer, times: OptimizerTimes, turns: Turns) -> tuple[str, ...]:
    """Return what else would help a program with this optimizer."""
    parameters = [each for group in optimizer.param_groups for each in group["params"] if each.grad is not None]
    hints = []
    step = statistics.median([block.step for block, _ in turns.pairs]) if turns.pairs else 0.0
    share = times.median() / step if step else 0.0
    if share > _LARGE_SHARE:
        ratio = _fused_ratio(optimizer, parameters)
        if ratio is not None and ratio < 0.9:
            name = type(optimizer).__name__
            hints.append(f"{name} is {share:.2f} of a step; {name}(..., fused=True) takes {ratio:.2f} of its time")
    images = [each for each in parameters if each.dim() == 4 and each.shape[2] * each.shape[3] > 1]
    if any(each.is_contiguous() and not each.is_contiguous(memory_format=torch.channels_last) for each in images):
        hints.append(f"convolutions: try model.to(memory_format=torch.channels_last) ({_PAGE})")
    return tuple(hints)


def _fused_ratio(optimizer: Optimizer, parameters: list[torch.Tensor]) -> float | None:
    """The time of a fused step by that of one as the program's, on copies; None where it cannot be tried."""
    if type(optimizer) not in _FUSED or any(group.get("fused") for group in optimizer.param_groups):
        return None
    plain = all(each.is_floating_point() and type(each.grad) is torch.Tensor for each in parameters)
    if not plain or sum(each.nbytes for each in parameters) > _MAX_BYTES:
        return None
    taken = inspect.signature(type(optimizer)).parameters  # the defaults of AdamW have one more, which is Adam's
    # Other programs interrupt the longer one of two steps more often.
    clock = thread_time if all(each.is_cpu for each in parameters) else perf_counter
    own = {name: value for name, value in optimizer.defaults.items() if name in taken}
    # The innermost function of step calls no hooks of the program and records nothing in its profile
    # (Optimizer.profile_hook_step, torch/optim/optimizer.py, 2.13). It relies on the grad mode that its wrapper sets.
    step = inspect.unwrap(type(optimizer).step)
    try:
        with torch.no_grad():
            sides = [_copy(optimizer, parameters, own | other) for other in ({}, {"foreach": None, "fused": True})]
            times: tuple[list[float], list[float]] = ([], [])
            for _ in range(_TRIALS):
                for side, seconds in zip(sides, times, strict=True):
                    started = clock()
                    step(side)
                    if parameters[0].is_cuda:
                        torch.cuda.synchronize()
                    seconds.append(clock() - started)
    except (RuntimeError, TypeError, ValueError):  # no fused kernel for these parameters
        return None
    plain_time, fused_time = (min(each[1:]) for each in times)
    return fused_time / plain_time


def _copy(optimizer: Optimizer, parameters: list[torch.Tensor], options: dict[str, Any]) -> Optimizer:
    copies = []
    for each in parameters:
        copy = each.detach().clone().requires_grad_()
        copy.grad = None if each.grad is None else each.grad.detach().clone()
        copies.append(copy)
    return type(optimizer)(copies, **options)
