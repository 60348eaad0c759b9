"""Optimizer steps made of foreach operations, differentiated by their learning rates.

A foreach call does one operation on a list of tensors, and is one node of the tape, with a gradient for each of them;
eager's backward of that node goes through the list tensor by tensor. Here the backward through three steps of Adam is
one compiled graph. Its derivatives are checked against forward mode, and then used: each tensor's rate is learned.

    python examples/foreach.py
"""

import statistics
import time
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch import Tensor

import compiled_autograd as ca

LAYERS, WIDTH, INNER_STEPS, OUTER_STEPS = 3, 32, 3, 30
Tensors = list[Tensor]


def loss_of(weights: Tensors, x: Tensor, y: Tensor) -> Tensor:
    """Mean square error of a network without a module; `weights` are [width, width] and [width] in turn."""
    for weight, bias in zip(weights[::2], weights[1::2], strict=True):
        x = torch.tanh(F.linear(x, weight, bias))
    return (x - y).square().mean()  # F.mse_loss cannot be differentiated backward and then forward (torch 2.13)


def adam_step(weights: Tensors, grads: Tensors, first: Tensors, second: Tensors, rates: Tensors) -> tuple[Tensors, ...]:
    """New weights and moments. `rates` has a learning rate [] for each weight; all else has the weights' shapes."""
    first = torch._foreach_lerp(first, grads, 0.1)
    second = torch._foreach_lerp(second, torch._foreach_mul(grads, grads), 0.01)
    direction = torch._foreach_div(first, torch._foreach_sqrt(torch._foreach_add(second, 1e-8)))
    return torch._foreach_sub(weights, torch._foreach_mul(direction, rates)), first, second


def after_training(weights: Tensors, log_rates: Tensors, x: Tensor, y: Tensor) -> Tensor:
    """The loss [] after INNER_STEPS steps of Adam, a function of the logarithms of the learning rates, each []."""
    rates = torch._foreach_exp(log_rates)
    first, second = ([torch.zeros_like(weight) for weight in weights] for _ in range(2))
    for _ in range(INNER_STEPS):
        grads = list(torch.autograd.grad(loss_of(weights, x, y), weights, create_graph=True))
        weights, first, second = adam_step(weights, grads, first, second, rates)
    return loss_of(weights, x, y)


def backward(log_rates: Tensors, loss: Tensor, around: AbstractContextManager[Any]) -> tuple[float, Tensors]:
    """Seconds of one backward of `loss`, whose tape is kept, and the derivative [] by each logarithm of a rate."""
    started = time.perf_counter()
    with around:
        found = torch.autograd.grad(loss, log_rates, retain_graph=True)
    return time.perf_counter() - started, list(found)


def forward(weights: Tensors, log_rates: Tensors, tangents: Tensors, x: Tensor, y: Tensor) -> Tensor:
    """The derivative [] of the loss along `tangents`, one [] for each logarithm of a rate, in forward mode."""
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(rate, tangent) for rate, tangent in zip(log_rates, tangents, strict=True)]
        return forward_ad.unpack_dual(after_training(weights, duals, x, y)).tangent


def main() -> None:
    """Compare the derivatives of both modes, then learn the rates."""
    torch.manual_seed(0)
    shapes = [(WIDTH, WIDTH), (WIDTH,)] * LAYERS
    weights = [(torch.randn(shape) / WIDTH**0.5).requires_grad_() for shape in shapes]
    x, y = torch.randn(256, WIDTH), torch.rand(256, WIDTH) - 0.5
    log_rates = [torch.tensor(1e-3).log().requires_grad_() for _ in weights]

    # backend="eager" runs the captured graph operator by operator: the same bits as the eager engine.
    loss = after_training(weights, log_rates, x, y)
    _, expected = backward(log_rates, loss, ca.disable())
    settings = {"on_miss": "compile", "compile_budget": float("inf"), "cache_dir": False}
    with ca.enable(backend="eager", **settings) as session:
        _, found = backward(log_rates, loss, session)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    tangents = [torch.randn(()) for _ in log_rates]
    along = sum(a * b for a, b in zip(found, tangents, strict=True))
    torch.testing.assert_close(forward(weights, log_rates, tangents, x, y), along)
    print(f"derivative along a random direction: {along:.6f} in both modes")

    # Learn the rates with what Inductor compiles: the structure is known, for another backend, hence a shape miss.
    # tune=False: no backward is left to eager to be timed, so that the counts below are exact.
    session = ca.enable(**settings, tune=False)
    outer = torch.optim.Adam(log_rates, lr=0.2, foreach=True)
    losses, times = [], {"eager": [], "compiled": []}
    for _ in range(OUTER_STEPS):
        loss = after_training(weights, log_rates, x, y)
        losses.append(loss.item())
        seconds, expected = backward(log_rates, loss, ca.disable())
        times["eager"].append(seconds)
        seconds, found = backward(log_rates, loss, session)
        times["compiled"].append(seconds)
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-6)
        for rate, derivative in zip(log_rates, found, strict=True):
            rate.grad = derivative
        outer.step()
    stats = session.stats()
    assert (stats.shape_misses, stats.hits, stats.compiles) == (1, OUTER_STEPS - 1, 1) and not stats.bypasses
    assert losses[-1] < 0.6 * losses[0]
    print(f"loss after {INNER_STEPS} steps of Adam: {losses[0]:.4f} with 0.001, {losses[-1]:.4f} with learned rates")
    assert session.last is not None and session.last.graph is not None
    names = [call.name for call in session.last.graph.tape.calls]
    assert len(session.last.graph.regions) == 1
    print(f"one graph of {len(names)} nodes, {sum('Foreach' in name for name in names)} of them of foreach calls")
    ratio = statistics.median(times["compiled"][1:]) / statistics.median(times["eager"][1:])
    print(f"compiled in {stats.compile_seconds:.1f} s, then {stats.hits} hits; backward over eager's {ratio:.2f}")


if __name__ == "__main__":
    main()
