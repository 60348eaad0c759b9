"""Where compiling takes long, very long runs of calls are several regions; alike ones are compiled once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import compiled_autograd as ca
from backends.eager import EagerBackend
from compiled_autograd.ir import partition

from .helpers import assert_grads

Loss = Callable[[nn.Module], torch.Tensor]


@pytest.fixture(autouse=True)
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The `eager` backend is taken for one that compiles long."""
    monkeypatch.setattr(EagerBackend, "slow", True, raising=False)


def _compiled(make: Callable[[], nn.Module], loss: Loss, steps: int = 3) -> tuple[ca.Session, list[int]]:
    """Takes some steps, whose gradients are eager's bit for bit; gives how many calls each region has."""
    torch.manual_seed(0)
    reference = make()
    torch.manual_seed(0)
    model = make()
    session = ca.enable(backend="eager", cache_dir=False, tune=False)
    for step in range(steps):
        for each, around in ((reference, ca.disable()), (model, session)):
            each.zero_grad()
            torch.manual_seed(step)
            with around:
                loss(each).backward()
        assert_grads(model, reference)
    assert session.last is not None and session.last.graph is not None
    return session, [len(step.region.nodes) for step in session.last.graph.variants[-1].regions]


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(3, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[time, batch, 3] -> a loss."""
        hidden = torch.zeros(x.shape[1], 4)
        for step in x.unbind(0):
            hidden = torch.tanh(self.inner(step) + self.outer(hidden))
        return hidden.square().sum()


class _Mixed(nn.Module):
    """Convolutions, norms, attention, and operators whose backward gives or takes several gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv1d(4, 8, 3, padding=1), nn.BatchNorm1d(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.linear = nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, 4, length] -> a loss."""
        x = F.gelu(self.norm(self.convolution(x))).transpose(1, 2)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        first, second, third = self.linear(F.layer_norm(x, (8,))).split(2, dim=-1)
        scale, shift = torch.std_mean(torch.stack([first, third]), dim=0)
        return (torch.cat([scale, second * shift]).tanh() @ torch.ones(2, 3)).unbind(0)[0].square().sum()


def test_a_tape_that_repeats_itself_is_cut_at_the_same_place_of_each_repetition(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(partition, "MAX_CALLS_OF_SLOW_REGION", 50)
    session, lengths = _compiled(_Recurrent, lambda model: model(torch.randn(40, 2, 3)))
    stats = session.stats()
    assert len(lengths) > 6 and max(lengths) <= 50
    # Regions between the ends are alike. Only the second lacks two sums: its first step has one term of each so far.
    assert {*lengths[2:-2]} == {lengths[1] + 2}
    assert stats.compiles <= 5 < len(lengths)
    assert (stats.captures, stats.structure_misses, stats.hits, stats.failures) == (1, 1, 2, 0)


def test_a_tape_that_repeats_nothing_is_cut_too(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = sum(_compiled(_Mixed, lambda model: model(torch.randn(2, 4, 5)))[1])
    for max_calls in (1, 2, 3, 5, 11, whole - 1, 2 * whole):
        ca.reset()
        monkeypatch.setattr(partition, "MAX_CALLS_OF_SLOW_REGION", max_calls)
        session, lengths = _compiled(_Mixed, lambda model: model(torch.randn(2, 4, 5)))
        assert sum(lengths) == whole
        assert (len(lengths) == 1) == (max_calls > whole)
        assert session.stats().hits == 2 and session.stats().failures == 0


def test_a_run_of_few_calls_is_cut_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition, "MAX_CALLS_OF_SLOW_REGION", 1)
    session, lengths = _compiled(lambda: nn.Linear(2, 1, bias=False), lambda model: model.weight.exp().sum())
    assert 1 < len(lengths) < 8 and session.stats().failures == 0


def test_checks_for_nans_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    session, lengths = _compiled(_Mixed, lambda model: model(torch.randn(2, 4, 5)))
    assert session.last is not None and session.last.graph is not None
    calls = [node for node in session.last.graph.tape.graph.nodes if node.op == "call_function"]
    ca.reset()
    monkeypatch.setattr(partition, "MAX_CALLS_OF_SLOW_REGION", len(calls))
    with pytest.warns(UserWarning, match="Anomaly Detection"), torch.autograd.detect_anomaly():
        _, checked = _compiled(_Mixed, lambda model: model(torch.randn(2, 4, 5)))
    assert len(checked) == 1 and checked[0] > lengths[0]


def test_where_compiling_takes_no_time_nothing_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EagerBackend, "slow", False, raising=False)
    monkeypatch.setattr(partition, "MAX_CALLS_OF_SLOW_REGION", 5)
    _, lengths = _compiled(_Recurrent, lambda model: model(torch.randn(10, 2, 3)))
    assert len(lengths) == 1


def test_sizes_that_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition, "MAX_CALLS_OF_SLOW_REGION", 20)
    sizes = iter([s for size in (4, 5, 6, 7) for s in (size, size)])
    session, lengths = _compiled(_Recurrent, lambda model: model(torch.randn(12, next(sizes), 3)), steps=4)
    assert len(lengths) > 3
    assert session.stats().hits == 2 and session.stats().shape_misses == 1


def test_accumulated_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition, "MAX_CALLS_OF_SLOW_REGION", 20)
    torch.manual_seed(0)
    model, x = _Recurrent(), torch.randn(12, 2, 3)
    model(x).backward()
    with ca.enable(backend="eager", cache_dir=False, tune=False) as session:
        model(x).backward()
        model(x).backward()
    once = [parameter.grad / 3 for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    model(x).backward()
    for parameter, grad in zip(model.parameters(), once, strict=True):
        torch.testing.assert_close(grad, parameter.grad)
    assert session.stats().hits == 1


def test_the_regions_of_a_loop_are_compiled_once_by_default() -> None:
    session, lengths = _compiled(_Recurrent, lambda model: model(torch.randn(400, 2, 3)))
    assert len(lengths) >= 8 and max(lengths) <= partition.MAX_CALLS_OF_REPEATED_REGION + 2
    assert session.stats().compiles <= 5 and session.stats().failures == 0


@pytest.mark.parametrize("repeated", [5, 20])
def test_long_repetitions_share_code_too(monkeypatch: pytest.MonkeyPatch, repeated: int) -> None:
    """A repetition of more calls than a repeated region may have, as a large layer in a deep model."""

    def loss(model: nn.Module) -> torch.Tensor:
        x = torch.randn(2, 3) * model.weight.sum()
        for _ in range(20):
            x = x.sin().exp().tanh().cos().sin().tanh().exp().cos()
        return x.sum()

    monkeypatch.setattr(partition, "MAX_CALLS_OF_SLOW_REGION", 70)
    monkeypatch.setattr(partition, "MAX_CALLS_OF_REPEATED_REGION", repeated)
    session, lengths = _compiled(lambda: nn.Linear(3, 3), loss)
    assert len(set(lengths[1:-1])) == 1 and session.stats().compiles <= 3 < len(lengths)


def test_a_short_loop_is_one_region() -> None:
    _, lengths = _compiled(_Recurrent, lambda model: model(torch.randn(100, 2, 3)))
    assert len(lengths) == 1
