"""Measures of the memory that a step takes: how far the process grows, and what torch's allocator hands out; on CUDA
also what torch holds of the device.

The second one is exact on the CPU and does not depend on what the C library keeps for later; it reads the profiler's
own tree of events, which is private (torch 2.13).
"""

import ctypes
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.runners import NotApplicable

_BACKWARD = "the backward that is measured"


def growth(step: Callable[[], Any], device: str) -> int:
    """Bytes by which memory grows at its highest during `step`: resident on the CPU, allocated on CUDA.

    Raises NotApplicable or OSError where the system does not tell.
    """
    return _cuda_growth(step) if device == "cuda" else _resident_growth(step)


def peak_of_backward(make_loss: Callable[[], Tensor], around: AbstractContextManager, device: str = "cpu") -> int:
    """The most bytes that are allocated at once during a backward, of those that the step allocated.

    What the forward saved counts; weights, batch and gradients that were there before do not. On the CPU the profiler
    reports each allocation and release of torch's allocator, which operators and compiled kernels share.

    Args:
        make_loss: runs the forward.
        around: entered around the backward.
    """
    return _cuda_peak(make_loss, around) if device == "cuda" else _cpu_peak(make_loss, around)


def held() -> int:
    """Bytes that torch holds of the GPU, after it has given back what nothing lives in."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def most_held(step: Callable[[], Any], steps: int) -> int:
    """The most bytes that torch holds of the GPU during steps that find nothing kept for them.

    The memory of CUDA graphs is among them also between their runs, when nothing of it counts as allocated.
    """
    held()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_reserved()


def _resident(key: str) -> int:
    """Bytes of resident memory: `key` is VmRSS for now, VmHWM for the highest since it was last reset."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return 1024 * int(line.split()[1])
    raise NotApplicable(f"/proc/self/status has no {key}")


def _resident_growth(step: Callable[[], Any]) -> int:
    """Memory that was freed but not yet given back would hide the growth: the allocator gives it back first."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = _resident("VmRSS")
    step()
    return _resident("VmHWM") - before


def _cuda_growth(step: Callable[[], Any]) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _cuda_peak(make_loss: Callable[[], Tensor], around: AbstractContextManager) -> int:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    loss = make_loss()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    with around:
        loss.backward()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _cpu_peak(make_loss: Callable[[], Tensor], around: AbstractContextManager) -> int:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        loss = make_loss()
        with record_function(_BACKWARD), around:
            loss.backward()
    begins: list[int] = []
    changes: list[tuple[int, int, int]] = []  # when in ns, address, bytes: negative where it was released
    waiting = list(profiler.profiler.kineto_results.experimental_event_tree())
    while waiting:
        event = waiting.pop()
        waiting.extend(event.children)
        if event.tag.name == "Allocation":
            if event.extra_fields.device.type == "cpu":
                changes.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
        elif event.name == _BACKWARD:
            begins.append(event.start_time_ns)
    (begin,) = begins
    return most_at_once(sorted(changes, key=lambda each: each[0]), begin)


def most_at_once(changes: list[tuple[int, int, int]], begin: int) -> int:
    """The most bytes alive at any time from `begin` on, of `changes` (when, address, bytes) in their order.

    A release of what was allocated before the first of them is nothing of the step's. The profiler may report one,
    with the size that an earlier profile saw at that address.
    """
    alive: dict[int, int] = {}
    allocated = most = 0
    started = False
    for when, address, size in changes:
        if when >= begin and not started:
            # What the forward saved is alive even if the backward allocates nothing.
            started, most = True, allocated
        allocated -= alive.pop(address, 0)
        if size > 0:
            alive[address] = size
            allocated += size
        if started:
            most = max(most, allocated)
    return most if started else allocated
