"""A backward inside autocast: the graph of a region has its casts in it, and whoever works on it must add none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn

import compiled_autograd as ca

from .helpers import compare


@ca.traceable
class _Products(torch.autograd.Function):
    """Its backward multiplies numbers of 16 bits, which autocast, where it is on, does in float32."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return grad.to(torch.bfloat16).prod(0, keepdim=True).to(torch.float32).expand_as(grad) * 2


def _loss(model: nn.Module) -> torch.Tensor:
    x = torch.linspace(0.5, 1.5, 12).reshape(3, 4)
    return (_Products.apply(model(x)) * x[:, :2]).sum()


def _multiplied(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Puts a product of one number behind each result; of 16 bits, and a product is float32 under autocast."""
    graph, aten, convert = graph_module.graph, torch.ops.aten, torch.ops.prims.convert_element_type.default
    output = graph.find_nodes(op="output")[0]
    results = []
    with graph.inserting_before(output):
        for node in output.args[0]:  # type: ignore[union-attr]
            low = graph.call_function(convert, (node, torch.bfloat16))
            row = graph.call_function(aten.unsqueeze.default, (low, 0))
            product = graph.call_function(aten.prod.dim_int, (row, 0))
            results.append(graph.call_function(convert, (product, node.meta["val"].dtype)))
    output.args = (results,)
    graph_module.recompile()
    return graph_module


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("passes", [[], [_multiplied]], ids=["plain", "passes"])
def test_what_is_compiled_knows_nothing_of_autocast(backend: str, passes: list[Any]) -> None:
    """Inductor asks fake tensors for dtypes: with autocast on, a product of 16 bits was float32 and had no cast."""
    result = compare(
        *(lambda: nn.Linear(4, 2), _loss, backend),
        around=lambda: torch.autocast("cpu", torch.bfloat16),
        low=True,
        passes=passes,
    )
    assert result.stats.failures == 0
