"""Decompositions that keep digits which those of Inductor lose (torch 2.11 to 2.15)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten
_MEAN = 1
"""The value of ``reduction`` for a mean (``torch/nn/_reduction.py``)."""


def soft_margin_loss_backward(grad: Tensor, self: Tensor, target: Tensor, reduction: int) -> Tensor:
    """``-target * grad * sigmoid(-target * self)``, over the number of elements for a mean.

    PyTorch's decomposition has ``sigmoid(target * self) - 1``, of which cancellation leaves few digits: in float32, 1
    in 30 is lost where ``target * self`` is 14. The kernel loses none.
    """
    dtype = grad.dtype
    if dtype in (torch.float16, torch.bfloat16):  # kernels compute these in float32
        grad, self, target = grad.float(), self.float(), target.float()
    result = -(target * grad) * torch.sigmoid(-(target * self))
    return (result / self.numel() if reduction == _MEAN else result).to(dtype)


DIGITS: Mapping[Any, Callable[..., Any]] = {_aten.soft_margin_loss_backward.default: soft_margin_loss_backward}
"""Instead of PyTorch's."""
