"""The legality table for lowered graphs: each violation is planted, and found."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx

import compiled_autograd as ca
from compiled_autograd import ir
from compiled_autograd.errors import IllegalGraphError
from compiled_autograd.lowering.aten import ABSOLUTE, CONSTANT, UNDEFINED, UNWRITTEN, breaches, verify
from compiled_autograd.lowering.tracing import trace

from .helpers import assert_same, expect

_aten: Any = torch.ops.aten


def _module(build: Callable[[fx.Graph, fx.Node], Any], **attributes: Any) -> fx.GraphModule:
    """A graph with one input; ``build`` adds to it, and gives the output."""
    graph = fx.Graph()
    graph.output(build(graph, graph.placeholder("x")))
    root = torch.nn.Module()
    for name, value in attributes.items():
        setattr(root, name, value)
    return fx.GraphModule(root, graph)


def _call(target: Any, *args: Any) -> Callable[[fx.Graph, fx.Node], Any]:
    return lambda graph, x: [graph.call_function(target, (x, *args))]


# ---- what a node may be ----------------------------------------------------------------------------------------------

LEGAL: dict[str, tuple[Callable[[fx.Graph, fx.Node], Any], dict[str, Any]]] = {
    "an operator": (_call(_aten.sin.default), {}),
    "an item": (lambda g, x: [g.call_function(operator.getitem, (g.call_function(_aten.split.Tensor, (x, 1)), 0))], {}),
    "a product of sizes": (lambda g, x: [g.call_function(operator.mul, (x, 2))], {}),
    "a constant of one element": (lambda g, x: [g.get_attr("c")], {"c": torch.tensor(2.0)}),
    "no output": (lambda g, x: [], {}),
}


@pytest.mark.parametrize("what", LEGAL)
def test_what_a_lowered_graph_may_have(what: str) -> None:
    build, attributes = LEGAL[what]
    verify(_module(build, **attributes))


ILLEGAL: dict[str, tuple[Callable[[fx.Graph, fx.Node], Any], dict[str, Any], str]] = {
    "a write": (_call(_aten.mul_.Tensor, 2), {}, "mul_.*no operator writes into its arguments"),
    "a write to an out": (
        lambda g, x: [g.call_function(_aten.sin.out, (x,), {"out": x})],
        {},
        "no operator writes into its arguments",
    ),
    "a product of three": (lambda g, x: [g.call_function(operator.mul, (x, 2, 3))], {}, "mul.*takes 2 of them"),
    "another function": (_call(torch.sin), {}, "neither an operator of torch.ops nor a function on sizes"),
    "a method": (lambda g, x: [g.call_method("sin", (x,))], {}, "no 'call_method' nodes"),
    "a module": (lambda g, x: [g.call_module("m", (x,))], {"m": torch.nn.Tanh()}, "no 'call_module' nodes"),
    "an item by name": (_call(operator.getitem, "a"), {}, "an item is taken by its number"),
    "a number for a constant": (lambda g, x: [g.get_attr("c")], {"c": 3}, "c: an attribute is a tensor with values"),
    "an output that is no list": (lambda g, x: x, {}, "the output is a list of nodes"),
    "a number for an output": (lambda g, x: [x, 1], {}, "the output is a list of nodes"),
}


@pytest.mark.parametrize("what", ILLEGAL)
def test_what_a_lowered_graph_may_not_have(what: str) -> None:
    build, attributes, message = ILLEGAL[what]
    with pytest.raises(IllegalGraphError, match=message):
        verify(_module(build, **attributes))


# ---- what it may do with memory --------------------------------------------------------------------------------------


WRITTEN: dict[str, Callable[[torch.Tensor], Any]] = {
    "copy": lambda x: torch.empty(2, 3).copy_(x) + 1,
    "fill": lambda x: torch.empty_like(x).fill_(2) + 1,
    "zero": lambda x: x.new_empty(2, 3).zero_() + 1,
    "through a view": lambda x: torch.empty(3, 2).t().view_as(x).copy_(x) + 1,
    "as an out": lambda x: torch.sin(x, out=x.new_empty_strided((2, 3), (3, 1))) + 1,
    "functional": lambda x: torch.ops.aten.copy(torch.empty(2, 3), x) + 1,
    "of its metadata alone": lambda x: torch.zeros_like(torch.empty(2, 3)) + x,
    "without elements": lambda x: torch.cat([torch.empty(0, 3), x]),
}


@pytest.mark.parametrize("what", WRITTEN)
def test_memory_that_is_wholly_written_may_be_read(what: str) -> None:
    assert not list(breaches(_traced(WRITTEN[what])))


NOT_WRITTEN: dict[str, Callable[[torch.Tensor], Any]] = {
    "never": lambda x: torch.empty(2, 3) + x,
    "given as it is": lambda x: torch.empty_like(x),
    "after it is read": lambda x: x + (lambda e: (e + 1, e.copy_(x))[0])(torch.empty(2, 3)),
    "in a part": lambda x: (lambda e: (e[0].copy_(x[0]), e + 1)[1])(torch.empty(2, 3)),
    "with what it has": lambda x: torch.empty(2, 3).mul_(2) + x,
    "with a view of itself": lambda x: (lambda e: e.copy_(e.t()) + 1)(torch.empty(3, 3)),
    "seen through a view": lambda x: torch.empty(3, 2).t() + x,
    "one of a list": lambda x: torch.cat([x, x.new_empty(1, 3)]),
    "by growing": lambda x: torch.ops.aten.resize(x, [4, 4]) + 1,
    "as a keyword": lambda x: torch.ops.aten.add.Tensor(x, other=torch.empty(2, 3)),
}


@pytest.mark.parametrize("what", NOT_WRITTEN)
def test_memory_that_is_not_may_not(what: str) -> None:
    (breach, *_) = breaches(_traced(NOT_WRITTEN[what]))
    assert breach.rule == UNWRITTEN and ("empty" in str(breach) or "resize" in str(breach))


def _traced(function: Callable[[torch.Tensor], Any]) -> fx.Graph:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        graph = trace(lambda x: [function(x)], None, [torch.ones(2, 3)]).graph
    assert mode is not None
    return graph


PLACES: dict[str, tuple[Callable[[torch.Tensor], Any], bool]] = {
    "of an input": (lambda x: x.as_strided((3,), (1,), 3) * 1, False),
    "of a view of one": (lambda x: x.t()[1:].as_strided((3,), (1,)) * 1, False),
    "of one of several views": (lambda x: x.split(1)[1].as_strided((3,), (1,), 0) * 1, False),
    "put into one": (lambda x: torch.as_strided_scatter(x, x[0] * 2, (3,), (1,), 0), False),
    "of a result": (lambda x: (x * 2).as_strided((3,), (1,), 3) * 1, True),
    "put into a result": (lambda x: torch.as_strided_scatter(x * 2, x[0], (3,), (1,), 0), True),
}


@pytest.mark.parametrize("what", PLACES)
def test_places_in_memory_are_those_of_results_alone(what: str) -> None:
    function, legal = PLACES[what]
    found = [breach.rule for breach in breaches(_traced(function))]
    assert found == ([] if legal else [ABSOLUTE])


# ---- in a backward ---------------------------------------------------------------------------------------------------


def _plant(monkeypatch: pytest.MonkeyPatch, name: str, wrong: Callable[[list[torch.Tensor]], Any]) -> None:
    """What the engine's function of that name gives goes through ``wrong``."""
    whole = ir.OpaqueOp.__call__

    def call(self: ir.OpaqueOp, *args: Any) -> Any:
        results = whole(self, *args)
        return wrong(results) if name in self.__name__ else results

    monkeypatch.setattr(ir.OpaqueOp, "__call__", call)


def _filled_unseen(results: list[Any]) -> Any:
    """As C++ does: what is copied is in no trace."""
    from torch._subclasses.fake_tensor import FakeTensor

    if isinstance(results[0], FakeTensor):
        return [torch.empty_like(results[0])]
    return results


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_call_that_fills_memory_unseen_stays_opaque(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _plant(monkeypatch, "TanhBackward", _filled_unseen)
    x = torch.randn(3, 3, requires_grad=True)

    def run() -> Any:
        return torch.autograd.grad((x.exp().tanh() * 2).tanh().sin().sum(), x)

    wanted = run()
    with ca.enable(backend=backend) as session:
        for _ in range(3):
            assert_same(run(), wanted, bitwise=backend == "eager")
    expect(session.stats(), structure_misses=1, hits=2)
    assert session.last is not None and session.last.graph is not None
    reasons = session.last.graph.variants[-1].program.schedule.untraceable
    assert [node.target.__name__ for node in reasons] == ["TanhBackward0"] * 2  # type: ignore[union-attr]
    assert all(UNWRITTEN in reason for reason in reasons.values())


def test_a_call_that_is_given_an_undefined_gradient_stays_opaque_where_its_operator_needs_one() -> None:
    """The kernel gives undefined gradients then, and the function for fake tensors gives tensors."""

    class GivesNone(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.set_materialize_grads(False)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> None:
            return None

    weight = torch.randn(12, 16, requires_grad=True)
    x = torch.randn(1, 5, 16)

    def run() -> list[torch.Tensor | None]:
        q, k, v = (part.view(1, 5, 1, 4).transpose(1, 2) for part in F.linear(x, weight).split(4, 2))
        given = GivesNone.apply(F.scaled_dot_product_attention(q, k, v))
        return list(torch.autograd.grad(given.sum(), weight, allow_unused=True))

    wanted = run()
    with ca.enable(backend="eager") as session:
        for _ in range(3):
            assert_same(run(), wanted)
    expect(session.stats(), structure_misses=1, hits=2)
    assert session.last is not None and session.last.graph is not None
    (reason,) = session.last.graph.variants[-1].program.schedule.untraceable.values()
    assert UNDEFINED in reason


def test_a_call_that_brings_a_tensor_of_its_own_stays_opaque(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = torch.randn(3, 3)
    _plant(monkeypatch, "TanhBackward", lambda results: [results[0] * kept])
    x = torch.randn(3, 3, requires_grad=True)

    def run() -> Any:
        return torch.autograd.grad(x.exp().tanh().sin().sum(), x)

    with ca.enable(backend="eager") as session:
        for _ in range(3):
            kept.copy_(torch.randn(3, 3))
            found = run()
            y = x.detach().exp()
            assert torch.allclose(found[0], y * kept * (1 - y.tanh() ** 2) * y.tanh().cos())
    assert session.last is not None and session.last.graph is not None
    (reason,) = session.last.graph.variants[-1].program.schedule.untraceable.values()
    assert CONSTANT in reason and session.stats().failures == 0


def test_it_stays_opaque_too_where_its_nodes_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second call is a copy of the first; each names its own call."""
    _plant(monkeypatch, "TanhBackward", _filled_unseen)
    x = torch.randn(3, 3, requires_grad=True)
    with ca.enable(backend="eager") as session:
        torch.autograd.grad(x.tanh().exp().tanh().exp().tanh().sum(), x)
    assert session.last is not None and session.last.graph is not None
    assert len(session.last.graph.variants[-1].program.schedule.untraceable) == 3


@pytest.mark.filterwarnings("ignore:Since version 1.3.0")
@pytest.mark.parametrize("size", [(2, 3, 1, 4, 5), (2, 3, 4, 4, 1), (2, 3, 1, 4), (2, 3, 4, 5)])
def test_a_function_that_fills_memory_through_a_pointer(size: tuple[int, ...]) -> None:
    """``affine_grid_generator_backward`` makes the coordinates of an axis of size 1 with ``at::tensor(0)``."""
    dims = len(size) - 2
    theta = torch.randn(2, dims, dims + 1, dtype=torch.float64, requires_grad=True)
    output = F.affine_grid(theta, list(size), align_corners=True)
    grad = torch.randn_like(output)
    wanted = torch.autograd.grad(output, theta, grad, retain_graph=True)
    with ca.enable(backend="eager") as session:
        for _ in range(2):
            assert_same(torch.autograd.grad(output, theta, grad, retain_graph=True), wanted)
    expect(session.stats(), structure_misses=1, hits=1)


@pytest.mark.parametrize("offset", [0, 6, 12])
def test_a_gradient_that_is_a_part_of_something_keeps_eagers_bits(offset: int) -> None:
    """The backward of ``as_strided_scatter`` takes its places from where the gradient's memory begins."""
    x, source = torch.randn(2, 3, requires_grad=True), torch.randn(3, requires_grad=True)
    grad = torch.arange(18.0)[offset : offset + 6].view(2, 3)

    def run() -> Any:
        return torch.autograd.grad(torch.as_strided_scatter(x, source, (3,), (1,), 3), [x, source], grad)

    wanted = run()
    with ca.enable(backend="eager") as session:
        for _ in range(2):
            assert_same(run(), wanted)
    expect(session.stats(), structure_misses=1, hits=1)


def test_a_pass_that_breaks_a_rule_costs_no_step() -> None:
    def writes(graph_module: fx.GraphModule) -> None:
        output = graph_module.graph.output_node()
        with graph_module.graph.inserting_before(output):
            value = graph_module.graph.call_function(_aten.mul_.Tensor, (output.args[0][0], 2))  # type: ignore[index]
        output.args = ([value],)
        graph_module.recompile()

    x = torch.randn(3, requires_grad=True)
    wanted = torch.autograd.grad(x.sin().sum(), x)
    with (
        pytest.warns(UserWarning, match="IllegalGraphError: mul_.*: no operator writes into its arguments"),
        ca.enable(backend="eager", passes=[writes]) as session,
    ):
        assert_same(torch.autograd.grad(x.sin().sum(), x), wanted)
    expect(session.stats(), structure_misses=1, failures=1, compiles=0)
