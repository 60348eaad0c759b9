"""Hooks marked as traceable by their author: how they are recognised, their dependencies, and how they are traced."""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable
from typing import Any

from .functions import TRACEABLE
from .inlined import Marked
from .marked_code import Code, NotPlainError, asked_of_the_thread, refuse_more_than_computing
from .marked_copies import Copies, RefuseSideEffects


def mark_hook(hook: types.FunctionType) -> None:
    """Mark a function as a hook that may be traced. A wrapper that takes over its attributes is not marked: its code is
    another."""
    hook.__dict__[TRACEABLE] = hook.__code__


def is_marked(hook: Any) -> bool:
    """Return whether a hook itself was marked."""
    return type(hook) is types.FunctionType and hook.__dict__.get(TRACEABLE) is hook.__code__


class TracedHook(Marked):
    """A call of a marked hook, at one place of a tape.

    Args:
        kind: what calls it: one of the functions of :mod:`compiled_autograd.user_code.hooks`.
    """

    def __init__(self, kind: Callable[..., Any]) -> None:
        super().__init__(f"traced_{kind.__name__}")
        self.kind = kind

    def __call__(self, *args: Any) -> Any:
        return self.kind(*args)

    def described(self, owner: Any) -> tuple[Any, Any, tuple[Any, ...]] | None:
        """Return the dependencies of a marked hook beside its gradients; None for a hook that is not marked."""
        return (Code(strictly=False).of(owner, 0), asked_of_the_thread(), ()) if is_marked(owner) else None

    def trace(self, hook: Any, *args: Any) -> Any:
        """Call it; nothing of what it can reach may be changed by that. Which of its gradients are undefined is part of
        what a region is compiled for."""
        grads = itertools.chain(*[each if isinstance(each, (list, tuple)) else (each,) for each in args])
        given = [grad for grad in grads if grad is not None]
        versions = [grad._version for grad in given]
        refuse_more_than_computing(hook)
        copies = Copies()
        with RefuseSideEffects():
            result = self.kind(copies.of_function(hook), *args)
        copies.refuse_changes()
        if versions != [grad._version for grad in given]:
            raise NotPlainError("traceable: the hook writes into its argument")
        return result
