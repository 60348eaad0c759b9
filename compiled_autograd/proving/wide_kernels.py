"""Calls that have no kernel for float64 on CUDA, computed by operators that have one.

What cuDNN's batch norm leaves for its backward is laid out for the dtype of the forward, so that cuDNN takes no other;
the operator of PyTorch's own computes the same from the mean and the inverse deviation (``native_batch_norm_backward``
in ``ATen/native/cuda/Normalization.cu``, 2.13).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_BY_CUDNN = torch.ops.aten.cudnn_batch_norm_backward.default


class WideKernels(TorchDispatchMode):
    """Within it, such calls with float64 run."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is _BY_CUDNN and args[0].dtype is torch.float64:
            x, grad, weight, mean, variance, own_mean, own_deviation, epsilon, _ = args
            wanted = [True, True, True]
            function = torch.ops.aten.native_batch_norm_backward.default
            args = (grad, x, weight, mean, variance, own_mean, own_deviation, True, epsilon, wanted)
        return function(*args, **(kwargs or {}))
