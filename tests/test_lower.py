"""Lowering to ATen, and the partition into regions and what lies between."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import compiled_autograd as ca
from compiled_autograd import ir
from compiled_autograd.cache.graphs import CompiledGraph
from compiled_autograd.ir import partition
from compiled_autograd.lowering import lower, region_compiler, wiring

from .helpers import GradientsDifferError, assert_same, both, compare, expect, mlp


class _Doubles(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        if x.abs().sum().item() < -1:  # asks for a value: nothing that is traced could
            raise AssertionError
        return 2 * x * grad


def _steps(graph: CompiledGraph) -> list[str]:
    return [type(step).__name__ for step in graph.variants[-1].program.schedule.steps]


def _last(session: ca.Session) -> CompiledGraph:
    assert session.last is not None and session.last.graph is not None
    return session.last.graph


# ---- regions -------------------------------------------------------------------------------------------------------


def test_a_tape_without_python_functions_is_one_region() -> None:
    result = compare(mlp, lambda model: model(torch.ones(2, 8)).square().mean(), steps=2)
    assert _steps(result.graph) == ["RegionStep", "AccumulateStep"]
    assert result.stats.compiles == len(result.graph.regions) == len(result.graph.aten) == 1


def test_a_python_function_lies_between_two_regions() -> None:
    def loss(model: nn.Module) -> torch.Tensor:
        return _Doubles.apply(model(torch.ones(2, 8)).sin()).cos().mean()

    result = compare(mlp, loss, steps=2)
    assert _steps(result.graph) == ["RegionStep", "OpaqueStep", "RegionStep", "AccumulateStep"]
    assert result.stats.compiles == 2


def test_leaves_are_written_before_the_users_code_runs_next() -> None:
    """Eager writes a leaf's ``.grad`` as soon as its gradient is there; a function further down may look at it."""

    class Looks(torch.autograd.Function):
        seen: list[bool] = []  # noqa: RUF012

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
            ctx.leaf = leaf
            return x * 1

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            Looks.seen.append(ctx.leaf.grad is not None)
            return grad, None

    def run(context: Any) -> None:
        x, late = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
        y = Looks.apply(x.exp(), late.detach().requires_grad_(False)) if late is None else Looks.apply(x.exp(), late)
        with context:
            (y * late).sum().backward()

    for context in (ca.disable(), ca.enable(backend="eager")):
        run(context)
    assert Looks.seen[0] == Looks.seen[1]


def test_inputs_and_outputs_of_regions() -> None:
    x = torch.randn(4, requires_grad=True)
    with ca.enable(backend="eager") as session:
        torch.autograd.grad(_Doubles.apply(x.exp()).sin().sum(), x)
    for step in partition.partition(_last(session).tape.graph):
        if not isinstance(step, partition.Region):
            continue
        inside = set(step.nodes)
        needed = {source for node in step.nodes for source in node.all_input_nodes} - inside
        assert set(step.inputs) == needed and len(step.inputs) == len(needed)
        for node in step.outputs:
            assert node in inside and ir.value_kind(node) == "tensor"
            assert any(user not in inside for user in node.users)


def test_cutting_keeps_every_call_once() -> None:
    x = torch.randn(4, requires_grad=True)
    with ca.enable(backend="eager") as session:
        _Doubles.apply(_Doubles.apply(x.exp()).sin()).sum().backward()
    graph = _last(session).tape.graph
    found: list[fx.Node] = []
    for step in partition.partition(graph):
        if isinstance(step, partition.Opaque):
            found += [step.node, *step.items]
        else:
            found += step.nodes
    calls = [node for node in graph.nodes if node.op == "call_function"]
    assert sorted(map(str, found)) == sorted(map(str, calls))


# ---- what cannot be traced -------------------------------------------------------------------------------------------


def _values_decide(x: torch.Tensor) -> torch.Tensor:
    """A masked sum whose backward asks how many elements there are."""
    y = x.exp()
    picked = y[y > 1.2]
    return (picked * picked).sum() + y.sin().sum()


def _product(x: torch.Tensor) -> torch.Tensor:
    return (x.exp().prod() * x.sin()).sum()


def _masked_select(x: torch.Tensor) -> torch.Tensor:
    return x.sin().masked_select(torch.tensor([True, False, True, True])).exp().sum()


@pytest.mark.parametrize("model", [_values_decide, _product, _masked_select])
def test_what_depends_on_values_is_right(model: Callable[[torch.Tensor], torch.Tensor]) -> None:
    def make() -> Any:
        x = torch.randn(4, requires_grad=True)
        return model(x), [x]

    stats = both(make)
    assert stats.failures == 0 and not stats.bypasses
    expect(stats, structure_misses=1, hits=1)


def _untraceable(name: str, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The engine's function of that name refuses fake tensors from now on."""
    from torch._subclasses.fake_tensor import FakeTensor

    ran: list[int] = []
    whole = ir.OpaqueOp.__call__

    def call(self: ir.OpaqueOp, *args: Any) -> Any:
        if name in self.__name__:
            if any(isinstance(each, FakeTensor) for each in args[0]):
                raise NotImplementedError("needs the data")
            ran.append(1)
        return whole(self, *args)

    monkeypatch.setattr(ir.OpaqueOp, "__call__", call)
    return ran


@pytest.mark.parametrize("position", ["first", "middle", "last"])
def test_an_untraceable_call_splits_its_region(position: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = _untraceable("TanhBackward", monkeypatch)

    def loss(model: nn.Module) -> torch.Tensor:
        hidden = model(torch.ones(2, 8))
        if position == "first":
            return hidden.square().mean().tanh()
        if position == "middle":
            return hidden.tanh().square().mean()
        return (hidden * model[0].weight.tanh().sum()).sum()

    result = compare(mlp, loss, steps=3)
    assert len(ran) == 3, "once at each step, for real"
    steps = _steps(result.graph)
    assert steps.count("OpaqueStep") == 1 and steps.count("RegionStep") >= 1
    (node,) = [node for node in result.graph.tape.graph.nodes if "untraceable" in node.meta]
    assert "needs the data" in node.meta["untraceable"] and "TanhBackward" in str(node.target)
    assert result.stats.failures == 0


def test_two_untraceable_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = _untraceable("GeluBackward", monkeypatch)
    result = compare(mlp, lambda model: model(torch.ones(2, 8)).square().mean(), steps=3)
    assert len(ran) == 6
    assert _steps(result.graph).count("OpaqueStep") == 2
    assert _steps(result.graph).count("RegionStep") == 3 == result.stats.compiles


def test_an_untraceable_write_into_a_view(monkeypatch: pytest.MonkeyPatch) -> None:
    _untraceable("TanhBackward", monkeypatch)

    def make() -> Any:
        x = torch.randn(4, requires_grad=True)
        y = x * 3
        y[1:3].tanh_()
        return y.sum(), [x]

    expect(both(make), structure_misses=1, hits=1)


def test_what_was_found_untraceable_stays_so_for_other_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    _untraceable("TanhBackward", monkeypatch)
    session = ca.enable(backend="eager")
    for size in (3, 4, 3):
        x = torch.randn(size, requires_grad=True)
        wanted = torch.autograd.grad(x.tanh().exp().sum(), x)
        with session:
            assert_same(torch.autograd.grad(x.tanh().exp().sum(), x), wanted)
    expect(session.stats(), structure_misses=1, shape_misses=1, hits=1)


# ---- mutation --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["view", "index", "cumulative", "convolution"])
def test_the_graph_that_a_backend_gets_mutates_nothing(kind: str) -> None:
    seen: list[fx.GraphModule] = []

    def backend(graph_module: fx.GraphModule, example_inputs: Any) -> Any:
        seen.append(fx.GraphModule(graph_module, copy.copy(graph_module.graph)))
        return graph_module.forward

    def make() -> Any:
        x = torch.randn(4, 4, requires_grad=True)
        y = x * 2
        if kind == "view":
            y[1:3].mul_(x[1:3])
            y[0] = x[3] * 2
        elif kind == "index":
            y = y[torch.tensor([0, 0, 2])]
        elif kind == "cumulative":
            y = y.cumsum(0).cummax(1).values
        else:
            y = F.conv2d(y.view(1, 1, 4, 4), torch.ones(2, 1, 3, 3))
        return (y * y).sum(), [x]

    expect(both(make, backend=backend), structure_misses=1, hits=1)
    for graph_module in seen:
        targets = [node.target for node in graph_module.graph.nodes if node.op == "call_function"]
        overloads = [target for target in targets if isinstance(target, torch._ops.OpOverload)]
        assert overloads and not any(target._schema.is_mutable for target in overloads)


def test_every_operator_is_aten_and_every_example_is_fake() -> None:
    from torch._subclasses.fake_tensor import FakeTensor

    seen: list[Any] = []

    def backend(graph_module: fx.GraphModule, example_inputs: Any) -> Any:
        seen.append(([str(n.target) for n in graph_module.graph.nodes if n.op == "call_function"], example_inputs))
        return graph_module.forward

    compare(mlp, lambda model: model(torch.ones(2, 8)).sum(), backend, steps=1, bitwise=True)
    ((targets, examples),) = seen
    assert targets and all(target.startswith(("aten.", "prims.")) for target in targets)
    assert all(isinstance(each, FakeTensor) for each in examples)


@pytest.mark.parametrize("activation", [nn.LeakyReLU(0.2), nn.Hardtanh()])
def test_operators_that_take_no_tensor_have_the_mode_of_all_others(activation: nn.Module) -> None:
    """The backward of these functions' backward gives zeros, of which Inductor's table makes ``full``."""
    from torch._inductor.decomposition import select_decomp_table
    from torch._subclasses.fake_tensor import FakeTensor

    made: list[str] = []

    def backend(graph_module: fx.GraphModule, example_inputs: Any) -> Any:
        for node in graph_module.graph.find_nodes(op="call_function", target=torch.ops.aten.full.default):
            made.append(type(node.meta["val"]).__name__)
            assert isinstance(node.meta["val"], FakeTensor)
            assert node.meta["val"].fake_mode is example_inputs[0].fake_mode
        return graph_module.forward

    backend.decompositions = select_decomp_table()  # type: ignore[attr-defined]
    model = nn.Sequential(nn.Linear(2, 8), activation, nn.Linear(8, 1))
    x = torch.rand(4, 2).requires_grad_()

    def penalty() -> Any:
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return torch.autograd.grad(gradient.square().mean(), [x, *model.parameters()], allow_unused=True)

    wanted = penalty()
    with ca.enable(backend=backend) as session:
        assert_same(penalty(), wanted, bitwise=False)
    expect(session.stats(), structure_misses=1, bypasses={"create_graph": 1}, compiles=1)
    assert made


# ---- passes ----------------------------------------------------------------------------------------------------------


def _counts_calls(seen: list[int]) -> Callable[[fx.GraphModule], None]:
    def count(graph_module: fx.GraphModule) -> None:
        seen.append(len(graph_module.graph.find_nodes(op="placeholder")))

    return count


def test_passes_run_on_each_region_in_order() -> None:
    order: list[str] = []

    def first(graph_module: fx.GraphModule) -> None:
        order.append("first")

    def second(graph_module: fx.GraphModule) -> fx.GraphModule:
        order.append("second")
        return fx.GraphModule(graph_module, graph_module.graph)

    def loss(model: nn.Module) -> torch.Tensor:
        return _Doubles.apply(model(torch.ones(2, 8)).sin()).cos().mean()

    compare(mlp, loss, steps=3, passes=[first, second])
    assert order == ["first", "second"] * 2  # two regions, compiled once


def test_sessions_with_other_passes_do_not_share() -> None:
    seen: list[int] = []

    def loss(model: nn.Module) -> torch.Tensor:
        return model(torch.ones(2, 8)).sum()

    compare(mlp, loss, steps=1)
    compare(mlp, loss, steps=2, passes=[_counts_calls(seen)], counts=False)
    assert len(seen) == 1


def _flips_a_sign(graph_module: fx.GraphModule) -> None:
    """A wrong pass: the first output is negated."""
    graph = graph_module.graph
    output = graph.find_nodes(op="output")[0]
    values = list(output.args[0])
    with graph.inserting_before(output):
        values[0] = graph.call_function(torch.ops.aten.neg.default, (values[0],))
    output.args = (values,)
    graph_module.recompile()


def test_a_planted_wrong_pass_is_caught() -> None:
    with pytest.raises(GradientsDifferError, match="but eager gives"):
        compare(mlp, lambda model: model(torch.ones(2, 8)).sum(), steps=1, passes=[_flips_a_sign])


def test_a_pass_that_raises_costs_no_step() -> None:
    def raises(graph_module: fx.GraphModule) -> None:
        raise ZeroDivisionError("a broken pass")

    with pytest.warns(UserWarning, match="a broken pass"):
        result = compare(mlp, lambda model: model(torch.ones(2, 8)).sum(), steps=2, passes=[raises], counts=False)
    expect(result.stats, structure_misses=1, hits=1, failures=1)


# ---- testing the checker ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("region", [0, 1])
def test_a_planted_wrong_lowering_of_one_region_is_caught(region: int, monkeypatch: pytest.MonkeyPatch) -> None:
    right, regions = lower.lower, []

    def wrong(*args: Any) -> lower.Lowered:
        lowered = right(*args)
        regions.append(lowered)
        if len(regions) - 1 == region:
            _flips_a_sign(lowered.graph_module)
        return lowered

    monkeypatch.setattr(region_compiler, "lower", wrong)

    def loss(model: nn.Module) -> torch.Tensor:
        return _Doubles.apply(model(torch.ones(2, 8)).sin()).cos().mean()

    with pytest.raises(GradientsDifferError):
        compare(mlp, loss, steps=1, check=False)
    assert len(regions) == 2


def test_a_planted_wrong_sum_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*gradients: torch.Tensor | None) -> torch.Tensor | None:
        defined = [each for each in gradients if each is not None]
        return defined[0] - defined[1] if len(defined) > 1 else defined[0]

    monkeypatch.setattr(ir.sum_gradients, "__code__", wrong.__code__)
    with pytest.raises(GradientsDifferError):
        compare(mlp, lambda model: model(model[0](torch.ones(2, 8))).sum(), steps=1)


def test_a_planted_rounding_error_is_caught_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    right = region_compiler.run_compiled

    def wrong(call: Any, arguments: Any) -> Any:
        results = right(call, arguments)
        results[0].view(-1)[0].mul_(1 + 1e-6)
        return results

    monkeypatch.setattr(region_compiler, "run_compiled", wrong)
    monkeypatch.setattr(wiring, "obeys_layout", lambda grad, leaf: True)  # else the leaf copies it
    with pytest.raises(GradientsDifferError):
        compare(mlp, lambda model: model(torch.ones(2, 8)).square().sum(), steps=1, check=False)


def test_a_planted_wrong_layout_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    right = region_compiler.run_compiled

    def wrong(call: Any, arguments: Any) -> Any:
        return [grad.t().contiguous().t() if grad.dim() == 2 else grad for grad in right(call, arguments)]

    monkeypatch.setattr(region_compiler, "run_compiled", wrong)
    monkeypatch.setattr(wiring, "obeys_layout", lambda grad, leaf: True)  # else the leaf copies it
    with pytest.raises(GradientsDifferError):
        compare(mlp, lambda model: model(torch.ones(2, 8)).square().sum(), steps=1, check=False)


def test_what_a_region_takes_is_used_and_named_after_who_keeps_it() -> None:
    """Of the first argument of ``nll_loss`` the tape keeps the tensor, and its backward asks for the sizes alone."""
    model = nn.Linear(4, 3)
    with ca.enable(backend="eager") as session:
        F.cross_entropy(model(torch.randn(5, 4).sin()), torch.tensor([0, 2, 1, 0, 1])).backward()
    (region,) = _last(session).regions
    (compiled,) = region.compiled_regions()
    placeholders = compiled.aten.graph_module().graph.find_nodes(op="placeholder")
    assert len(placeholders) == len(compiled.arguments) < len(region.inputs)
    assert all(node.users for node in placeholders)
    assert {str(node.target)[:3] for node in placeholders} == {"sav"}  # the weight is only written to
    x = torch.randn(5, 4, requires_grad=True)
    with ca.enable(backend="eager") as session:
        model(x).sum().backward()
    (region,) = _last(session).regions
    (compiled,) = region.compiled_regions()
    names = [str(node.target) for node in compiled.aten.graph_module().graph.find_nodes(op="placeholder")]
    assert sorted(name.rstrip("_1234567890") for name in names) == ["arg", "saved", "saved"]
