"""Keeps glibc from handing a step's memory back to the system, to be faulted in again at the next step."""

from __future__ import annotations

import functools

import torch

_CEILING = 32 << 20
"""glibc's ``DEFAULT_MMAP_THRESHOLD_MAX`` on 64-bit systems, in bytes."""


@functools.cache
def keep_freed_memory() -> None:
    """Let glibc keep up to 64 MiB of freed memory at the top of its heap. Once in a process; costs microseconds.

    glibc serves large blocks by ``mmap``, and returns freed memory at the heap's top to the system, above thresholds
    that it raises by itself when a large block is freed: the first to that block's size, the second to twice that
    (``man mallopt``, ``M_MMAP_THRESHOLD``). Until a program has freed a block of 32 MiB, a compiled backward that gives
    back all its buffers at once therefore faults every page in again at each step. So one such block is allocated,
    untouched, and freed. Whoever has set the thresholds (``MALLOC_TRIM_THRESHOLD_``, ``mallopt``) has thereby turned
    the adjustment off, and this does nothing; the same goes for other allocators.
    """
    torch.empty(_CEILING - (64 << 10), dtype=torch.uint8)
