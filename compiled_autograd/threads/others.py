"""What others do with the engine's seam waits while one of our walks has it.

PyTorch itself turns its own compiled autograd off and on again around what must not be captured: ``torch.func.grad``,
AOTAutograd and Inductor do at each call (``torch._dynamo.compiled_autograd._disable``, 2.13). It notes what is set and
puts that back, and the seam is the process's. In another thread, while we walk, it would note what we have set, and put
that back when we are gone; or take away what we have set before the engine looks at it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from .gate import GATE, Turn

_seam = torch._C._dynamo.compiled_autograd
set_autograd_compiler = _seam.set_autograd_compiler
clear_cache = _seam.clear_cache


def have_them_wait() -> None:
    """From now on, others change the seam between walks."""
    for function in (set_autograd_compiler, clear_cache):
        setattr(_seam, function.__name__, _between_walks(function))


def out_of_walk(run: Callable[..., Any]) -> Callable[..., Any]:
    """What asks the engine for a backward, so that the engine runs it itself: also where Python has come to it in the
    midst of a walk of the calling thread, by a signal's handler or a ``__del__``."""
    if not GATE.has_seam():
        return run

    def alone(*args: Any, **named: Any) -> Any:
        prior: list[Any] = []
        try:
            prior += map(set_autograd_compiler, (None,), (False,))  # in one go: see the gate
            return run(*args, **named)
        finally:
            if prior and prior[0][0] is not None:
                set_autograd_compiler(*prior[0])

    return alone


def _between_walks(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def others(*args: Any) -> Any:
        turn = Turn()
        try:
            GATE.enter_alone(turn)  # inside a walk of the calling thread there is no waiting
            return function(*args)
        finally:
            turn.over = True  # no call before the release: see the gate
            turn.token.release()
            GATE.leave(turn)

    return others
