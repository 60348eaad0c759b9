"""The backward of cells of recurrent networks on CUDA, as pointwise operators.

There ``nn.LSTMCell`` and ``nn.GRUCell`` run as one kernel, whose backward is an operator of its own: Inductor calls it,
and cannot fuse it with what is around. Its formulas are those of ``aten/src/ATen/native/cuda/RNN.cu`` (2.13), in
float32 for 16-bit numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten


def _lstm_cell_backward(
    grad_hy: Tensor | None, grad_cy: Tensor | None, cx: Tensor, cy: Tensor, workspace: Tensor, has_bias: bool
) -> Any:
    """``_thnn_fused_lstm_cell_backward_impl``: of the gates, of the cell's state before, and of one bias.

    Args:
        grad_hy, grad_cy: (batch, hidden), of the new state and the new cell's state; None where it is undefined.
        cx, cy: (batch, hidden), the cell's state before and after.
        workspace: (batch, 4 * hidden): the gates i, f, g and o after their nonlinearities.
    """
    if grad_hy is None and grad_cy is None:
        return NotImplemented  # all results are undefined
    wide = _wider(workspace)
    i, f, g, o = wide(workspace).chunk(4, dim=1)
    tanh = wide(cy).tanh()
    if grad_hy is None:
        state, output = wide(grad_cy), torch.zeros_like(tanh)
    else:
        output = wide(grad_hy) * tanh
        state = wide(grad_hy) * o * (1 - tanh * tanh)
        state = state if grad_cy is None else state + wide(grad_cy)
    of_gates = [state * g * (1 - i) * i, state * wide(cx) * (1 - f) * f, state * i * (1 - g * g), output * (1 - o) * o]
    gates = torch.cat(of_gates, dim=1).to(workspace.dtype)
    return gates, (state * f).to(workspace.dtype).contiguous(), gates.sum(0) if has_bias else None


def _gru_cell_backward(grad_hy: Tensor, workspace: Tensor, has_bias: bool) -> Any:
    """``_thnn_fused_gru_cell_backward``: of the input's and the hidden gates, of the state before, and of both biases.

    Args:
        grad_hy: (batch, hidden), of the new state.
        workspace: (batch, 5 * hidden): r, z and n, the state before, and the hidden part of n before ``r`` takes it.
    """
    wide = _wider(workspace)
    r, z, n, hx, hidden = wide(workspace).chunk(5, dim=1)
    grad = wide(grad_hy)
    of_n = grad * (1 - z) * (1 - n * n)
    of_r = of_n * hidden * (1 - r) * r
    of_z = grad * (hx - n) * (1 - z) * z
    of_input = torch.cat([of_r, of_z, of_n], dim=1).to(workspace.dtype)
    of_hidden = torch.cat([of_r, of_z, of_n * r], dim=1).to(workspace.dtype)
    of_biases = (of_input.sum(0), of_hidden.sum(0)) if has_bias else (None, None)
    return of_input, of_hidden, (grad * z).to(workspace.dtype).contiguous(), *of_biases


def _wider(tensor: Tensor) -> Callable[[Any], Tensor]:
    """To the dtype that the kernels compute in."""
    dtype = torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else tensor.dtype
    return lambda each: each.to(dtype)


CELLS: Mapping[Any, Callable[..., Any]] = {
    _aten._thnn_fused_lstm_cell_backward_impl.default: _lstm_cell_backward,
    _aten._thnn_fused_gru_cell_backward.default: _gru_cell_backward,
}
