"""Times of two ways to run backwards, compared: medians, where they are near enough to each other."""

from __future__ import annotations

import statistics
import time

import torch
from torch import distributed

WIDE = 1.5
"""Ratio of the quartiles of one side above which a few times have no median, as when sizes change."""
COLDER = 15e-6
"""Seconds that eager is given for what decides between two backwards of a trial, some hundred microseconds of Python
that are not timed: they take the engine's code and the tape out of the caches. An ODE solver's backward took 60 us of
eager where nothing was on trial, and 85 in one; its hits 65 and 80."""
LEAST = 1e-9
"""Seconds that a backward takes at least, whatever a coarse clock says."""


def out_of_a_trial(eager: list[float]) -> float:
    """Return eager's time outside of a trial: at least half of the timed one, since one of two groups may have been
    slow."""
    plain = middle(eager)
    return max(plain - COLDER, plain / 2, LEAST)


def time_ratio(eager: list[float], compiled: list[float]) -> float:
    """The time of the compiled ones by eager's."""
    return middle(compiled) / out_of_a_trial(eager)


def is_wide(times: list[float]) -> bool:
    """Return whether times are too far apart for a few of them to have a median."""
    ordered = sorted(times)
    return ordered[3 * len(ordered) // 4] > WIDE * ordered[len(ordered) // 4]


def middle(times: list[float]) -> float:
    """Return the median of times. If they spread, return the mean without the extremes: with two sizes, either could be
    the median."""
    return statistics.mean(sorted(times)[1:-1] or times) if is_wide(times) else statistics.median_low(times)


def now() -> float:
    """Return seconds on the clock of trials. This is the processor time of the thread if it computes alone, so that
    other programs do not matter; else wall time. Backwards that wait for other ranks use wall time.

    CUDA is synchronised first: else only the launch would be timed.
    """
    wait_for_devices()
    alone = torch.get_num_threads() == 1 and not (distributed.is_available() and distributed.is_initialized())
    return time.thread_time() if alone else time.perf_counter()


def wait_for_devices() -> None:
    """Wait for all CUDA devices, if CUDA is in use and no graph is being captured."""
    if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
        for index in range(torch.cuda.device_count()):
            if torch.cuda.memory_reserved(index):  # else nothing was ever done there
                torch.cuda.synchronize(index)
