"""The order in which the eager engine runs nodes, and sums whose rounding depends on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import compiled_autograd as ca
from compiled_autograd.capture import tape
from compiled_autograd.ir import order

from .helpers import assert_same, compare, expect, mlp


class _Recorded(torch.autograd.Function):
    """Notes when its backward runs."""

    ran: list[int] = []  # noqa: RUF012

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, number: int) -> torch.Tensor:
        ctx.number = number
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        _Recorded.ran.append(ctx.number)
        return grad, None


def _branches(x: torch.Tensor) -> torch.Tensor:
    a, b = x.sin(), x.cos()
    return (a * b + a.exp() - (b * a).tanh()).sum()


def _diamond(x: torch.Tensor) -> torch.Tensor:
    for _ in range(4):
        x = x.sin() * x + x
    return x.sum()


def _made_in_another_order(x: torch.Tensor) -> torch.Tensor:
    late = x.exp()
    early = x.sin()
    middle = late * 2
    return (early.cos() + middle + early * late + x).sum()


def _unrolled(x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(1)
    cell = nn.LSTMCell(4, 4)
    h = c = torch.zeros(3, 4)
    for step in x.view(2, 3, 4):
        h, c = cell(step, (h, c))
    return h.sum() + c.sum()


def _several_outputs(x: torch.Tensor) -> torch.Tensor:
    a, b, c = x.view(4, 6).split(2, dim=1)
    return (a * c).sum() + (b * a).sum() + x.sum()


def _residual(x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(1)
    model = mlp()
    y = x.view(3, 8)
    for layer in model[:4]:
        y = y + F.layer_norm(layer(y), (8,))
    return y.square().mean()


MODELS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    _branches,
    _diamond,
    _made_in_another_order,
    _unrolled,
    _several_outputs,
    _residual,
]


@pytest.mark.parametrize("model", MODELS)
def test_the_order_is_the_one_in_which_eager_runs_the_nodes(model: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = torch.randn(24, requires_grad=True)
    loss = model(x)
    with ca.enable(backend="eager") as session:
        loss.backward(retain_graph=True)
    assert session.last is not None and session.last.graph is not None
    graph = session.last.graph.tape
    visited = tape.walk([loss])
    ran: list[int] = []
    hooks = [
        each.node.register_prehook(lambda grads, index=index: ran.append(index))
        for index, each in enumerate(visited, start=1)
    ]
    loss.backward()
    for hook in hooks:
        hook.remove()
    assert len(ran) == len(visited) > 4
    assert [index for index in graph.order if index != 0] == ran
    assert order.engine_order(graph.calls) == graph.order


@pytest.mark.parametrize("model", MODELS)
def test_the_graphs_calls_stand_in_that_order(model: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = torch.randn(24, requires_grad=True)
    with ca.enable(backend="eager") as session:
        model(x).backward()
    assert session.last is not None and session.last.graph is not None
    graph = session.last.graph.tape
    seen = list(dict.fromkeys(node.meta["call"] for node in graph.graph.nodes if node.op == "call_function"))
    position = {index: place for place, index in enumerate(graph.order)}
    assert [position[index] for index in seen] == sorted(position[index] for index in seen)


@pytest.mark.parametrize("model", MODELS)
def test_gradients_are_bit_for_bit_eagers(model: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = torch.randn(24, requires_grad=True)
    wanted = torch.autograd.grad(model(x), x)
    with ca.enable(backend="eager") as session:
        for _ in range(2):
            assert_same(torch.autograd.grad(model(x), x), wanted)
    assert session.stats().hits == 1 and session.stats().structure_misses == 1


@pytest.mark.parametrize("ways", [2, 3, 4, 7, 9, 30])
def test_sums_of_many_gradients_are_rounded_as_eager_rounds_them(ways: int) -> None:
    """Numbers of very different sizes: every other order of the terms gives other bits."""

    def loss(x: torch.Tensor) -> torch.Tensor:
        h = x * 1
        parts = [h.sin() * (10.0 ** (3 * index % 7)) / 3 for index in range(ways)]
        total = parts[0]
        for part in parts[1:]:
            total = total + part * part
        return total.sum()

    x = torch.randn(50, requires_grad=True)
    wanted = torch.autograd.grad(loss(x), x)
    with ca.enable(backend="eager"):
        for _ in range(2):
            assert_same(torch.autograd.grad(loss(x), x), wanted)


def test_a_planted_wrong_order_of_terms_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above would notice: with the terms of sums reversed, bits differ."""
    from compiled_autograd import ir
    from compiled_autograd.ir import order

    right = order._made_as_they_come
    planted = []

    def backwards(graph: fx.Graph) -> None:
        for node in graph.find_nodes(op="call_function", target=ir.sum_gradients):
            node.args = node.args[::-1]
            planted.append(len(node.args))
        right(graph)

    monkeypatch.setattr(order, "_made_as_they_come", backwards)
    with pytest.raises(AssertionError, match="but eager gives"):
        test_sums_of_many_gradients_are_rounded_as_eager_rounds_them(7)
    assert max(planted) == 7


def test_python_functions_run_in_eagers_order() -> None:
    def loss(x: torch.Tensor) -> torch.Tensor:
        first = _Recorded.apply(x, 1)
        second = _Recorded.apply(x.sin(), 2)
        third = _Recorded.apply(first * second, 3)
        return (_Recorded.apply(second, 4) + third + _Recorded.apply(first.exp(), 5)).sum()

    x = torch.randn(4, requires_grad=True)
    _Recorded.ran.clear()
    wanted = torch.autograd.grad(loss(x), x)
    eager = list(_Recorded.ran)
    with ca.enable(backend="eager"):
        for _ in range(2):
            _Recorded.ran.clear()
            assert_same(torch.autograd.grad(loss(x), x), wanted)
            assert _Recorded.ran == eager
    assert sorted(eager) == [1, 2, 3, 4, 5]


def test_two_losses_at_once() -> None:
    batch = torch.randn(4, 8)

    def loss(model: nn.Module) -> torch.Tensor:
        hidden = model(batch)
        return hidden.square().mean() + hidden.sin().sum()

    compare(mlp, loss, steps=2)


def test_without_sequence_numbers_the_walk_is_kept() -> None:
    x = torch.randn(24, requires_grad=True)
    with ca.enable(backend="eager") as session:
        _branches(x).backward()
    assert session.last is not None and session.last.graph is not None
    graph = session.last.graph.tape
    graph.calls[2].sequence = None
    assert order.engine_order(graph.calls) == [call.index for call in graph.calls]


# ---- a later tape of the same structure, made in another order -----------------------------------------------------


def _two_ways(x: torch.Tensor, first: int, noted: list[int], between: int = 0) -> torch.Tensor:
    """One structure, whichever branch is computed first; a hook on each."""
    branches: list[torch.Tensor] = [x, x]
    for index in (first, 1 - first):
        branches[index] = x.sin()
        branches[index].register_hook(lambda grad, index=index: noted.append(index))
        for _ in range(between):
            (x * 2).exp()
    return (branches[0] * branches[1]).sum()


def test_hooks_run_in_eagers_order_at_each_step() -> None:
    x = torch.randn(4, requires_grad=True)
    session = ca.enable(backend="eager")
    outcomes = []
    for first in (0, 1, 0, 1, 1, 0):
        eager: list[int] = []
        wanted = torch.autograd.grad(_two_ways(x, first, eager), x)
        ours: list[int] = []
        loss = _two_ways(x, first, ours)
        with session:
            assert_same(torch.autograd.grad(loss, x), wanted)
        assert ours == eager == [1 - first, first]
        assert session.last is not None
        outcomes.append(session.last.outcome)
    assert outcomes == ["structure_miss", "structure_miss", "hit", "hit", "hit", "hit"]
    expect(session.stats(), structure_misses=2, hits=4, captures=1)


def test_another_order_says_so() -> None:
    x = torch.randn(4, requires_grad=True)
    session = ca.enable(backend="eager")
    for first in (0, 1):
        with session:
            _two_ways(x, first, []).backward()
        x.grad = None
    assert session.last is not None
    assert [str(reason).partition(", ")[0] for reason in session.last.reasons] == [
        "node_attribute at the order of the nodes"
    ]


def test_what_else_the_forward_makes_is_no_other_order() -> None:
    x = torch.randn(4, requires_grad=True)
    session = ca.enable(backend="eager")
    for between in range(100):
        noted: list[int] = []
        loss = _two_ways(x, 0, noted, between % 70)
        with session:
            torch.autograd.grad(loss, x)
        assert noted == [1, 0]
    expect(session.stats(), structure_misses=1, hits=99, captures=1)


def test_a_sequence_number_that_was_set_is_respected_at_each_step() -> None:
    x = torch.randn(4, requires_grad=True)
    session = ca.enable(backend="eager")

    def loss(urgent: int | None, noted: list[int]) -> torch.Tensor:
        branches = [_Recorded.apply(x, index) for index in range(3)]
        if urgent is not None:
            branches[urgent].grad_fn._set_sequence_nr(1 << 40)
        return (branches[0] * branches[1] * branches[2]).sum()

    for urgent in (None, 0, 1, None, 2, 0):
        _Recorded.ran.clear()
        wanted = torch.autograd.grad(loss(urgent, []), x)
        eager = list(_Recorded.ran)
        _Recorded.ran.clear()
        with session:
            assert_same(torch.autograd.grad(loss(urgent, []), x), wanted)
        assert _Recorded.ran == eager
    assert session.stats().captures == 1


@pytest.mark.parametrize("fours", [1, 3, 7])
def test_sums_are_rounded_in_eagers_order_at_each_step(fours: int) -> None:
    x = torch.randn(50, requires_grad=True)
    session = ca.enable(backend="eager")

    def loss(order: tuple[int, ...]) -> torch.Tensor:
        h = x * 1
        parts = [h] * 4 * fours
        for index in [index + 4 * four for four in range(fours) for index in order]:
            parts[index] = h.sin()
        return sum((part * 10.0 ** (3 * index % 13)).sum() for index, part in enumerate(parts))  # type: ignore[return-value]

    different = set()
    for order_made in ((0, 1, 2, 3), (2, 0, 3, 1), (3, 2, 1, 0), (0, 1, 2, 3), (2, 0, 3, 1)):
        wanted = torch.autograd.grad(loss(order_made), x)
        different.add(tuple(wanted[0].tolist()))
        with session:
            assert_same(torch.autograd.grad(loss(order_made), x), wanted)
    assert len(different) > 1
    expect(session.stats(), structure_misses=3, hits=2, captures=1)


@pytest.mark.parametrize("policy", ["eager", "raise", "background"])
def test_another_order_under_each_policy(policy: str) -> None:
    x = torch.randn(4, requires_grad=True)
    with ca.enable(backend="eager"):
        torch.autograd.grad(_two_ways(x, 0, []), x)
    session = ca.enable(backend="eager", on_miss=policy)
    for _ in range(2):
        noted: list[int] = []
        wanted = torch.autograd.grad(_two_ways(x, 1, []), x)
        with session:
            if policy == "raise":
                with pytest.raises(ca.CacheMissError, match="the order of the nodes"):
                    torch.autograd.grad(_two_ways(x, 1, noted), x)
                assert noted == []
                continue
            assert_same(torch.autograd.grad(_two_ways(x, 1, noted), x), wanted)
        assert noted == [0, 1]
        session.wait()
    assert session.stats().captures == 0
    if policy == "eager":
        expect(session.stats(), bypasses={"on_miss": 2})
        assert session.last is not None and "the order of the nodes" in str(session.last.reasons[1])
