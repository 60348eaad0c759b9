"""Compiled code draws the random numbers that eager draws."""

from __future__ import annotations

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from backends.inductor.backend import InductorBackend
from backends.inductor.poison import run_poisoned
from backends.inductor.straight_line.straight_line import StraightLine


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
