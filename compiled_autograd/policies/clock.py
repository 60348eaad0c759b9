"""The clock of trials, and the mean of its times."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence

import torch
from torch import distributed


def now() -> float:
    """Return seconds on the clock of trials. This is the processor time of the thread if it computes alone, so that
    other programs do not matter; else wall time, as for backwards that wait for other ranks or for a GPU, for which
    the engine has threads of its own.

    CUDA is synchronised first: else only the launch would be timed.
    """
    wait_for_devices()
    alone = torch.get_num_threads() == 1 and not torch.cuda.is_initialized()
    if alone and distributed.is_available():
        alone = not distributed.is_initialized()
    return time.thread_time() if alone else time.perf_counter()


def wait_for_devices() -> None:
    """Wait for all CUDA devices, if CUDA is in use and no graph is being captured."""
    if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
        for index in range(torch.cuda.device_count()):
            if torch.cuda.memory_reserved(index):  # else nothing was ever done there
                torch.cuda.synchronize(index)


def row_of(turn: int, rows: Sequence[int]) -> tuple[bool, bool]:
    """Return whether a backward of a trial runs on eager, and whether it is the first of its row.

    Args:
        turn: its number in the trial.
        rows: how many run in a row: compiled, on eager, and so on.
    """
    turn %= 2 * sum(rows)
    for number, length in enumerate((*rows, *rows)):
        if turn < length:
            return number % 2 == 1, turn == 0
        turn -= length
    raise AssertionError


def log_mean(times: Sequence[float]) -> tuple[float, float]:
    """Return the logarithm of the geometric mean, and its squared standard error."""
    logarithms = [math.log(max(each, 1e-9)) for each in times]
    mean = statistics.fmean(logarithms)
    return mean, statistics.variance(logarithms, mean) / len(times)
