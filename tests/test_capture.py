"""What a capture must carry over: functions with their ctx, views, undefined gradients, edges, hooks."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, get_gradient_edge

import compiled_autograd as ca
from compiled_autograd.capture import capture
from compiled_autograd.capture.capture import Capture

from .helpers import assert_same, both, expect

# ---- Python functions ----------------------------------------------------------------------------------------------


def _leaf(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True)


class _Everything(Function):
    """Tensors, numbers, None, a string; two outputs; attributes on ctx; one output saved."""

    seen: list[Any] = []  # noqa: RUF012  a test's notebook

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, power: float, y: torch.Tensor | None, word: str) -> Any:
        out = x**power
        ctx.save_for_backward(x, None, out)
        ctx.power, ctx.word = power, word
        ctx.later = {"made": "in forward"}
        _Everything.seen.append(ctx)
        return out, x * 3

    @staticmethod
    def backward(ctx: Any, first: torch.Tensor, second: torch.Tensor) -> Any:
        x, nothing, out = ctx.saved_tensors
        assert nothing is None and out.shape == x.shape
        assert any(ctx is each for each in _Everything.seen), "not the ctx that forward had"
        assert isinstance(ctx, torch.autograd.function.FunctionCtx)
        assert type(ctx).__name__ == "_EverythingBackward"
        assert ctx.word == "word" and ctx.later == {"made": "in forward"}
        ctx.later["changed"] = True
        assert ctx.needs_input_grad == (True, False, False, False)
        return first * ctx.power * x ** (ctx.power - 1) + second * 3, None, None, None


def test_a_function_gets_its_real_ctx() -> None:
    _Everything.seen.clear()

    def make() -> Any:
        x = _leaf(4)
        first, second = _Everything.apply(x.exp(), 2.0, None, "word")
        return (first.sin() + second).sum(), [x]

    expect(both(make), structure_misses=1, hits=1, captures=1)
    assert all(ctx.later["changed"] for ctx in _Everything.seen) and len(_Everything.seen) == 3
    assert all(type(ctx).__mro__[1] is not type(ctx) and "saved" not in str(vars(ctx)) for ctx in _Everything.seen)


def test_undefined_gradients_of_outputs_become_zeros() -> None:
    def make() -> Any:
        x = _leaf(4)
        first, _ = _Everything.apply(x.exp(), 2.0, None, "word")
        return first.sum(), [x]

    expect(both(make), structure_misses=1, hits=1)


class _NoZeros(Function):
    seen: list[Any] = []  # noqa: RUF012

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, first: torch.Tensor | None, second: torch.Tensor | None) -> Any:
        _NoZeros.seen.append((first is None, second is None))
        return first * 2 if first is not None else None if second is None else second * 3


@pytest.mark.parametrize("used", [0, 1])
def test_undefined_gradients_stay_undefined_where_a_function_asks_for_it(used: int) -> None:
    _NoZeros.seen.clear()

    def make() -> Any:
        x = _leaf(4)
        return _NoZeros.apply(x.exp())[used].sum(), [x]

    expect(both(make), structure_misses=1, hits=1)
    assert _NoZeros.seen == [(used != 0, used != 1)] * 3


def test_a_function_that_gives_none_leaves_the_gradient_undefined() -> None:
    class GivesNone(Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x + y

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            return None, grad * 2

    def make() -> Any:
        x, y = _leaf(4), _leaf(4)
        return (GivesNone.apply(x.exp() * y, y.sin()) * y).sum(), [x, y]

    expect(both(make, allow_unused=True), structure_misses=1, hits=1)

    x, y = _leaf(4), _leaf(4)
    with ca.enable(backend="eager"):
        GivesNone.apply(x.exp(), y).sum().backward()
    assert x.grad is None and y.grad is not None and torch.equal(y.grad, torch.full((4,), 2.0))


def test_a_function_whose_gradient_is_sometimes_none() -> None:
    """What a Python function gives is known only when it runs; each kind is compiled for itself."""

    class Sometimes(Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, switch: list[bool]) -> torch.Tensor:
            ctx.switch = switch
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            return (grad * 2 if ctx.switch[0] else None), None

    switch = [True]
    values: list[Any] = []
    for context in (ca.disable(), ca.enable(backend="eager")):
        for on in (True, False, True, False):
            switch[0] = on
            torch.manual_seed(3)
            x, y = _leaf(4), _leaf(4)
            with context:
                (Sometimes.apply(x.exp(), switch).sin() * y.exp()).sum().backward()
            values.append((x.grad, y.grad))
    for found, wanted in zip(values[4:], values[:4], strict=True):
        assert_same(found, wanted)
    assert values[1][0] is None


class _SetupContext(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor, scale: float) -> torch.Tensor:
        return x * scale

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        x, ctx.scale = inputs
        ctx.save_for_backward(x)

    @staticmethod
    def vjp(ctx: Any, grad: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return grad * ctx.scale + 0 * x, None


def test_setup_context_and_vjp() -> None:
    def make() -> Any:
        x = _leaf(4)
        return _SetupContext.apply(x.exp(), 3.0).sin().sum(), [x]

    expect(both(make), structure_misses=1, hits=1)


def test_once_differentiable() -> None:
    class Once(Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            (x,) = ctx.saved_tensors
            return grad * x.cos()

    def make() -> Any:
        x = _leaf(4)
        return Once.apply(x * 2).sum(), [x]

    expect(both(make), structure_misses=1, hits=1)


def test_mark_non_differentiable() -> None:
    class Sorts(Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> Any:
            values, index = x.sort()
            ctx.mark_non_differentiable(index)
            ctx.save_for_backward(index)
            return values, index

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor, unused: Any) -> torch.Tensor:
            (index,) = ctx.saved_tensors
            return torch.zeros_like(grad).index_add_(0, index, grad)

    def make() -> Any:
        x = _leaf(6)
        values, _ = Sorts.apply(x * 2)
        return (values * torch.arange(6.0)).sum(), [x]

    expect(both(make), structure_misses=1, hits=1)


class Doubles(Function):
    """Writes into its argument."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2


def test_mark_dirty_writes_in_place() -> None:
    def make() -> Any:
        x = _leaf(4)
        y = x * 3
        y[1:] = Doubles.apply(x[1:] * 1)
        return Doubles.apply(y * 1).sum(), [x]

    expect(both(make), structure_misses=1, hits=1)


def _gives(value: Callable[[torch.Tensor], Any]) -> Any:
    class Gives(Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor, n: int) -> torch.Tensor:
            return x + y * n

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            return value(grad)

    return Gives


@pytest.mark.parametrize(
    "value",
    [
        lambda grad: grad,
        lambda grad: (grad, grad),
        lambda grad: (grad, grad, None, grad),
        lambda grad: (grad, grad, grad),
        lambda grad: (grad, 3.0, None),
        lambda grad: [grad, grad, None],
        lambda grad: (grad[:2], grad, None),
        lambda grad: None,
        lambda grad: (),
    ],
    ids=["one", "two", "four", "for a number", "a float", "a list", "wrong shape", "None", "empty"],
)
def test_wrong_results_of_backward_are_answered_in_eagers_words(value: Callable[[torch.Tensor], Any]) -> None:
    gives = _gives(value)

    def message(context: Any) -> Any:
        x, y = _leaf(4), _leaf(4)
        try:
            with context:
                gives.apply(x.exp(), y.exp(), 2).sum().backward()
        except (RuntimeError, TypeError) as error:
            return type(error), str(error)
        return x.grad, y.grad

    wanted, found = message(ca.disable()), message(ca.enable(backend="eager"))
    assert found == wanted


@pytest.mark.parametrize(
    "value",
    [lambda grad: (grad, grad, None, None, None), lambda grad: (grad.expand(2, 4), grad, None)],
    ids=["more", "wide"],
)
def test_lenient_results_of_backward_are_taken(value: Callable[[torch.Tensor], Any]) -> None:
    """More gradients than arguments, if None; a gradient that can be summed to its argument's shape."""
    gives = _gives(value)

    def make() -> Any:
        x, y = _leaf(4), _leaf(4)
        return gives.apply(x.exp(), y.exp(), 2).sum(), [x, y]

    expect(both(make), structure_misses=1, hits=1)


def test_a_gradient_of_another_dtype_is_cast() -> None:
    class Wider(Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad.double() / 3

    def make() -> Any:
        x = _leaf(4)
        return Wider.apply(x).sum(), [x]

    expect(both(make), structure_misses=1, hits=1)


def test_a_function_may_call_an_attribute_as_it_likes() -> None:
    class Named(Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.name, ctx._sequence_nr, ctx.saved = "mine", 7, 1
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            assert (ctx.name, ctx._sequence_nr) == ("mine", 7)
            return grad * 2

    def make() -> Any:
        x = _leaf(4)
        return Named.apply(x).sum(), [x]

    expect(both(make), structure_misses=1, hits=1)


def test_saved_tensors_can_be_read_twice_and_after_retain_graph() -> None:
    class Twice(Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * (ctx.saved_tensors[0] + ctx.saved_tensors[0])

    x = _leaf(4)
    y = Twice.apply(x.exp())
    wanted = torch.autograd.grad(y.sum(), x, retain_graph=True)
    with ca.enable(backend="eager") as session:
        for _ in range(3):
            assert_same(torch.autograd.grad(y.sum(), x, retain_graph=True), wanted)
    expect(session.stats(), structure_misses=1, hits=2)
    assert torch.equal(y.grad_fn.saved_tensors[0], x.exp())  # type: ignore[union-attr]


def test_a_function_class_made_anew_at_each_step_is_a_hit() -> None:
    """And it is this step's class that runs, not the one that was captured."""

    def step(context: Any, factor: float) -> torch.Tensor:
        class Fresh(Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                return x.clone()

            @staticmethod
            def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
                return grad * factor

        x = torch.ones(3, requires_grad=True)
        with context:
            Fresh.apply(x).sum().backward()
        assert x.grad is not None
        return x.grad

    session = ca.enable(backend="eager")
    for factor in (5.0, 6.0, 7.0):
        assert_same([step(session, factor)], [step(ca.disable(), factor)])
    expect(session.stats(), structure_misses=1, hits=2, captures=1)


def test_functions_of_one_name_and_different_arguments_are_told_apart() -> None:
    def make(count: int) -> type[Function]:
        class Fresh(Function):
            @staticmethod
            def forward(ctx: Any, *args: Any) -> Any:
                return args[0] * count if count == 1 else (args[0] * 2, args[1] * 3)

            @staticmethod
            def backward(ctx: Any, *grads: torch.Tensor) -> Any:
                return tuple(grad * (index + 1 + count) for index, grad in enumerate(grads))

        return Fresh

    def grads(count: int) -> tuple[torch.Tensor, ...]:
        leaves = [torch.ones(3, requires_grad=True) for _ in range(count)]
        out = make(count).apply(*leaves)
        total = out.sum() if count == 1 else out[0].sum() + out[1].sum()
        return torch.autograd.grad(total, leaves)

    with ca.enable(backend="eager") as session:
        found = [grads(1), grads(2), grads(1), grads(2)]
    for each, count in zip(found, (1, 2, 1, 2), strict=True):
        assert_same(each, grads(count))
    expect(session.stats(), structure_misses=2, hits=2, captures=2)


# ---- writes into views -----------------------------------------------------------------------------------------------


def _slice(y: torch.Tensor) -> None:
    y[1:3].mul_(2)


def _item(y: torch.Tensor) -> None:
    y[0, 1] = y[1, 2] * 3


def _diagonal(y: torch.Tensor) -> None:
    y.diagonal().exp_()


def _transpose(y: torch.Tensor) -> None:
    y.t()[1:].add_(y[0, 0].clone())


def _select_twice(y: torch.Tensor) -> None:
    y[0].sin_()
    y[:, 0].cos_()


def _view_of_view(y: torch.Tensor) -> None:
    y.view(-1)[2:10].view(2, 4)[1].mul_(y[3].clone())


def _unsqueezed(y: torch.Tensor) -> None:
    y.unsqueeze(0)[:, 1].zero_()


def _strided(y: torch.Tensor) -> None:
    y.as_strided((2, 2), (5, 1), 3).mul_(4)


def _masked(y: torch.Tensor) -> None:
    y[:2].masked_fill_(torch.eye(2, 4).bool(), 3.0)


def _index_put(y: torch.Tensor) -> None:
    y[torch.tensor([0, 2])] = y[torch.tensor([1, 3])] * 2


def _chunk(y: torch.Tensor) -> None:
    y.narrow(1, 1, 2).copy_(y[:, :2].clone() ** 2)


_WRITES = [
    _slice,
    _item,
    _diagonal,
    _transpose,
    _select_twice,
    _view_of_view,
    _unsqueezed,
    _strided,
    _masked,
    _index_put,
    _chunk,
]


@pytest.mark.parametrize("write", _WRITES)
def test_writes_into_views(write: Callable[[torch.Tensor], None]) -> None:
    def make() -> Any:
        x, w = _leaf(4, 4), _leaf(4, 4)
        y = x * w
        write(y)
        return (y.sin() * w).sum(), [x, w]

    expect(both(make), structure_misses=1, hits=1)


def test_a_python_function_that_writes_into_a_view() -> None:
    """CopySlices around a Python function."""

    def make() -> Any:
        x = _leaf(4)
        y = x * 3
        Doubles.apply(y[1:3])
        return y.sin().sum(), [x]

    expect(both(make), structure_misses=1, hits=1)


def test_a_write_into_a_view_of_a_transposed_base() -> None:
    def make() -> Any:
        x = _leaf(3, 5)
        y = x.t().contiguous().t() * 2
        y[:, 1:4].mul_(x[:, :3])
        return y.exp().sum(), [x]

    expect(both(make), structure_misses=1, hits=1)


def test_a_base_whose_written_part_is_not_used() -> None:
    def make() -> Any:
        x, w = _leaf(4), _leaf(2)
        y = x * 2
        y[:2] = w.detach()
        return y[2:].sum(), [x]

    expect(both(make), structure_misses=1, hits=1)


# ---- autograd.grad -------------------------------------------------------------------------------------------------


def _two() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x, y = _leaf(4), _leaf(4)
    return x, y, x.exp() * y


def test_grads_of_leaves_and_of_what_lies_between() -> None:
    def make() -> Any:
        x, y, z = _two()
        h = z.sin()
        return (h * y).sum(), [z, x, h, y]

    expect(both(make), structure_misses=1, hits=1)


def test_only_the_way_to_the_inputs_is_run() -> None:
    ran: list[str] = []

    class Notes(Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, label: str) -> torch.Tensor:
            ctx.label = label
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            ran.append(ctx.label)
            return grad, None

    def make() -> Any:
        x, y, _ = _two()
        return (Notes.apply(x, "x") * Notes.apply(y, "y")).sum(), [y]

    both(make)
    assert ran == ["y"] * 3


def test_inputs_twice() -> None:
    def make() -> Any:
        x, y, z = _two()
        return z.sum(), [x, y, x, z, z]

    expect(both(make), structure_misses=1, hits=1)


def test_the_same_gradient_for_two_inputs() -> None:
    def make() -> Any:
        x, y = _leaf(4), _leaf(4)
        return (x + y).sum(), [x, y]

    expect(both(make), structure_misses=1, hits=1)


def test_an_output_that_is_an_input() -> None:
    def make() -> Any:
        x, y, z = _two()
        return [z, y], [z, x, y]

    expect(both(make, grad_outputs=[torch.ones(4), torch.arange(4.0)]), structure_misses=1, hits=1)


def test_a_leaf_differentiated_by_itself() -> None:
    def make() -> Any:
        x = _leaf(4)
        return x, [x]

    expect(both(make, grad_outputs=torch.arange(4.0)), structure_misses=1, hits=1)


def test_several_outputs_some_without_a_gradient_given() -> None:
    def make() -> Any:
        x, y, z = _two()
        return [z.sum(), z.sin(), y * 2], [x, y]

    grads = [None, torch.arange(4.0), torch.ones(4)]
    expect(both(make, grad_outputs=grads), structure_misses=1, hits=1)


def test_the_same_output_twice() -> None:
    def make() -> Any:
        x, _, z = _two()
        s = z.sum()
        return [s, s, s], [x]

    expect(both(make), structure_misses=1, hits=1)


def test_gradient_edges_as_inputs_and_outputs() -> None:
    def make() -> Any:
        x, y, z = _two()
        h = z.sin()
        out = (h * y).sum()
        return [get_gradient_edge(out)], [get_gradient_edge(z), get_gradient_edge(x), GradientEdge(h.grad_fn, 0), y]

    expect(both(make, grad_outputs=[torch.tensor(2.0)]), structure_misses=1, hits=1)


def test_a_gradient_edge_to_one_of_several_outputs() -> None:
    def make() -> Any:
        x = _leaf(4, 6)
        left, right = x.exp().split(3, dim=1)
        return (left.sin().sum() + right.cos().sum()), [
            GradientEdge(right.grad_fn, 1),
            GradientEdge(left.grad_fn, 0),
            x,
        ]

    expect(both(make), structure_misses=1, hits=1)


def test_unused_inputs() -> None:
    def make() -> Any:
        x, y, z = _two()
        return z.detach().mul(x).sum(), [x, y]

    expect(both(make, allow_unused=True), structure_misses=1, hits=1)
    expect(both(make, materialize_grads=True), hits=2)


def test_unused_inputs_without_permission_are_an_error_and_counted() -> None:
    x, y = _leaf(4), _leaf(4)
    with ca.enable(backend="eager") as session:
        for _ in range(2):
            with pytest.raises(RuntimeError, match="appears to not have been used in the graph"):
                torch.autograd.grad(x.sum(), [x, y])
    assert session.stats().backwards == 2


def test_an_error_about_an_unused_input_leaves_the_tape_as_eager_does() -> None:
    def again(context: Any) -> str:
        x, _, z = _two()
        loss = z.sum() * 2
        with context:
            with pytest.raises(RuntimeError):
                torch.autograd.grad(loss, [x, _leaf(4)])
            try:
                torch.autograd.grad(loss, [x])
            except RuntimeError as error:
                return str(error)
        return "it runs again"

    assert again(ca.enable(backend="eager")) == again(ca.disable())


def test_results_do_not_require_grad_and_are_not_written_to_grad() -> None:
    x, y, z = _two()
    with ca.enable(backend="eager"):
        found = torch.autograd.grad(z.sum(), [x, y])
    assert x.grad is None and y.grad is None and not any(each.requires_grad for each in found)


def test_backward_with_inputs() -> None:
    def run(context: Any) -> list[Any]:
        torch.manual_seed(0)
        x, y, z = _two()
        with context:
            torch.autograd.backward(z.sum() + x.sum(), inputs=[x])
        return [x.grad, y.grad]

    session = ca.enable(backend="eager")
    assert_same(run(session), run(ca.disable()))
    assert_same(run(session), run(ca.disable()))
    expect(session.stats(), structure_misses=1, hits=1)


def test_gradients_that_alias_one_another_have_values_of_their_own_in_what_is_given() -> None:
    def make() -> Any:
        x, y = _leaf(4), _leaf(4, 4)
        return (x.expand(4, 4) + y).sum(), [x, y]

    expect(both(make), structure_misses=1, hits=1)


def test_a_tensor_that_is_a_leafs_value_and_saved() -> None:
    def make() -> Any:
        x = _leaf(4)
        y = x * x
        return [y.exp(), y], [x, y]

    expect(both(make, grad_outputs=[torch.ones(4), torch.arange(4.0)]), structure_misses=1, hits=1)


def test_an_undefined_gradient_on_the_way() -> None:
    def make() -> Any:
        x = _leaf(4, 4)
        values, _ = torch.linalg.slogdet(x @ x.t() + torch.eye(4) * 5)
        logabs = torch.linalg.slogdet(x @ x.t() + torch.eye(4) * 5)[1]
        return logabs + values.detach(), [x]

    expect(both(make), structure_misses=1, hits=1)


@pytest.mark.parametrize("used", [(0,), (1,), (2,), (0, 2), (0, 1, 2)])
def test_patterns_of_undefined_gradients_are_structures_of_their_own(used: tuple[int, ...]) -> None:
    def make() -> Any:
        x = _leaf(6)
        parts = x.exp().split(2)
        return sum(parts[index].sin().sum() for index in used), [x]

    expect(both(make), structure_misses=1, hits=1)


# ---- hooks -----------------------------------------------------------------------------------------------------------


def _hook_tensor(x: torch.Tensor, y: torch.Tensor, calls: list[str]) -> None:
    y.register_hook(lambda grad: calls.append("tensor") or grad * 2)


def _hook_leaf(x: torch.Tensor, y: torch.Tensor, calls: list[str]) -> None:
    x.register_hook(lambda grad: calls.append("leaf") or grad * 3)


def _hook_post_accumulate(x: torch.Tensor, y: torch.Tensor, calls: list[str]) -> None:
    x.register_post_accumulate_grad_hook(lambda leaf: calls.append(f"post {leaf.grad is not None}"))


def _hook_node(x: torch.Tensor, y: torch.Tensor, calls: list[str]) -> None:
    y.grad_fn.register_hook(lambda into, out: calls.append("node"))  # type: ignore[union-attr]


def _hook_node_pre(x: torch.Tensor, y: torch.Tensor, calls: list[str]) -> None:
    y.grad_fn.register_prehook(lambda grads: calls.append("pre") or (grads[0] * 2,))  # type: ignore[union-attr]


def _hook_retain(x: torch.Tensor, y: torch.Tensor, calls: list[str]) -> None:
    y.retain_grad()
    calls.append("retain")


def _hook_multi(x: torch.Tensor, y: torch.Tensor, calls: list[str]) -> None:
    torch.autograd.graph.register_multi_grad_hook([x, y], lambda grads: calls.append(f"multi {len(grads)}"))


_HOOKS = [_hook_tensor, _hook_leaf, _hook_post_accumulate, _hook_node, _hook_node_pre, _hook_retain, _hook_multi]


@pytest.mark.parametrize("register", _HOOKS)
def test_hooks_run_as_under_eager(register: Callable[..., None]) -> None:
    def run(context: Any) -> tuple[list[Any], list[str]]:
        torch.manual_seed(0)
        calls: list[str] = []
        x = _leaf(4)
        y = x.exp()
        register(x, y, calls)
        with context:
            (y.sin() * 2).sum().backward(retain_graph=True)
            x.grad = None
            (y.cos() * 2).sum().backward()
        return [x.grad, y.grad if y.retains_grad else None], calls

    wanted, calls = run(ca.disable())
    session = ca.enable(backend="eager")
    found, found_calls = run(session)
    assert_same(found, wanted)
    assert found_calls == calls and calls
    expect(session.stats(), structure_misses=2)
    found, found_calls = run(session)  # new functions at each step
    assert_same(found, wanted)
    assert found_calls == calls
    expect(session.stats(), structure_misses=2, hits=2)


@pytest.mark.parametrize("kind", ["python", "built-in", "view"])
def test_a_capture_that_fails_leaves_the_tape_whole(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever call of the report fails: eager finds everything that was saved."""
    record = Capture._call

    def apply(x: torch.Tensor) -> torch.Tensor:
        if kind == "python":
            return _Everything.apply(x, 2.0, None, "word")[0]
        if kind == "view":
            y = x * 2
            y[1:].mul_(x[1:])
            return y
        return x.sin() * x

    def run(context: Any) -> list[Any]:
        torch.manual_seed(0)
        _Everything.seen.clear()
        x = _leaf(4)
        z = apply(apply(x.exp()).sum(0, keepdim=True) * 2)
        with context:
            z.sum().backward()
        return [x.grad]

    wanted = run(ca.disable())
    for failing in itertools.count():
        seen = itertools.count()

        def fail(self: Capture, *args: Any, failing: int = failing, seen: Iterator[int] = seen) -> Any:
            if next(seen) == failing:
                raise ValueError("planted")
            return record(self, *args)

        monkeypatch.setattr(Capture, "_call", fail)
        ca.reset()
        session = ca.enable(backend="eager")
        assert_same(run(session), wanted)
        if session.stats().structure_misses == 1:
            break
        expect(session.stats(), bypasses={"unsupported(capture failed: ValueError: planted)": 1})
    assert failing > 10


def test_saved_tensor_hooks() -> None:
    def run(context: Any) -> tuple[list[Any], list[str]]:
        torch.manual_seed(0)
        calls: list[str] = []
        x = _leaf(4)

        def pack(tensor: torch.Tensor) -> Any:
            return tensor.clone()

        def unpack(packed: Any) -> torch.Tensor:
            calls.append("unpack")
            return packed

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            y = (x.exp() * x).sin()
        with context:
            y.sum().backward()
        return [x.grad], calls

    wanted, calls = run(ca.disable())
    session = ca.enable(backend="eager")
    found, found_calls = run(session)
    assert_same(found, wanted)
    assert found_calls == calls
    expect(session.stats(), structure_misses=1)


def test_save_on_cpu() -> None:
    def run(context: Any) -> list[Any]:
        torch.manual_seed(0)
        x = _leaf(4)
        with torch.autograd.graph.save_on_cpu():
            y = x.exp() * x
        with context:
            y.sum().backward()
        return [x.grad]

    session = ca.enable(backend="eager")
    assert_same(run(session), run(ca.disable()))
    expect(session.stats(), structure_misses=1)


@pytest.mark.parametrize("kind", ["forward", "full backward", "full backward pre"])
def test_module_hooks(kind: str) -> None:
    def run(context: Any) -> tuple[list[Any], int]:
        torch.manual_seed(0)
        module = torch.nn.Linear(4, 4)
        calls: list[int] = []
        if kind == "forward":
            module.register_forward_hook(lambda *args: calls.append(1))
        elif kind == "full backward":
            module.register_full_backward_hook(lambda m, into, out: calls.append(1))
        else:
            module.register_full_backward_pre_hook(lambda m, out: calls.append(1))
        x = _leaf(2, 4)
        with context:
            module(x).sum().backward()
        return [x.grad, *(each.grad for each in module.parameters())], len(calls)

    wanted, calls = run(ca.disable())
    session = ca.enable(backend="eager")
    found, found_calls = run(session)
    assert_same(found, wanted)
    assert found_calls == calls == 1
    expect(session.stats(), structure_misses=1)


# ---- how the capture works -----------------------------------------------------------------------------------------


def test_the_capture_knows_nothing_of_fake_tensors() -> None:
    files = list(Path(capture.__file__).parent.glob("*.py"))
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text()))]
    names = {getattr(node, "module", "") or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    names |= {alias.name for node in nodes if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names}
    assert not [name for name in names if re.search("fake|FakeTensor|symbolic_shapes|_dynamo", name)]


def test_the_capture_works_where_fake_tensors_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    from compiled_autograd.lowering import lower

    def none_today(*args: Any, **kwargs: Any) -> Any:
        raise MemoryError("no fake tensors today")

    monkeypatch.setattr(lower, "TracingMode", none_today)
    x = _leaf(4)
    wanted = torch.autograd.grad((x.exp() * x).sum(), x)
    with ca.enable(backend="eager") as session, pytest.warns(UserWarning, match="no fake tensors today"):
        found = torch.autograd.grad((x.exp() * x).sum(), x)
    assert_same(found, wanted)
    expect(session.stats(), structure_misses=1, captures=1, compiles=0, failures=1)
    assert session.last is not None and session.last.graph is not None
    assert "ExpBackward0" in session.last.graph.readable()


def test_many_edges_into_one_node_are_refused() -> None:
    parts = [_leaf(1) for _ in range(2100)]
    with ca.enable(backend="eager") as session:
        torch.cat(parts).sum().backward()
    assert all(part.grad is not None and part.grad.item() == 1.0 for part in parts)
    (reason,) = session.stats().bypasses
    assert "edges" in reason


def test_a_wide_node_below_the_limit_is_captured() -> None:
    def make() -> Any:
        parts = [_leaf(1) for _ in range(300)]
        return (torch.cat(parts) * torch.arange(300.0)).sum(), parts

    expect(both(make), structure_misses=1, hits=1)


def test_a_deep_tape() -> None:
    def make() -> Any:
        x = _leaf(2)
        y = x
        for _ in range(400):
            y = y * 1.01
        return y.sum(), [x]

    expect(both(make), structure_misses=1, hits=1)


@pytest.mark.parametrize(
    "function", [F.relu, F.softplus, torch.linalg.norm, lambda x: x.cumprod(0), lambda x: x.prod()]
)
def test_scalars_of_the_step_are_not_baked_in(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """A second step with other numbers must not get the first one's."""
    session = ca.enable(backend="eager")
    for scale in (2.0, 3.0, 2.0):
        x = torch.randn(5, requires_grad=True)
        wanted = torch.autograd.grad((function(x * scale) * scale).sum(), x)
        with session:
            found = torch.autograd.grad((function(x * scale) * scale).sum(), x)
        assert_same(found, wanted)
    stats = session.stats()
    assert stats.backwards == 3 and not stats.bypasses and stats.structure_misses == 1
