"""Libraries that call `backward` for their user."""

from __future__ import annotations

from typing import Any

import numpy
import torch
from torch import Tensor, nn

from benchmarks.client_programs.plain import batch, classifier
from benchmarks.client_programs.training import Training


def train_accelerate() -> Training:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    net = classifier()
    model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-3))
    x, target = batch()

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), target)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    return Training(step, lambda: [*model.parameters()])


def train_lightning() -> Training:
    """Its Fabric, in 16 bits where that is safe."""
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
    net = classifier()
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.05))
    x, target = batch()

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), target)
        fabric.backward(loss)
        optimizer.step()
        return loss

    return Training(step, lambda: [*net.parameters()])


def train_pytorch_ignite() -> Training:
    from ignite.engine import create_supervised_trainer

    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    trainer = create_supervised_trainer(model, optimizer, nn.CrossEntropyLoss())
    data = [batch()]
    return Training(lambda: trainer.run(data, max_epochs=1).output, lambda: [*model.parameters()])


def train_skorch() -> Training:
    from skorch import NeuralNetClassifier

    net = NeuralNetClassifier(
        classifier(),
        criterion=nn.CrossEntropyLoss,
        optimizer=torch.optim.SGD,
        lr=0.05,
        batch_size=64,
        train_split=None,
        verbose=0,
    )
    net.initialize()
    x, target = (tensor.numpy() for tensor in batch())
    x = x.astype(numpy.float32)

    def step() -> float:
        net.partial_fit(x, target)
        return net.history[-1, "train_loss"]

    return Training(step, lambda: [*net.module_.parameters()])


def train_opacus() -> Training:
    """Gradients of each row, clipped and with noise: hooks on the modules compute them beside the backward."""
    from opacus import PrivacyEngine

    net: Any = nn.Sequential(nn.Linear(64, 64), nn.GroupNorm(4, 64), nn.ReLU(), nn.Linear(64, 10))
    data = torch.utils.data.TensorDataset(*batch(256))
    net, optimizer, loader = PrivacyEngine(accountant="rdp").make_private(
        module=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.05),
        data_loader=torch.utils.data.DataLoader(data, batch_size=32),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        poisson_sampling=False,
    )
    x, target = next(iter(loader))

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(x), target)
        loss.backward()
        optimizer.step()
        return loss

    return Training(step, lambda: [*net.parameters()])
