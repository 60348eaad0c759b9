"""Programs that learn by acting."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical, Normal

from benchmarks.ordinary import trainings
from benchmarks.ordinary.networks import ActorCritic
from benchmarks.ordinary.trainings import CartPoles

from .models import train


class _Plain:
    """The ways of eager, for trainings of `benchmarks.ordinary`."""

    def compiled(self, module: nn.Module) -> Any:
        return module

    def backward(self, loss: Tensor) -> None:
        loss.backward()


def actor_critic(here: Any) -> None:
    """16 rounds of 16 poles, then one backward."""
    training = trainings.actor_critic(_Plain())
    for _ in range(60):
        training.step()


def actor_critic_episodes(here: Any) -> None:
    """One forward for each move and one backward for each game, which ends by chance, at the latest after 70 moves:
    nearly each backward has another structure, of up to some thousand nodes."""
    model, poles = ActorCritic(4, 128, 2), CartPoles(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(80):
        kept: list[tuple[Tensor, Tensor]] = []
        while len(kept) < 70 and (len(kept) < 3 or torch.rand(()) > 1 / 30):
            logits, value = model(poles.states)
            choice = Categorical(logits=logits)
            action = choice.sample()
            poles.step(action)
            kept.append((choice.log_prob(action), value))
        returns = torch.arange(float(len(kept)), 0.0, -1.0)
        returns = (returns - returns.mean()) / (returns.std() + 1e-6)
        losses = [
            -log * (gain - value.item()) + F.smooth_l1_loss(value, gain[None])
            for (log, value), gain in zip(kept, returns, strict=True)
        ]
        optimizer.zero_grad()
        torch.stack(losses).sum().backward()
        optimizer.step()


def ppo(here: Any) -> None:
    """64 moves of 4 poles, then four epochs of minibatches, the last of which is smaller."""
    model = ActorCritic(4, 64, 2)
    poles = CartPoles(4)

    def losses() -> Iterable[Tensor]:
        for _ in range(8):
            with torch.no_grad():
                states, actions, logs = [], [], []
                for _ in range(64):
                    states.append(poles.states)
                    choice = Categorical(logits=model(poles.states)[0])
                    actions.append(choice.sample())
                    logs.append(choice.log_prob(actions[-1]))
                    poles.step(actions[-1])
            x, chosen, before = torch.cat(states), torch.cat(actions), torch.cat(logs)
            gains = torch.randn(len(x))
            for _ in range(4):
                for rows in torch.randperm(len(x)).split(100):
                    logits, value = model(x[rows])
                    choice = Categorical(logits=logits)
                    ratio = (choice.log_prob(chosen[rows]) - before[rows]).exp()
                    clipped = ratio.clamp(0.8, 1.2)
                    actor = -torch.min(ratio * gains[rows], clipped * gains[rows]).mean()
                    yield actor + 0.5 * F.mse_loss(value, gains[rows]) - 0.01 * choice.entropy().mean()

    train(model, losses(), clip=True)


def sac(here: Any) -> None:
    """Three backwards a step: two critics at once, the actor, and the temperature."""
    actor = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 4))
    critics = nn.ModuleList(nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 1)) for _ in range(2))
    targets = copy.deepcopy(critics).requires_grad_(False)
    alpha = nn.Parameter(torch.zeros(()))
    of_actor, of_critics, of_alpha = (
        torch.optim.Adam(each, lr=3e-4) for each in ([*actor.parameters()], [*critics.parameters()], [alpha])
    )

    def act(states: Tensor) -> tuple[Tensor, Tensor]:
        mean, log = actor(states).chunk(2, 1)
        choice = Normal(mean, log.clamp(-5, 2).exp())
        raw = choice.rsample()
        action = raw.tanh()
        return action, (choice.log_prob(raw) - (1 - action.square() + 1e-6).log()).sum(1, keepdim=True)

    def least(nets: nn.ModuleList, states: Tensor, actions: Tensor) -> Tensor:
        x = torch.cat([states, actions], 1)
        return torch.min(nets[0](x), nets[1](x))

    for _ in range(60):
        states, after, actions, rewards = torch.randn(64, 8), torch.randn(64, 8), torch.randn(64, 2), torch.randn(64, 1)
        with torch.no_grad():
            following, log = act(after)
            wanted = rewards + 0.99 * (least(targets, after, following) - alpha.exp() * log)
        x = torch.cat([states, actions], 1)
        loss = F.mse_loss(critics[0](x), wanted) + F.mse_loss(critics[1](x), wanted)
        of_critics.zero_grad()
        loss.backward()
        of_critics.step()
        chosen, log = act(states)
        of_actor.zero_grad()
        (alpha.exp().detach() * log - least(critics, states, chosen)).mean().backward()
        of_actor.step()
        of_alpha.zero_grad()
        (-alpha * (log.detach() - 2.0)).mean().backward()
        of_alpha.step()


def dqn(here: Any) -> None:
    """A backward for each fourth move."""
    net = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    poles = CartPoles(1)

    def losses() -> Iterable[Tensor]:
        for _ in range(100):
            for _ in range(4):
                with torch.no_grad():
                    poles.step(net(poles.states).argmax(1))
            states, wanted = torch.randn(64, 4), torch.randn(64)
            yield F.smooth_l1_loss(net(states).gather(1, torch.randint(2, (64, 1))).squeeze(1), wanted)

    train(net, losses())
