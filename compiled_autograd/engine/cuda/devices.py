"""The CUDA device of a tape, made current for its backward. Written against torch 2.13.

The eager engine has a thread for each device, in which that device is current (``torch/csrc/autograd/engine.cpp``).
PyTorch's own operators go to the device of their tensors. But ``torch.empty(3, device="cuda")`` in a hook does not, nor
do kernels that a Python function launches by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ...diagnostics.bypass import CUDA_DEVICES
from ...errors import CaptureRefusedError
from ...ir import TapeGraph


def cuda_device(tape: TapeGraph) -> int | None:
    """The index of the one CUDA device that a captured tape lies on; None where it lies on none.

    The structure says so: what the engine expects of each gradient names its device, and so do the lifted tensors.

    Raises:
        CaptureRefusedError: it lies on several.
    """
    found: list[Any] = [torch.device(lifted.device) for lifted in tape.inputs]
    for node in tape.graph.nodes:
        fx.node.map_aggregate(node.args, found.append)
    indices = {each.index or 0 for each in found if isinstance(each, torch.device) and each.type == "cuda"}
    if len(indices) > 1:
        raise CaptureRefusedError(CUDA_DEVICES)
    return min(indices, default=None)


def lie_apart(outputs: Sequence[Any]) -> bool:
    """Return whether some outputs lie on a CUDA device, and some on the CPU."""
    kinds = {device.type for each in outputs if (device := getattr(each, "device", None)) is not None}
    return {"cpu", "cuda"} <= kinds
