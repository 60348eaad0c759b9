"""Trainings of ordinary models, each as people write it: AdamW, and gradients clipped by their norm.

A training is given the ways of its runner: `compiled(module)` is what it calls in place of the module, and
`backward(loss)` stands for `loss.backward()`. It draws weights and batches from PyTorch's generator when it is made,
and whatever else is random at each step.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.nn.utils import clip_grad_norm_

from benchmarks.models import GPT
from benchmarks.ordinary import networks

BATCHES = 4


class Ways(Protocol):
    """How a runner has a model called and its loss differentiated."""

    def compiled(self, module: nn.Module) -> Callable[..., Any]: ...

    def backward(self, loss: Tensor) -> None: ...


@dataclass(frozen=True)
class Training:
    """One training, ready for its first step.

    Attributes:
        step: makes a whole step.
        modules: what is trained, always in the same order.
    """

    step: Callable[[], None]
    modules: list[nn.Module]


def batches(draw: Callable[[], tuple[Tensor, ...]]) -> Iterator[tuple[Tensor, ...]]:
    """A few batches, over and over."""
    return cycle([draw() for _ in range(BATCHES)])


def supervised(ways: Ways, model: nn.Module, data: Iterator[tuple[Tensor, ...]], loss_of: Callable[..., Tensor]) -> Any:
    """The loop that most tutorials have: `loss_of(model, *batch)`, one optimizer."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    called = ways.compiled(model)

    def step() -> None:
        optimizer.zero_grad()
        ways.backward(loss_of(called, *next(data)))
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return Training(step, [model])


def of_symbols(model: Callable[..., Tensor], tokens: Tensor, labels: Tensor) -> Tensor:
    """The loss of a language model; labels of -100 are left out."""
    return F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())


def vit(ways: Ways, batch: int = 8, size: int = 64, width: int = 128, heads: int = 4, layers: int = 4) -> Training:
    data = batches(lambda: (torch.randn(batch, 3, size, size), torch.randint(10, (batch,))))
    model = networks.ViT(size, width, heads, layers, classes=10)
    return supervised(ways, model, data, lambda model, images, labels: F.cross_entropy(model(images), labels))


def bert(
    ways: Ways,
    vocabulary: int = 1024,
    batch: int = 8,
    length: int = 64,
    width: int = 128,
    heads: int = 4,
    layers: int = 4,
) -> Training:
    """A masked language model: 15 % of the symbols are hidden behind symbol 1, some of the rest is padding."""

    def draw() -> tuple[Tensor, ...]:
        tokens = torch.randint(2, vocabulary, (batch, length))
        hidden = torch.rand(batch, length) < 0.15
        padded = torch.arange(length) >= torch.randint(length // 2, length + 1, (batch, 1))
        labels = tokens.masked_fill(~hidden | padded, -100)
        return tokens.masked_fill(hidden, 1).masked_fill(padded, 0), labels

    return supervised(ways, networks.BERT(vocabulary, length, width, heads, layers), batches(draw), of_symbols)


def gpt2(
    ways: Ways,
    vocabulary: int = 1024,
    batch: int = 4,
    length: int = 128,
    width: int = 128,
    heads: int = 4,
    layers: int = 4,
) -> Training:
    """Query, key and value in one product, and PyTorch's own attention."""

    def draw() -> tuple[Tensor, ...]:
        text = torch.randint(vocabulary, (batch, length + 1))
        return text[:, :-1], text[:, 1:]

    return supervised(ways, GPT(vocabulary, length, layers, width, heads), batches(draw), of_symbols)


def unet(ways: Ways, batch: int = 4, size: int = 32, channels: int = 16) -> Training:
    """A diffusion model: the noise in an image is predicted."""
    kept = torch.linspace(0.9999, 0.01, 1000)

    def loss_of(model: Callable[..., Tensor], images: Tensor) -> Tensor:
        noise, times = torch.randn_like(images), torch.randint(1000, (len(images),))
        part = kept[times][:, None, None, None]
        return F.mse_loss(model(part.sqrt() * images + (1 - part).sqrt() * noise, times), noise)

    return supervised(ways, networks.UNet(channels), batches(lambda: (torch.randn(batch, 3, size, size),)), loss_of)


def gan(ways: Ways, batch: int = 16, latent: int = 32, channels: int = 16) -> Training:
    """DCGAN: a step of the discriminator, then one of the generator, each with an optimizer."""
    data = batches(lambda: (torch.randn(batch, 3, 32, 32).tanh(),))
    makes, judges = networks.Generator(latent, channels), networks.Discriminator(channels)
    makers, judgers = (torch.optim.AdamW(each.parameters(), lr=2e-4, betas=(0.5, 0.999)) for each in (makes, judges))
    made_by, judged_by = ways.compiled(makes), ways.compiled(judges)
    real, false = torch.ones(batch), torch.zeros(batch)
    loss_of = F.binary_cross_entropy_with_logits

    def step() -> None:
        (images,) = next(data)
        made = made_by(torch.randn(batch, latent, 1, 1))
        judgers.zero_grad()
        ways.backward(loss_of(judged_by(images), real) + loss_of(judged_by(made.detach()), false))
        clip_grad_norm_(judges.parameters(), 1.0)
        judgers.step()
        makers.zero_grad()
        ways.backward(loss_of(judged_by(made), real))
        clip_grad_norm_(makes.parameters(), 1.0)
        makers.step()

    return Training(step, [makes, judges])


class CartPoles:
    """Poles to be balanced, each on a cart of its own: the task of Gymnasium's CartPole-v1, many at a time."""

    def __init__(self, count: int) -> None:
        self.states = self._new(count)

    @staticmethod
    def _new(count: int) -> Tensor:
        return 0.1 * torch.rand(count, 4) - 0.05

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor]:
        """(states f32[count, 4], whether each has fallen bool[count]); one that has fallen is begun anew."""
        speed, angle, turning = self.states[:, 1:].unbind(1)
        cosine, sine = angle.cos(), angle.sin()
        pushed = (20.0 * actions - 10.0 + 0.05 * turning.square() * sine) / 1.1
        turns = (9.8 * sine - cosine * pushed) / (0.5 * (4 / 3 - 0.1 * cosine.square() / 1.1))
        moves = pushed - 0.05 * turns * cosine / 1.1
        changes = torch.stack([speed, moves, turning, turns], dim=1)
        after = self.states + 0.02 * changes
        fallen = (after[:, 0].abs() > 2.4) | (after[:, 2].abs() > 0.21)
        self.states = torch.where(fallen[:, None], self._new(len(after)), after)
        return self.states, fallen


def actor_critic(ways: Ways, environments: int = 16, rounds: int = 16, hidden: int = 64) -> Training:
    """Advantage actor-critic: some rounds are played, one call of the network each, then comes one backward."""
    model, poles = networks.ActorCritic(4, hidden, 2), CartPoles(environments)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    called = ways.compiled(model)

    def step() -> None:
        states, log_probabilities, values, entropies, going = poles.states, [], [], [], []
        for _ in range(rounds):
            logits, value = called(states)
            choice = Categorical(logits=logits)
            action = choice.sample()
            states, fallen = poles.step(action)
            log_probabilities.append(choice.log_prob(action))
            values.append(value)
            entropies.append(choice.entropy())
            going.append(1.0 - fallen.float())
        with torch.no_grad():
            expected = called(states)[1]
            returns = [expected := 1.0 + 0.99 * goes * expected for goes in reversed(going)]
        advantages = torch.stack(returns[::-1]) - torch.stack(values)
        actor_loss = -(torch.stack(log_probabilities) * advantages.detach()).mean()
        optimizer.zero_grad()
        ways.backward(actor_loss + 0.5 * advantages.square().mean() - 0.01 * torch.stack(entropies).mean())
        clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()

    return Training(step, [model])


TRAININGS: dict[str, Callable[..., Training]] = {
    "vit": vit,
    "bert": bert,
    "gpt2": gpt2,
    "unet": unet,
    "gan": gan,
    "actor-critic": actor_critic,
}
TINY: dict[str, dict[str, int]] = {
    "vit": {"batch": 2, "size": 16, "width": 16, "heads": 2, "layers": 1},
    "bert": {"vocabulary": 32, "batch": 2, "length": 8, "width": 16, "heads": 2, "layers": 1},
    "gpt2": {"vocabulary": 32, "batch": 2, "length": 8, "width": 16, "heads": 2, "layers": 1},
    "unet": {"batch": 1, "size": 8, "channels": 8},
    "gan": {"batch": 2, "latent": 4, "channels": 2},
    "actor-critic": {"environments": 2, "rounds": 2, "hidden": 4},
}
"""Sizes at which only overhead is measured, to try the benchmark itself."""
DRAWS_INSIDE = ("bert",)
"""Models that draw in their forward: compiled by Inductor, they draw other numbers than eager does."""
