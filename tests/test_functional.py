"""In-place operators of an ATen graph, replaced where nothing else sees the memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from compiled_autograd.lowering.functional import made_functional, mutates
from compiled_autograd.lowering.tracing import trace

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


def _through_views_of_views(x: torch.Tensor) -> list[torch.Tensor]:
    y = x.exp()
    column = y.t()[1:]
    column[0, 1:3].sub_(x[0, 0])
    seen = column * 1
    y.diagonal().fill_(0.5)
    y.view(12)[::5].copy_(y[:3, 1])
    return [y, column, seen, torch.complex(y, y)]


def _of_complex_numbers(x: torch.Tensor) -> list[torch.Tensor]:
    y = torch.complex(x, x)
    torch.view_as_real(y)[:, :, 1].mul_(2)
    y.conj().sum()
    return [y, y.conj() * y]


def _seen_by_a_view(x: torch.Tensor) -> list[torch.Tensor]:
    y = x * 2
    row = y[0]
    y.mul_(3)
    return [row * 1, y, row]


def _seen_by_a_view_that_does_not_say_so(x: torch.Tensor) -> list[torch.Tensor]:
    y = x * 2
    row, _ = y.unsafe_split(2)
    y.mul_(3)
    return [row * 1, y]


def _through_a_broadcast(x: torch.Tensor) -> list[torch.Tensor]:
    y = x[:1] * 2
    y.expand(1, 3).mul_(2)
    return [y]


def _keeps_its_dtype(x: torch.Tensor) -> list[torch.Tensor]:
    return [(x * 2).add_(torch.ones(3, dtype=torch.double))]


def _keeps_its_strides(x: torch.Tensor) -> list[torch.Tensor]:
    return [(x.t() * 2).copy_(x.t().contiguous())]


def _keeps_strides_that_the_operator_would_not(x: torch.Tensor) -> list[torch.Tensor]:
    return [(x.t() * 2).masked_fill_(x.t() > 0, 3.0)]  # masked_fill gives a contiguous tensor


def _random(x: torch.Tensor) -> list[torch.Tensor]:
    return [(x * 2).bernoulli_(0.5)]


def _graph(function: Function) -> torch.fx.GraphModule:
    fake = FakeTensorMode(allow_non_fake_inputs=True).from_tensor(torch.ones(4, 3))
    with torch.no_grad():
        module = trace(function, None, [fake])
    module.graph.eliminate_dead_code()
    assert any(mutates(node) for node in module.graph.nodes)
    return module


@pytest.mark.parametrize(
    "function",
    [
        _chain,
        _copied_into,
        _itself,
        _through_a_view,
        _through_views_of_views,
        _of_complex_numbers,
        _seen_by_a_view,
        _keeps_its_dtype,
        _keeps_its_strides,
        _keeps_strides_that_the_operator_would_not,
    ],
)
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
        _through_a_broadcast,
        _seen_by_a_view_that_does_not_say_so,
        _random,
    ],
)
def test_what_something_else_sees_is_left_as_it_is(function: Function) -> None:
    module = _graph(function)
    before = str(module.graph)
    assert not made_functional(module.graph)
    assert str(module.graph) == before


def _of_changing_sizes(x: torch.Tensor) -> list[torch.Tensor]:
    rows, columns = x.shape
    y = x * 2
    y[1:, : columns - 1].mul_(3)
    y[2].sub_(x[0])
    y.diagonal().fill_(1)
    seen = y[:, 2] * 1
    y.t()[: rows // 2].add_(1)
    z = x.new_empty_strided(x.shape, x.stride()).copy_(x)
    z.as_strided((rows, columns - 1), (columns, 1), 0).tanh_()
    return [y, seen, z]


def test_sizes_that_are_symbols() -> None:
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    with torch.no_grad():
        module = trace(_of_changing_sizes, None, [mode.from_tensor(torch.ones(6, 5))])
        module.graph.eliminate_dead_code()
        assert made_functional(module.graph)
    module.graph.lint()
    module.recompile()
    assert not any(mutates(node) for node in module.graph.nodes)
    for rows, columns in ((6, 5), (9, 7)):
        x = torch.randn(rows, columns)
        for found, wanted in zip(module(x.clone()), _of_changing_sizes(x.clone()), strict=True):
            assert torch.equal(found, wanted) and found.stride() == wanted.stride()


def test_a_size_that_is_a_symbol_is_no_constant_of_the_graph() -> None:
    def through_a_view(x: torch.Tensor) -> list[torch.Tensor]:
        y = x * 2
        y.view(-1).mul_(3)
        return [y]

    shapes = ShapeEnv()
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=shapes)
    with torch.no_grad():
        module = trace(through_a_view, None, [mode.from_tensor(torch.ones(4, 3))])
    module.graph.eliminate_dead_code()
    before = str(module.graph)
    assert not made_functional(module.graph)
    assert str(module.graph) == before
    assert made_functional(_graph(through_a_view).graph)


VIEWS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda x: x[1:],
    lambda x: x[..., ::2],
    lambda x: x[-1],
    lambda x: x.t() if x.dim() <= 2 else x.transpose(0, -1),
    lambda x: x.permute([*range(1, x.dim()), 0]),
    lambda x: x.unsqueeze(-1),
    lambda x: x.squeeze(0),
    lambda x: x.squeeze(),
    lambda x: x.view(-1) if x.is_contiguous() else x,
    lambda x: x.diagonal(-1) if x.dim() >= 2 else x,
    lambda x: x.expand(2, *x.shape),
    lambda x: x.split(1)[-1],
    lambda x: x.as_strided((2,), (3,), 1) if x.numel() == 12 and x.is_contiguous() else x,
    lambda x: x.detach(),
]
IN_PLACE: list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = [
    lambda x, y: x.mul_(2),
    lambda x, y: x.add_(y.sum()),
    lambda x, y: x.sub_(y) if x.shape == y.shape else x.neg_(),
    lambda x, y: x.copy_(y) if x.shape == y.shape else x.zero_(),
    lambda x, y: x.fill_(3),
    lambda x, y: x.masked_fill_(x > 0, 0.25),
    lambda x, y: x.tril_() if x.dim() == 2 else x.tanh_(),
    lambda x, y: x.pow_(2).add_(1),
]
NEW: list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = [
    lambda x, y: x * 2,
    lambda x, y: x + y if x.shape == y.shape else x.sin(),
    lambda x, y: x.clone(),
    lambda x, y: x.new_zeros(3, 4),
]


@st.composite
def _programs(draw: st.DrawFn) -> list[tuple[str, int, int, int]]:
    kinds = st.sampled_from(["view", "in place", "in place", "new"])
    places = st.integers(0, 40)
    return draw(st.lists(st.tuples(kinds, places, places, places), min_size=2, max_size=12))


def _run_program(program: list[tuple[str, int, int, int]], x: torch.Tensor) -> list[torch.Tensor]:
    """Each instruction takes two of the tensors that are there; what overlaps itself is not written to."""
    tensors = [x * 1.5]
    for kind, number, one, other in program:
        first, second = tensors[one % len(tensors)], tensors[other % len(tensors)]
        if kind == "view":
            tensors.append(VIEWS[number % len(VIEWS)](first) if first.dim() and 0 not in first.shape else first)
        elif kind == "new":
            tensors.append(NEW[number % len(NEW)](first, second))
        elif 0 not in first.stride() and first.untyped_storage()._cdata != second.untyped_storage()._cdata:
            tensors.append(IN_PLACE[number % len(IN_PLACE)](first, second))
    return tensors


@pytest.mark.parametrize("examples", [150, pytest.param(5000, marks=pytest.mark.slow)])
def test_random_writes(examples: int) -> None:
    replaced = []

    @settings(max_examples=examples, derandomize=True, database=None)
    @given(_programs())
    def check(program: list[tuple[str, int, int, int]]) -> None:
        fake = FakeTensorMode(allow_non_fake_inputs=True).from_tensor(torch.ones(3, 4))
        with torch.no_grad():
            module = trace(lambda x: _run_program(program, x), None, [fake])
        module.graph.eliminate_dead_code()
        if not any(mutates(node) for node in module.graph.nodes):
            return
        before = str(module.graph)
        replaced.append(made_functional(module.graph))
        module.graph.lint()
        if not replaced[-1]:
            assert str(module.graph) == before
            return
        assert not any(mutates(node) for node in module.graph.nodes)
        module.recompile()
        x = torch.randn(3, 4)
        values = [node.meta["val"] for node in next(iter(reversed(module.graph.nodes))).args[0]]
        for found, wanted, value in zip(module(x.clone()), _run_program(program, x.clone()), values, strict=True):
            assert torch.equal(found, wanted) and found.dtype == wanted.dtype
            assert found.stride() == wanted.stride() == value.stride()

    check()
    assert sum(replaced) > 0.6 * len(replaced)
