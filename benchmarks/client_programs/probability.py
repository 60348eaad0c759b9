"""Gaussian processes, variational inference and normalizing flows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.client_programs.training import Training


def _likelihood(flow: Any, minus_log: Any, lr: float = 1e-3) -> Training:
    """A flow that is fitted to points of two moons, made anew for each step."""
    optimizer = torch.optim.Adam(flow.parameters(), lr=lr)

    def step() -> Tensor:
        angle = torch.pi * torch.rand(128)
        side = torch.randint(2, (128,)) * 2 - 1
        points = torch.stack([angle.cos() + 0.5 * side, side * angle.sin()], 1) + 0.05 * torch.randn(128, 2)
        optimizer.zero_grad()
        loss = minus_log(points)
        loss.backward()
        optimizer.step()
        return loss

    return Training(step, lambda: [*flow.parameters()])


def train_nflows() -> Training:
    from nflows.distributions.normal import StandardNormal
    from nflows.flows import Flow
    from nflows.transforms import CompositeTransform, MaskedAffineAutoregressiveTransform, ReversePermutation

    layers: list[Any] = []
    for _ in range(3):
        layers += [ReversePermutation(features=2), MaskedAffineAutoregressiveTransform(features=2, hidden_features=16)]
    flow = Flow(CompositeTransform(layers), StandardNormal(shape=[2]))
    return _likelihood(flow, lambda points: -flow.log_prob(inputs=points).mean())


def train_normflows() -> Training:
    import normflows as nf

    layers: list[Any] = []
    for _ in range(4):
        layers += [nf.flows.AffineCouplingBlock(nf.nets.MLP([1, 32, 32, 2], init_zeros=True))]
        layers += [nf.flows.Permute(2, mode="swap")]
    flow = nf.NormalizingFlow(nf.distributions.base.DiagGaussian(2), layers)
    return _likelihood(flow, flow.forward_kld)


def train_zuko() -> Training:
    """Splines, whose bins are looked up."""
    import zuko

    flow = zuko.flows.NSF(features=2, transforms=2, hidden_features=(32, 32))
    return _likelihood(flow, lambda points: -flow().log_prob(points).mean())


def train_gpytorch() -> Training:
    """An exact Gaussian process: the marginal likelihood of 100 points."""
    import gpytorch

    x = torch.linspace(0, 1, 100)
    y = (2 * torch.pi * x).sin() + 0.2 * torch.randn(100)

    class Process(gpytorch.models.ExactGP):
        def __init__(self, likelihood: Any) -> None:
            super().__init__(x, y, likelihood)
            self.mean_module = gpytorch.means.ConstantMean()
            self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

        def forward(self, at: Tensor) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean_module(at), self.covar_module(at))

    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    model = Process(likelihood)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    log_likelihood = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
    model.train()

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = -log_likelihood(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return Training(step, lambda: [*model.parameters()])


def train_botorch() -> Training:
    """Where to look next: an acquisition function is climbed from several points at once."""
    from botorch.acquisition import qLogExpectedImprovement
    from botorch.models import SingleTaskGP
    from botorch.sampling import SobolQMCNormalSampler

    seen = torch.rand(20, 2, dtype=torch.float64)
    values = (seen.sum(1, keepdim=True) * 3).sin()
    sampler = SobolQMCNormalSampler(sample_shape=torch.Size([32]), seed=0)
    model = SingleTaskGP(seen, values).eval()
    improvement = qLogExpectedImprovement(model, best_f=values.max(), sampler=sampler)
    points = nn.Parameter(torch.rand(5, 2, 2, dtype=torch.float64))
    optimizer = torch.optim.Adam([points], lr=0.01)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = -improvement(points).sum()
        loss.backward()
        optimizer.step()
        return loss

    return Training(step, lambda: [points])


def train_pyro_ppl() -> Training:
    """A regression with a guide that the library makes."""
    import pyro
    from pyro import distributions as dist
    from pyro.infer import Trace_ELBO
    from pyro.infer.autoguide import AutoMultivariateNormal

    x = torch.randn(100, 3)
    y = x @ torch.tensor([1.0, -2.0, 0.5]) + 0.1 * torch.randn(100)

    def model(x: Tensor, y: Tensor) -> None:
        weight = pyro.sample("weight", dist.Normal(torch.zeros(3), 10.0).to_event(1))
        sigma = pyro.sample("sigma", dist.LogNormal(torch.zeros(()), 1.0))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(x @ weight, sigma), obs=y)

    pyro.settings.set(module_local_params=True)
    guide = AutoMultivariateNormal(model)
    bound = Trace_ELBO()(model, guide)
    bound(x, y)  # makes the guide's parameters
    optimizer = torch.optim.Adam(bound.parameters(), lr=0.01)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = bound(x, y)
        loss.backward()
        optimizer.step()
        return loss

    return Training(step, lambda: [*bound.parameters()])
