"""Around training on a CUDA device: memory, the store, compiling in the background, profiles, streams, devices.

What runs on the CPU too has its logic tried there by default; ``python -m pytest -m gpu`` runs the rest.
"""

from __future__ import annotations

import contextlib
import copy
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import compiled_autograd as ca
from backends.inductor.environment import environment
from benchmarks.memory import peak_of_backward
from compiled_autograd.process_state import PROCESS

from .helpers import Squares, assert_grads, assert_same, expect, in_subprocess, mlp

BACKENDS = ["eager", pytest.param("inductor", marks=pytest.mark.slow)]


class Twins:
    """Two copies of a model, one on eager and one in a session."""

    def __init__(self, device: str, session: ca.Session, make: Callable[[], nn.Module] = mlp) -> None:
        self.session, self.device = session, device
        self.model = make().to(device)
        self.reference = copy.deepcopy(self.model)

    def step(self, forward: Any = contextlib.nullcontext, backward: Any = contextlib.nullcontext) -> None:
        """One backward of each, in contexts that hold for both; gradients agree."""
        x = torch.randn(4, 8, device=self.device)
        for each, around in ((self.reference, ca.disable()), (self.model, self.session)):
            each.zero_grad()
            with forward():
                loss = each(x).square().mean()
            with around, backward():
                loss.backward()
        bitwise = self.device == "cpu" and self.session.settings.backend == "eager"
        assert_grads(self.model, self.reference, bitwise)


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_in_the_background(device: str, backend: str) -> None:
    session = ca.enable(backend=backend, on_miss="background")
    twins = Twins(device, session)
    twins.step()
    assert session.stats().structure_misses == 1
    assert session.wait(200)
    for _ in range(3):
        twins.step()
    expect(session.stats(), structure_misses=1, hits=3, captures=1, compiles=1)


def _restart() -> None:
    """As in another process."""
    PROCESS.restart()


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_store_on_disk(device: str, backend: str, tmp_path: Path) -> None:
    """What was compiled is found again, Triton's kernels with it."""
    counts = []
    for _ in range(2):
        _restart()
        session = ca.enable(backend=backend, cache_dir=tmp_path)
        twins = Twins(device, session)
        twins.step()
        twins.step()
        counts.append(session.stats())
        assert session.graphs()[0].variants[0].not_stored == ""
    expect(counts[0], structure_misses=1, hits=1, captures=1, compiles=1)
    expect(counts[1], hits=2, captures=1, compiles=0)
    assert counts[1].loads == 1


class Waves(nn.Module):
    """Each kind of kernel: over elements, over rows, over columns, over all. The input is among what it saves."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 40))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = (x * self.weight).sin()
        return (y.softmax(1) * x + y - y.mean(0)).std() + (y.t() @ y).sum()


def _compare_waves(session: ca.Session, x: torch.Tensor) -> None:
    """One backward of a model, and of a copy on eager."""
    model = Waves().to(x.device)
    reference = copy.deepcopy(model)
    reference(x).backward()
    with session:
        loss = model(x)
        loss.backward()
    assert_grads(model, reference, bitwise=x.device.type == "cpu" and session.settings.backend == "eager")


def _at(offset: int, rows: int, device: str) -> torch.Tensor:
    """An input that begins so many elements behind where memory was allocated; kernels read 16 bytes at once."""
    return torch.randn(rows * 40 + offset, device=device)[offset:].view(rows, 40)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_stored_takes_misaligned_inputs(device: str, backend: str, tmp_path: Path) -> None:
    for first in (0, 1):
        folder = tmp_path / str(first)
        for compiles, offsets in ((True, (first, 0, 1, 3)), (False, (1, 0, 3, 2))):
            _restart()
            session = ca.enable(backend=backend, cache_dir=folder)
            for offset in offsets:
                _compare_waves(session, _at(offset, 300, device))
            stats = session.stats()
            assert (stats.compiles > 0) == compiles and (stats.loads > 0) != compiles
            expect(stats, structure_misses=int(compiles), hits=4 - compiles, captures=1, compiles=stats.compiles)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_stored_for_several_shapes(device: str, backend: str, dynamic: bool, tmp_path: Path) -> None:
    stats = []
    for _ in range(2):
        _restart()
        session = ca.enable(backend=backend, dynamic=dynamic, cache_dir=tmp_path)
        for rows in (300, 77, 300, 1025):
            _compare_waves(session, _at(0, rows, device))
        stats.append(session.stats())
        assert not any(variant.not_stored for graph in session.graphs() for variant in graph.variants)
    assert stats[0].compiles > 0 and stats[0].loads == 0
    assert stats[1].compiles == 0 and stats[1].loads > 0 and stats[1].hits == 4


_IN_ANOTHER_PROCESS = """
import json, os, sys
import torch
import compiled_autograd as ca

x = torch.linspace(-2, 2, 300 * 40 + 1, device=DEVICE)[1:].view(300, 40)
weight = torch.linspace(-1, 1, 40, device=DEVICE, requires_grad=True)
with ca.enable(backend="inductor") as session:
    y = (x * weight).sin()
    ((y.softmax(1) * x + y - y.mean(0)).std() + (y.t() @ y).sum()).backward()
stats = session.stats()
compilers = [each for each in ("triton", "torch._inductor", "torch._dynamo") if each in sys.modules]
print(json.dumps([stats.hits, stats.compiles, stats.loads, compilers, weight.grad.tolist()]))
"""


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_was_compiled_in_the_background_is_stored(device: str, backend: str, tmp_path: Path) -> None:
    """Once it has run: before that, it is not known which of its kernels' forms is the fastest."""
    session = ca.enable(backend=backend, on_miss="background", cache_dir=tmp_path)
    twins = Twins(device, session)
    twins.step()
    assert session.wait(200)
    twins.step()
    assert session.graphs()[0].variants[0].not_stored == ""
    _restart()
    again = ca.enable(backend=backend, cache_dir=tmp_path)
    Twins(device, again).step()
    expect(again.stats(), hits=1, captures=1, compiles=0)
    assert again.stats().loads == 1


@pytest.mark.gpu
def test_what_kernels_depend_on_is_part_of_the_key(cuda: str) -> None:
    torch.zeros(1, device=cuda)
    found = environment()
    assert torch.cuda.get_device_name() in found["cuda_devices"]
    assert found["cuda"] == torch.version.cuda and int(found["cuda_driver"]) >= 12000
    assert "triton" not in sys.modules or found["cuda_triton"] == sys.modules["triton"].__version__
    began = time.perf_counter()
    for _ in range(10):
        environment()
    assert time.perf_counter() - began < 0.1


@pytest.mark.slow
def test_a_first_backward_in_another_process_compiles_nothing(device: str, tmp_path: Path) -> None:
    """Neither Triton nor Inductor is imported there."""
    found = []
    for folder in ("first", "second"):
        done = in_subprocess(
            _IN_ANOTHER_PROCESS.replace("DEVICE", repr(device)),
            timeout=300,
            TORCHINDUCTOR_CACHE_DIR=str(tmp_path / folder),
            COMPILED_AUTOGRAD_CACHE_DIR=str(tmp_path / "store"),
        )
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout.splitlines()[-1]))
    (_, compiles, loads, _, wanted), (hits, compiled, loaded, compilers, grad) = found
    assert compiles > 0 and loads == 0
    assert (hits, compiled) == (1, 0) and loaded > 0 and compilers == []
    torch.testing.assert_close(torch.tensor(grad), torch.tensor(wanted))
    assert not list((tmp_path / "second").glob("*/*"))


@pytest.mark.parametrize("backend", BACKENDS)
def test_peak_memory_is_eagers(device: str, backend: str) -> None:
    session = ca.enable(backend=backend)
    model = mlp(width=256, depth=8).to(device)
    x = torch.randn(512, 256, device=device)

    def make_loss() -> torch.Tensor:
        model.zero_grad()
        return model(x).square().mean()

    # What libraries allocate once is not counted; nor what a comparison with the real calls holds, the results of both.
    for around in (ca.disable(), *[session] * 3):
        loss = make_loss()
        with around:
            loss.backward()
    assert session.last is not None and "prove" not in session.last.seconds
    del loss

    def peak(around: Any) -> int:
        model.zero_grad()  # else gradients of before, which the first thing of a step frees, would be taken off
        return peak_of_backward(make_loss, around, device)

    eager = peak(ca.disable())
    wanted = [parameter.grad for parameter in model.parameters()]
    compiled = peak(session)
    assert_same([parameter.grad for parameter in model.parameters()], wanted, bitwise=False)
    expect(session.stats(), structure_misses=1, hits=3, captures=1)
    assert compiled <= 1.1 * eager


def test_events_in_a_profile(device: str) -> None:
    x = torch.randn(3, device=device, requires_grad=True)
    x.register_hook(lambda grad: None)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    with ca.enable(backend="eager") as session, profile(activities=activities) as profiler:
        (Squares.apply(x) * 2).sum().backward()
    expect(session.stats(), structure_misses=1, captures=1, compiles=2)
    names = [event.name for event in profiler.events()]
    for name in ("SumBackward0", "MulBackward0", "SquaresBackward", "tensor_hook of AccumulateGrad"):
        assert name in names


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_region_is_one_event(device: str, backend: str) -> None:
    session = ca.enable(backend=lambda graph_module, examples: graph_module) if backend == "eager" else None
    session = session or ca.enable(backend=backend)
    twins = Twins(device, session)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        twins.step()
    names = [event.name for event in profiler.events()]
    assert sum(name.startswith("compiled_autograd: ") for name in names) == 1
    expect(session.stats(), structure_misses=1, captures=1, compiles=1)


def _ordered(stream: Any) -> Any:
    """A context on another stream, before and after which the two wait for one another."""

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        current = torch.cuda.current_stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            yield
        current.wait_stream(stream)

    return context


@pytest.fixture
def session(cuda: str) -> ca.Session:
    """Of a process that has CUDA in use, with what other tests did on streams forgotten."""
    torch.zeros(1, device=cuda)
    return ca.enable(backend="eager")


@pytest.mark.gpu
def test_forward_on_another_stream(session: ca.Session) -> None:
    twins = Twins("cuda", session)
    side = _ordered(torch.cuda.Stream())
    for _ in range(3):
        twins.step(forward=side)
    expect(session.stats(), bypasses={"cuda_streams": 3})
    twins.step()
    twins.step()
    expect(session.stats(), bypasses={"cuda_streams": 3}, structure_misses=1, hits=1)


@pytest.mark.gpu
def test_backward_on_another_stream(session: ca.Session) -> None:
    twins = Twins("cuda", session)
    for _ in range(3):
        twins.step(backward=_ordered(torch.cuda.Stream()))
    expect(session.stats(), bypasses={"cuda_streams": 3})


@pytest.mark.gpu
@pytest.mark.parametrize("entered", ["torch.cuda.stream", "torch.cuda.Stream", "torch.Stream", "torch.accelerator"])
def test_all_ways_to_a_stream_are_seen(session: ca.Session, entered: str) -> None:
    @contextlib.contextmanager
    def by_accelerator() -> Iterator[None]:
        before = torch.accelerator.current_stream()
        torch.accelerator.set_stream(torch.Stream(device="cuda"))
        yield
        torch.accelerator.set_stream(before)

    contexts: dict[str, Callable[[], Any]] = {
        "torch.cuda.stream": lambda: torch.cuda.stream(torch.cuda.Stream()),
        "torch.cuda.Stream": lambda: torch.cuda.Stream(),
        "torch.Stream": lambda: torch.Stream(device="cuda"),
        "torch.accelerator": by_accelerator,
    }

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        torch.cuda.synchronize()
        with contexts[entered]():
            assert torch.cuda.current_stream() != torch.cuda.default_stream()
            yield
        assert torch.cuda.current_stream() == torch.cuda.default_stream()
        torch.cuda.synchronize()

    Twins("cuda", session).step(forward=context)
    expect(session.stats(), bypasses={"cuda_streams": 1})


@pytest.mark.gpu
def test_a_whole_loop_on_one_stream(session: ca.Session) -> None:
    with _ordered(torch.cuda.Stream())():
        twins = Twins("cuda", session)
        for _ in range(3):
            twins.step()
    expect(session.stats(), structure_misses=1, hits=2)


@pytest.mark.gpu
def test_a_prefetcher_costs_nothing(session: ca.Session) -> None:
    twins = Twins("cuda", session)
    stream = torch.cuda.Stream()
    for _ in range(3):
        with torch.cuda.stream(stream):
            torch.randn(1000).pin_memory().to("cuda", non_blocking=True)
        twins.step()
    expect(session.stats(), structure_misses=1, hits=2)


@pytest.mark.gpu
def test_while_a_cuda_graph_is_captured(session: ca.Session) -> None:
    """As in PyTorch's own example of it: some steps on a side stream first, then one that is captured, then replays."""
    model = mlp().to("cuda")
    x = torch.randn(4, 8, device="cuda")

    def step() -> None:
        model.zero_grad(set_to_none=True)
        with session:
            model(x).square().mean().backward()

    stream = torch.cuda.Stream()
    with _ordered(stream)(), ca.disable():
        for _ in range(3):
            model(x).square().mean().backward()
    model.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    expect(session.stats(), bypasses={"stream_capture": 1})
    x.copy_(torch.randn_like(x))
    graph.replay()
    found = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    wanted = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
    assert_same(found, wanted, bitwise=False)


@pytest.fixture
def two(cuda: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")


@pytest.mark.gpu
def test_a_tape_on_two_devices(session: ca.Session, two: None) -> None:
    first, last = nn.Linear(8, 8, device="cuda:0"), nn.Linear(8, 3, device="cuda:1")
    for _ in range(2):
        with session:
            last(first(torch.ones(4, 8, device="cuda:0")).to("cuda:1")).sum().backward()
    expect(session.stats(), bypasses={"cuda_devices": 2})


@pytest.mark.gpu
def test_a_tape_on_a_device_that_is_not_the_current_one(session: ca.Session, two: None) -> None:
    twins = Twins("cuda:1", session)
    devices = []
    for each in (twins.reference, twins.model):
        each[0].weight.register_hook(lambda grad: devices.append(torch.empty(1, device="cuda").device))
    for _ in range(3):
        twins.step()
    assert torch.cuda.current_device() == 0
    assert devices == [torch.device("cuda", 1)] * 6
    expect(session.stats(), structure_misses=1, hits=2)
