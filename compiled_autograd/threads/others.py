"""Other uses of the engine's seam: they wait while a walk of this package has it.

PyTorch itself turns its own compiled autograd off and on again around code that must not be captured.
``torch.func.grad``, AOTAutograd and Inductor do so at each call (``torch._dynamo.compiled_autograd._disable``, 2.13).
That saves and restores the seam, which belongs to the process. In another thread, during a walk of ours, it would save
our setting and restore it when the walk has ended, or remove our setting before the engine reads it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from .gate import GATE

_seam = torch._C._dynamo.compiled_autograd
set_autograd_compiler = _seam.set_autograd_compiler
clear_cache = _seam.clear_cache


def have_them_wait() -> None:
    """Have other users change the seam only between walks."""
    for function in (set_autograd_compiler, clear_cache):
        setattr(_seam, function.__name__, _between_walks(function))


def out_of_walk(run: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that calls the engine for a backward, so that the engine runs it even inside a walk of the
    calling thread: a signal's handler or a ``__del__`` may call it there."""
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
        with GATE.lock:  # inside a walk of the calling thread there is no waiting
            return function(*args)

    return others
