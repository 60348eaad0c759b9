"""The clock of trials."""

from __future__ import annotations

import time

import torch
from torch import distributed


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
