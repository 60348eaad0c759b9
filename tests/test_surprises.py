"""Each row of ``docs/surprises.md``: on eager, and the same answer inside a session."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import compiled_autograd as ca
from backends.torch_versions import has

_ONE = torch.ones(())
_OPEN = has("clamp_at_bounds", torch.__version__)


@pytest.fixture(params=["eager", "session"], autouse=True)
def around(request: pytest.FixtureRequest) -> Any:
    """Each test runs twice: on eager PyTorch, and inside a session."""
    with ca.enable(backend="eager") if request.param == "session" else contextlib.nullcontext() as session:
        yield session


def _grad(function: Callable[[Tensor], Tensor], at: float | list[float]) -> Any:
    x = torch.tensor(at, requires_grad=True)
    function(x).backward()
    assert x.grad is not None
    return x.grad.tolist()


@pytest.mark.parametrize(
    ("function", "at", "wanted"),
    [
        (lambda x: x.clamp(max=1.0), 1.0, 0 if _OPEN else 1),
        (lambda x: x.clamp(min=1.0), 1.0, 0 if _OPEN else 1),
        (lambda x: x.clamp(0.0, 1.0), 1.0, 0 if _OPEN else 1),
        (lambda x: x.clamp(max=_ONE), 1.0, 0.5 if _OPEN else 1),
        (lambda x: x.clamp(min=_ONE), 1.0, 0.5 if _OPEN else 1),
        (F.hardtanh, 1.0, 0),
        (F.relu6, 6.0, 0),
        (F.relu, 0.0, 0),
        (lambda x: torch.minimum(x, _ONE), 1.0, 0.5),
        (lambda x: x.max(), [1.0, 1.0], [0.5, 0.5]),
        (lambda x: x.amax(0), [1.0, 1.0], [0.5, 0.5]),
        (lambda x: x.max(0).values, [1.0, 1.0], [1, 0]),
    ],
)
def test_at_a_bound(function: Callable[[Tensor], Tensor], at: Any, wanted: Any) -> None:
    assert _grad(function, at) == wanted


def test_the_bound_gets_the_other_half() -> None:
    bound = torch.ones((), requires_grad=True)
    torch.ones((), requires_grad=True).clamp(max=bound).backward()
    assert bound.grad is not None and bound.grad.item() == (0.5 if _OPEN else 0)


def test_a_quantiser_at_its_bound() -> None:
    """Rounding passes the gradient on (straight through), and the clamp takes it away at the bound."""

    def quantised(x: Tensor) -> Tensor:
        return (x + (x.round() - x).detach()).clamp(-8.0, 7.0).sum()

    assert _grad(quantised, [0.2, 6.8, 7.4, 9.0]) == ([1, 0, 0, 0] if _OPEN else [1, 1, 1, 0])


@pytest.mark.parametrize(
    ("function", "at", "reverse", "forward"),
    [
        (lambda x: F.prelu(x, torch.tensor([0.25])), 0.0, 0.25, 1),
        (lambda x: torch.fmax(x, _ONE), 1.0, *((0.5, 0.5) if _OPEN else (1, 0))),
    ],
)
def test_modes_at_a_kink(function: Callable[[Tensor], Tensor], at: float, reverse: float, forward: float) -> None:
    assert _grad(function, at) == reverse
    assert torch.func.jvp(function, (torch.tensor(at),), (_ONE,))[1].item() == forward


@pytest.mark.parametrize(
    "body",
    [
        lambda g: g.detach() * 2,
        lambda g: torch.einsum("i,->i", g, 2 * _ONE),
        lambda g: g.unflatten(0, (2, 2)).flatten(),
        lambda g: g * g.sum().item(),
    ],
    ids=["detach", "einsum", "unflatten", "item"],
)
def test_batched_gradients(body: Callable[[Tensor], Tensor]) -> None:
    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
            return body(grad)

    x = torch.ones(4, requires_grad=True)
    torch.autograd.grad(Function.apply(x), x, torch.ones(4))
    with pytest.raises(RuntimeError, match="Batching rule not implemented"):
        torch.autograd.grad(Function.apply(x), x, torch.eye(4), is_grads_batched=True)


def test_nothing_is_checked_that_save_on_cpu_saved() -> None:
    def changed(where: Any) -> list[float]:
        x, weight = torch.ones(2, requires_grad=True), torch.full((2,), 3.0)
        with where:
            y = (x * weight).sum()
        weight.add_(1)
        return torch.autograd.grad(y, x)[0].tolist()

    assert changed(torch.autograd.graph.save_on_cpu()) == [4, 4]  # of the weight after the change
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        changed(contextlib.nullcontext())


def test_a_multi_grad_hook_on_leaves() -> None:
    def grad(mode: Any) -> None:
        leaves = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
        torch.autograd.graph.register_multi_grad_hook(leaves, lambda *_: None, mode=mode)
        (leaves[0] * leaves[1]).sum().backward()
        torch.autograd.grad((leaves[0] * leaves[1]).sum(), leaves)

    grad("any")
    with pytest.raises(RuntimeError, match="A leaf node was passed to _will_engine_execute_node"):
        grad("all")


def test_a_post_accumulate_hook_that_returns_something() -> None:
    x = torch.ones(3, requires_grad=True)
    x.register_post_accumulate_grad_hook(lambda _: 3)  # type: ignore[arg-type, return-value]
    with pytest.raises(TypeError, match="expected Variable"):
        (x * 2).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [2, 2, 2]


@pytest.mark.parametrize("name", ["SGD", "RMSprop", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam"])
def test_optimizers_and_a_dtype_of_gradients(name: str) -> None:
    weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    weight.grad_dtype = torch.float32
    (weight.float() * 2).sum().backward()
    assert weight.grad is not None and weight.grad.dtype == torch.float32
    takes = name in ("SGD", "RMSprop", "Adagrad")
    with contextlib.nullcontext() if takes else pytest.raises(RuntimeError, match="expected dtype c10::BFloat16"):
        getattr(torch.optim, name)([weight], lr=0.1).step()


def test_layouts_of_a_linear_layer(around: Any) -> None:
    layer = nn.Linear(4, 3)
    names = []
    for x in (torch.randn(2, 5, 4), torch.randn(5, 2, 4).transpose(0, 1)):
        y = layer(x)
        names.append([y.grad_fn.name(), y.grad_fn.next_functions[0][0].name()])
        y.sum().backward()
        if around is not None:
            assert around.last.outcome == "structure_miss"
    assert "AddmmBackward0" in names[0] and names[1] == ["AddBackward0", "UnsafeViewBackward0"]


@pytest.mark.slow
def test_sums_over_rows() -> None:
    torch.manual_seed(0)
    x = torch.randn(4096, 64)
    exact = x.double().sum(0)
    compiled = torch.compile(lambda x: x.sum(0))(x)
    assert (x.sum(0) - exact).abs().max() < 5e-5 < 1e-4 < (compiled - exact).abs().max() < 1e-3
