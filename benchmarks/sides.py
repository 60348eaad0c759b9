"""Copies of a model, each stepped by its own runner, and the time of their backwards."""

import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.models import MakeLoss, build
from benchmarks.runners import RUNNERS, Runner


def now(device: str) -> float:
    """The time in seconds, after everything that was sent to `device` is done."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def give_back(device: str) -> None:
    """Let other processes have the device's memory that nothing lives in."""
    if device == "cuda":
        torch.cuda.empty_cache()


@dataclass
class Side:
    """One copy of the model and the runner that steps it."""

    module: nn.Module
    make_loss: MakeLoss
    runner: Runner
    device: str

    def use(self, runner: str) -> None:
        """From now on it is stepped by the runner of this name."""
        self.runner = RUNNERS[runner]()
        self.make_loss = self.runner.prepare(self.make_loss)

    def forward(self) -> Tensor:
        self.module.zero_grad(set_to_none=True)
        return self.make_loss(self.module)

    def backward(self, loss: Tensor) -> float:
        """Seconds of the backward alone: entering the runner's context is not counted."""
        with self.runner.around():
            started = now(self.device)
            loss.backward()
            return now(self.device) - started

    def step(self) -> float:
        return self.backward(self.forward())


def eager_side(model: str, seed: int, device: str) -> Side:
    """A copy of `model` under eager."""
    return Side(*build(model, seed, device), RUNNERS["eager"](), device)


def sides(model: str, seed: int, device: str) -> tuple[Side, Side]:
    """(eager, other): two copies of `model`, both still under eager, warmed by one step of the first."""
    pair = [eager_side(model, seed, device) for _ in range(2)]
    pair[0].step()
    return pair[0], pair[1]
