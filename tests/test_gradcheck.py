"""``gradcheck`` and ``gradgradcheck`` pass inside a session, and the backwards in them that can be captured are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import Function, gradcheck, gradgradcheck
from torch.autograd.gradcheck import GradcheckError

import compiled_autograd as ca

from .helpers import mlp, total


def _input(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


class _Softplus(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, beta: float) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.beta = beta
        return (1 + (x * beta).exp()).log() / beta

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return grad * (x * ctx.beta).sigmoid(), None


def _softplus(x: torch.Tensor) -> torch.Tensor:
    return _Softplus.apply(x, 2.0)


def _writes_into_a_view(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    y[1:].mul_(x[:-1].sin())
    return y


def _normalised(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, (4,), weight)


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.softmax(q @ k.transpose(-1, -2), dim=-1) @ v


def _spectrum(x: torch.Tensor) -> torch.Tensor:
    return torch.fft.fft(x).abs().square()


def _two_outputs(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.sin(), (x @ x.t()).tanh()


Inputs = Callable[[], tuple[torch.Tensor, ...]]

CASES: dict[str, tuple[Callable[..., Any], Inputs]] = {
    "product": (torch.mul, lambda: (_input(3, 4), _input(4))),
    "matmul": (torch.matmul, lambda: (_input(2, 3, 4), _input(4, 2))),
    "linear": (F.linear, lambda: (_input(3, 4), _input(2, 4), _input(2))),
    "conv1d": (F.conv1d, lambda: (_input(1, 2, 5), _input(2, 2, 3))),
    "layer_norm": (_normalised, lambda: (_input(3, 4), _input(4))),
    "attention": (_attention, lambda: (_input(3, 2), _input(3, 2), _input(3, 2))),
    "cumprod": (lambda x: x.cumprod(0), lambda: (_input(5),)),
    "solve": (torch.linalg.solve, lambda: (_input(3, 3), _input(3, 2))),
    "logsumexp": (lambda x: x.logsumexp(1), lambda: (_input(3, 4),)),
    "index": (lambda x: x[torch.tensor([0, 2, 2])] * x[1], lambda: (_input(3, 4),)),
    "spectrum": (_spectrum, lambda: (_input(4),)),
    "complex": (lambda z, x: z.conj() * x.exp(), lambda: (_input(3, dtype=torch.complex128), _input(3))),
    "write into a view": (_writes_into_a_view, lambda: (_input(3, 2),)),
    "two outputs": (_two_outputs, lambda: (_input(3, 2),)),
    "function": (_softplus, lambda: (_input(4),)),
}


def _expect_captured(session: ca.Session, left_to_eager: set[str]) -> None:
    """Everything but what is left to the eager engine on purpose was captured, and most of it only once."""
    stats = session.stats()
    assert set(stats.bypasses) <= left_to_eager
    assert stats.backwards == total(stats)
    assert stats.hits > 0 and stats.captures == stats.structure_misses and not stats.failures


@pytest.mark.parametrize("fast_mode", [False, True])
@pytest.mark.parametrize("case", list(CASES))
def test_gradcheck(case: str, fast_mode: bool) -> None:
    function, inputs = CASES[case]
    with ca.enable(backend="eager") as session:
        assert gradcheck(function, inputs(), fast_mode=fast_mode)
    _expect_captured(session, set())


_SLOWLY = ["product", "write into a view", "function", "index"]


@pytest.mark.parametrize(
    ("case", "fast_mode"), [*((case, True) for case in CASES), *((case, False) for case in _SLOWLY)]
)
def test_gradgradcheck(case: str, fast_mode: bool) -> None:
    """The first derivative is left to eager, which makes a tape of it; the backward of that tape is captured."""
    function, inputs = CASES[case]
    with ca.enable(backend="eager") as session:
        assert gradgradcheck(function, inputs(), fast_mode=fast_mode)
    _expect_captured(session, {"create_graph"})
    assert session.stats().bypasses


def test_batched_gradients() -> None:
    """They are left to eager; those beside them are not."""
    with ca.enable(backend="eager") as session:
        assert gradcheck(_attention, (_input(3, 2), _input(3, 2), _input(3, 2)), check_batched_grad=True)
    _expect_captured(session, {"batched_grads"})
    assert session.stats().bypasses["batched_grads"] > 0


@pytest.mark.parametrize("fast_mode", [False, True])
def test_a_module(fast_mode: bool) -> None:
    model = mlp(width=2, depth=1, dtype=torch.float64)
    names = [name for name, _ in model.named_parameters()]

    def run(x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, dict(zip(names, parameters, strict=True)), x)

    given = (_input(2, 2), *(parameter.detach().clone().requires_grad_() for parameter in model.parameters()))
    with ca.enable(backend="eager") as session:
        assert gradcheck(run, given, fast_mode=fast_mode)
        assert gradgradcheck(run, given, fast_mode=True)
    _expect_captured(session, {"create_graph"})


def test_a_module_with_dropout_and_a_checkpoint() -> None:
    """What is recomputed in the backward is the same at each of its runs."""
    from torch.utils.checkpoint import checkpoint

    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh()).double()

    def run(x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(1)
        return F.dropout(checkpoint(model, x, use_reentrant=False), 0.5)

    with ca.enable(backend="eager") as session:
        assert gradcheck(run, (_input(2, 3),))
    _expect_captured(session, set())


class _Wrong(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * ctx.saved_tensors[0]


def _message(check: Callable[..., bool], fast_mode: bool) -> str:
    torch.manual_seed(3)
    with pytest.raises(GradcheckError) as raised:
        check(_Wrong.apply, (_input(3),), fast_mode=fast_mode)
    return str(raised.value)


@pytest.mark.parametrize("fast_mode", [False, True])
def test_a_wrong_derivative_is_found_and_told_in_the_same_words(fast_mode: bool) -> None:
    wanted = _message(gradcheck, fast_mode)
    with ca.enable(backend="eager"):
        assert _message(gradcheck, fast_mode) == wanted
