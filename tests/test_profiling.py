"""What a profiler shows of a compiled backward, beside what it shows of eager's."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import compiled_autograd as ca

from .helpers import Squares, expect, same_bits

Event = tuple[str, int]


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 2))


def _profiled(model: nn.Module, around: Any, steps: int = 1) -> list[Event]:
    """The events of the last of ``steps`` backwards: names, and sequence numbers from that of the loss on."""
    x = torch.arange(12.0).view(3, 4)
    for _ in range(steps - 1):
        with around():
            (model(x) * 2).sum().backward()
        model.zero_grad()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        loss = (model(x) * 2).sum()
        assert loss.grad_fn is not None
        first = loss.grad_fn._sequence_nr()
        with around():
            loss.backward()
    events = [(event.name, event.sequence_nr) for event in profiler.events()]
    return [(name, number - first if number >= 0 else number) for name, number in events]


def _of_nodes(events: Sequence[Event]) -> list[Event]:
    return [(name, number) for name, number in events if "Backward" in name]


@pytest.mark.parametrize("steps", [1, 3])
def test_each_node_has_the_engines_events(steps: int) -> None:
    """With the sequence numbers that join it to its operator of the forward, in the order in which eager runs."""
    eagers = _of_nodes(_profiled(_model(), contextlib.nullcontext))
    model, reference = _model(), _model()
    with ca.enable(backend="eager") as session:
        ours = _of_nodes(_profiled(model, contextlib.nullcontext, steps))
    expect(session.stats(), structure_misses=1, captures=1, compiles=1, hits=steps - 1)
    assert ours == eagers
    assert len(eagers) == 16 and all(number <= 0 for _, number in eagers)
    (reference(torch.arange(12.0).view(3, 4)) * 2).sum().backward()
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert same_bits(one.grad, other.grad)


def test_operators_lie_within_their_node() -> None:
    """The time of a node is that of what it computes."""
    model = _model()
    with ca.enable(backend="eager"), profile(activities=[ProfilerActivity.CPU]) as profiler:
        model(torch.randn(3, 4)).sum().backward()
    node = next(event for event in profiler.events() if event.name == "NativeLayerNormBackward0")
    assert [child.name for child in node.cpu_children] == ["aten::native_layer_norm_backward"]


def test_a_fused_region_is_one_event() -> None:
    model = _model()
    with ca.enable(backend=lambda graph_module, example_inputs: graph_module) as session:
        ours = [name for name, _ in _profiled(model, contextlib.nullcontext, 2)]
    expect(session.stats(), structure_misses=1, captures=1, compiles=1, hits=1)
    assert [name for name in ours if "Backward" in name] == [
        "compiled_autograd: 8 nodes: SumBackward0, MulBackward0, AddmmBackward0, TBackward0, 2 more"
    ]


def test_users_code_has_an_event_of_its_name() -> None:
    x = torch.randn(3, requires_grad=True)
    seen = []
    x.register_hook(lambda grad: seen.append(grad.clone()))
    with ca.enable(backend="eager") as session, profile(activities=[ProfilerActivity.CPU]) as profiler:
        Squares.apply(x).sum().backward()
    expect(session.stats(), structure_misses=1, captures=1, compiles=2)
    names = [event.name for event in profiler.events()]
    assert "SquaresBackward" in names and "tensor_hook of AccumulateGrad" in names
    assert same_bits(seen[0], x.grad) and same_bits(x.grad, 2 * x.detach())


def test_a_nan_check_has_no_event() -> None:
    def names(anomaly: bool) -> list[str]:
        x = torch.randn(3, requires_grad=True)
        with torch.autograd.set_detect_anomaly(anomaly):
            y = Squares.apply(x)
            y.grad_fn.register_hook(lambda given, got: None)
            with ca.enable(backend="eager") as session, profile(activities=[ProfilerActivity.CPU]) as profiler:
                y.sum().backward()
        assert session.stats().compiles == 2
        return [event.name for event in profiler.events() if "Squares" in event.name]

    plain = names(anomaly=False)
    assert "post_hook of SquaresBackward" in plain and names(anomaly=True) == plain


def test_a_backward_inside_a_profiled_one() -> None:
    x = torch.randn(3, requires_grad=True)
    w = torch.ones(3, requires_grad=True)

    @torch.enable_grad()
    def hook(grad: torch.Tensor) -> None:
        (w * 2).sum().backward()

    x.register_hook(hook)
    with ca.enable(backend="eager") as session, profile(activities=[ProfilerActivity.CPU]) as profiler:
        (x * 3).sum().backward()
    expect(session.stats(), structure_misses=2, captures=2, compiles=2)
    assert [event.name for event in profiler.events()].count("MulBackward0") == 2
    assert same_bits(w.grad, torch.full((3,), 2.0)) and same_bits(x.grad, torch.full((3,), 3.0))


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_anomaly_mode_finds_no_nan_in_what_only_makes_events() -> None:
    """The values that stand for gradients there were memory that nobody had written to."""
    leaf, session = torch.ones(3, requires_grad=True), ca.enable(backend="eager", cache_dir=False, tune=False)
    torch.use_deterministic_algorithms(True)  # what is not written to holds NaNs
    try:
        for _ in range(3):
            leaf.grad = None
            with torch.autograd.detect_anomaly(), torch.profiler.profile(), session:
                (leaf * 2).sin().sum().backward()
            assert leaf.grad is not None
            torch.testing.assert_close(leaf.grad, 2 * (leaf.detach() * 2).cos())
    finally:
        torch.use_deterministic_algorithms(False)
