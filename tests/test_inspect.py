"""``ca.inspect``: what is read of a tape, and that reading it changes nothing."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

import compiled_autograd as ca
from compiled_autograd.inspection.nodes import SavedTensor, TapeNode

from .helpers import mlp


def _leaf(*shape: int) -> torch.Tensor:
    return torch.randn(shape or (3,), requires_grad=True)


def _node(view: ca.TapeView, name: str) -> TapeNode:
    (found,) = [node for node in view.nodes if node.name == name]
    return found


def _saved(view: ca.TapeView, node: str, name: str) -> SavedTensor:
    (found,) = [each for each in _node(view, node).saved if each.name == name]
    return found


class Block(nn.Module):
    """Of a transformer, without attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


class Model(nn.Module):
    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.place = nn.Parameter(torch.randn(5, 8))
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 10, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x) + self.place
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def _modules(view: ca.TapeView, name: str) -> set[str]:
    return {node.module for node in view.nodes if node.name == name}


# ---- the nodes -------------------------------------------------------------------------------------------------------


def test_inspect_runs_nothing() -> None:
    x = _leaf()
    y = x.exp()
    loss = (y * y).sum()
    view = ca.inspect(loss)
    assert [node.name for node in view.nodes] == ["SumBackward0", "MulBackward0", "ExpBackward0", "AccumulateGrad"]
    assert x.grad is None
    loss.backward()
    assert x.grad is not None


def test_inspect_text() -> None:
    x = _leaf()
    view = ca.inspect((x.exp() * x).sum())
    assert view.readable() == (
        "#0 SumBackward0 -> #1[0]\n#1 MulBackward0 -> #2[0], #3[0]\n#2 ExpBackward0 -> #3[0]\n#3 AccumulateGrad\n"
    )


def test_inspect_names_parameters_and_sources() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    with pytest.warns(UserWarning, match="Anomaly Detection"), torch.autograd.detect_anomaly(check_nan=False):
        loss = model(torch.ones(1, 2)).exp().sum()
    view = ca.inspect(loss)
    assert {node.parameter for node in view.nodes if node.parameter} == {"0.weight", "0.bias"}
    (source,) = [node.source for node in view.nodes if node.name == "ExpBackward0"]
    assert source is not None and f"{Path(__file__).name}:" in source
    assert "parameter=0.weight" in view.readable() and f"at {source}" in view.readable()


def test_inspect_of_several_outputs_and_edges() -> None:
    x = _leaf()
    a, b = x.exp(), x.sin()
    view = ca.inspect(a, get_gradient_edge(b))
    assert sorted(node.name for node in view.nodes) == ["AccumulateGrad", "ExpBackward0", "SinBackward0"]
    graph = view.to_networkx()
    assert nx.is_directed_acyclic_graph(graph) and graph.number_of_edges() == 2
    assert {data["name"] for _, data in graph.nodes(data=True)} == {node.name for node in view.nodes}


def test_inspect_of_something_without_a_tape_says_so() -> None:
    with pytest.raises(ValueError, match=r"output 1 does not require grad.*no_grad"):
        ca.inspect(_leaf().sum(), torch.ones(3))


def test_inspect_walks_in_the_order_of_the_capture() -> None:
    model = mlp(depth=3)
    loss = model(torch.randn(2, 8)).square().mean()
    view = ca.inspect(loss)
    with ca.enable(backend="eager") as session:
        loss.backward()
    assert session.last is not None and session.last.graph is not None
    captured = [call.name for call in session.last.graph.tape.calls[1:]]
    assert [node.name for node in view.nodes] == captured
    assert [node.parameter for node in view.nodes] == [call.parameter for call in session.last.graph.tape.calls[1:]]


def test_what_was_read_keeps_nothing_alive() -> None:
    x = _leaf()
    hidden = x.exp()
    alive = weakref.ref(hidden)
    view = ca.inspect((hidden * hidden).sum())
    del hidden
    assert alive() is None and len(view.nodes) == 4


def test_a_backward_after_an_inspection_is_as_before() -> None:
    torch.manual_seed(0)
    model, x = Model(), torch.randint(10, (2, 5))
    expected = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    with ca.enable(backend="eager") as session:
        for _ in range(3):
            model.zero_grad()
            loss = model(x).sum()
            str(ca.inspect(loss))
            loss.backward()
    assert (session.stats().structure_misses, session.stats().hits, session.stats().bypasses) == (1, 2, {})
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), expected, strict=True) if p.grad is not None)


def test_gradients_that_come_in() -> None:
    x = _leaf(4, 3)
    values, _ = x.max(1)
    view = ca.inspect(values.double().sum())
    assert [str(each) for each in _node(view, "MaxBackward0").gradients] == ["f32[4]"]
    assert [str(each) for each in _node(view, "SumBackward0").gradients] == ["f64[]"]


# ---- modules ---------------------------------------------------------------------------------------------------------


def test_nodes_belong_to_the_modules_of_their_parameters() -> None:
    model = Model()
    view = ca.inspect(F.cross_entropy(model(torch.randint(10, (2, 5))).flatten(0, 1), torch.randint(10, (10,))))
    assert view.models == ("Model",)
    assert _modules(view, "EmbeddingBackward0") == {"embed"}
    assert _modules(view, "NativeLayerNormBackward0") == {"norm", *(f"blocks.{number}.norm" for number in range(4))}
    assert _modules(view, "NllLossBackward0") == {""}
    weights = {node.module: node for node in view.nodes if node.parameter and node.parameter.endswith("weight")}
    assert {f"{module}.weight" for module in weights} == {node.parameter for node in weights.values()}


def test_what_lies_between_belongs_to_what_has_both_neighbours() -> None:
    model = Model()
    view = ca.inspect(model(torch.randint(10, (2, 5))).sum())
    assert _modules(view, "GeluBackward0") == {f"blocks.{number}.mlp.0" for number in range(4)}
    additions = [node.module for node in view.nodes if node.name == "AddBackward0"]
    assert additions == ["blocks.3", "blocks.2", "blocks.1", "blocks.0", ""]


def test_two_models_are_told_apart() -> None:
    actor, critic = nn.Sequential(nn.Linear(3, 3)), nn.Sequential(nn.Linear(3, 3))
    view = ca.inspect(critic(actor(torch.ones(1, 3))).sum())
    assert view.models == ("Sequential", "Sequential 2")
    assert _modules(view, "AddmmBackward0") == {"Sequential.0", "Sequential 2.0"}


def test_a_parametrized_module_has_its_own_nodes() -> None:
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)), nn.Tanh(), nn.Linear(3, 1))
    view = ca.inspect(model(torch.ones(1, 3)).sum())
    assert {node.module for node in view.nodes if node.parameter} == {"0", "2"}


class _Adapted(nn.Module):
    """A frozen layer beside one of low rank that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.norm = nn.Linear(4, 4).requires_grad_(False), nn.LayerNorm(4).requires_grad_(False)
        self.low = nn.Sequential(nn.Linear(4, 1, bias=False), nn.Linear(1, 4, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.base(x) + self.low(x))


def test_frozen_parameters_tell_the_modules_too() -> None:
    model = nn.Sequential(*(_Adapted() for _ in range(3)))
    view = ca.inspect(model(torch.randn(2, 4)).sum())
    assert _modules(view, "NativeLayerNormBackward0") == {f"{number}.norm" for number in range(3)}
    assert _modules(view, "AddmmBackward0") == {"1.base", "2.base"}  # no gradient goes to the input of the first
    assert not any(node.module == "" for node in view.nodes[1:])


def test_a_tape_without_parameters_has_no_modules() -> None:
    view = ca.inspect(_leaf().exp().sum())
    assert view.models == () and {node.module for node in view.nodes} == {""}


# ---- saved tensors and memory ----------------------------------------------------------------------------------------


def test_saved_tensors_have_shape_dtype_and_bytes() -> None:
    x = _leaf(2, 3)
    saved = _saved(ca.inspect(x.double().exp().sum()), "ExpBackward0", "result")
    assert (saved.shape, saved.dtype, saved.device, saved.bytes, saved.kind) == (
        (2, 3),
        torch.float64,
        "cpu",
        48,
        "kept",
    )


def test_what_is_there_anyway_is_not_counted() -> None:
    model, batch = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh()), torch.randn(5, 4)
    view = ca.inspect(model(batch).sum())
    kinds = {(each.name, each.kind) for node in view.nodes for each in node.saved}
    assert ("mat1", "input") in kinds and ("weight", "parameter") in kinds and ("running_mean", "buffer") in kinds
    memory = view.memory()
    mean_and_deviation = 2 * 8 * 4
    assert memory.bytes == 2 * (5 * 8 * 4) + mean_and_deviation  # what BatchNorm took, and what Tanh gave
    assert memory.there_anyway["input"] == 5 * 4 * 4
    assert memory.by_module == {"1": 5 * 8 * 4 + mean_and_deviation, "": 5 * 8 * 4}  # nothing comes after Tanh


def test_a_batch_that_nobody_else_holds_is_kept_by_the_tape() -> None:
    linear, batch = nn.Linear(4, 4), torch.randn(2, 4)
    whole, part, alone = linear(batch).sum(), linear(batch[:1]).sum(), linear(torch.randn(2, 4)).sum()
    assert [ca.inspect(each).memory().bytes for each in (whole, part, alone)] == [0, 0, 2 * 4 * 4]


def test_a_frozen_models_parameters_are_parameters() -> None:
    x, frozen = _leaf(2, 4), nn.Linear(4, 4).requires_grad_(False)
    view = ca.inspect(frozen(x).sum())
    assert {each.kind for node in view.nodes for each in node.saved} == {"parameter"}
    assert view.memory().bytes == 0


def test_shared_memory_counts_once() -> None:
    x = _leaf(4)
    y = x.exp()
    memory = ca.inspect((y * y.view(2, 2).view(4) + y.sin()).sum()).memory()
    assert memory.bytes == 16 and list(memory.by_node.values()) == [16]
    part = ca.inspect((torch.ones(100) * x.sum())[:1].exp()).memory()
    assert part.bytes == 400 + 4  # the ones, and the result of one element


def test_saved_tensors_that_a_hook_packed_are_not_unpacked() -> None:
    def unpack(packed: Any) -> torch.Tensor:
        raise AssertionError("it was unpacked")

    with saved_tensors_hooks(lambda tensor: tensor.half(), unpack):
        a = _leaf(4).exp()
    with saved_tensors_hooks(lambda tensor: "on disk", unpack):
        b = a.sin()
    view = ca.inspect(b.sum())
    packed = _saved(view, "ExpBackward0", "result")
    assert (packed.kind, packed.bytes, str(packed)) == ("packed", 8, "result packed by a hook")
    assert _saved(view, "SinBackward0", "self").bytes is None
    memory = view.memory()
    assert (memory.bytes, memory.unknown) == (8, 1)
    assert "result packed by a hook 8 B" in str(view) and "1 saved tensors are of unknown size" in str(memory)


class _Keeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, x * 2)
        ctx.mask = x > 0
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


def test_what_a_python_function_keeps() -> None:
    view = ca.inspect(_Keeps.apply(_leaf(8)).sum())
    saved = {each.name: (each.bytes, each.kind) for each in _node(view, "_KeepsBackward").saved}
    assert saved == {
        "saved_tensors[0]": (32, "input"),
        "saved_tensors[1]": (32, "kept"),
        "ctx.mask": (8, "kept"),
    }


def test_what_a_backward_has_freed_is_not_there() -> None:
    x = _leaf(8)
    loss = (_Keeps.apply(x.exp())[torch.tensor([0, 1])]).sum()
    assert ca.inspect(loss).memory().bytes > 0
    loss.backward()
    view = ca.inspect(loss)
    assert [each.name for node in view.nodes for each in node.saved] == ["ctx.mask"]


def test_a_sparse_tensor_has_the_bytes_of_its_parts() -> None:
    x = _leaf(3, 2)
    view = ca.inspect(torch.sparse.mm(torch.eye(3).to_sparse(), x).sum())
    assert view.memory().bytes == 2 * 3 * 8 + 3 * 4


# ---- hooks -----------------------------------------------------------------------------------------------------------


def _my_hook(*given: Any) -> None:
    return None


def test_hooks_that_can_be_seen() -> None:
    x = _leaf(3)
    hidden = x.exp()
    loss = (hidden * hidden.sin()).sum()
    x.register_hook(_my_hook)
    x.register_post_accumulate_grad_hook(_my_hook)
    hidden.register_hook(_my_hook)
    loss.retain_grad()
    view = ca.inspect(loss)
    assert _node(view, "AccumulateGrad").hooks == ("on the gradient: _my_hook", "after accumulation: _my_hook")
    assert _node(view, "ExpBackward0").hooks == ("on the gradient: _my_hook",)
    assert _node(view, "SumBackward0").hooks == ("retain_grad",)
    assert "hooks on the gradient: _my_hook" in str(view)
