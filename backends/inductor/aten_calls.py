"""What ATen computes faster than fused code on the CPU, and is asked to compute (torch 2.13, x86).

Two operators that most backwards have. A sum over rows, as the gradient of each bias is: Inductor's code goes down the
rows once for each vector of columns, ATen takes 0.4 to 0.85 of its time. The backward of GELU with ``erf``: ATen has
oneDNN compute it, in 0.8 of the time. ``benchmarks/aten_calls.py`` measures both. A call fuses with nothing, so a sum
is called only where what it sums is in memory whatever happens.
"""

from __future__ import annotations

import functools
import itertools
import platform
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx

_aten = torch.ops.aten
LEAST_SUMMED, LEAST_GELU = 1 << 17, 1 << 18
"""Elements from which on a call pays. oneDNN alone takes some 40 us to begin."""
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
    _aten.gelu_backward.default,
}


def _gelu_backward(grad: Tensor, self: Tensor, *, approximate: str = "none") -> Any:
    """Stays a call where ATen asks oneDNN (``use_mkldnn`` in ``aten/src/ATen/native/Activation.cpp``, of float32)."""
    plain = approximate == "none" and grad.dtype == self.dtype == torch.float32 and _has(LEAST_GELU, self)
    if plain and self.device.type == grad.device.type == "cpu" and _has_onednn():
        return NotImplemented
    from torch._inductor.decomposition import select_decomp_table

    return select_decomp_table()[_aten.gelu_backward.default](grad, self, approximate=approximate)


def _has_onednn() -> bool:
    return platform.machine() in ("x86_64", "AMD64") and torch.backends.mkldnn.is_available()


DECOMPOSITIONS: Mapping[Any, Callable[..., Any]] = {_aten.gelu_backward.default: _gelu_backward}
"""Instead of Inductor's."""


@functools.cache
def _keep_calls() -> None:
    """Have Inductor call ``gelu_backward`` where a graph has it. No other graph has it: others decompose it."""
    from torch._inductor import lowering

    lowering.make_fallback(_aten.gelu_backward.default, warn=False, override_decomp=True)


def call_aten(graph_module: fx.GraphModule) -> None:
    """Make calls of what ATen computes faster.

    Args:
        graph_module: an ATen graph, whose nodes have their values in ``meta``. What it has on devices stays as it is.
    """
    _keep_calls()
    sums = {
        node: _rows(node) for node in graph_module.graph.find_nodes(op="call_function", target=_aten.sum.dim_IntList)
    }
    read = Counter((dims, each) for dims, summed in sums.values() for each in _origins(summed))
    for node, (dims, summed) in sums.items():
        of = _origin(summed)
        if _sums_many_rows(node) and _is_in_memory(of) and read[dims, of] == 1:
            node.meta["should_fallback"] = True  # read by `GraphLowering.call_function`


def _rows(node: Any) -> tuple[tuple[int, ...], fx.Node]:
    """Of a sum the dimensions, and what it sums."""
    return tuple(node.args[1]), node.args[0]


def _sums_many_rows(node: Any) -> bool:
    """Whether it is one over the first dimensions of a contiguous tensor, and large enough to call."""
    value, given = node.args[0].meta["val"], node.args[1]
    if value.device.type != "cpu" or value.dtype not in (torch.float32, torch.float64):
        return False
    dims = sorted(dim % max(value.dim(), 1) for dim in given)
    if dims != [*range(len(dims))] or not 0 < len(dims) < value.dim() or not value.is_contiguous():
        return False
    return node.kwargs.get("dtype") in (None, value.dtype) and _has(LEAST_SUMMED, value)


def _has(elements: int, value: Tensor) -> bool:
    """Of a size that is a symbol, the one that the graph was traced with counts."""
    sizes = [getattr(getattr(size, "node", None), "hint", size) for size in value.shape]
    return all(isinstance(size, int) for size in sizes) and torch.Size(sizes).numel() >= elements


def _origin(node: Any) -> fx.Node:
    """What a view is one of."""
    while node.target in _VIEWS:
        node = node.args[0]
    found: fx.Node = node
    return found


def _origins(node: Any) -> set[fx.Node]:
    """What a sum of this reads as it goes down the rows. Where several read the same, as those for the weight and the
    bias of a normalization do, fused code computes them in one loop."""
    return {_origin(each) for each in (node, *node.all_input_nodes)}


def _is_in_memory(node: fx.Node) -> bool:
    """Whether fused code would not have a value in passing: it comes from, or goes to, what is no fused code."""
    return node.op == "placeholder" or node.target in _CALLED or any(user.target in _CALLED for user in _users(node))


def _users(node: fx.Node) -> Iterator[fx.Node]:
    """Those of a value and of its views."""
    return itertools.chain.from_iterable(_users(user) if user.target in _VIEWS else (user,) for user in node.users)
