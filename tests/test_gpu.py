"""What is trained on a CUDA device: models, hooks, functions and modes, each compared with eager, and counted.

Every test runs on the CPU too, where its logic is tried by default; ``python -m pytest -m gpu`` runs the other half. On
CUDA some of eager's own kernels add with atomics, in no fixed order, so gradients are compared within rounding there.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import compiled_autograd as ca

from .helpers import MakeLoss, Squares, assert_grads, assert_same, compare, expect, mlp

Case = tuple[Callable[[], nn.Module], MakeLoss]
INDUCTOR = pytest.param("inductor", marks=pytest.mark.slow)
BACKENDS = ["eager", INDUCTOR]


def _mlp(device: str) -> Case:
    x, y = torch.randn(6, 8, device=device), torch.randn(6, 3, device=device)
    return mlp, lambda model: F.mse_loss(model(x), y)


def _transformer(device: str) -> Case:
    x = torch.randn(2, 5, 16, device=device)

    def make() -> nn.Module:
        return nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)

    return make, lambda model: model(x).square().mean()


def _cnn(device: str) -> Case:
    images, labels = torch.randn(4, 3, 8, 8, device=device), torch.randint(5, (4,), device=device)

    def make() -> nn.Module:
        return nn.Sequential(
            *(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(4, 8, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 5)),
        )

    return make, lambda model: F.cross_entropy(model(images), labels)


def _embedding(device: str) -> Case:
    tokens = torch.randint(7, (3, 4), device=device)

    def make() -> nn.Module:
        return nn.Sequential(nn.Embedding(7, 5, padding_idx=0), nn.Linear(5, 2))

    return make, lambda model: model(tokens).square().mean()


def _lstm_cell(device: str) -> Case:
    x = torch.randn(5, 3, 4, device=device)

    def loss(cell: nn.Module) -> torch.Tensor:
        hidden = torch.zeros(3, 6, device=device), torch.zeros(3, 6, device=device)
        for step in x:
            hidden = cell(step, hidden)
        return hidden[0].square().mean()

    return lambda: nn.LSTMCell(4, 6), loss


CASES = {"mlp": _mlp, "transformer": _transformer, "cnn": _cnn, "embedding": _embedding, "lstm_cell": _lstm_cell}


def _compare(device: str, case: Case, backend: str = "eager", **settings: Any) -> Any:
    make, loss = case
    bitwise = backend == "eager" and device == "cpu"
    return compare(lambda: make().to(device), loss, backend, bitwise=bitwise, **settings)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_model(device: str, case: str, backend: str) -> None:
    result = _compare(device, CASES[case](device), backend)
    expect(result.stats, structure_misses=1, hits=2, captures=1)


@pytest.mark.slow
def test_the_mlp_with_inductor(device: str) -> None:
    _compare(device, _mlp(device), "inductor")


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_add_up(device: str, backend: str) -> None:
    result = _compare(device, _cnn(device), backend, keep_grads=True, steps=4)
    expect(result.stats, structure_misses=2, hits=2, captures=2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_autograd_grad(device: str, backend: str) -> None:
    make, loss = _mlp(device)
    model = make().to(device)
    parameters = list(model.parameters())
    wanted = torch.autograd.grad(loss(model), parameters)
    session = ca.enable(backend=backend)
    for _ in range(3):
        with session:
            found = torch.autograd.grad(loss(model), parameters)
        assert_same(found, wanted, bitwise=backend == "eager" and device == "cpu")
    expect(session.stats(), structure_misses=1, hits=2, captures=1)
    assert all(parameter.grad is None for parameter in parameters)


class _Notes:
    """What hooks of every kind that Python registers saw."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.grads: list[torch.Tensor | None] = []

    def note(self, name: str, *grads: torch.Tensor | None) -> None:
        self.names.append(name)
        self.grads.extend(None if grad is None else grad.detach().clone() for grad in grads)

    def hook_model(self, model: Any) -> None:
        first, last = model[0], model[-1]
        first.weight.register_hook(lambda grad: self.note("tensor", grad) or grad * 2)
        first.bias.register_post_accumulate_grad_hook(lambda leaf: self.note("post", leaf.grad))
        last.register_full_backward_pre_hook(lambda module, grads: self.note("module pre", *grads))
        last.register_full_backward_hook(lambda module, got, given: self.note("module", *got, *given))
        torch.autograd.graph.register_multi_grad_hook(
            tuple(last.parameters()), lambda grads: self.note("multi", *grads)
        )

    def hook_node(self, node: Any) -> None:
        node.register_prehook(lambda grads: self.note("node pre", *grads))
        node.register_hook(lambda given, got: self.note("node", *given, *got))


def test_hooks_of_all_kinds(device: str) -> None:
    make, loss_of = _mlp(device)
    model = make().to(device)
    reference = copy.deepcopy(model)
    session = ca.enable(backend="eager")
    ours, eagers = _Notes(), _Notes()
    ours.hook_model(model)
    eagers.hook_model(reference)
    for _ in range(3):
        for each, around, notes in ((reference, ca.disable(), eagers), (model, session, ours)):
            each.zero_grad()
            loss = loss_of(each)
            notes.hook_node(loss.grad_fn)
            with around:
                loss.backward()
        assert_grads(model, reference, bitwise=device == "cpu")
    assert len(set(eagers.names)) == 7 and ours.names == eagers.names
    assert_same(ours.grads, eagers.grads, bitwise=device == "cpu")
    expect(session.stats(), structure_misses=1, hits=2, captures=1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_function_of_python(device: str, backend: str) -> None:
    x = torch.randn(6, 8, device=device)
    result = _compare(device, (mlp, lambda model: Squares.apply(model(Squares.apply(x))).mean()), backend)
    expect(result.stats, structure_misses=1, hits=2, captures=1)


class _WhichDevice(torch.autograd.Function):
    """Notes on which device a backward that names none makes its tensors."""

    seen: list[torch.device] = []  # noqa: RUF012

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        _WhichDevice.seen.append(torch.empty(1, device=grad.device.type).device)
        return grad


def test_a_function_that_names_no_index_gets_the_tapes_device(device: str) -> None:
    _WhichDevice.seen.clear()
    _compare(device, (mlp, lambda model: _WhichDevice.apply(model(torch.ones(2, 8, device=device))).mean()))
    assert len(set(_WhichDevice.seen)) == 1 and len(_WhichDevice.seen) == 6


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_checkpoints(device: str, reentrant: bool, backend: str) -> None:
    x = torch.randn(6, 8, device=device)

    def loss(model: nn.Module) -> torch.Tensor:
        hidden = model[0](x)
        return checkpoint(lambda h: F.dropout(model[1:](h).tanh(), 0.3), hidden, use_reentrant=reentrant).mean()

    result = _compare(device, (mlp, loss), backend, counts=False)
    tapes = 2 if reentrant else 1
    expect(result.stats, structure_misses=tapes, hits=2 * tapes, captures=tapes)


@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast_to_bfloat16(device: str, backend: str) -> None:
    case = _cnn(device)
    _compare(device, case, backend, around=lambda: torch.autocast(device, torch.bfloat16), low=True)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_autocast_to_float16_with_a_scaler(cuda: str, backend: str) -> None:
    """Steps whose gradients overflow are skipped in both, and scales go the same way."""
    make, loss_of = _mlp(cuda)
    model = make().to(cuda)
    reference = copy.deepcopy(model)
    session = ca.enable(backend=backend)
    optimizers = [torch.optim.SGD(each.parameters(), 0.01) for each in (reference, model)]
    scalers = [torch.amp.GradScaler("cuda", init_scale=2.0**40) for _ in optimizers]
    for _ in range(30):
        for index, (each, around) in enumerate(((reference, ca.disable()), (model, session))):
            optimizers[index].zero_grad()
            with torch.autocast(cuda, torch.float16):
                loss = loss_of(each)
            with around:
                scalers[index].scale(loss).backward()
            scalers[index].step(optimizers[index])
            scalers[index].update()
        assert scalers[0].get_scale() == scalers[1].get_scale()
    assert scalers[1].get_scale() < 2.0**40
    assert_same(list(model.parameters()), list(reference.parameters()), bitwise=False, low=True)
    expect(session.stats(), structure_misses=1, hits=29, captures=1)


def test_retain_grad(device: str) -> None:
    make, _ = _mlp(device)
    model = make().to(device)
    x = torch.randn(6, 8, device=device)
    session = ca.enable(backend="eager")
    for _ in range(3):
        kept = []
        for around in (ca.disable(), session):
            model.zero_grad()
            hidden = model[0](x)
            hidden.retain_grad()
            loss = model[1:](hidden).square().mean()
            with around:
                loss.backward()
            kept.append([hidden.grad, *(parameter.grad for parameter in model.parameters())])
        assert_same(kept[1], kept[0], bitwise=device == "cpu")
    expect(session.stats(), structure_misses=1, hits=2, captures=1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_batches_of_all_sizes(device: str, backend: str) -> None:
    model = mlp().to(device)
    reference = copy.deepcopy(model)
    session = ca.enable(backend=backend)
    for batch in (4, 7, 5, 9, 6):
        x = torch.randn(batch, 8, device=device)
        for each, around in ((reference, ca.disable()), (model, session)):
            each.zero_grad()
            loss = each(x).square().mean()
            with around:
                loss.backward()
        assert_grads(model, reference, bitwise=backend == "eager" and device == "cpu")
    expect(session.stats(), structure_misses=1, shape_misses=1, hits=3, captures=1)


def test_no_two_gradients_share_memory(device: str) -> None:
    x = torch.randn(4, device=device, requires_grad=True)
    y = torch.randn(4, device=device, requires_grad=True)
    with ca.enable(backend="eager") as session:
        (x + y).sum().backward()
    assert x.grad is not None and y.grad is not None
    assert x.grad.untyped_storage().data_ptr() != y.grad.untyped_storage().data_ptr()
    assert torch.equal(x.grad, torch.ones_like(x)) and torch.equal(y.grad, torch.ones_like(y))
    expect(session.stats(), structure_misses=1, captures=1)
