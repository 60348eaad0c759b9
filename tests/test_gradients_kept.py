"""What a leaf keeps is a tensor of its own: no view, and, unless it can be proved nobody's, a copy."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import compiled_autograd as ca
from compiled_autograd.steps import accumulate
from compiled_autograd.steps.steps import AccumulateStep
from compiled_autograd.torch_api import references
from compiled_autograd.user_code import functions

from .helpers import assert_same, expect

Forward = Callable[[nn.Linear, torch.Tensor], torch.Tensor]


class _GivesAView(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return (grad * 2).t().contiguous().t()


_FORWARDS: dict[str, Forward] = {
    "linear": lambda layer, x: layer(x).sum(),
    "three dimensions": lambda layer, x: layer(x[None]).pow(2).sum(),
    "narrowed": lambda layer, x: (layer.weight[:1].exp().sum() + layer.bias.sum()) * x.sum(),
    "expanded": lambda layer, x: layer.weight.sum() + layer.bias.sum() + x.sum(),
    "transposed": lambda layer, x: (layer.weight.t() @ layer.weight).sum() + layer.bias.view(3, 1).t().sum() + x.sum(),
    "a Python function": lambda layer, x: F.linear(x, _GivesAView.apply(layer.weight), layer.bias).sum(),
    "a hook": lambda layer, x: _with_hook(layer(x)).sum(),
}


def _with_hook(y: torch.Tensor) -> torch.Tensor:
    y.register_hook(lambda grad: grad.t().contiguous().t())
    return y


@pytest.mark.parametrize(
    ("forward", "backend"),
    [
        *((forward, "eager") for forward in _FORWARDS),
        ("transposed", "inductor"),
        *(pytest.param(each, "inductor", marks=pytest.mark.slow) for each in _FORWARDS if each != "transposed"),
    ],
)
def test_what_a_leaf_keeps_is_no_view(forward: str, backend: str) -> None:
    """``p.grad.detach_()``, with which gradients were zeroed once, is refused for a view."""
    torch.manual_seed(0)
    layer = nn.Linear(3, 3)
    batch = torch.randn(2, 3)
    session = ca.enable(backend=backend)

    def step(context: Any) -> list[torch.Tensor]:
        layer.zero_grad()
        x = batch.clone().requires_grad_()
        with context:
            _FORWARDS[forward](layer, x).backward()
        kept = [each.grad for each in (*layer.parameters(), x) if each.grad is not None]
        found = [each.clone() for each in kept]
        for each in kept:
            assert not each._is_view()
            each.detach_().zero_()
        return found

    wanted = step(ca.disable())
    for _ in range(3):
        assert_same(step(session), wanted, bitwise=backend == "eager")
    expect(session.stats(), structure_misses=1, hits=2)


def test_a_view_is_kept_without_a_copy_of_its_memory() -> None:
    leaf = torch.zeros(3, 4, requires_grad=True)
    with torch.no_grad():
        slots: list[Any] = [leaf, torch.ones(4, 3).t(), None]
        memory = slots[1].data_ptr()
        accumulate.write(AccumulateStep([0], [1], [2], [0], [1], frozenset([1])), slots)
    assert leaf.grad is not None and not leaf.grad._is_view()
    assert leaf.grad.data_ptr() == memory and slots == [leaf, None, None]
    # Its own, and that of the storage object that is made to ask: the view's base is gone.
    assert torch._C._storage_Use_Count(leaf.grad.untyped_storage()._cdata) == 2


@pytest.mark.parametrize("step", ["compiled", "one by one"])
def test_a_leaf_that_a_hook_freezes_keeps_nothing(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its post-accumulate hooks run all the same, as under eager."""

    def run() -> tuple[bool, bool, int]:
        calls: list[torch.Tensor] = []
        p, q = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
        p.register_post_accumulate_grad_hook(calls.append)
        y = p * q * 2

        def freeze(grad: torch.Tensor) -> None:
            p.requires_grad_(False)

        y.register_hook(freeze)
        y.sum().backward()
        return p.grad is None, q.grad is None, len(calls)

    assert run() == (True, False, 1)
    if step == "one by one":
        monkeypatch.setattr("compiled_autograd.cache.graphs.Program", None)
    with ca.enable(backend="eager") as session, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the program that cannot be made
        assert [run(), run()] == [(True, False, 1)] * 2
    failures = 2 * (step == "one by one")
    assert session.stats().failures == failures and session.stats().hits == (0 if failures else 1)


# ---- who else refers to it -------------------------------------------------------------------------------------------


def test_nobodys_references_are_measured_where_they_are_compared() -> None:
    """Not assumed: versions of Python count differently."""
    assert references.references([object()], 0) == references.COUNT_OF_UNSHARED
    held = object()
    assert references.references([held], 0) == references.COUNT_OF_UNSHARED + 1
    also = [held]
    assert references.references([held], 0) == references.COUNT_OF_UNSHARED + 2
    assert accumulate.COUNT_OF_UNSHARED is functions.COUNT_OF_UNSHARED is references.COUNT_OF_UNSHARED and also


@pytest.mark.parametrize("lent", [-1, 0, 1, 2])
def test_an_interpreter_that_counts_otherwise(lent: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one would that lends references, or that holds more of them for a call."""
    real = sys.getrefcount
    monkeypatch.setattr(sys, "getrefcount", lambda thing: real(thing) + lent)
    nobodys = references.references([object()], 0)
    monkeypatch.setattr(sys, "getrefcount", lambda thing: real(thing))
    # The lambda's own: one, or two while Dynamo looks at each frame of the process.
    own = references.references([object()], 0) - references.COUNT_OF_UNSHARED
    assert own in (1, 2) and nobodys == references.COUNT_OF_UNSHARED + own + lent
    monkeypatch.setattr(sys, "getrefcount", lambda thing: real(thing) + lent)
    monkeypatch.setattr(accumulate, "COUNT_OF_UNSHARED", nobodys)
    leaf = torch.zeros(4)
    assert accumulate.stealable([torch.ones(4)], leaf)
    held = torch.ones(4)
    assert not accumulate.stealable([held], leaf)


def test_stealable() -> None:
    leaf = torch.zeros(3, 4)
    assert accumulate.stealable([torch.ones(3, 4)], leaf)
    assert not accumulate.stealable([torch.ones(4, 3).t()], leaf), "another layout"
    assert not accumulate.stealable([torch.ones(4, 4)[1:]], leaf), "its base has the memory too"
    assert accumulate.stealable([torch.ones(1, 3, 4).view(3, 4)], leaf), "nothing but the view has its base"
    base = torch.ones(1, 3, 4)
    assert not accumulate.stealable([base.view(3, 4)], leaf), "somebody has its base"
    other = torch.ones(12).view(1, 3, 4)
    assert not accumulate.stealable([other.view(3, 4)], leaf), "somebody has another view"
    base = torch.ones(12)
    assert not accumulate.stealable([torch.empty(0).set_(base.untyped_storage(), 0, (3, 4))], leaf), "shared memory"
    slots = [torch.ones(3, 4)]
    assert not accumulate.stealable([slots[0]], leaf), "a later step needs it"
    assert not accumulate.stealable([torch.ones(3, 4, requires_grad=True)], leaf)
    assert not accumulate.stealable([nn.Parameter(torch.ones(3, 4), requires_grad=False)], leaf)
