"""CUDA graphs on a device: trainings compared with eager, in which what is kept, moved and changed varies.

``tests/test_cuda_graphs.py`` has the same on a stand-in. ``python -m pytest -m gpu`` runs these.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import compiled_autograd as ca
from backends.inductor.cuda.graphs import Replayed
from benchmarks.models import ResidualMLP, UnrolledLSTM

from .helpers import assert_grads, assert_same, expect, mlp

pytestmark = pytest.mark.gpu
MODE = "reduce-overhead"


class Training:
    """Two copies of a model, one under eager and one under CUDA graphs, step by step."""

    def __init__(self, make: Callable[[], nn.Module], loss: Callable[[nn.Module], torch.Tensor], **settings: Any):
        torch.manual_seed(0)
        self.session = ca.enable(mode=MODE, **settings)
        self.model = make().to("cuda")
        self.reference = copy.deepcopy(self.model)
        self.loss = loss
        self.optimizers = [torch.optim.SGD(each.parameters(), 1e-3) for each in (self.reference, self.model)]

    def step(self, zero: bool = True, to_none: bool = True) -> None:
        for each, optimizer, around in zip(
            (self.reference, self.model), self.optimizers, (ca.disable(), self.session), strict=True
        ):
            if zero:
                optimizer.zero_grad(set_to_none=to_none)
            loss = self.loss(each)
            with around:
                loss.backward()
        assert_grads(self.model, self.reference, bitwise=False)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.step()
            for optimizer in self.optimizers:
                optimizer.step()

    def regions(self) -> list[Replayed]:
        """All that may run as CUDA graphs."""
        found = []
        for graph in self.session.graphs():
            for variant in graph.variants:
                for region in variant.regions:
                    found += [each.call for each in region.compiled_regions() if isinstance(each.call, Replayed)]
        return list({id(each): each for each in found}.values())

    def replays(self) -> int:
        return sum(each.replays for each in self.regions())


def _mlp_loss(model: nn.Module, batch: int = 16) -> torch.Tensor:
    return model(torch.linspace(-1, 1, 8 * batch, device="cuda").view(batch, 8)).square().mean()


def test_an_mlp(cuda: str) -> None:
    training = Training(lambda: mlp(depth=4), _mlp_loss)
    training.train(60)
    expect(training.session.stats(), structure_misses=1, hits=59, captures=1)
    (region,) = training.regions()
    assert region.why_not == "" and region.replays >= 25 and region.captures <= 12


def test_numbers_that_the_forward_multiplies_by(cuda: str) -> None:
    """``0.5 * x`` saves a tensor on the CPU, a new one in each step."""
    x = torch.randn(32, 32, device=cuda)
    training = Training(lambda: ResidualMLP(blocks=6), lambda model: model(x).square().mean())
    training.train(60)
    expect(training.session.stats(), structure_misses=1, hits=59, captures=1)
    assert training.replays() >= 20


def test_a_number_that_changes_is_never_a_stale_one(cuda: str) -> None:
    x, numbers = torch.randn(8, 8, device=cuda), iter(range(1, 1000))
    scale = [1.0]
    training = Training(mlp, lambda model: (scale[0] * model(x)).square().mean())
    for _ in range(20):
        scale[0] = next(numbers) / 10
        training.step()
    for _ in range(20):
        training.step()
    assert training.replays() > 0
    scale[0] = -0.0
    training.step()
    expect(training.session.stats(), structure_misses=1, hits=40, captures=1)


def test_an_lstm(cuda: str) -> None:
    x, y = torch.randn(12, 4, 8, device=cuda), torch.randn(4, 1, device=cuda)
    training = Training(lambda: UnrolledLSTM(8, 16), lambda model: F.mse_loss(model(x), y))
    training.train(60)
    assert training.replays() >= 20


def test_layers_that_share_their_code(cuda: str) -> None:
    x = torch.randn(4, 16, 32, device=cuda)

    def make() -> nn.Module:
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        return nn.TransformerEncoder(layer, 5, enable_nested_tensor=False)

    training = Training(make, lambda model: model(x).square().mean())
    training.train(60)
    assert training.replays() >= 60
    assert training.session.stats().hits == 59


def test_a_convolutional_network_with_dropout(cuda: str) -> None:
    images, labels = torch.randn(8, 3, 16, 16, device=cuda), torch.randint(5, (8,), device=cuda)

    def make() -> nn.Module:
        return nn.Sequential(
            *(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.3)),
            *(nn.Conv2d(8, 8, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(288, 5)),
        )

    def loss(model: nn.Module) -> torch.Tensor:
        torch.manual_seed(1)
        return F.cross_entropy(model(images), labels)

    training = Training(make, loss)
    training.train(20)
    assert training.session.stats().hits == 19


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_that_add_up(cuda: str, to_none: bool) -> None:
    training = Training(mlp, _mlp_loss)
    for step in range(80):
        training.step(zero=step % 4 == 0, to_none=to_none)
    assert training.replays() >= 20


def test_whatever_users_keep_stays(cuda: str) -> None:
    training, kept = Training(mlp, _mlp_loss), []
    for step in range(60):
        training.step()
        if step % 3 == 0:
            grads = [each.grad for each in training.model.parameters()]
            kept.append((grads, [None if each is None else each.clone() for each in grads]))
        for optimizer in training.optimizers:
            optimizer.step()
    for grads, copies in kept:
        assert_same(grads, copies)
    assert training.replays() > 0


def test_autograd_grad_and_one_tape_many_times(cuda: str) -> None:
    training = Training(mlp, _mlp_loss)
    parameters = list(training.model.parameters())
    loss = training.loss(training.model)
    wanted = torch.autograd.grad(loss, parameters, retain_graph=True)
    kept = []
    for _ in range(20):
        with training.session:
            kept.append(torch.autograd.grad(loss, parameters, retain_graph=True))
    for found in kept:
        assert_same(found, wanted, bitwise=False)
    kept.clear()
    for _ in range(5):
        with training.session:
            assert_same(torch.autograd.grad(loss, parameters, retain_graph=True), wanted, bitwise=False)
    assert training.replays() >= 5


def test_hooks_see_what_eager_gives(cuda: str) -> None:
    training = Training(mlp, _mlp_loss)
    seen: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    for model, into in zip((training.reference, training.model), seen, strict=True):
        model[0].weight.register_hook(into.append)  # type: ignore[index, union-attr, operator]
        model[2].weight.register_hook(lambda grad: grad * 2)  # type: ignore[index, union-attr, operator]
    training.train(25)
    assert_same(seen[1], seen[0], bitwise=False)


def test_batches_of_many_sizes(cuda: str) -> None:
    training, sizes = Training(mlp, lambda model: _mlp_loss(model, size[0])), [16, 24, 7]
    size = [16]
    for step in range(45):
        size[0] = sizes[step % 3]
        training.step()
    assert training.session.stats().bypasses == {}


def test_the_number_of_graphs_stays_small_where_memory_moves(cuda: str) -> None:
    training, ballast = Training(mlp, _mlp_loss), []
    for step in range(60):
        ballast.append(torch.empty(1 << (8 + step % 12), device=cuda))
        if step % 7 == 0:
            ballast.clear()
        training.step()
    (region,) = training.regions()
    assert region.captures <= 170


def test_memory_does_not_grow(cuda: str) -> None:
    training = Training(lambda: mlp(width=256, depth=6), lambda model: model(x).square().mean())
    x = torch.randn(256, 256, device=cuda)
    training.train(60)
    torch.cuda.synchronize()
    before = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
    training.train(60)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before[1] + (1 << 20)
    assert torch.cuda.memory_reserved() <= before[0] + (8 << 20)


def test_two_threads(cuda: str) -> None:
    trainings = [Training(mlp, _mlp_loss) for _ in range(2)]
    barrier = threading.Barrier(2)

    def train(training: Training) -> None:
        torch.cuda.set_device(0)
        for _ in range(25):
            barrier.wait(60)
            training.step()

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(train, trainings))


def test_on_a_stream_of_its_own_and_beside_a_prefetcher(cuda: str) -> None:
    stream, prefetch = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        training = Training(mlp, _mlp_loss)
        for _ in range(60):
            with torch.cuda.stream(prefetch):
                torch.randn(1 << 16).pin_memory().to(cuda, non_blocking=True)
            training.step()
    torch.cuda.synchronize()
    assert training.replays() >= 10


def test_beside_a_graph_of_the_users(cuda: str) -> None:
    """A step that the user captures is eager's; ours go on around it."""
    training = Training(mlp, _mlp_loss)
    training.train(40)
    static = torch.randn(4, 4, device=cuda)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        doubled = static * 2
    training.train(40)
    graph.replay()
    assert torch.equal(doubled, static * 2)
    assert training.replays() >= 12


def test_a_graph_of_nothing_but_half_precision(cuda: str) -> None:
    training = Training(
        lambda: mlp(width=64, depth=3).to(torch.bfloat16), lambda model: model(x).float().square().mean()
    )
    x = torch.randn(32, 64, device=cuda, dtype=torch.bfloat16)
    for _ in range(60):
        for each, around in ((training.reference, ca.disable()), (training.model, training.session)):
            each.zero_grad()
            loss = training.loss(each)
            with around:
                loss.backward()
        assert_grads(training.model, training.reference, bitwise=False, low=True)
    assert training.replays() >= 10
