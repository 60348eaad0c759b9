"""The hooks of ``torch.autograd.graph.saved_tensors_hooks`` that a thread is in (private, 2.13)."""

from __future__ import annotations

import itertools
from typing import Any

import torch


def saved_tensor_hooks() -> list[Any]:
    """The thread's, outermost first."""
    hooks: list[Any] = []
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
        return hooks
    put_back = itertools.starmap(torch._C._autograd._push_saved_tensors_default_hooks, hooks)
    try:
        while True:  # not a condition: see Ctrl-C in docs/internals/threads.md
            top = torch._C._autograd._top_saved_tensors_default_hooks(True)
            if top is None:
                break
            hooks[:0] = [top]  # no call: nothing comes between this and the next line
            torch._C._autograd._pop_saved_tensors_default_hooks()
    finally:
        _ = [*put_back]  # no call of Python's: all of them, before it looks for Ctrl-C
    return hooks


def restore_saved_tensor_hooks(hooks: list[Any]) -> None:
    """Have these again. What users' code does to them in a backward ends with it."""
    now = saved_tensor_hooks()
    if now == hooks:
        return
    for _ in now:
        torch._C._autograd._pop_saved_tensors_default_hooks()
    for pair in hooks:
        torch._C._autograd._push_saved_tensors_default_hooks(*pair)
