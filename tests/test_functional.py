"""In-place operators of an ATen graph, replaced where nothing else sees the memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from compiled_autograd.functional import made_functional, mutates
from compiled_autograd.tracing import trace

Function = Callable[[torch.Tensor], list[torch.Tensor]]


def _chain(x: torch.Tensor) -> list[torch.Tensor]:
    y = x * 2
    z = y.sum()
    y.masked_fill_(x > 0, 3.0).pow_(2).add_(x)
    return [y, z, y.relu_()]


def _copied_into(x: torch.Tensor) -> list[torch.Tensor]:
    return [torch.empty_like(x).copy_(x).div_(3), x.new_zeros(4).index_put_([torch.tensor([1])], x[0, 0])]


def _itself(x: torch.Tensor) -> list[torch.Tensor]:
    y = x.exp()
    return [y.mul_(y)]


def _an_input(x: torch.Tensor) -> list[torch.Tensor]:
    return [x.add_(1) * 2]


def _through_a_view(x: torch.Tensor) -> list[torch.Tensor]:
    y = x * 2
    y[0].mul_(3)
    return [y]


def _seen_by_a_view(x: torch.Tensor) -> list[torch.Tensor]:
    y = x * 2
    row = y[0]
    y.mul_(3)
    return [row * 1, y]


def _seen_by_a_view_that_does_not_say_so(x: torch.Tensor) -> list[torch.Tensor]:
    y = x * 2
    row, _ = y.unsafe_split(2)
    y.mul_(3)
    return [row * 1, y]


def _keeps_its_dtype(x: torch.Tensor) -> list[torch.Tensor]:
    return [(x * 2).add_(torch.ones(3, dtype=torch.double))]


def _keeps_its_strides(x: torch.Tensor) -> list[torch.Tensor]:
    return [(x.t() * 2).copy_(x.t().contiguous())]


def _random(x: torch.Tensor) -> list[torch.Tensor]:
    return [(x * 2).bernoulli_(0.5)]


def _graph(function: Function) -> torch.fx.GraphModule:
    fake = FakeTensorMode(allow_non_fake_inputs=True).from_tensor(torch.ones(4, 3))
    with torch.no_grad():
        module = trace(function, None, [fake])
    module.graph.eliminate_dead_code()
    assert any(mutates(node) for node in module.graph.nodes)
    return module


@pytest.mark.parametrize("function", [_chain, _copied_into, _itself])
def test_what_was_just_made_is_made_anew(function: Function) -> None:
    module = _graph(function)
    assert made_functional(module.graph)
    module.graph.lint()
    module.recompile()
    assert not any(mutates(node) for node in module.graph.nodes)
    x = torch.randn(4, 3)
    for found, wanted in zip(module(x.clone()), function(x.clone()), strict=True):
        assert torch.equal(found, wanted) and found.stride() == wanted.stride() and found.dtype == wanted.dtype


@pytest.mark.parametrize(
    "function",
    [
        _an_input,
        _through_a_view,
        _seen_by_a_view,
        _seen_by_a_view_that_does_not_say_so,
        _keeps_its_dtype,
        _random,
    ],
)
def test_what_something_else_sees_is_left_as_it_is(function: Function) -> None:
    module = _graph(function)
    before = str(module.graph)
    assert not made_functional(module.graph)
    assert str(module.graph) == before


def test_strides_are_kept() -> None:
    module = _graph(_keeps_its_strides)
    made_functional(module.graph)
    module.recompile()
    x = torch.randn(4, 3)
    (found,), (wanted,) = module(x), _keeps_its_strides(x)
    assert torch.equal(found, wanted) and found.stride() == wanted.stride()
