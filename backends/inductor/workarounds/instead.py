"""Functions of ours in the place of PyTorch's: once replaced, a function is that of all threads."""

from __future__ import annotations

import contextlib
import functools
import pkgutil
import threading
from collections.abc import Callable, Iterator
from typing import Any


class Instead(threading.local):
    """A function that runs in the place of one of PyTorch's, in threads that are inside alone.

    Args:
        owner: the module that has PyTorch's function, or the class after a colon. It is imported when a thread is first
            inside.
        name: that of the function.
        ours: is given PyTorch's function and the arguments.

    Attributes:
        depth: the number of times that the calling thread has gone inside, and not left.
    """

    depth = 0

    def __init__(self, owner: str, name: str, ours: Callable[..., Any]) -> None:
        self.owner, self.name, self.ours = owner, name, ours

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Count the calling thread as inside."""
        _install(self)
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1


@functools.cache
def _install(instead: Instead) -> None:
    owner = pkgutil.resolve_name(instead.owner)
    before = getattr(owner, instead.name)

    @functools.wraps(before)
    def function(*given: Any, **named: Any) -> Any:
        return instead.ours(before, *given, **named) if instead.depth else before(*given, **named)

    setattr(owner, instead.name, function)
