"""What a pass is told of a region's graph, and what it may add to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

import compiled_autograd as ca
from examples import compressed_gradients, gradient_norms

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


# ---- the two examples ------------------------------------------------------------------------------------------------


class _Tied(nn.Module):
    """A layer that is used twice, with a hook between both uses where that is wanted, and one that is frozen."""

    def __init__(self, hook: bool) -> None:
        super().__init__()
        self.twice, self.frozen, self.hook = nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False), hook

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.twice(x)
        if self.hook:
            hidden.register_hook(lambda grad: grad * 2)
        return self.twice(self.frozen(hidden.tanh()))


class _Sum(nn.Module):
    """Two parameters with one gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.one + self.other) * x


@pytest.mark.parametrize("rows", [(4, 4, 4), (4, 5, 7)], ids=["one size", "sizes that change"])
@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize(
    "make", [lambda: _Tied(False), lambda: _Tied(True), _Sum, mlp], ids=["tied", "hook", "sum", ""]
)
def test_norms_are_those_of_what_each_backward_gives(
    make: Callable[[], nn.Module], accumulates: bool, rows: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradient_norms, "NAMES", [])
    monkeypatch.setattr(gradient_norms, "NORMS", {})
    model = make()
    session = ca.enable(backend="eager", passes=[gradient_norms.add_norms], tune=False, cache_dir=False)
    for count in rows:
        x = torch.randn(count, 8)
        leaves = {name: leaf for name, leaf in model.named_parameters() if leaf.requires_grad}
        own = torch.autograd.grad(model(x).square().sum(), [*leaves.values()])
        if not accumulates:
            model.zero_grad()
        gradient_norms.NORMS.clear()
        with session:
            model(x).square().sum().backward()
        norms = gradient_norms.norms_of_last_backward()
        assert norms.keys() == leaves.keys()
        for name, grad in zip(leaves, own, strict=True):
            assert norms[name] == pytest.approx(grad.norm().item(), rel=1e-4)
    stats = session.stats()
    assert stats.backwards == len(rows) == stats.hits + stats.structure_misses + stats.shape_misses
    assert stats.structure_misses == stats.captures == 1 + accumulates and not stats.failures


def test_rounding_keeps_what_is_no_number() -> None:
    """A NaN whose bits are all ones, as CUDA makes them, becomes no number by adding to its bits."""
    ones = torch.tensor([0x7FFFFFFF, -1, 0x7F800000, -0x800000, 0x7F7FFFFF, 0x3F808000], dtype=torch.int32)
    values = ones.view(torch.float32)
    leaf = torch.zeros(len(values), requires_grad=True)
    session = ca.enable(backend="eager", passes=[compressed_gradients.round_gradients], cache_dir=False)
    with session:
        (leaf * values).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad[:2].isnan().all() and leaf.grad[2:].tolist() == [
        *[float("inf"), float("-inf")],
        float("inf"),
        1.0078125,
    ]
    expect(session.stats(), structure_misses=1, captures=1)
