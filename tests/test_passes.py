"""What a pass is told of a region's graph, and what it may add to it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn

import compiled_autograd as ca

from .helpers import assert_grads, expect, mlp


def _doubled(graph_module: fx.GraphModule) -> None:
    """Doubles what becomes the gradient of a leaf."""
    (output,) = graph_module.graph.find_nodes(op="output")
    results = list(output.args[0])
    with graph_module.graph.inserting_before(output):
        for index, node in enumerate(results):
            if node is not None and "gradient_of" in node.meta:
                results[index] = graph_module.graph.call_function(torch.ops.aten.mul.Tensor, (node, 2.0))
    output.args = (results,)
    graph_module.recompile()


def _names(seen: list[Any]) -> Any:
    def look(graph_module: fx.GraphModule) -> None:
        (output,) = graph_module.graph.find_nodes(op="output")
        seen.append([None if node is None else node.meta.get("gradient_of") for node in output.args[0]])

    return look


@pytest.mark.parametrize("hooks", [False, True])
def test_gradients_of_leaves_alone_are_named(hooks: bool) -> None:
    model, reference, seen = mlp(), mlp(), []
    reference.load_state_dict(model.state_dict())
    x = torch.randn(4, 8)
    handles = [each.register_hook(lambda grad: grad) for each in model.parameters() if hooks]
    with ca.enable(backend="eager", passes=[_names(seen), _doubled]) as session:
        for _ in range(2):
            model.zero_grad()
            model(x).sum().backward()
    (2 * reference(x).sum()).backward()
    assert_grads(model, reference, bitwise=True)
    named = [name for graph in seen for names in graph for name in names or ()]
    assert sorted(named) == sorted(name for name, _ in model.named_parameters())
    assert (len(seen) > 1) is bool(handles) and any(None in graph for graph in seen) is hooks
    expect(session.stats(), structure_misses=1, hits=1, captures=1, compiles=len(seen))


def test_an_output_that_is_appended_is_nobodys_also_where_nans_are_looked_for() -> None:
    def append(graph_module: fx.GraphModule) -> None:
        (output,) = graph_module.graph.find_nodes(op="output")
        with graph_module.graph.inserting_before(output):
            more = graph_module.graph.call_function(torch.ops.aten.mul.Tensor, (output.args[0][0], float("nan")))
        output.args = ([*output.args[0], more],)
        graph_module.recompile()

    layer = nn.Linear(3, 2)
    with ca.enable(backend="eager", passes=[append]) as session, torch.autograd.detect_anomaly(check_nan=True):
        layer(torch.randn(4, 3)).sum().backward()
        layer.zero_grad()
        with pytest.raises(RuntimeError, match="returned nan values"):
            (layer(torch.randn(4, 3)).sum() * 0.0).sqrt().mul(0.0).backward()
    assert session.stats().failures == 0
