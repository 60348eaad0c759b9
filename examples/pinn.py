"""A network that learns a differential equation, the backward of its loss compiled.

The heat equation u_t = u_xx / pi^2 asks for a gradient of the network by (t, x) and for a second one by x. Both are
differentiated again (create_graph=True), and so run on the eager engine: the reason is printed. The backward of the
loss goes through all three tapes; it is the largest, and it is compiled as one graph.

    python examples/pinn.py
"""

import math
import statistics
import time
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

import compiled_autograd as ca

STEPS, POINTS = 100, 1024


def solution(network: nn.Module, where: Tensor) -> Tensor:
    """u [n, 1] at the points (t, x) of `where` [n, 2]: by construction sin(pi x) at t = 0, and 0 at x = 0 and 1."""
    t, x = where[:, :1], where[:, 1:]
    return torch.sin(math.pi * x) + t * x * (1 - x) * network(where)


def loss_of(network: nn.Module, where: Tensor) -> Tensor:
    """Mean square of u_t - u_xx / pi^2 over the points `where` [n, 2], which require grad."""
    u = solution(network, where)
    (first,) = torch.autograd.grad(u.sum(), where, create_graph=True)
    (second,) = torch.autograd.grad(first[:, 1].sum(), where, create_graph=True)
    return (first[:, 0] - second[:, 1] / math.pi**2).square().mean()


def gradients(network: nn.Module, where: Tensor, around: AbstractContextManager[Any]) -> tuple[float, list[Tensor]]:
    """Seconds of the forward and of all three backwards, and the gradients of the loss by the parameters."""
    network.zero_grad()
    started = time.perf_counter()
    with around:
        loss_of(network, where).backward(inputs=list(network.parameters()))  # not by the points
    seconds = time.perf_counter() - started
    return seconds, [parameter.grad for parameter in network.parameters() if parameter.grad is not None]


def error(network: nn.Module) -> float:
    """Largest distance to the exact solution, exp(-t) sin(pi x), on a grid."""
    grid = torch.cartesian_prod(torch.linspace(0, 1, 21), torch.linspace(0, 1, 21))
    exact = torch.exp(-grid[:, :1]) * torch.sin(math.pi * grid[:, 1:])
    with torch.no_grad():
        return (solution(network, grid) - exact).abs().max().item()


def main() -> None:
    """Train on the compiled gradients, and compare them with eager's at every step."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
    network.append(nn.Linear(64, 1))
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    # For exact counts: each new structure is compiled at once, and nothing is left to eager to be timed.
    session = ca.enable(on_miss="compile", compile_budget=float("inf"), cache_dir=False, tune=False)
    print(f"largest error before training: {error(network):.3f}")
    times: dict[str, list[float]] = {"eager": [], "compiled": []}
    for _ in range(STEPS):
        where = torch.rand(POINTS, 2, requires_grad=True)
        seconds, expected = gradients(network, where, ca.disable())
        times["eager"].append(seconds)
        seconds, found = gradients(network, where, session)
        times["compiled"].append(seconds)
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
        optimizer.step()  # with the compiled gradients: they are the ones that stand in .grad
    print(f"largest error after {STEPS} steps: {error(network):.3f}")
    assert error(network) < 0.02

    stats = session.stats()
    assert (stats.structure_misses, stats.hits, stats.compiles) == (1, STEPS - 1, 1)
    assert stats.bypasses == {"create_graph": 2 * STEPS}
    print(f"backwards of the loss: {stats.structure_misses} compiled, {stats.hits} hits")
    print(f"backwards left to eager: {stats.bypasses}")
    ratio = statistics.median(times["compiled"][1:]) / statistics.median(times["eager"][1:])
    print(f"forward and all backwards, compiled over eager: {ratio:.2f}; compiling took {stats.compile_seconds:.1f} s")


if __name__ == "__main__":
    main()
