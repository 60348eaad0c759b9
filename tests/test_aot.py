"""A forward that ``torch.compile`` compiled: its backward is inlined into the region around it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import compiled_autograd as ca
from compiled_autograd.runtime.program import AccumulateStep, OpaqueStep, RegionStep

from .helpers import assert_same, expect


@pytest.fixture(autouse=True)
def _forget_compiled_forwards() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


Loss = Callable[[nn.Module, torch.Tensor], torch.Tensor]


def _plain_loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).tanh().square().sum()


def _hooked_loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = model(x).tanh()
    y.register_hook(lambda grad: grad * 2)
    return y.square().sum()


def _half_loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return model(x).float().square().sum()


def _train(
    loss: Loss, session: Any, rows: tuple[int, ...] = (5, 5, 5), backend: str = "aot_eager", keep: bool = True
) -> list[torch.Tensor | None]:
    model = _model()
    forward = torch.compile(model, backend=backend)  # type: ignore[call-overload]
    for index, count in enumerate(rows):
        value = loss(forward, torch.linspace(-1, 1, 8 * count).view(count, 8) + index)
        if not keep:
            model.zero_grad()
        with session:
            value.backward()
    return [parameter.grad for parameter in model.parameters()]


def _steps(session: ca.Session) -> list[type]:
    assert session.last is not None and session.last.graph is not None
    return [type(step) for step in session.last.graph.variants[-1].program.schedule.steps]


@pytest.mark.parametrize("keep", [True, False])
def test_it_is_inlined(keep: bool) -> None:
    session = ca.enable(backend="aot_eager")
    found = _train(_plain_loss, session, keep=keep)
    assert_same(found, _train(_plain_loss, ca.disable(), keep=keep))
    assert _steps(session) == [RegionStep, AccumulateStep]
    assert session.stats().failures == 0 and session.stats().hits == (1 if keep else 2)


def test_a_hook_splits_the_region_and_no_more() -> None:
    session = ca.enable(backend="aot_eager")
    assert_same(_train(_hooked_loss, session), _train(_hooked_loss, ca.disable()))
    assert _steps(session) == [RegionStep, OpaqueStep, RegionStep, AccumulateStep]


def test_backward_in_sixteen_bits() -> None:
    session = ca.enable(backend="aot_eager")
    assert_same(_train(_half_loss, session), _train(_half_loss, ca.disable()))
    assert _steps(session) == [RegionStep, AccumulateStep]


def test_backward_inside_autocast_adds_no_casts() -> None:
    def train(session: Any) -> list[torch.Tensor | None]:
        with torch.autocast("cpu", torch.bfloat16):
            return _train(_plain_loss, session)

    session = ca.enable(backend="aot_eager")
    assert_same(train(session), train(ca.disable()))


def test_under_the_eager_backend_it_runs_as_it_was_compiled() -> None:
    """Bit for bit what the eager engine would run: the compiled backward itself."""
    session = ca.enable(backend="eager")
    assert_same(_train(_plain_loss, session), _train(_plain_loss, ca.disable()))
    assert _steps(session) == [RegionStep, OpaqueStep, AccumulateStep]


def test_dynamic_shapes_of_the_forward_stay_opaque() -> None:
    rows = (5, 6, 7, 8, 7)
    session = ca.enable(backend="aot_eager")
    assert_same(_train(_plain_loss, session, rows), _train(_plain_loss, ca.disable(), rows))
    assert OpaqueStep in _steps(session) and session.stats().failures == 0


def test_saved_tensor_hooks_stay_opaque() -> None:
    packed: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor.numel())
        return tensor.clone()

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            return _plain_loss(model, x)

    session = ca.enable(backend="aot_eager")
    assert_same(_train(loss, session), _train(loss, ca.disable()))
    assert packed


def test_an_undefined_gradient_of_one_of_two_results() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.first(x).tanh(), self.second(x).sin()

    def train(session: Any) -> list[torch.Tensor | None]:
        torch.manual_seed(0)
        model = Two()
        forward = torch.compile(model, backend="aot_eager")
        for _ in range(2):
            loss = forward(torch.ones(3, 4))[1].sum()
            with session:
                loss.backward()
        return [parameter.grad for parameter in model.parameters()]

    session = ca.enable(backend="aot_eager")
    found = train(session)
    torch._dynamo.reset()
    assert_same(found, train(ca.disable()))
    expect(session.stats(), structure_misses=2)


@pytest.mark.slow
def test_with_inductor_on_both_sides() -> None:
    session = ca.enable(backend="inductor")
    found = _train(_hooked_loss, session, backend="inductor")
    torch._dynamo.reset()
    assert_same(found, _train(_hooked_loss, ca.disable(), backend="inductor"), bitwise=False)
    assert _steps(session) == [RegionStep, OpaqueStep, RegionStep, AccumulateStep]
