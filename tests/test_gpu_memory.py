"""A CUDA device with little memory, or whose memory is managed another way; and deterministic algorithms."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import compiled_autograd as ca
from shadow_cache import Failure

from .helpers import ROOT, assert_same, expect, mlp

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

_CHILD = """
import sys
import torch
import compiled_autograd as ca
from tests.helpers import assert_same, mlp

def train(session):
    torch.manual_seed(0)
    model = mlp(width=64, depth=3).to("cuda")
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for step in range(6):
        x = torch.randn(32, 64, device="cuda")
        optimizer.zero_grad()
        loss = model(x).square().mean()
        with session:
            loss.backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]

session = ca.enable(backend="inductor", mode=sys.argv[1])
assert_same(train(session), train(ca.disable()), bitwise=False)
stats = session.stats()
assert stats.failures == 0 and stats.hits >= 3, stats
assert torch.cuda.memory._snapshot()["allocator_settings"]["expandable_segments"]
print("trained", torch.cuda.max_memory_allocated() > 0)
"""


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_expandable_segments(cuda: str, mode: str) -> None:
    setting = "expandable_segments:True"
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": setting, "PYTORCH_ALLOC_CONF": setting}
    environment |= {"PYTHONPATH": str(ROOT), "COMPILED_AUTOGRAD_CACHE_DIR": "false", "COMPILED_AUTOGRAD_TUNE": "false"}
    environment["COMPILED_AUTOGRAD_COMPILE_BUDGET"] = "inf"
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, mode], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "trained True" in done.stdout


@contextlib.contextmanager
def _no_more_than(size: int) -> Iterator[None]:
    """The process gets so many bytes of the device."""
    torch.cuda.empty_cache()
    whole = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, size / whole))
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()


class _Steps:
    """Steps of a model whose activations are most of what it needs: 64 MiB each."""

    def __init__(self) -> None:
        self.model = mlp(width=1024, depth=6).to("cuda")
        self.x = torch.randn(16 * 1024, 1024, device="cuda")

    def step(self, around: Any) -> list[torch.Tensor]:
        """One backward; its gradients on the CPU."""
        self.model.zero_grad()
        loss = self.model(self.x).square().mean()
        with around:
            loss.backward()
        return [parameter.grad.cpu() for parameter in self.model.parameters() if parameter.grad is not None]

    def reserved(self, around: Any) -> int:
        """The most bytes that the process has of the device during a step."""
        self.step(around)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        self.step(around)
        return torch.cuda.max_memory_reserved()


@pytest.mark.parametrize("room", [1.3, 1.5, 1.8, 2.5])
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_little_memory_costs_no_step(cuda: str, backend: str, room: float) -> None:
    """Enough for eager, and not for a comparison, which has both results and all that was saved: the step goes on."""
    steps = _Steps()
    wanted = steps.step(ca.disable())
    size = int(room * steps.reserved(ca.disable()))
    session = ca.enable(backend=backend)
    reasons: list[Failure] = []
    with _no_more_than(size):
        for _ in range(5):
            assert_same(steps.step(session), wanted, bitwise=False)
            assert session.last is not None
            reasons += [each for each in session.last.reasons if isinstance(each, Failure)]
    assert {each.kind for each in reasons} <= {"unproved", "run", "compile"}
    assert all("memory" in each.error for each in reasons), reasons
    stats = session.stats()
    assert stats.backwards == 5 and not stats.bypasses
    assert torch.cuda.memory_allocated() < size  # nothing of what failed is held
    for _ in range(3):  # with room again, it is proved
        assert_same(steps.step(session), wanted, bitwise=False)


def test_a_failed_step_holds_nothing(cuda: str) -> None:
    """What does not fit on eager does not fit here either; after that all memory is free again, and a step goes on.

    (The code of Inductor would fit.)
    """
    steps, session = _Steps(), ca.enable(backend="eager")
    for _ in range(4):
        wanted = steps.step(session)
    steps.model.zero_grad()
    before = torch.cuda.memory_allocated()
    loss = steps.model(steps.x).square().mean()
    filling: list[torch.Tensor] = []
    torch.cuda.empty_cache()
    with _no_more_than(torch.cuda.memory_reserved() + (8 << 20)):
        with contextlib.suppress(torch.OutOfMemoryError):
            while True:
                filling.append(torch.empty(8 << 20, device="cuda", dtype=torch.uint8))
        with pytest.raises(torch.OutOfMemoryError), session:
            loss.backward()
    del loss, filling
    steps.model.zero_grad()
    gc.collect()  # frames of the error
    assert torch.cuda.memory_allocated() <= before
    assert_same(steps.step(session), wanted, bitwise=False)


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


class _Lookups(nn.Module):
    """Rows that are taken many times: their gradients are added up, in an order of which atomics have none."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(50, 64))
        self.embedding = nn.Embedding(50, 64)
        self.weight = nn.Parameter(torch.randn(64))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        taken = self.table[rows] * self.weight + self.embedding(rows)
        return taken.gather(1, rows[:, None] % 64).sum() + taken.sin().index_select(0, rows % 100).square().mean()


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_deterministic_algorithms(cuda: str, backend: str) -> None:
    model, rows = _Lookups().to(cuda), torch.randint(50, (20_000,), device=cuda)
    session = ca.enable(backend=backend)
    runs = []
    for around in (ca.disable(), *[session] * 4):
        model.zero_grad()
        loss = model(rows)
        with around:
            loss.backward()
        runs.append([parameter.grad for parameter in model.parameters()])
    for each in runs[1:]:
        assert_same(each, runs[0], bitwise=backend == "eager")
    assert_same(runs[4], runs[3])  # in the first two the real calls gave the gradients
    expect(session.stats(), structure_misses=1, hits=3, captures=1)
    torch.use_deterministic_algorithms(False)
    model.zero_grad()
    with session:
        model(rows).backward()
    expect(session.stats(), structure_misses=1, shape_misses=1, hits=3, captures=1)
