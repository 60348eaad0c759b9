"""Optimizers, and steps of an optimizer that are differentiated themselves."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.client_programs.plain import batch, classifier
from benchmarks.client_programs.training import Training


def train_geoopt() -> Training:
    """Points of a ball that is curved: pairs are pulled together, others pushed away."""
    import geoopt

    ball = geoopt.PoincareBall()
    points = geoopt.ManifoldParameter(1e-2 * torch.randn(100, 5), manifold=ball)
    optimizer = geoopt.optim.RiemannianAdam([points], lr=1e-2)
    one, other = torch.randint(100, (2, 64))
    far = torch.randint(100, (64, 10))

    def step() -> Tensor:
        optimizer.zero_grad()
        near = -ball.dist(points[one], points[other])
        all_of_them = torch.cat([near[:, None], -ball.dist(points[one][:, None], points[far])], 1)
        loss = -(near - all_of_them.logsumexp(1)).mean()
        loss.backward()
        optimizer.step()
        return loss

    return Training(step, lambda: [points])


def _regressor() -> nn.Module:
    return nn.Sequential(nn.Linear(1, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 1))


def _wave() -> tuple[Tensor, Tensor]:
    """Points of a sine: f32[20, 1] each."""
    x = 10 * torch.rand(20, 1) - 5
    return x, (1 + 4 * torch.rand(1)) * (x + torch.pi * torch.rand(1)).sin()


def train_higher() -> Training:
    """MAML: three inner steps on one sine, and how well they did is differentiated through them."""
    import higher

    model = _regressor()
    optimizer, inner = torch.optim.Adam(model.parameters(), lr=1e-3), torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> Tensor:
        x, y = _wave()
        optimizer.zero_grad()
        with higher.innerloop_ctx(model, inner, copy_initial_weights=False) as (adapted, changes):
            for _ in range(3):
                changes.step(nn.functional.mse_loss(adapted(x[:10]), y[:10]))
            loss = nn.functional.mse_loss(adapted(x[10:]), y[10:])
            loss.backward()
        optimizer.step()
        return loss

    return Training(step, lambda: [*model.parameters()])


def train_torchopt() -> Training:
    """The same with the library's own differentiable optimizer, which changes the model and gives it back."""
    import torchopt

    model = _regressor()
    optimizer, inner = torch.optim.Adam(model.parameters(), lr=1e-3), torchopt.MetaSGD(model, lr=0.01)
    trained = [*model.parameters()]

    def step() -> Tensor:
        x, y = _wave()
        before = torchopt.extract_state_dict(model, by="reference"), torchopt.extract_state_dict(inner, by="reference")
        optimizer.zero_grad()
        for _ in range(3):
            inner.step(nn.functional.mse_loss(model(x[:10]), y[:10]))
        loss = nn.functional.mse_loss(model(x[10:]), y[10:])
        loss.backward()
        optimizer.step()
        torchopt.recover_state_dict(model, before[0])
        torchopt.recover_state_dict(inner, before[1])
        return loss

    return Training(step, lambda: trained)


def train_pytorch_optimizer() -> Training:
    """One that asks for the gradients twice a step: once where the model is, once where the loss is sharpest."""
    from pytorch_optimizer import SAM

    model, (x, target) = classifier(), batch()
    optimizer = SAM(model.parameters(), torch.optim.SGD, lr=0.05, rho=0.05)

    def step() -> Tensor:
        loss = nn.functional.cross_entropy(model(x), target)
        loss.backward()
        optimizer.first_step(zero_grad=True)
        nn.functional.cross_entropy(model(x), target).backward()
        optimizer.second_step(zero_grad=True)
        return loss

    return Training(step, lambda: [*model.parameters()])
