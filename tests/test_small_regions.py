"""Many small regions between users' code: found quickly, and handed through where they compute nothing."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import compiled_autograd as ca
from compiled_autograd.guards.value_kinds import check_of, kind_of_value
from compiled_autograd.steps.steps import RegionStep

from .helpers import assert_same

WAYS: dict[str, Callable[[torch.Tensor], torch.Tensor | None]] = {
    "as it is": lambda grad: grad * 2,
    "other strides": lambda grad: (grad * 2).t().contiguous().t(),
    "undefined": lambda grad: None,
    "no memory of its own": lambda grad: torch.ones(()).expand_as(grad),
    "a part of another": lambda grad: torch.cat([grad, grad])[: grad.shape[0]],
    "another dtype": lambda grad: (grad * 2).double(),
    "the same": lambda grad: grad,
}


class Gives(torch.autograd.Function):
    """Hands on its gradient in one of several ways."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, way: str) -> torch.Tensor:
        ctx.way = way
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, None]:
        return WAYS[ctx.way](grad), None


def _train(session: Any, ways: list[str], hooked: bool) -> list[torch.Tensor | None]:
    found = []
    for way in ways:
        leaf = torch.linspace(-1, 1, 12).view(4, 3).requires_grad_()
        value = leaf * 1.5
        given = Gives.apply(value, way)
        if hooked:
            value.register_hook(lambda grad: None if grad is None else grad * 3)
            given.grad_fn.register_hook(lambda given, got: None)
        loss = Gives.apply(given.sin(), "as it is").sum()
        with session:
            loss.backward()
        found.append(leaf.grad)
    return found


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_what_is_handed_on_in_turns(hooked: bool, backend: str) -> None:
    ways = [*WAYS, *WAYS, *reversed(WAYS)]
    session = ca.enable(backend=backend, check=False)
    assert_same(_train(session, ways, hooked), _train(ca.disable(), ways, hooked), bitwise=backend != "inductor")
    stats = session.stats()
    assert stats.backwards == len(ways) and stats.captures == 1 and stats.hits >= 2 * len(WAYS) and stats.bypasses == {}


def test_a_quick_yes_is_a_yes() -> None:
    base = torch.randn(4, 3)
    odd = [base, base.clone(), base.t().contiguous().t(), base.double(), base[:2], torch.randn(4, 3).requires_grad_()]
    odd += [nn.Parameter(base), torch.randn(8, 3)[::2], torch._efficientzerotensor((4, 3)), base.to(torch.complex64)]
    odd += [base.to(torch.complex64).conj(), base.to(torch.complex64).conj().imag, base.to_sparse()]
    with torch.no_grad():
        for one in odd:
            check = check_of([one])
            for other in [*odd, None, 3.0]:
                if check is not None and check(other):
                    assert kind_of_value(one) == kind_of_value(other)
        again = check_of([base, base.t()])
        assert again is not None and again(base.clone(), torch.randn(4, 3).t()) and not again(base, base)
    assert check_of([]) is None and check_of([None]) is None and check_of([base.to_sparse()]) is None


def test_a_quick_check_holds_no_tensor() -> None:
    tensor = torch.randn(3)
    held, check = weakref.ref(tensor), check_of([tensor])
    del tensor
    gc.collect()
    assert held() is None and check is not None


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_region_that_computes_nothing_hands_through(backend: str) -> None:
    """Of each layer, what lies between its two functions and its hooks; the hooks see what they see under eager."""
    seen: list[Any] = []

    def train(session: Any) -> list[Any]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
        for layer in net:
            layer.register_full_backward_hook(lambda module, given, got: seen.append([*given, *got]))
        for _ in range(6):
            net.zero_grad()
            loss = net(torch.linspace(-1, 1, 30).view(5, 6).requires_grad_()).square().sum()
            with session:
                loss.backward()
        return [parameter.grad for parameter in net.parameters()]

    wanted = train(ca.disable())
    expected, session = seen[:], ca.enable(backend=backend)
    seen.clear()
    assert_same(train(session), wanted, bitwise=False)
    for one, other in zip(seen, expected, strict=True):
        assert_same(one, other, bitwise=False)
    assert session.last is not None and session.last.graph is not None and session.stats().hits == 5
    steps = session.last.graph.variants[-1].program.schedule.steps
    regions = [each for step in steps if isinstance(step, RegionStep) for each in step.compiled_regions()]
    assert len([each for each in regions if each.through]) == 6 and any(each.through == [] for each in regions)
