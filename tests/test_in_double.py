"""What a region gives in float64, where a plain tolerance does not settle what its compiled code gave."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import compiled_autograd as ca
from compiled_autograd.proving import comparison, judging, tf32
from compiled_autograd.proving.judging import Judge
from compiled_autograd.proving.reference import RealCalls, each_in_double, in_double
from shadow_cache import Mismatch

from .helpers import expect


def _chain(*functions: Callable[..., Any]) -> tuple[fx.Node, list[fx.Node]]:
    """An input, and calls of which each is given what the one before gave."""
    graph = fx.Graph()
    nodes = [graph.placeholder("x")]
    for function in functions:
        nodes.append(graph.call_function(function, (nodes[-1],)))
    return nodes[0], nodes[1:]


def _fails(x: Tensor) -> Tensor:
    raise AssertionError("not in float64")


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Counter[fx.Node]:
    """How often each call ran in float64."""
    counts: Counter[fx.Node] = Counter()
    run = RealCalls.run

    def counted(calls: RealCalls, node: fx.Node) -> Any:
        counts[node] += calls._wide
        return run(calls, node)

    monkeypatch.setattr(RealCalls, "run", counted)
    return counts


def test_many_values_take_one_run_of_the_calls(ran: Counter[fx.Node]) -> None:
    x, nodes = _chain(torch.sin, torch.cos, torch.tan, torch.exp, torch.tanh)
    given, wanted = {x: torch.rand(4)}, [x, nodes[0], *nodes[2:4]]
    found = dict(each_in_double(nodes, given, wanted))
    assert [*found] == wanted and ran == dict.fromkeys(nodes[:4], 1)
    for node, double in found.items():
        assert double is not None and double.dtype is torch.float64
        assert torch.equal(double, given[x].double() if node is x else in_double(nodes, given, node))


def test_a_value_is_freed_once_it_was_looked_at_and_nothing_needs_it() -> None:
    x, nodes = _chain(torch.sin, torch.cos, torch.tan)
    twigs = [nodes[0].graph.call_function(torch.exp, (node,)) for node in nodes]
    before: list[weakref.ref[Any]] = []
    for node, double in each_in_double([*nodes, *twigs], {x: torch.rand(4)}, twigs):
        assert node in twigs and all(each() is None for each in before)
        before.append(weakref.ref(double))
        del double
    assert len(before) == 3


def test_what_fails_in_float64_fails_for_what_it_leads_to() -> None:
    x, nodes = _chain(torch.sin, _fails, torch.cos)
    other = nodes[0].graph.call_function(torch.tan, (nodes[0],))
    found = dict(each_in_double([*nodes, other], {x: torch.ones(2)}, [*nodes, other]))
    assert [node for node, double in found.items() if double is None] == nodes[1:]


def test_who_looks_at_a_value_is_in_no_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else what is computed of it would be rounded as well."""
    monkeypatch.setattr(tf32, "_DEVICE", "cpu")
    monkeypatch.setattr(tf32._C, "_get_fp32_precision_getter", lambda *_: "tf32")
    seen = []

    def mm(x: Tensor) -> Tensor:
        seen.append(len(_get_current_dispatch_mode_stack()))
        return torch.mm(x, x)

    x, nodes = _chain(mm, torch.sin, mm)
    for _ in each_in_double(nodes, {x: torch.rand(4, 4)}, nodes, 1):
        assert not _get_current_dispatch_mode_stack()
    assert seen == [2, 2], "operands and results are rounded"


def _beside_eager(session: ca.Session, model: nn.Module, x: Tensor, loss: Callable[[Tensor], Tensor]) -> None:
    wanted = torch.autograd.grad(loss(model(x)), [*model.parameters()])
    model.zero_grad()
    with session:
        loss(model(x)).backward()
    for parameter, want in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, want)


def _rounding(graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """A backend whose code is off by the last bit."""

    def compiled(*arguments: Any) -> Any:
        return [each * (1 + torch.finfo(torch.float32).eps) for each in graph_module.forward(*arguments)]

    return compiled


def _deep() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(module for _ in range(6) for module in (nn.Linear(24, 24), nn.Tanh())))


def test_all_results_of_a_region_take_one_run(ran: Counter[fx.Node], monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a ResNet whose convolutions round further than their dtype made its calls run fifty times."""
    comparisons: list[int] = []

    def each_counted(nodes: Sequence[fx.Node], given: Any, wanted: Sequence[fx.Node]) -> Any:
        comparisons.append(len(wanted))
        return each_in_double(nodes, given, wanted)

    monkeypatch.setitem(comparison._TOLERANCES, torch.float32, 1e-12)
    monkeypatch.setattr(judging, "each_in_double", each_counted)
    session, model = ca.enable(backend=_rounding, cache_dir=False, tune=False), _deep()
    for _ in range(4):
        _beside_eager(session, model, torch.randn(16, 24), torch.sum)
    expect(session.stats(), structure_misses=1, hits=3, compiles=1)
    assert len(comparisons) >= 2 and min(comparisons) >= 10
    assert max(ran.values()) == len(comparisons)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "wrong", [{3: "value"}, {3: "value", 7: "dtype"}, {3: "dtype", 7: "value"}, {7: "value", 3: "value"}]
)
def test_the_first_result_that_differs_is_named(wrong: dict[int, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the order in which the calls give them, and whether it shows before anything is computed in float64."""

    def backend(graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        def compiled(*arguments: Any) -> Any:
            results = list(graph_module.forward(*arguments))
            for index, what in wrong.items():
                results[index] = results[index] * 1.5 if what == "value" else results[index].double()
            return results

        return compiled

    names: list[str] = []
    results_of = Judge._results

    def results(judge: Judge, *slots: Any) -> Any:
        found = results_of(judge, *slots)
        names.extend(judge.region_compiler.name_of(each.node) for each in found if not _same(each.want, each.found))
        return found

    monkeypatch.setattr(Judge, "_results", results)
    session, model = ca.enable(backend=backend, cache_dir=False, tune=False), _deep()
    _beside_eager(session, model, torch.randn(16, 24), torch.sum)
    (mismatch,) = (each for each in session.last.reasons if isinstance(each, Mismatch))
    assert mismatch.value == names[0] and len(names) == len(wrong)


def _same(want: Any, found: Any) -> bool:
    return want.dtype is found.dtype and torch.allclose(want, found)


@pytest.mark.filterwarnings("ignore")
def test_where_all_results_are_wrong_one_is_looked_into(ran: Counter[fx.Node]) -> None:
    """From moved inputs the calls run 32 times for a result: eight times for all of them took a minute."""

    def backend(graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        return lambda *arguments: [each * 1.01 for each in graph_module.forward(*arguments)]

    session, model = ca.enable(backend=backend, cache_dir=False, tune=False), _deep()
    _beside_eager(session, model, torch.randn(16, 24), torch.sum)
    expect(session.stats(), structure_misses=1, captures=1, compiles=1, failures=1)
    once = 1 + 1 + 2 * comparison._PERTURBATIONS[-1]
    assert max(ran.values()) == once and sum(ran.values()) <= once * len(ran)


@pytest.mark.filterwarnings("ignore")
def test_without_memory_for_float64_a_mistake_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain tolerance decides. A run that nobody has judged would count as one that showed little, and after ten of
    these the code would be trusted."""
    run = RealCalls.run

    def without_memory(calls: RealCalls, node: fx.Node) -> Any:
        if calls._wide:
            raise torch.OutOfMemoryError
        return run(calls, node)

    def backend(graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        return lambda *arguments: [each * 1.5 for each in graph_module.forward(*arguments)]

    monkeypatch.setattr(RealCalls, "run", without_memory)
    session, model = ca.enable(backend=backend, cache_dir=False, tune=False), _deep()
    for _ in range(12):
        _beside_eager(session, model, torch.randn(16, 24), torch.sum)
    expect(session.stats(), structure_misses=1, hits=11, captures=1, compiles=1, failures=1)


def test_what_is_neither_given_nor_made_is_an_error() -> None:
    x, nodes = _chain(torch.sin, torch.cos)
    with pytest.raises(KeyError, match="neither given nor made: cos"):
        dict(each_in_double(nodes[:1], {x: torch.ones(2)}, nodes))


def test_reading_what_dropout_drew_is_no_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name alone says too little: `native_dropout_backward` reads a mask."""
    monkeypatch.setitem(comparison._TOLERANCES, torch.float32, 1e-12)
    session, leaf = ca.enable(backend=_rounding, cache_dir=False, tune=False), torch.randn(64, requires_grad=True)
    for _ in range(4):
        leaf.grad = None
        loss = (torch.native_dropout(leaf.tanh(), 0.5, True)[0] * 3).sin().sum()
        (wanted,) = torch.autograd.grad(loss, leaf, retain_graph=True)
        with session:
            loss.backward()
        assert leaf.grad is not None
        torch.testing.assert_close(leaf.grad, wanted)
    expect(session.stats(), structure_misses=1, hits=3, captures=1, compiles=1)
    (compiled,) = session.graphs()[0].regions[0].compiled_regions()
    assert compiled.proof.draws and compiled.proof.settled
