"""Networks of spikes: a step of time is a step of a loop, and the spike has a gradient that somebody chose."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.client_programs.training import Training

TIMES = 10


def _on_rates(model: nn.Module, rates: Callable[[Tensor], Tensor]) -> Training:
    """Classes by the mean of what comes out over time."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    x, target = torch.rand(32, 64), torch.randint(10, (32,))

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(rates(x), target)
        loss.backward()
        optimizer.step()
        return loss

    return Training(step, lambda: [*model.parameters()])


def train_snntorch() -> Training:
    import snntorch as snn

    first, second = nn.Linear(64, 100), nn.Linear(100, 10)
    one, two = snn.Leaky(beta=0.9), snn.Leaky(beta=0.9, learn_beta=True)

    def rates(x: Tensor) -> Tensor:
        hidden, out = one.reset_mem(), two.reset_mem()
        spikes = []
        for _ in range(TIMES):
            spike, hidden = one(first(x), hidden)
            spike, out = two(second(spike), out)
            spikes.append(out)
        return torch.stack(spikes).mean(0)

    return _on_rates(nn.ModuleList([first, second, one, two]), rates)


def train_spikingjelly() -> Training:
    from spikingjelly.activation_based import functional, layer, neuron, surrogate

    spike = surrogate.ATan()
    model = nn.Sequential(layer.Linear(64, 100), neuron.LIFNode(surrogate_function=spike), layer.Linear(100, 10))

    def rates(x: Tensor) -> Tensor:
        functional.reset_net(model)
        return torch.stack([model(4 * x) for _ in range(TIMES)]).mean(0)

    return _on_rates(model, rates)


def train_norse() -> Training:
    from norse.torch import LIF, SequentialState

    model = SequentialState(nn.Linear(64, 100), LIF(), nn.Linear(100, 10))

    def rates(x: Tensor) -> Tensor:
        outputs, _ = model((4 * x).expand(TIMES, *x.shape))
        return outputs.mean(0)

    return _on_rates(model, rates)
