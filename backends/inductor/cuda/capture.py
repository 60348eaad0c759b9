"""Captures what runs on a CUDA device as a graph, in memory that all graphs of a stream share (torch 2.13)."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from ...garbage_collection import RARELY


def cuda_device(graph_module: fx.GraphModule) -> int | None:
    """The index of the first CUDA device that a graph of fake tensors has values on; None for none."""
    for node in graph_module.graph.nodes:
        for value in tree_leaves(node.meta.get("val")):
            if isinstance(value, torch.Tensor) and value.device.type == "cuda":
                return torch.cuda.current_device() if value.device.index is None else value.device.index
    return None


class Replayable(Protocol):
    """A captured graph."""

    def replay(self) -> None:
        """Run it on the current stream."""


class CannotCaptureError(Exception):
    """A region cannot run as a CUDA graph; the text says why."""


class Device:
    """Queries and actions on one CUDA device. Tests replace it."""

    kind = "cuda"

    def __init__(self, index: int) -> None:
        self.index = index

    def stream(self) -> int:
        """The stream that the calling thread's kernels go to."""
        return torch._C._cuda_getCurrentRawStream(self.index)

    def is_capturing(self) -> bool:
        """Return whether other code is capturing the current stream."""
        return torch.cuda.is_current_stream_capturing()

    def capture(self, run: Callable[[], None]) -> Replayable:
        """Capture the work of ``run`` as a graph, without executing it.

        Raises:
            CannotCaptureError: it does something that cannot be captured, or memory was short.
        """
        now = torch.cuda.current_stream(self.index)
        graph = torch.cuda.CUDAGraph()
        try:
            pool, side = _memory_for(self.index, now)
            side.wait_stream(now)
            with torch.cuda.stream(side), RARELY:  # what is garbage may be another graph
                _record(graph, pool, run)
            now.wait_stream(side)
        except RuntimeError as error:
            _pools.pop((self.index, now.cuda_stream), None)  # a capture that fails may leave its pool unusable
            raise CannotCaptureError(str(error).partition("\n")[0]) from error
        return graph


def _record(graph: torch.cuda.CUDAGraph, pool: Any, run: Callable[[], None]) -> None:
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        run()
    except BaseException:
        with contextlib.suppress(RuntimeError):  # it says that the capture has failed
            graph.capture_end()
        raise
    graph.capture_end()


_pools: dict[tuple[int, int], tuple[Any, torch.cuda.Stream, torch.cuda.CUDAGraph]] = {}
"""By device and stream: the pool that all graphs share which run on this stream, the stream that they are captured on,
and an empty graph that keeps the pool.

In a pool lies only what lives inside of graphs. They run one after the other, so it may lie at the same place.
"""
CAPTURING = threading.Lock()
"""One capture at a time in the process: two must not share a pool, and their stream is one."""


def _memory_for(index: int, stream: torch.cuda.Stream) -> tuple[Any, torch.cuda.Stream]:
    key = index, stream.cuda_stream
    if key not in _pools:
        pool, side, keeper = torch.cuda.graph_pool_handle(), torch.cuda.Stream(index), torch.cuda.CUDAGraph()
        with warnings.catch_warnings(), torch.cuda.stream(side):
            warnings.simplefilter("ignore")  # that it is empty
            _record(keeper, pool, lambda: None)
        _pools[key] = pool, side, keeper
    return _pools[key][:2]
