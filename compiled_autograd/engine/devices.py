"""On which CUDA device a tape lies, and to make it the current one for a backward. Written against torch 2.13.

The eager engine has a thread for each device, in which that device is the current one
(``torch/csrc/autograd/engine.cpp``). What PyTorch's own operators compute does not depend on that, since each goes to
the device of its tensors. But ``torch.empty(3, device="cuda")`` in a hook does, and so do kernels that a Python
function launches by itself. So a compiled backward makes the device of its tape the current one; and a tape that lies
on several devices, where it would have to change from node to node, is the eager engine's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ..diagnostics.bypass import CUDA_DEVICES
from ..errors import CaptureRefusedError
from ..ir import TapeGraph

_AS_IT_IS = nullcontext()


def cuda_device(tape: TapeGraph) -> int | None:
    """The index of the one CUDA device that a captured tape lies on; None where it lies on none.

    The structure says so: what the engine expects of each gradient names its device, and so do the lifted tensors.

    Raises:
        CaptureRefusedError: it lies on several.
    """
    found = {torch.device(lifted.device) for lifted in tape.inputs}
    for node in tape.graph.nodes:
        found.update(_devices_in(node.args))
    indices = {device.index or 0 for device in found if device.type == "cuda"}
    if len(indices) > 1:
        raise CaptureRefusedError(CUDA_DEVICES)
    return min(indices, default=None)


def _devices_in(value: Any) -> Iterator[torch.device]:
    if isinstance(value, torch.device):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _devices_in(each)
    elif isinstance(value, dict):
        for each in value.values():
            yield from _devices_in(each)


def on_device(index: int | None) -> AbstractContextManager[Any]:
    """Inside, the device of that index is the current one; None leaves it as it is."""
    return _AS_IT_IS if index is None else torch.cuda.device(index)
