"""Gradients of gradients inside ``enable``: eager runs what is differentiated again, the last backward is captured."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.autograd.gradcheck import GradcheckError

import compiled_autograd as ca

from .helpers import assert_grads, assert_same, expect, in_subprocess

Grads = Sequence[torch.Tensor | None]
Compute = Callable[[], Grads]


def net(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 1)).to(dtype)


def points(count: int = 5, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.linspace(-1, 1, 3 * count, dtype=dtype).reshape(count, 3).requires_grad_()


def gradient(output: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """With its history."""
    (found,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    return found


def detached(values: Grads) -> Grads:
    return [None if value is None else value.detach() for value in values]


def check(compute: Compute, times: int = 3, backend: Any = "eager") -> ca.Stats:
    """``compute`` gives eager's bits inside a session, and what it gives has a history where eager's has one."""
    wanted = compute()
    session = ca.enable(backend=backend)
    for _ in range(times):
        with session:
            found = compute()
        assert_same(detached(found), detached(wanted), bitwise=backend == "eager")
        assert [_kind_of_node(each) for each in found] == [_kind_of_node(each) for each in wanted]
    return session.stats()


def _kind_of_node(value: torch.Tensor | None) -> str:
    return "none" if value is None else type(value.grad_fn).__name__


# ---- the users -----------------------------------------------------------------------------------------------------


def test_gradient_penalty() -> None:
    def step(critic: nn.Module) -> None:
        x = points()
        penalty = (gradient(critic(x), x).norm(2, dim=1) - 1).square().mean()
        (critic(x).mean() + 10 * penalty).backward()

    critic, reference = net(), net()
    session = ca.enable(backend="eager")
    for _ in range(3):
        for each in (critic, reference):
            each.zero_grad()
        step(reference)
        with session:
            step(critic)
        assert_grads(critic, reference)
    expect(session.stats(), structure_misses=1, hits=2, bypasses={"create_graph": 3}, captures=1, compiles=1)


def test_gradient_penalty_of_a_convolutional_critic() -> None:
    torch.manual_seed(0)
    critic = nn.Sequential(
        nn.Conv2d(1, 4, 3, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(4, 4, 3), nn.GroupNorm(2, 4), nn.SiLU(), nn.Flatten()
    ).double()
    parameters = list(critic.parameters())

    def compute() -> Grads:
        torch.manual_seed(1)
        x = torch.randn(2, 1, 9, 9, dtype=torch.float64, requires_grad=True)
        penalty = (gradient(critic(x), x).flatten(1).norm(dim=1) - 1).square().mean()
        return torch.autograd.grad(penalty, parameters, allow_unused=True)

    expect(check(compute), structure_misses=1, hits=2, bypasses={"create_graph": 3}, captures=1)


def test_differential_equation() -> None:
    """Two derivatives of a network by its input, and the gradient of an equation in them."""
    model = net()
    parameters = list(model.parameters())

    def compute() -> Grads:
        x = points()
        u = model(x)
        first = gradient(u, x)
        second = gradient(first[:, 0], x)
        residual = (first[:, 1:2] + u * first[:, :1] - second[:, :1]).square().mean()
        return [first, second, *torch.autograd.grad(residual, parameters)]

    expect(check(compute), structure_misses=1, hits=2, bypasses={"create_graph": 6}, captures=1, compiles=1)


def test_fourth_order() -> None:
    model = net()

    def compute() -> Grads:
        x = points()
        derivatives = [model(x)]
        for _ in range(3):
            derivatives.append(gradient(derivatives[-1].square(), x))
        return [*derivatives, *torch.autograd.grad(derivatives[-1].sum(), x)]

    expect(check(compute), structure_misses=1, hits=2, bypasses={"create_graph": 9})


def test_hessian_vector_product_of_parameters() -> None:
    model, x = net(), points()
    parameters = list(model.parameters())
    vector = [torch.ones_like(each) for each in parameters]

    def compute() -> Grads:
        grads = torch.autograd.grad(model(x).square().mean(), parameters, create_graph=True)
        return torch.autograd.grad(grads, parameters, vector)

    expect(check(compute), structure_misses=1, hits=2, bypasses={"create_graph": 3})


def test_forward_mode_made_of_two_backwards() -> None:
    """The gradient that is given to ``autograd.grad`` is differentiated too."""
    x = points()

    def compute() -> Grads:
        dummy = torch.ones(5, 3, dtype=torch.float64, requires_grad=True)
        (by_x,) = torch.autograd.grad(x.sin(), x, dummy, create_graph=True)
        return torch.autograd.grad(by_x, dummy, x.detach())

    expect(check(compute), structure_misses=1, hits=2, bypasses={"create_graph": 3})


def _flat(values: Any) -> list[torch.Tensor]:
    return [values] if isinstance(values, torch.Tensor) else [leaf for value in values for leaf in _flat(value)]


@pytest.mark.parametrize("name", ["hvp", "vhp", "hessian", "jacobian", "jvp", "vjp"])
def test_functional(name: str) -> None:
    def function(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        result = a.sin() * b.square()
        return result.sum().exp() if name in ("hvp", "vhp", "hessian") else result

    inputs = (torch.linspace(0, 1, 3, dtype=torch.float64), torch.linspace(-1, 0, 3, dtype=torch.float64))
    vectors = {"hvp": inputs, "vhp": inputs, "jvp": inputs, "vjp": inputs[0]}
    given = (vectors[name],) if name in vectors else ()
    stats = check(lambda: _flat(getattr(torch.autograd.functional, name)(function, inputs, *given)))
    assert set(stats.bypasses) <= {"create_graph"} and stats.failures == 0
    assert stats.hits + stats.structure_misses + stats.shape_misses > 0


def test_functional_keeps_its_strict_checks() -> None:
    x = torch.ones(2, dtype=torch.float64)
    with ca.enable(backend="eager"), pytest.raises(RuntimeError, match="independent of the input"):
        torch.autograd.functional.hessian(lambda a: a.sum(), x, strict=True)


@pytest.mark.parametrize("function", [torch.tanh, lambda a: (a @ a.T).logsumexp(1), lambda a: a.softmax(0) * a.norm()])
def test_gradgradcheck(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    torch.manual_seed(0)
    x = torch.rand(2, 3, dtype=torch.float64, requires_grad=True)
    with ca.enable(backend="eager") as session:
        assert torch.autograd.gradgradcheck(function, (x,))
    stats = session.stats()
    assert stats.hits > 0 and set(stats.bypasses) == {"create_graph"}


def test_gradgradcheck_finds_a_wrong_second_derivative() -> None:
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            (x,) = ctx.saved_tensors
            return grad * x.detach().cos()

    x = torch.rand(3, dtype=torch.float64, requires_grad=True)
    with ca.enable(backend="eager"), pytest.raises(GradcheckError):
        torch.autograd.gradgradcheck(Wrong.apply, (x,))


@pytest.mark.parametrize("first_inside", [True, False])
def test_only_one_of_two_backwards_inside(first_inside: bool) -> None:
    model = net()
    parameters = list(model.parameters())
    session = ca.enable(backend="eager")

    def compute(first: Any, last: Any) -> Grads:
        x = points()
        with first:
            slope = gradient(model(x), x)
        with last:
            return torch.autograd.grad(slope.square().sum(), parameters, allow_unused=True)

    wanted = compute(ca.disable(), ca.disable())
    for _ in range(2):
        found = compute(session, ca.disable()) if first_inside else compute(ca.disable(), session)
        assert_same(found, wanted)
    if first_inside:
        expect(session.stats(), bypasses={"create_graph": 2})
    else:
        expect(session.stats(), structure_misses=1, hits=1)


def test_compiled_by_inductor() -> None:
    model = net(torch.float32)
    parameters = list(model.parameters())

    def compute() -> Grads:
        x = points(dtype=torch.float32)
        slope = gradient(model(x), x)
        return torch.autograd.grad(slope.square().sum(), parameters, allow_unused=True)

    expect(check(compute, backend="inductor"), structure_misses=1, hits=2, bypasses={"create_graph": 3}, compiles=1)


# ---- what must stay as it is under eager ---------------------------------------------------------------------------


def test_undefined_gradients_stay_undefined() -> None:
    weight = torch.ones(3, dtype=torch.float64, requires_grad=True)
    bias = torch.ones(3, dtype=torch.float64, requires_grad=True)
    leaves = [weight, bias]

    def compute() -> Grads:
        x = torch.ones(3, dtype=torch.float64, requires_grad=True)
        y = (x * weight).sin().sum() + bias.sum() * 2
        by_x, by_weight, by_bias = torch.autograd.grad(y, [x, *leaves], create_graph=True)
        assert not by_bias.requires_grad
        one = torch.autograd.grad(by_x.sum(), [x, *leaves], retain_graph=True, allow_unused=True)
        other = torch.autograd.grad(by_weight[0], [x, *leaves], allow_unused=True)
        return [by_bias, *one, *other]

    assert compute()[3] is None
    expect(check(compute), structure_misses=2, hits=4, bypasses={"create_graph": 3})


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 3 * grad * x**2


class CubeOnce(Cube):
    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return Cube.backward(ctx, grad)


def test_no_zeros_where_eager_has_nothing() -> None:
    """A custom function makes zeros of an undefined gradient: it must not get one that eager would not bring it."""
    hooked: list[torch.Tensor | None] = []

    def compute() -> Grads:
        x, weight, bias = (torch.ones(3, dtype=torch.float64, requires_grad=True) for _ in range(3))
        inner = Cube.apply(x)
        y = (inner.sin() * weight).sum() + bias.pow(3).sum()
        _, by_bias = torch.autograd.grad(y, [weight, bias], create_graph=True)
        inner.register_hook(hooked.append)
        return torch.autograd.grad(by_bias.sum(), [x, bias], allow_unused=True)

    assert compute()[0] is None
    check(compute)
    assert not hooked


def test_what_was_not_used_is_an_error() -> None:
    x, other = points(), points()
    with ca.enable(backend="eager"), pytest.raises(RuntimeError, match="appears to not have been used"):
        torch.autograd.grad(x.sin().sum(), [x, other], create_graph=True)


def test_changing_a_saved_tensor_in_place_is_an_error() -> None:
    model, x = net(), points()
    session = ca.enable(backend="eager")
    with session:
        slope = gradient(model(x), x)
        with torch.no_grad():
            model[2].weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(slope.sum(), x)
    stats = session.stats()
    assert stats.bypasses.pop("create_graph") == 1
    assert len(stats.bypasses) == 1  # the engine met the mistake, and eager worded it


def test_a_gradient_can_be_written_to() -> None:
    model = net()

    def compute() -> Grads:
        x = points()
        slope = gradient(model(x), x)
        slope.mul_(2)
        slope[0] = 1
        return [slope, *torch.autograd.grad(slope.square().sum(), x)]

    expect(check(compute), structure_misses=1, hits=2, bypasses={"create_graph": 3})


def test_a_freed_graph_is_an_error() -> None:
    x = points()
    with ca.enable(backend="eager"):
        slope = gradient(x.sin(), x)
        torch.autograd.grad(slope.sum(), x)
        with pytest.raises(RuntimeError, match="second time"):
            torch.autograd.grad(slope.sum(), x)


def test_a_graph_that_was_differentiated_is_kept_and_captured() -> None:
    x = points()
    y = x.sin().sum()
    with ca.enable(backend="eager") as session:
        (with_history,) = torch.autograd.grad(y, x, create_graph=True)
        (found,) = torch.autograd.grad(y, x)
    assert torch.equal(found, with_history) and found.grad_fn is None
    expect(session.stats(), structure_misses=1, bypasses={"create_graph": 1})


def test_hooks_run_as_often_and_with_grad_mode_as_under_eager() -> None:
    model = net()
    seen: list[tuple[str, bool]] = []

    def noting(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
        def hook(grad: torch.Tensor) -> torch.Tensor:
            seen.append((name, torch.is_grad_enabled()))
            return grad * grad

        return hook

    def compute() -> Grads:
        x = points()
        inner = model[0](x)
        inner.register_hook(noting("inner"))
        slope = gradient(model[1:](inner), x)
        slope.register_hook(noting("slope"))
        return [slope, *torch.autograd.grad(slope.sum(), x)]

    compute()
    under_eager = list(seen)
    seen.clear()
    expect(check(compute, times=2), structure_misses=1, hits=1, bypasses={"create_graph": 2})
    assert ("inner", True) in under_eager and seen == under_eager * 3


def test_a_python_function_is_differentiated_twice() -> None:
    def compute() -> Grads:
        x = points()
        slope = gradient(Cube.apply(x), x)
        return [slope, *torch.autograd.grad(slope.square().sum(), x)]

    expect(check(compute), structure_misses=1, hits=2, bypasses={"create_graph": 3})


def test_once_differentiable() -> None:
    x = points()
    with ca.enable(backend="eager"):
        slope = gradient(CubeOnce.apply(x).square(), x)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            slope.sum().backward()


def test_accumulating_with_create_graph() -> None:
    """``backward(create_graph=True)`` writes ``.grad`` with its history, and adds to it out of place."""

    def compute() -> Grads:
        x = points()
        x.sin().sum().backward(create_graph=True)
        before = x.grad
        x.exp().sum().backward(create_graph=True)
        after = x.grad
        assert before is not None and after is not None and after is not before
        x.grad = None  # else tape and leaf hold each other
        return [before, after, *torch.autograd.grad(after.sum(), x)]

    expect(check(compute), structure_misses=1, hits=2, bypasses={"create_graph": 6})


def test_accumulating_into_a_grad_with_history() -> None:
    """A captured backward finds a ``.grad`` that has a history, and adds to it in place as eager does."""

    def compute() -> Grads:
        x = points()
        x.sin().sum().backward(create_graph=True)
        before = x.grad
        x.exp().sum().backward()
        assert x.grad is before
        x.grad = None
        return [before]

    check(compute)


def test_a_backward_in_a_hook_of_a_captured_one() -> None:
    """A gradient of a gradient inside a compiled backward."""

    def second_derivative(grad: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            x = grad.detach().requires_grad_()
            return gradient(gradient(x**3, x), x).detach()

    def compute() -> Grads:
        x = points()
        y = x.sin()
        y.register_hook(second_derivative)
        return torch.autograd.grad(y.exp().sum(), x)

    expect(check(compute), structure_misses=1, hits=2, bypasses={"create_graph": 6})


def test_nothing_is_kept_alive() -> None:
    def step(model: nn.Module) -> list[Any]:
        x = points()
        y = model(x)
        slope = gradient(y, x)
        (last,) = torch.autograd.grad(slope.sum(), x)
        return [weakref.ref(each) for each in (x, y, slope, last)]

    model = net()
    gc.collect()
    gc.disable()
    try:
        with ca.enable(backend="eager"):
            step(model)
            assert [each() for each in step(model)] == [None] * 4
    finally:
        gc.enable()


def test_threads_at_once() -> None:
    model, wrong = net(), []

    def compute() -> torch.Tensor:
        x = points()
        return torch.autograd.grad(gradient(model(x), x).sum(), x)[0]

    wanted = compute()
    session = ca.enable(backend="eager")

    def work() -> None:
        for _ in range(5):
            with session:
                found = compute()
            if not torch.equal(found, wanted):
                wrong.append(found)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stats = session.stats()
    assert not wrong and stats.backwards == 30 and stats.bypasses["create_graph"] == 15


def test_raise_names_create_graph() -> None:
    x = points()
    y = x.sin().sum()
    with ca.enable(backend="eager", on_unsupported="raise"), pytest.raises(ca.UnsupportedBackwardError) as raised:
        torch.autograd.grad(y, x, create_graph=True)
    assert raised.value.reason.kind == "create_graph"
    assert torch.equal(torch.autograd.grad(y, x)[0], x.cos())  # the tape is whole


@pytest.mark.slow
def test_the_benchmark_runs() -> None:
    code = """
import sys
from benchmarks.double_backward import main
sys.argv = ["double_backward", "--models", "hvp", "pinn-small", "--pairs", "2", "--backend", "eager"]
sys.exit(main())
"""
    ended = in_subprocess(code, OMP_NUM_THREADS="1")
    assert ended.returncode == 0 and "pinn-small" in ended.stdout, ended.stderr
