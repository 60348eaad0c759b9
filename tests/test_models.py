"""Real models: trained side by side with eager, bit for bit on ``eager``, within rounding on ``inductor``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import compiled_autograd as ca
from benchmarks.models import GPT, BasicBlock, ResidualMLP, UnrolledLSTM

from .helpers import MakeLoss, assert_grads, compare, expect, mlp

Case = tuple[Callable[[], Any], MakeLoss]


def _mlp() -> Case:
    x, y = torch.randn(6, 8), torch.randn(6, 3)
    return mlp, lambda model: F.mse_loss(model(x), y)


def _residual_mlp() -> Case:
    x = torch.randn(4, 8)
    return lambda: ResidualMLP(blocks=6, width=8), lambda model: model(x).square().mean()


def _gpt(dropout: float = 0.0) -> Case:
    tokens, targets = torch.randint(20, (2, 12)), torch.randint(20, (24,))

    def make() -> nn.Module:
        return GPT(vocabulary=20, block_size=12, layers=2, width=16, heads=2, dropout=dropout)

    return make, lambda model: F.cross_entropy(model(tokens).flatten(0, 1), targets)


def _gpt_with_dropout() -> Case:
    return _gpt(0.3)


class _SmallResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2))
        self.blocks = nn.Sequential(BasicBlock(4, 4, 1), BasicBlock(4, 8, 2))
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, 3, height, width] -> logits [batch, 5]."""
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


def _resnet() -> Case:
    images, labels = torch.randn(2, 3, 8, 8), torch.randint(5, (2,))
    return _SmallResNet, lambda model: F.cross_entropy(model(images), labels)


def _convolutions() -> Case:
    x = torch.randn(2, 2, 10)

    def make() -> nn.Module:
        return nn.Sequential(
            nn.Conv1d(2, 4, 3, stride=2, groups=2),
            nn.GroupNorm(2, 4),
            nn.ConvTranspose1d(4, 2, 3),
            nn.InstanceNorm1d(2, affine=True),
            nn.AvgPool1d(2),
        )

    return make, lambda model: model(x).square().sum()


def _unrolled_lstm() -> Case:
    x, y = torch.randn(5, 3, 4), torch.randn(3, 1)
    return lambda: UnrolledLSTM(features=4, hidden=6), lambda model: F.mse_loss(model(x), y)


def _lstm() -> Case:
    x = torch.randn(5, 2, 4)
    return lambda: nn.LSTM(4, 6, num_layers=2, bidirectional=True), lambda model: model(x)[0].square().mean()


def _gru() -> Case:
    x = torch.randn(5, 2, 4)
    return lambda: nn.GRU(4, 6, batch_first=True), lambda model: model(x)[0].sin().sum()


def _attention() -> Case:
    x, y = torch.randn(2, 5, 8), torch.randn(2, 3, 8)
    return (
        lambda: nn.MultiheadAttention(8, 2, batch_first=True, dropout=0.1),
        lambda model: model(x, y, y)[0].square().mean(),
    )


def _encoder() -> Case:
    x = torch.randn(2, 5, 8)

    def make() -> nn.Module:
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    return make, lambda model: model(x).square().mean()


def _embeddings() -> Case:
    tokens, bags = torch.randint(7, (3, 4)), torch.randint(7, (3, 2))

    def make() -> nn.Module:
        return nn.ModuleList([nn.Embedding(7, 5, padding_idx=0), nn.EmbeddingBag(7, 5, mode="mean")])

    return make, lambda model: (model[0](tokens).mean(1) * model[1](bags)).sum()


def _dropout() -> Case:
    x = torch.randn(6, 8)

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.AlphaDropout(0.3))

    return make, lambda model: model(x).square().mean()


def _shared_and_frozen() -> Case:
    x = torch.randint(7, (3,))

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(7, 5)
            self.middle = nn.Linear(5, 5)
            self.head = nn.Linear(5, 7)
            self.head.weight = self.embed.weight
            self.middle.bias.requires_grad_(False)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.head(self.middle(self.embed(tokens)).relu())

    return Tied, lambda model: F.cross_entropy(model(x), x)


class _Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))
        self.scale = nn.Parameter(torch.randn(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spectrum = torch.fft.fft(x * self.scale) @ self.weight
        return torch.fft.ifft(spectrum * spectrum.conj()).abs()


def _complex() -> Case:
    x = torch.randn(3, 4)
    return _Complex, lambda model: model(x).sum()


def _float64() -> Case:
    x = torch.randn(6, 8, dtype=torch.float64)
    return lambda: mlp(dtype=torch.float64), lambda model: model(x).square().mean()


def _linear_algebra() -> Case:
    def loss(model: nn.Module) -> torch.Tensor:
        w = model.weight
        symmetric = w @ w.t() + torch.eye(4) * 4
        return torch.linalg.cholesky(symmetric).sum() + torch.logdet(symmetric) + torch.linalg.solve(symmetric, w).sum()

    return lambda: nn.Linear(4, 4, bias=False), loss


def _indexing() -> Case:
    index = torch.tensor([0, 2, 2, 5])

    def loss(model: nn.Module) -> torch.Tensor:
        w = model.weight
        picked = w[index] * w.gather(0, index[:, None].expand(4, 6))
        scattered = torch.zeros(6, 6).scatter_add(0, index[:, None].expand(4, 6), picked @ w)
        return (scattered.where(scattered > 0, -scattered) + w.topk(6, dim=1).values).sum()

    return lambda: nn.Linear(6, 6, bias=False), loss


CASES = [
    _mlp,
    _residual_mlp,
    _gpt,
    _gpt_with_dropout,
    _resnet,
    _convolutions,
    _unrolled_lstm,
    _lstm,
    _gru,
    _attention,
    _encoder,
    _embeddings,
    _dropout,
    _shared_and_frozen,
    _complex,
    _float64,
    _linear_algebra,
    _indexing,
]


@pytest.mark.parametrize("case", CASES)
def test_bit_for_bit_eager(case: Callable[[], Case]) -> None:
    """Three steps of training; the second compiles nothing, and hits."""
    make, loss = case()
    result = compare(make, loss, steps=3)
    first, second, third = result.history
    assert (first.structure_misses, first.hits) == (1, 0)
    assert (second.hits, second.compiles, second.captures) == (1, first.compiles, 1)
    assert (third.hits, third.compiles, third.captures) == (2, first.compiles, 1)


@pytest.mark.parametrize("case", CASES)
def test_bit_for_bit_with_gradients_kept(case: Callable[[], Case]) -> None:
    """Accumulation over steps: a first structure without ``.grad``, a second with it, then hits."""
    make, loss = case()
    result = compare(make, loss, steps=4, keep_grads=True)
    assert result.stats.hits == 2 and result.stats.captures == 2


@pytest.mark.parametrize("case", [_mlp, _gpt, _resnet, _encoder, _unrolled_lstm])
def test_bf16_autocast(case: Callable[[], Case]) -> None:
    make, loss = case()

    def in_float(model: nn.Module) -> torch.Tensor:
        return loss(model).float()

    compare(make, in_float, around=lambda: torch.autocast("cpu", dtype=torch.bfloat16))


def test_forward_in_autocast_backward_outside() -> None:
    """As PyTorch recommends it."""
    x = torch.randn(4, 8)

    def loss(model: nn.Module) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(x).float().square().mean()

    compare(mlp, loss)


@pytest.mark.parametrize("case", [_mlp, _gpt, _resnet])
def test_a_model_in_bf16(case: Callable[[], Case]) -> None:
    if case is _gpt:
        make, loss = case()
        compare(lambda: make().to(torch.bfloat16), loss)
        return
    x = torch.randn(2, 3, 8, 8).bfloat16() if case is _resnet else torch.randn(4, 8).bfloat16()
    factory: Callable[[], Any] = _SmallResNet if case is _resnet else mlp
    compare(lambda: factory().to(torch.bfloat16), lambda model: model(x).float().square().mean())


def test_several_losses_share_a_tape() -> None:
    x = torch.randn(4, 8)

    def losses(model: nn.Module) -> list[torch.Tensor]:
        hidden = model(x)
        return [hidden.square().mean(), hidden.sin().sum(), hidden.abs().max()]

    result = compare(mlp, losses, steps=2, counts=False)
    expect(result.stats, structure_misses=3, hits=3)


def test_a_model_whose_structure_changes_by_step() -> None:
    x = torch.randn(4, 8)
    calls = iter([0, 0, 1, 1, 0, 0, 1, 1])  # each number twice: once for each copy

    def loss(model: nn.Module) -> torch.Tensor:
        hidden = model[0](x)
        if next(calls):
            hidden = model[2](hidden).relu()
        return hidden.sum()

    result = compare(mlp, loss, steps=4, counts=False)
    expect(result.stats, structure_misses=2, hits=2, captures=2)


def test_batches_of_different_sizes() -> None:
    sizes = iter([4, 4, 2, 2, 4, 4, 2, 2])

    def loss(model: nn.Module) -> torch.Tensor:
        return model(torch.ones(next(sizes), 8)).square().sum()

    result = compare(mlp, loss, steps=4, counts=False)
    expect(result.stats, structure_misses=1, shape_misses=1, hits=2, captures=1)


def test_a_real_optimiser_with_clipping_and_a_scheduler() -> None:
    """Twenty steps of AdamW: weights stay bit for bit equal."""
    import copy

    x, y = torch.randn(16, 8), torch.randint(3, (16,))
    models = [mlp()]
    models.append(copy.deepcopy(models[0]))
    session = ca.enable(backend="eager")
    for model, context in zip(models, (ca.disable(), session), strict=True):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
        for _ in range(20):
            optimizer.zero_grad()
            with context:
                F.cross_entropy(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
    for one, other in zip(models[1].parameters(), models[0].parameters(), strict=True):
        assert torch.equal(one, other)
    assert_grads(models[1], models[0])
    expect(session.stats(), structure_misses=1, hits=19)


def test_gradients_with_respect_to_inputs() -> None:
    model = mlp()
    session = ca.enable(backend="eager")
    for _ in range(2):
        x = torch.randn(4, 8, requires_grad=True)
        (wanted,) = torch.autograd.grad(model(x).square().sum(), x)
        with session:
            (found,) = torch.autograd.grad(model(x).square().sum(), x)
        assert torch.equal(found, wanted)
    expect(session.stats(), structure_misses=1, hits=1)


# ---- inductor: a few here, the rest slow -----------------------------------------------------------------------------

_FAST_ON_INDUCTOR = [_mlp, _gpt, _resnet]


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case is _mlp else pytest.mark.slow) for case in _FAST_ON_INDUCTOR]
)
def test_inductor_within_rounding(case: Callable[[], Case]) -> None:
    make, loss = case()
    result = compare(make, loss, backend="inductor", steps=3)
    assert result.stats.compiles == 1


def test_inductor_with_a_python_function_in_the_middle() -> None:
    class Triples(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 3

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * 3

    x = torch.randn(4, 8)
    result = compare(mlp, lambda model: Triples.apply(model(x)).square().mean(), backend="inductor", steps=3)
    assert result.stats.compiles == 2


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case not in _FAST_ON_INDUCTOR])
def test_inductor_within_rounding_of_everything_else(case: Callable[[], Case]) -> None:
    make, loss = case()
    compare(make, loss, backend="inductor", steps=3)


@pytest.mark.slow
@pytest.mark.parametrize("case", [_mlp, _gpt, _encoder])
def test_inductor_with_gradients_kept(case: Callable[[], Case]) -> None:
    make, loss = case()
    compare(make, loss, backend="inductor", steps=4, keep_grads=True)


@pytest.mark.slow
@pytest.mark.parametrize("case", [_mlp, _gpt])
def test_inductor_in_bf16_autocast(case: Callable[[], Case]) -> None:
    make, loss = case()
    compare(
        make,
        lambda model: loss(model).float(),
        backend="inductor",
        low=True,
        around=lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    )
