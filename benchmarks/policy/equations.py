"""Programs that solve equations, and loops written in Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .models import train

Field = Callable[[Tensor], Tensor]
_A = (
    (1 / 5,),
    (3 / 40, 9 / 40),
    (44 / 45, -56 / 15, 32 / 9),
    (19372 / 6561, -25360 / 2187, 64448 / 6561, -212 / 729),
    (9017 / 3168, -355 / 33, 46732 / 5247, 49 / 176, -5103 / 18656),
    (35 / 384, 0.0, 500 / 1113, 125 / 192, -2187 / 6784, 11 / 84),
)
_E = (71 / 57600, 0.0, -71 / 16695, 71 / 1920, -17253 / 339200, 22 / 525, -1 / 40)


def solve(field: Field, y: Tensor, tolerance: float = 1e-4) -> Tensor:
    """Dormand and Prince, from time 0 to 1, with steps that it chooses."""
    time, step = 0.0, 0.1
    while time < 1.0:
        step = min(step, 1.0 - time)
        slopes = [field(y)]
        for row in _A:
            ahead = y + step * sum(part * slope for part, slope in zip(row, slopes, strict=False))
            slopes.append(field(ahead))
        error = step * sum(part * slope for part, slope in zip(_E, slopes, strict=True))
        size = float(torch.as_tensor(error).detach().abs().max()) / tolerance
        if size <= 1.0:
            time, y = time + step, ahead
        step *= min(5.0, max(0.2, 0.9 * (size + 1e-12) ** -0.2))
    return y


def _field() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))


def dopri5(here: Any) -> None:
    """Differentiated through the solver: the number of its steps changes."""
    net = _field()
    train(net, (F.mse_loss(solve(net, 3 * torch.randn(20, 2)), torch.randn(20, 2)) for _ in range(60)), lr=2e-2)


class _Adjoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, net: nn.Module, *weights: Tensor) -> Tensor:
        with torch.no_grad():
            end = solve(net, y)
        ctx.net = net
        ctx.save_for_backward(end, *weights)
        return end

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        end, *weights = ctx.saved_tensors
        rows = end.numel()

        def field(state: Tensor) -> Tensor:
            y, adjoint = state[:rows].view_as(end).detach().requires_grad_(), state[rows : 2 * rows].view_as(end)
            with torch.enable_grad():
                slope = ctx.net(y)
                grads = torch.autograd.grad(slope, (y, *weights), -adjoint)
            return -torch.cat([slope.detach().flatten(), *(each.flatten() for each in grads)])

        start = torch.cat([end.flatten(), grad.flatten(), *(torch.zeros(each.numel()) for each in weights)])
        with torch.no_grad():
            found = solve(field, start, tolerance=1e-3)[rows:]
        parts = found[rows:].split([each.numel() for each in weights])
        return found[:rows].view_as(end), None, *(p.view_as(w) for p, w in zip(parts, weights, strict=True))


def dopri5_adjoint(here: Any) -> None:
    """The backward solves an equation of its own, with a small backward for each value of the field."""
    net = _field()

    def loss() -> Tensor:
        return F.mse_loss(_Adjoint.apply(torch.randn(20, 2), net, *net.parameters()), torch.zeros(20, 2))

    train(net, (loss() for _ in range(40)), lr=2e-2)


def physics_informed(here: Any) -> None:
    """The Poisson equation: gradients by the points are differentiated again."""
    net = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))

    def loss() -> Tensor:
        x = torch.rand(64, 1, requires_grad=True)
        (slope,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        (curve,) = torch.autograd.grad(slope.sum(), x, create_graph=True)
        ends = net(torch.tensor([[0.0], [1.0]]))
        return (curve + torch.sin(3.14 * x)).square().mean() + ends.square().mean()

    train(net, (loss() for _ in range(100)))


def long_loop(here: Any) -> None:
    """A recurrence of 300 steps."""
    cell, x = nn.RNNCell(4, 8), torch.randn(300, 2, 4)

    def loss() -> Tensor:
        hidden = torch.zeros(2, 8)
        for row in x:
            hidden = cell(row, hidden)
        return hidden.sum()

    train(cell, (loss() for _ in range(60)))


class _Spike(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x > 0).float()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad / (1 + 25 * x.square())


def spikes(here: Any) -> None:
    """A spiking network over ten steps of time, with a gradient of its own for the spike."""
    first, second = nn.Linear(64, 100), nn.Linear(100, 10)
    x, y = torch.rand(32, 64), torch.randint(10, (32,))

    def loss() -> Tensor:
        hidden, found = torch.zeros(32, 100), []
        for _ in range(10):
            hidden = 0.9 * hidden + first(x)
            spike = _Spike.apply(hidden - 1.0)
            hidden = hidden * (1 - spike)
            found.append(second(spike))
        return F.cross_entropy(torch.stack(found).mean(0), y)

    train(nn.ModuleList([first, second]), (loss() for _ in range(80)))


def maml(here: Any) -> None:
    """Three inner steps that are differentiated, then a backward through them."""
    net = nn.Sequential(nn.Linear(1, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 1))
    names = [name for name, _ in net.named_parameters()]

    def loss() -> Tensor:
        x = 10 * torch.rand(20, 1) - 5
        y = (1 + torch.rand(1)) * x.sin()
        weights: list[Tensor] = [*net.parameters()]
        for _ in range(3):
            found = torch.func.functional_call(net, dict(zip(names, weights, strict=True)), (x[:10],))
            grads = torch.autograd.grad(F.mse_loss(found, y[:10]), weights, create_graph=True)
            weights = [weight - 0.01 * grad for weight, grad in zip(weights, grads, strict=True)]
        found = torch.func.functional_call(net, dict(zip(names, weights, strict=True)), (x[10:],))
        return F.mse_loss(found, y[10:])

    train(net, (loss() for _ in range(80)))
