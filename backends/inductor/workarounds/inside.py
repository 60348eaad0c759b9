"""The threads in which a workaround holds: Inductor's functions, once replaced, are those of all threads."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class Inside(threading.local):
    """The number of times that the calling thread has entered a workaround, and not left it."""

    depth = 0

    def __bool__(self) -> bool:
        return self.depth > 0

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """The calling thread is inside."""
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1
