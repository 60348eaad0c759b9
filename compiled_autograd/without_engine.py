"""The public names on an untested PyTorch if an import of this package fails: all backwards run on eager."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .backends.torch_versions import TESTED_TORCH
from .diagnostics.users_line import users_line
from .outcomes import BYPASS, Outcome, Stats
from .settings import Settings, resolve
from .shadow_cache import Bypass
from .shadow_cache.amounts import date
from .versions import VERSION


class Session:
    """A context manager without effect and without counts.

    Attributes:
        last: the outcome of each backward, a bypass.
    """

    native = own_loop = "off: this PyTorch was not tested"

    def __init__(self, settings: Settings, why: str) -> None:
        self.settings = dataclasses.replace(settings, untested_torch="eager")
        self.last = Outcome(BYPASS, reasons=(Bypass("untested_torch", hint=why),))

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exception: object) -> None: ...

    def serve_everywhere(self) -> None: ...

    def stats(self) -> Stats:
        """Return counts of zero: backwards run on PyTorch's own engine, and are not counted."""
        return Stats()

    def summary(self) -> str:
        """Return why nothing is compiled."""
        return f"compiled_autograd: {self.last.reasons[0]}"

    def metrics(self) -> dict[str, float]:
        """Return an empty dict: nothing is counted."""
        return {}

    def graphs(self) -> list[Any]:
        """Return an empty list: nothing is compiled."""
        return []

    def wait(self, timeout: float | None = None) -> bool:
        """Return True: nothing is being compiled."""
        return True

    def report(self, path: str | os.PathLike[str]) -> Path:
        """Write a page that says why nothing is compiled.

        Raises:
            OSError: the page cannot be written.
        """
        from .shadow_cache.report import data, page

        facts = ("torch", str(torch.__version__)), ("compiled_autograd", VERSION), ("why", str(self.last.reasons[0]))
        timeline = data.Timeline((), 0, hits_between=False)
        return page.write(data.Report("session", "a session", date(time.time()), (), timeline, (), (), facts), path)


def names(error: Exception) -> dict[str, Any]:
    """Return the public names. None of them needs the module whose import failed with ``error``."""

    warned: list[bool] = []
    why = f"this package was not tested on this PyTorch, and an import failed: {type(error).__name__}: {error}"

    def warn() -> None:
        if warned:
            return
        warned.append(True)
        users_line().warn(
            f"compiled_autograd was not tested on torch {torch.__version__} (tested: {TESTED_TORCH}), and an import "
            f"failed: {type(error).__name__}: {error}. All backwards run on PyTorch's own engine. To compile, install "
            "a tested torch or a newer compiled_autograd."
        )

    def enable(**settings: Any) -> Session:
        warn()
        return Session(resolve(settings), why)

    def compile_step(function: Callable[..., Any] | None = None, **settings: Any) -> Any:
        warn()
        if function is None:
            return functools.partial(compile_step, **settings)
        step = functools.wraps(function)(lambda *args, **kwargs: function(*args, **kwargs))
        step.session = Session(resolve(settings), why)  # type: ignore[attr-defined]
        return step

    def compare(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"ca.compare needs a tested torch ({TESTED_TORCH}): {error}") from error

    def inspect(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"ca.inspect needs a tested torch ({TESTED_TORCH}): {error}") from error

    return {
        "Comparison": type("Comparison", (), {}),
        "Outcome": Outcome,
        "Session": Session,
        "Stats": Stats,
        "TapeView": type("TapeView", (), {}),
        "compare": compare,
        "compile_step": compile_step,
        "disable": contextlib.nullcontext,
        "enable": enable,
        "inspect": inspect,
        "reset": lambda: None,
        "trace_sources": contextlib.nullcontext,
        "traceable": lambda function: function,
    }
