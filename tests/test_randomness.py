"""Compiled code draws the random numbers that eager draws."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import compiled_autograd as ca
from backends.inductor import randomness
from backends.inductor.backend import InductorBackend
from backends.inductor.poison import run_poisoned
from backends.inductor.straight_line.straight_line import StraightLine

from .helpers import expect


def test_draws_are_those_of_eager() -> None:
    """Else no run could be compared with another."""
    aten = torch.ops.aten

    def region(x: torch.Tensor, p: torch.Tensor) -> list[torch.Tensor]:
        return [
            aten.rand_like.default(x) + x,
            aten.bernoulli.default(p) * x,
            aten.native_dropout.default(x, 0.3, True)[0] * 2,
            aten.bernoulli.p(x, 0.25),
            aten.randn.default([3, 3]).relu(),
            aten.normal.Tensor_float(x, 2.0) - 1,
            aten.randint.default(9, [4]) * 3,
            aten.randperm.default(7) + 1,
            aten.exponential.default(p, 2.0),
            aten.uniform.default(x, -1.0, 1.0) * 2,
            aten.multinomial.default(p, 3),
        ]

    inputs = [torch.randn(4, 5), torch.rand(4, 5)]
    backend = InductorBackend()
    graph = make_fx(region, dict(backend.decompositions()), tracing_mode="fake")(*inputs)
    compiled = backend.compile(graph, inputs)
    assert isinstance(compiled, StraightLine)
    for run in range(3):
        torch.manual_seed(run)
        expected = region(*inputs)
        after = torch.get_rng_state()
        torch.manual_seed(run)
        results = compiled(list(inputs)) if run != 1 else run_poisoned(compiled, list(inputs))
        assert torch.equal(torch.get_rng_state(), after)
        for one, other in zip(expected, results, strict=True):
            torch.testing.assert_close(other, one)


# ---- while something is compiled ---------------------------------------------------------------------------------


def test_what_is_compiled_beside_a_training_does_not_set_its_numbers_back() -> None:
    """Inductor has its generators as they were when it began: numbers that were drawn meanwhile came once more."""
    torch.manual_seed(3)
    wanted = [torch.rand(()).item() for _ in range(4_000)]
    model, found = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 1)), list[float]()
    session = ca.enable(backend="inductor", on_miss="background", dynamic=True)

    def step(batch: int) -> None:
        loss = model(torch.ones(batch, 4)).square().mean()
        with session:
            loss.backward()

    torch.manual_seed(3)
    for batch in (2, 3, 4):  # from the second on with symbols, of which the thread makes code
        step(batch)
        while not session.wait(0.002) and len(found) < len(wanted):
            found.append(torch.rand(()).item())
        assert session.wait(200)
    stats = session.stats()
    assert (stats.hits, stats.compiles, stats.failures) == (1, 1, 0), stats
    assert len(found) > 10 and found == wanted[: len(found)]


@pytest.mark.parametrize("beside", [False, True])
def test_inductor_keeps_the_generators_outside_of_ours_alone(beside: bool) -> None:
    from torch._dynamo import utils

    def drawn_within() -> bool:
        """Whether what is drawn where Inductor keeps them is gone from the sequence."""
        before = torch.get_rng_state()
        with utils.preserve_rng_state():
            torch.rand(())
        return not torch.equal(torch.get_rng_state(), before)

    def run() -> list[bool]:
        if beside:
            randomness.compiles_beside(True)
        with randomness.generators_kept(None):
            inside = drawn_within()
        return [inside, drawn_within()]

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(run).result() == [True, False]


@pytest.mark.gpu
def test_compiling_draws_nothing_on_a_device(cuda: str) -> None:
    """Inductor draws matrices to see whether a product is faster with others sizes (``fx_passes/pad_mm.py``)."""
    model = nn.Sequential(nn.Linear(63, 65), nn.GELU(), nn.Linear(65, 3)).to(cuda, torch.float16)
    session = ca.enable(backend="inductor")
    x = torch.randn(33, 63, device=cuda, dtype=torch.float16)
    for _ in range(4):
        loss = model(x).float().square().mean()
        before = torch.cuda.get_rng_state()
        with session:
            loss.backward()
        assert torch.equal(torch.cuda.get_rng_state(), before)
    expect(session.stats(), structure_misses=2, hits=2, captures=2)  # the second step adds to what the first left
