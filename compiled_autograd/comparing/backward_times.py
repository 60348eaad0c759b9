"""The time of backwards, by either side, and what eager's consist of.

Private, tried on 2.11 to 2.15: ``torch.autograd`` calls ``_engine_run_backward`` by its name in that module.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch

_NAME = "_engine_run_backward"
_PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "mv", "dot", "conv", "scaled_dot_product", "rnn_layer")


class BackwardTimes:
    """A context manager in which the outermost backwards of each thread are timed.

    Attributes:
        count: the number of backwards so far.
        is_timed: False on devices that compute while Python goes on: the seconds are 0 then.
        threads: the threads that called them.
        stepping: the thread that runs the steps; None before the first one.
        profiles: True: the next backwards run under PyTorch's profiler.
    """

    def __init__(self) -> None:
        self.count, self.is_timed, self.profiles = 0, True, False
        self.threads: set[int] = set()
        self.stepping: int | None = None
        self._seconds = self._all = self._products = 0.0
        self._inside = threading.local()
        self._original: Callable[..., Any] | None = None

    def __enter__(self) -> BackwardTimes:
        self._original = getattr(torch.autograd, _NAME)
        setattr(torch.autograd, _NAME, self._run)
        return self

    def __exit__(self, *exception: object) -> None:
        if getattr(torch.autograd, _NAME) == self._run:  # else somebody else has put something there, which calls us
            setattr(torch.autograd, _NAME, self._original)

    def take(self) -> float:
        """Return the seconds of backward since this was last called."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds if self.is_timed else 0.0

    def share_of_products(self) -> float:
        """Return which part of the profiled backwards were matrix products and convolutions; 0 where none ran."""
        return self._products / self._all if self._all else 0.0

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        assert self._original is not None
        if getattr(self._inside, "on", False):
            return self._original(*args, **kwargs)
        self._inside.on = True
        started = perf_counter()
        try:
            return self._profiled(args, kwargs) if self.profiles else self._original(*args, **kwargs)
        finally:
            self._inside.on = False
            self._seconds += perf_counter() - started
            self.count += 1
            self.threads.add(threading.get_ident())

    def _profiled(self, args: Any, kwargs: Any) -> Any:
        assert self._original is not None
        profile = torch.autograd.profiler.profile()
        try:
            profile.__enter__()
        except RuntimeError:  # the program profiles itself
            return self._original(*args, **kwargs)
        try:
            return self._original(*args, **kwargs)
        finally:
            profile.__exit__(None, None, None)
            self._add(profile)

    def _add(self, profile: Any) -> None:
        """Add the times of a profile, if it has some."""
        try:
            times = [(event.key, event.self_cpu_time_total) for event in profile.key_averages()]
        except (AttributeError, RuntimeError):
            return
        for name, time in times:
            self._all += time
            if _is_product(name):
                self._products += time


def _is_product(name: str) -> bool:
    operator = name.rpartition("::")[2].strip("_")
    return name.startswith("aten::") and (operator in _PRODUCTS or any(word in operator for word in _PRODUCTS[6:]))
