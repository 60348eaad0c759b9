"""Calls whose kernels for CUDA take no float64 where float32 was, computed so that they do.

What cuDNN's batch norm leaves for its backward is laid out for the dtype of the forward, so that cuDNN takes no other;
the operator of PyTorch's own computes the same from the mean and the inverse deviation (``native_batch_norm_backward``
in ``ATen/native/cuda/Normalization.cu``, 2.13). The backward of a softmax is told which dtype the forward was given,
which the node has noted, and compares it with that of the gradient (``ATen/native/cuda/SoftMax.cu``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_BY_CUDNN = torch.ops.aten.cudnn_batch_norm_backward.default
_SOFTMAX = (torch.ops.aten._log_softmax_backward_data.default, torch.ops.aten._softmax_backward_data.default)


class WideKernels(TorchDispatchMode):
    """Within it, such calls with float64 run."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is _BY_CUDNN and args[0].dtype is torch.float64:
            x, grad, weight, mean, variance, own_mean, own_deviation, epsilon, _ = args
            wanted = [True, True, True]
            function = torch.ops.aten.native_batch_norm_backward.default
            args = (grad, x, weight, mean, variance, own_mean, own_deviation, True, epsilon, wanted)
        if function in _SOFTMAX and args[0].dtype is torch.float64:
            args = (*args[:3], torch.float64)
        return function(*args, **(kwargs or {}))
