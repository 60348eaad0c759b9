"""Two operators that most backwards have, computed in less time than Inductor's code for the CPU takes (torch 2.13).

A sum over rows, as the gradient of each bias is: Inductor's code goes down the rows once for each vector of columns,
ATen takes 0.4 to 0.85 of its time, and is called. A call fuses with nothing: so it is one only where what is summed is
in memory whatever happens. The backward of GELU with ``erf``: one exponential does for two. ``benchmarks/on_cpu.py``
measures both.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx

_aten = torch.ops.aten
LEAST_SUMMED = 1 << 17
"""Elements from which on a call pays."""
_VIEWS = {
    _aten.view.default,
    _aten._unsafe_view.default,
    _aten.reshape.default,
    _aten.permute.default,
    _aten.t.default,
    _aten.transpose.int,
    _aten.squeeze.dim,
    _aten.unsqueeze.default,
}
_CALLED = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.baddbmm.default,
}
_SCALE = 0.3275911
_COEFFICIENTS = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)
"""Coefficients of ``1 - erf(z)`` as a polynomial in ``1 / (1 + _SCALE * z)``, without its constant, times ``exp(-z *
z)``, for ``z`` from 0 on: Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26, off by at most 1.5e-7.
With AVX2 and AVX512 this is ATen's ``erf``, which Inductor's code uses (``aten/src/ATen/cpu/vec/``, 2.13). In an eager
GELU of float32 oneDNN computes it, as exactly."""


def gelu_backward(grad: Tensor, self: Tensor) -> Tensor:
    """``grad * (P + x * p)`` of float32, of a normal distribution's function P and density p, which share
    ``exp(-x * x / 2)``."""
    exponential = (self * self * -0.5).exp()
    fraction = 1 / (self.abs() * (_SCALE * math.sqrt(0.5)) + 1)
    first, *others = (each / 2 for each in _COEFFICIENTS)
    polynomial = fraction * first
    for coefficient in others:
        polynomial = (polynomial + coefficient) * fraction
    tail = polynomial * exponential
    return grad * (torch.where(self < 0, tail, 1 - tail) + self * exponential * (1 / math.sqrt(2 * math.pi)))


def _gelu_backward(grad: Tensor, self: Tensor, *, approximate: str = "none") -> Any:
    """Compute GELU's backward about as exactly as eager. Its largest error is a tenth less, but larger below -1."""
    plain = approximate == "none" and grad.dtype == self.dtype == torch.float32 and self.device.type == "cpu"
    if plain and torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512"):
        return gelu_backward(grad, self)
    from torch._inductor.decomposition import select_decomp_table

    return select_decomp_table()[_aten.gelu_backward.default](grad, self, approximate=approximate)


DECOMPOSITIONS: Mapping[Any, Callable[..., Any]] = {_aten.gelu_backward.default: _gelu_backward}
"""Instead of Inductor's."""


def sum_rows_with_aten(graph_module: fx.GraphModule) -> None:
    """Have ATen compute sums over rows.

    Args:
        graph_module: an ATen graph, whose nodes have their values in ``meta``. Nodes on other devices are unchanged.
    """
    found = graph_module.graph.find_nodes(op="call_function", target=_aten.sum.dim_IntList)
    sums = {node: _rows(node) for node in found if len(node.args) > 1}  # users' passes may name arguments
    read = Counter((dims, each) for dims, summed in sums.values() for each in _origins(summed))
    for node, (dims, summed) in sums.items():
        of = _origin(summed)
        if _sums_many_rows(node, dims) and _is_in_memory(of) and read[dims, of] == 1:
            node.meta["should_fallback"] = True  # read by `GraphLowering.call_function`


def _rows(node: Any) -> tuple[tuple[int, ...], fx.Node]:
    """Return the dimensions of a sum, and its argument."""
    ndim = max(node.args[0].meta["val"].dim(), 1)
    return tuple(sorted(dim % ndim for dim in node.args[1] or ())), node.args[0]


def _sums_many_rows(node: Any, dims: tuple[int, ...]) -> bool:
    """Return whether a sum is over the first dimensions of a contiguous tensor, and large enough for a call."""
    value = node.args[0].meta["val"]
    if value.device.type != "cpu" or value.dtype not in (torch.float32, torch.float64):
        return False
    if dims != tuple(range(len(dims))) or not 0 < len(dims) < value.dim() or not value.is_contiguous():
        return False
    return node.kwargs.get("dtype") in (None, value.dtype) and _is_large(value)


def _is_large(value: Tensor) -> bool:
    """Return whether a value is large. For a symbolic size, the size of the trace counts."""
    sizes = [getattr(getattr(size, "node", None), "hint", size) for size in value.shape]
    return all(isinstance(size, int) for size in sizes) and torch.Size(sizes).numel() >= LEAST_SUMMED


def _origin(node: Any) -> fx.Node:
    """Return the tensor of which a value is a view."""
    while node.target in _VIEWS:
        node = node.args[0]
    found: fx.Node = node
    return found


def _origins(node: Any) -> set[fx.Node]:
    """Return the tensors that a sum reads as it goes down the rows. If several sums read the same, as those for the
    weight and the bias of a normalization do, fused code computes them in one loop."""
    return {_origin(each) for each in (node, *_origin(node).all_input_nodes)}


def _is_in_memory(node: fx.Node) -> bool:
    """Return whether a value comes from, or goes to, unfused code. Then fused code cannot sum it in passing."""
    return node.op == "placeholder" or node.target in _CALLED or any(user.target in _CALLED for user in _users(node))


def _users(node: fx.Node) -> Iterator[fx.Node]:
    """Return the users of a value and of its views."""
    return itertools.chain.from_iterable(_users(user) if user.target in _VIEWS else (user,) for user in node.users)
