"""Random models in random forms of FSDP2, compiled beside eager: two processes, bit for bit, and in eager's order."""

from __future__ import annotations

import contextlib
import random
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import compiled_autograd as ca

from .fsdp_forms import EVENTS, Event, MixedPrecisionPolicy, _mesh, checkpoint_wrapper, fully_shard
from .helpers import Squares
from .pair import Pair
from .test_ddp import _GivesNone, extension
from .test_ddp import builds as builds
from .test_distributed import Tensors, _grads, _same, _whole
from .test_fsdp import _written_down

STEPS = 6
_SUM = "unsupported(a sum of gradients for a grad_dtype that a hook may change)"
"""Mixed precision and a layer that is used twice, from torch 2.15 on."""
SETTINGS: list[dict[str, Any]] = [
    {},
    {"check": True},
    {"dynamic": False},
    {"dynamic": True},
    {"on_miss": "background"},
]
FUNCTIONS: list[Callable[[torch.Tensor], torch.Tensor]] = [torch.tanh, torch.sigmoid, nn.functional.gelu, torch.relu]


class Layer(nn.Module):
    """Of one of the kinds that it has methods for, or a plain one."""

    def __init__(self, width: int, chance: random.Random) -> None:
        super().__init__()
        names = ("plain", "residual", "squares", "written", "view_written", "hooked", "anew", "twice", "undefined")
        self.kind = chance.choice((*names, "skipped"))
        self.linear, self.scale = nn.Linear(width, width), nn.Parameter(torch.ones(width))
        self.function = chance.choice(FUNCTIONS)

    def forward(self, x: torch.Tensor, skips: bool) -> Any:
        if self.kind == "skipped" and skips:
            return x.sin()
        return getattr(self, self.kind, self.plain)(x)

    def plain(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.linear(x))

    def residual(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.plain(x) * self.scale

    def squares(self, x: torch.Tensor) -> Any:
        return Squares.apply(self.plain(x))

    def written(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.linear(x).mul_(2))

    def view_written(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x).clone()
        y[:, :2] = x[:, 2:4] * 2
        return self.function(y)

    def hooked(self, x: torch.Tensor) -> torch.Tensor:
        y = self.plain(x)

        def halve(grad: torch.Tensor) -> torch.Tensor:
            EVENTS.append(("hook", grad.numel()))
            return grad * 0.5

        y.register_hook(halve)
        return y * self.scale

    def anew(self, x: torch.Tensor) -> Any:
        return checkpoint(self.residual, x, use_reentrant=False)

    def twice(self, x: torch.Tensor) -> torch.Tensor:
        again: torch.Tensor = self.linear(self.plain(x))
        return again

    def undefined(self, x: torch.Tensor) -> Any:
        return _GivesNone.apply(self.plain(x), self.scale)


class Net(nn.Module):
    """Layers of one width, some parameters of which are frozen."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        self.width = chance.choice((4, 7, 8))
        self.layers = nn.ModuleList(Layer(self.width, chance) for _ in range(chance.randint(1, 5)))
        self.scale, self.last = nn.Parameter(torch.ones(self.width)), nn.Linear(self.width, 3)
        for each in self.layers.parameters():
            each.requires_grad_(chance.random() < 0.9)

    def forward(self, x: torch.Tensor, skips: bool) -> torch.Tensor:
        x = x * self.scale
        for layer in self.layers:
            x = layer(x, skips)
        last: torch.Tensor = self.last(x)
        return last


def _sharded(net: Net, chance: random.Random) -> nn.Module:
    """Layers one by one, in pairs, checkpointed, or with the root."""
    mesh, how = _mesh(chance.choice([(2,), (2,), (2, 1), (1, 2)])), {}
    if chance.random() < 0.4:
        how["reshard_after_forward"] = chance.random() < 0.5
    if chance.random() < 0.3:
        reduces = chance.choice([None, torch.float32])
        how["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduces)
    shard = partial(fully_shard, mesh=mesh, **how)
    layers, index = list(net.layers), 0
    while index < len(layers):
        kind, pair_of = chance.random(), layers[index : index + 2]
        if kind < 0.15 and len(pair_of) == 2:
            shard(pair_of)
            index += 1
        elif kind < 0.7:
            shard(layers[index])
        elif kind < 0.85:
            net.layers[index] = checkpoint_wrapper(shard(layers[index]))
        index += 1
    model: Any = shard(net)
    model.set_reshard_after_backward(chance.random() < 0.8)
    return model


def _training(rank: int, builds: Path, seed: int, enabled: bool) -> tuple[list[Tensors], list[Event], ca.Stats]:
    warnings.simplefilter("ignore")
    chance, found = random.Random(seed), []
    native = extension(builds) if chance.random() < 0.5 else contextlib.nullcontext()
    with _written_down(), native:
        session = ca.enable(backend="eager", tune=False, **chance.choice(SETTINGS))
        torch.manual_seed(seed)
        net = Net(chance)
        model: Any = _sharded(net, chance)
        parameters = [each for each in model.parameters() if each.requires_grad]
        for each in parameters:
            if chance.random() < 0.15:
                each.register_post_accumulate_grad_hook(lambda leaf: EVENTS.append(("leaf", leaf.numel())))
        optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
        parts, sets_none, toggles = chance.choice((1, 1, 2)), chance.random() < 0.6, chance.random() < 0.3
        for step in range(STEPS):
            size = chance.choice((3, 4, 9)) + (rank if chance.random() < 0.3 else 0)
            for part in range(parts):
                model.set_requires_gradient_sync(part == parts - 1)
                make = torch.Generator().manual_seed(1000 * step + 10 * part + rank)
                skips, on = chance.random() < 0.4, enabled and not (toggles and (step + rank) % 2)
                loss = model(torch.randn(size, net.width, generator=make), skips).square().mean()
                with session if on else contextlib.nullcontext():
                    loss.backward()
                found.append(_grads(parameters))
            optimizer.step()
            optimizer.zero_grad(set_to_none=sets_none)
        found.append({str(index): _whole(each) for index, each in enumerate(parameters)})
        return found, list(EVENTS), session.stats()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100))
def test_a_random_training_is_bit_for_bit_eagers(pair: Pair, builds: Path, seed: int) -> None:
    eager, found = (pair.run(_training, builds, seed, enabled, seconds=120.0) for enabled in (False, True))
    for (wanted, in_order, _), (seen, events, stats) in zip(eager, found, strict=True):
        _same(seen, wanted)
        assert events == in_order
        served = stats.hits + stats.shape_misses + stats.structure_misses
        assert (served or _SUM in stats.bypasses) and not stats.failures
        assert set(stats.bypasses) <= {"compiling", _SUM}, stats
