"""Regions that Inductor runs as CUDA graphs: their results are copied out of the graphs' memory (torch 2.13).

No tensor of a graph's own memory leaves this file, for the next replay overwrites it. So nothing in the pool that all
graphs of a thread share (``torch._inductor.cudagraph_trees``) is alive when the next region begins: each region's graph
stands by itself, and no generation has to be marked (``mark_step_begin``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves


def cuda_device(graph_module: fx.GraphModule) -> int | None:
    """The index of the first CUDA device that a graph of fake tensors has values on; None for none."""
    for node in graph_module.graph.nodes:
        for value in tree_leaves(node.meta.get("val")):
            if isinstance(value, torch.Tensor) and value.device.type == "cuda":
                return torch.cuda.current_device() if value.device.index is None else value.device.index
    return None


def running_backward(device: int) -> Any:
    """What Inductor takes for ``boxed_forward_device_index``.

    Where it decides against CUDA graphs for a backward, it tells the manager of the device that the backward has begun,
    so that the graphs of a compiled forward need not wait for it. It takes for granted that the forward has made that
    manager (``maybe_handle_backward_generation`` in ``output_code.py``); here the forward may have been eager.
    """
    from torch._inductor.cudagraph_trees import get_manager
    from torch._inductor.cudagraph_utils import BoxedDeviceIndex

    get_manager(device)
    return BoxedDeviceIndex(device)


class CopiedOut:
    """Calls what runs as CUDA graphs, and gives copies of its results.

    Attributes:
        compiled: what Inductor made.
        device: the index of the device whose streams it runs on; None for a stand-in that has none.
    """

    proving_runs = 3  # the first warms up, the second records, the third replays

    def __init__(self, compiled: Callable[[list[Any]], Sequence[Any]], device: int | None) -> None:
        self.compiled = compiled
        self.device = device

    def __call__(self, arguments: list[Any]) -> list[Any]:
        """Run it. The arguments are emptied, as :data:`Compiled` has it."""
        if self.device is not None:
            _wait_for_last(self.device)
        return copies(self.compiled(arguments))


def copies(results: Iterable[Any]) -> list[Any]:
    """The results with new memory for each tensor, in the same shapes and strides; what is no tensor stays."""
    results = list(results)
    tensors = [value for value in results if isinstance(value, torch.Tensor)]
    new = [torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device=each.device) for each in tensors]
    if tensors:  # a kernel for all of them, where one can do it
        torch._foreach_copy_([_each_once(each) for each in new], [_each_once(each) for each in tensors])
    waiting = iter(new)
    return [next(waiting) if isinstance(value, torch.Tensor) else value for value in results]


def _each_once(tensor: torch.Tensor) -> torch.Tensor:
    """Without the repetitions of expanded dimensions, which share memory and cannot be written at once."""
    if 0 not in tensor.stride():
        return tensor
    return tensor[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())]


class _Thread(threading.local):
    def __init__(self) -> None:
        self.streams: dict[int, Any] = {}


_thread = _Thread()


def _wait_for_last(device: int) -> None:
    """Begin after the copies of the last region, which a thread may have left to another stream.

    The graphs of a thread share their memory, and a stream knows nothing of what another one still reads.
    """
    now, last = torch.cuda.current_stream(device), _thread.streams.get(device)
    if last is not None and last != now:
        now.wait_stream(last)
    _thread.streams[device] = now
