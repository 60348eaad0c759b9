"""Differential equations."""

from __future__ import annotations

import os
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from benchmarks.client_programs.training import Training


def train_deepxde() -> Training:
    """The Poisson equation of the library's first page: gradients by the points are differentiated again."""
    os.environ["DDE_BACKEND"] = "pytorch"
    import deepxde as dde

    def equation(x: Tensor, y: Tensor) -> Tensor:
        return -dde.grad.hessian(y, x) - numpy.pi**2 * torch.sin(numpy.pi * x)

    line = dde.geometry.Interval(-1, 1)
    border = dde.icbc.DirichletBC(line, lambda x: 0 * x[:, :1], lambda _, at_border: at_border)
    data = dde.data.PDE(line, equation, border, num_domain=64, num_boundary=2)
    model = dde.Model(data, dde.nn.FNN([1, 50, 50, 50, 1], "tanh", "Glorot uniform"))
    losses: list[Tensor] = []

    def squares(target: Tensor, found: Tensor) -> Tensor:
        losses.append((found - target).square().mean())
        return losses[-1]

    model.compile("adam", lr=1e-3, loss=squares, verbose=0)

    def step() -> Tensor:
        model.train_state.set_data_train(*data.train_next_batch())
        losses.clear()
        model._train_step(model.train_state.X_train, model.train_state.y_train, None)
        return torch.stack(losses).sum()

    return Training(step, lambda: [*model.net.parameters()])


def train_neuraloperator() -> Training:
    """A Fourier neural operator: its weights are complex."""
    from neuralop.losses import LpLoss
    from neuralop.models import FNO

    model = FNO(n_modes=(8, 8), in_channels=1, out_channels=1, hidden_channels=16, n_layers=2)
    optimizer, loss_of = torch.optim.Adam(model.parameters(), lr=1e-3), LpLoss(d=2)
    x, target = torch.randn(4, 1, 16, 16), torch.randn(4, 1, 16, 16)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model(x), target)
        loss.backward()
        optimizer.step()
        return loss

    return Training(step, lambda: [*model.parameters()])


def train_torchdiffeq() -> Training:
    """A spiral by a solver that chooses its steps; the backward solves an equation of its own."""
    from torchdiffeq import odeint_adjoint

    class Derivative(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(2, 50), nn.Tanh(), nn.Linear(50, 2))

        def forward(self, time: Tensor, y: Tensor) -> Tensor:
            return self.net(y**3)

    model = Derivative()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    times, start, target = torch.linspace(0.0, 1.0, 10), torch.randn(20, 1, 2), torch.randn(10, 20, 1, 2)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = (odeint_adjoint(model, start, times) - target).abs().mean()
        loss.backward()
        optimizer.step()
        return loss

    return Training(step, lambda: [*model.parameters()])


def train_torchsde() -> Training:
    """A stochastic equation, differentiated through the solver."""
    from torchsde import BrownianInterval, sdeint

    class Equation(nn.Module):
        noise_type, sde_type = "diagonal", "ito"

        def __init__(self) -> None:
            super().__init__()
            self.drift, self.spread = nn.Linear(3, 3), nn.Linear(3, 3)

        def f(self, time: Tensor, y: Tensor) -> Tensor:
            return self.drift(y).tanh()

        def g(self, time: Tensor, y: Tensor) -> Tensor:
            return self.spread(y).sigmoid()

    model: Any = Equation()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    times, start = torch.linspace(0.0, 1.0, 12), torch.full((32, 3), 0.1)

    def step() -> Tensor:
        optimizer.zero_grad()
        noise = BrownianInterval(0.0, 1.0, size=(32, 3), entropy=int(torch.randint(2**31, ())))
        loss = (sdeint(model, start, times, bm=noise, method="euler", dt=0.1)[-1] - 1.0).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return Training(step, lambda: [*model.parameters()])
