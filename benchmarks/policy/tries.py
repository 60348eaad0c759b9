"""Programs with several models, losses or threads, and programs that try things."""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.client_programs.plain import batch, classifier
from benchmarks.ordinary.networks import Discriminator, Generator

from .models import train


def _two(*modules: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.Adam(each.parameters(), lr=2e-4, betas=(0.5, 0.999)) for each in modules]


def gan_with_r1(here: Any) -> None:
    """A DCGAN; at each eighth step the slope of the judge is made smaller (R1)."""
    makes, judges = Generator(16, 8), Discriminator(8)
    of_maker, of_judge = _two(makes, judges)
    images = torch.randn(8, 3, 32, 32)
    for step in range(64):
        made = makes(torch.randn(8, 16, 1, 1))
        of_judge.zero_grad()
        (F.softplus(-judges(images)) + F.softplus(judges(made.detach()))).mean().backward()
        if step % 8 == 0:
            real = images.clone().requires_grad_()
            (slope,) = torch.autograd.grad(judges(real).sum(), real, create_graph=True)
            (5.0 * slope.square().sum((1, 2, 3)).mean()).backward()
        of_judge.step()
        of_maker.zero_grad()
        F.softplus(-judges(made)).mean().backward()
        of_maker.step()


def wasserstein(here: Any) -> None:
    """Five steps of the critic with a penalty on its slope, then one of the generator."""
    makes = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 2))
    judges = nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
    of_maker, of_judge = _two(makes, judges)
    for step in range(120):
        made = makes(torch.randn(64, 8))
        if step % 6 == 5:
            of_maker.zero_grad()
            (-judges(made).mean()).backward()
            of_maker.step()
            continue
        real, share = torch.randn(64, 2), torch.rand(64, 1)
        mixed = (share * real + (1 - share) * made.detach()).requires_grad_()
        (slope,) = torch.autograd.grad(judges(mixed).sum(), mixed, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).square().mean()
        of_judge.zero_grad()
        (judges(made.detach()).mean() - judges(real).mean() + 10 * penalty).backward()
        of_judge.step()


def _model(depth: int, width: int, activation: type[nn.Module], features: int = 64) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Linear(features, width), activation()]
    for _ in range(depth):
        layers += [nn.Linear(width, width), activation()]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def _steps(model: nn.Module, steps: int, rows: int = 64, features: int = 64) -> None:
    x, y = batch(rows, features)
    train(model, (F.cross_entropy(model(x), y) for _ in range(steps)))


def ten_models(here: Any) -> None:
    """Ten models of other structures, 60 steps each."""
    for number in range(10):
        _steps(_model(1 + number // 2, 64, (nn.ReLU, nn.Tanh)[number % 2]), 60)


def search_of_widths(here: Any) -> None:
    """Twelve widths of one model, 50 steps each."""
    for number in range(12):
        _steps(_model(2, 32 + 16 * number, nn.ReLU), 50)


def notebook(here: Any) -> None:
    """Cells that try models and sizes; somebody thinks between them."""
    cells: list[tuple[int, int, type[nn.Module], int, int]] = [
        (1, 64, nn.ReLU, 3, 64),
        (1, 64, nn.ReLU, 100, 64),
        (2, 64, nn.ReLU, 20, 64),
        (2, 128, nn.ReLU, 20, 64),
        (2, 128, nn.GELU, 100, 64),
        (2, 128, nn.GELU, 100, 256),
        (3, 128, nn.GELU, 5, 256),
        (3, 128, nn.GELU, 300, 256),
        (4, 256, nn.SiLU, 30, 256),
        (4, 256, nn.SiLU, 300, 128),
    ]
    for depth, width, activation, steps, rows in cells:
        here.pause(45.0)
        _steps(_model(depth, width, activation), steps, rows)


def forty_losses_once(here: Any) -> None:
    """A file of tests: each loss is differentiated once."""
    names = ("sin", "cos", "tanh", "exp", "sigmoid")
    for number in range(40):
        x = torch.randn(32, 32, requires_grad=True)
        y = x
        for place in range(3 + number % 3):
            y = getattr(torch, names[(number // 5**place + place) % 5])(y) @ x
        y.sum().backward()
        here.pause(0.05)


def two_threads(here: Any) -> None:
    """Two threads train a model each, by turns."""
    turns = [threading.Semaphore(1), threading.Semaphore(0)]
    models = [classifier(hidden=64), _model(2, 64, nn.Tanh)]

    def work(number: int) -> None:
        x, y = batch()
        model = models[number]
        for _ in range(100):
            turns[number].acquire()
            model.zero_grad()
            F.cross_entropy(model(x), y).backward()
            turns[1 - number].release()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def hooks_on_every_module(here: Any) -> None:
    """Gradients of activations are read, of other modules each time: tensors get a hook in the forward."""
    model = _model(4, 64, nn.GELU)
    x, y = batch()
    seen: list[float] = []

    def read(grad: Tensor) -> Tensor:
        seen.append(float(grad.abs().max()))
        return grad * 1.0

    def losses() -> Any:
        for step in range(130):
            hidden = x
            for number, layer in enumerate(model):
                hidden = layer(hidden)
                if (number + step // 10) % 13 < 6 and hidden.requires_grad:
                    hidden.register_hook(read)
            yield F.cross_entropy(hidden, y)

    train(model, losses())
