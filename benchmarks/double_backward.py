"""Gradients of gradients against eager, where the session is around every backward and where around the last alone.

    python -m benchmarks.double_backward
    python -m benchmarks.double_backward --models pinn hvp --pairs 60 --json results.json

A step is everything from the end of the forward to the end of the last backward. In each round every runner does one
step on its own copy of the model, eager too, and the order turns from round to round.

`last` enters the session for the last backward only; `all` for every one. Those with ``create_graph`` bypass, so what
lies between the two is the cost of a bypass, or on a version that captures them what that brings.
"""

import argparse
import contextlib
import copy
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import compiled_autograd as ca
from benchmarks.measure import WARM_PAIRS, gradient_difference
from benchmarks.models import tanh_network

Context = contextlib.AbstractContextManager[Any]
Clock = Callable[[], float]
Step = Callable[[nn.Module, Context, Context, Clock], float]
RUNNERS = ("last", "all")
# What the processor spent says more than a wall clock where others use the machine too; it adds up over threads.
CLOCKS: dict[str, Clock] = {"wall": time.perf_counter, "cpu": time.process_time}


def pinn(width: int, depth: int, batch: int) -> tuple[nn.Module, Step]:
    """Burgers' equation: a network's gradient by (x, t), its second derivative by x, and the equation's residual."""
    points = torch.rand(batch, 2)

    def step(module: nn.Module, inner: Context, last: Context, now: Clock) -> float:
        given = points.clone().requires_grad_()
        u = module(given)
        started = now()
        with inner:
            (first,) = torch.autograd.grad(u.sum(), given, create_graph=True)
        with inner:
            (second,) = torch.autograd.grad(first[:, 0].sum(), given, create_graph=True)
        residual = (first[:, 1:] + u * first[:, :1] - 0.01 * second[:, :1]).square().mean()
        with last:
            residual.backward()
        return now() - started

    return tanh_network(2, *[width] * depth, 1), step


def penalty(critic: nn.Module, real: Tensor, fake: Tensor) -> tuple[nn.Module, Step]:
    """The critic's loss of WGAN-GP."""
    mixed = torch.rand(len(real), *[1] * (real.dim() - 1))

    def step(module: nn.Module, inner: Context, last: Context, now: Clock) -> float:
        between = (mixed * real + (1 - mixed) * fake).requires_grad_()
        distance, scores = module(fake).mean() - module(real).mean(), module(between)
        started = now()
        with inner:
            (slope,) = torch.autograd.grad(scores.sum(), between, create_graph=True)
        loss = distance + 10 * (slope.flatten(1).norm(dim=1) - 1).square().mean()
        with last:
            loss.backward()
        return now() - started

    return critic, step


def convolutional_critic() -> tuple[nn.Module, Step]:
    widths = [3, 16, 32, 64]
    layers = [each for a, b in pairwise(widths) for each in (nn.Conv2d(a, b, 4, 2, 1), nn.LeakyReLU(0.2))]
    critic = nn.Sequential(*layers, nn.Flatten(), nn.Linear(1024, 1))
    return penalty(critic, torch.rand(32, 3, 32, 32), torch.rand(32, 3, 32, 32))


def mlp_critic() -> tuple[nn.Module, Step]:
    return penalty(tanh_network(32, 128, 128, 128, 1), torch.rand(256, 32), torch.rand(256, 32))


def hessian_vector_product() -> tuple[nn.Module, Step]:
    x, y = torch.rand(256, 64), torch.rand(256, 1)
    module = tanh_network(64, 64, 64, 64, 64, 1)
    vector = [torch.randn_like(parameter) for parameter in module.parameters()]

    def step(module: nn.Module, inner: Context, last: Context, now: Clock) -> float:
        parameters = list(module.parameters())
        loss = (module(x) - y).square().mean()
        started = now()
        with inner:
            grads = torch.autograd.grad(loss, parameters, create_graph=True)
        with last:
            products = torch.autograd.grad(grads, parameters, vector)
        taken = now() - started
        for parameter, product in zip(parameters, products, strict=True):
            parameter.grad = product
        return taken

    return module, step


MODELS: dict[str, Callable[[], tuple[nn.Module, Step]]] = {
    "pinn": lambda: pinn(64, 4, 1024),
    "pinn-large": lambda: pinn(64, 4, 8192),
    "pinn-small": lambda: pinn(20, 8, 256),
    "penalty-conv": convolutional_critic,
    "penalty-mlp": mlp_critic,
    "hvp": hessian_vector_product,
}


@dataclass
class Side:
    """One copy of a model, and what to enter for the backwards with ``create_graph`` and for the last one."""

    module: nn.Module
    step_of: Step
    inner: Context
    last: Context
    now: Clock

    def step(self) -> float:
        """Seconds of its backwards."""
        self.module.zero_grad()
        return self.step_of(self.module, self.inner, self.last, self.now)


def alternate(eager: Side, others: dict[str, Side], rounds: int) -> dict[str, list[float]]:
    """Seconds of each side in each round; the order turns by one from round to round."""
    sides = {"eager": eager, **others}
    times: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds):
        names = list(sides)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            times[name].append(sides[name].step())
    return times


def measure(model: str, pairs: int, seed: int, backend: str, clock: str) -> list[dict[str, Any]]:
    """One row for each runner."""
    torch.manual_seed(seed)
    module, step = MODELS[model]()
    sessions = {name: ca.enable(backend=backend, on_miss="compile", cache_dir=False) for name in RUNNERS}
    nothing, now = contextlib.nullcontext(), CLOCKS[clock]
    eager = Side(module, step, nothing, nothing, now)
    others: dict[str, Side] = {}
    first_steps: dict[str, float] = {}
    for name, session in sessions.items():
        others[name] = Side(copy.deepcopy(module), step, session if name == "all" else nothing, session, now)
        first_steps[name] = others[name].step()
    alternate(eager, others, WARM_PAIRS)
    times = alternate(eager, others, pairs)
    rows = []
    for name, side in others.items():
        stats = sessions[name].stats()
        rows.append(
            {
                "model": model,
                "runner": name,
                "first_step_seconds": first_steps[name],
                "eager_ms": 1e3 * statistics.median(times["eager"]),
                "runner_ms": 1e3 * statistics.median(times[name]),
                "ratio": statistics.median(b / a for a, b in zip(times["eager"], times[name], strict=True)),
                "gradient_difference": gradient_difference(module, side.module),
                "counts": {"hits": stats.hits, "compiles": stats.compiles, "bypasses": stats.bypasses},
            }
        )
    return rows


def table_of(rows: list[dict[str, Any]]) -> Table:
    table = Table("model", "runner", "first step s", "eager ms", "runner ms", "ratio", "grad diff", "counts")
    table.title = "Backwards of a step against eager, below 1 is faster"
    for row in rows:
        table.add_row(
            row["model"],
            row["runner"],
            f"{row['first_step_seconds']:.1f}",
            f"{row['eager_ms']:.2f}",
            f"{row['runner_ms']:.2f}",
            f"{row['ratio']:.3f}",
            f"{row['gradient_difference']:.1e}",
            ", ".join(f"{name} {value}" for name, value in row["counts"].items() if value),
        )
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=list(MODELS))
    parser.add_argument("--pairs", type=int, default=40, help="rounds that are timed")
    parser.add_argument("--clock", choices=tuple(CLOCKS), default="wall", help="cpu: with OMP_NUM_THREADS=1")
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write all results to this file")
    args = parser.parse_args()
    console = Console()
    if not console.is_terminal:
        console.width = 140
    rows: list[dict[str, Any]] = []
    for model in args.models:
        with console.status(model):
            rows += measure(model, args.pairs, args.seed, args.backend, args.clock)
        if args.json:
            args.json.write_text(json.dumps({"threads": torch.get_num_threads(), "results": rows}, indent=2) + "\n")
    console.print(table_of(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
