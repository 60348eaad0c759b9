"""Plain torch: what the others are to be seen against."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.client_programs.training import Training


def supervised(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, target: Tensor) -> Training:
    """A classifier on one batch: the loop that most libraries' first page has."""

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), target)
        loss.backward()
        optimizer.step()
        return loss

    return Training(step, lambda: [*model.parameters()])


def classifier(features: int = 64, hidden: int = 128, classes: int = 10) -> nn.Module:
    """Three linear layers with batch norm and dropout."""
    return nn.Sequential(
        nn.Linear(features, hidden),
        nn.BatchNorm1d(hidden),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Linear(hidden, hidden),
        nn.GELU(),
        nn.Linear(hidden, classes),
    )


def batch(rows: int = 64, features: int = 64, classes: int = 10) -> tuple[Tensor, Tensor]:
    """f32[rows, features] and i64[rows], classes below `classes`."""
    return torch.randn(rows, features), torch.randint(classes, (rows,))


def train_torch() -> Training:
    model = classifier()
    return supervised(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), *batch())
