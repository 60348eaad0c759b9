"""Calls whose CUDA kernels take no float64 instead of float32, computed in another way.

cuDNN's batch norm saves data for its backward in a layout for the forward's dtype, and takes no other dtype. PyTorch's
own operator computes the same from the mean and the inverse deviation (``native_batch_norm_backward`` in
``ATen/native/cuda/Normalization.cu``, 2.13). The backward of a softmax gets the dtype of the forward's input, which the
node saved, and compares it with the gradient's dtype (``ATen/native/cuda/SoftMax.cu``).
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
