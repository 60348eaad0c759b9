"""Random models under DDP with random forms of it, compiled beside eager: two processes on gloo, bit for bit."""

from __future__ import annotations

import contextlib
import gc
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import compiled_autograd as ca

from .pair import Pair
from .test_ddp import DistributedDataParallel, _GivesNone, default_hooks, extension
from .test_ddp import builds as builds

STEPS, FEATURES = 6, 8
SETTINGS: list[dict[str, Any]] = [{}, {"check": True}, {"check": 2}, {"dynamic": False}, {"on_miss": "background"}]
LAYERS = ("plain", "checkpointed", "residual", "undefined", "skipped", "shared")


class Random(nn.Module):
    """Layers of random kinds; a wide one, so that there is more than one bucket."""

    def __init__(self, chance: random.Random, same_each_time: bool) -> None:
        super().__init__()
        kinds = [kind for kind in LAYERS if not (same_each_time and kind in ("undefined", "skipped"))]
        self.kinds = [chance.choice(kinds) for _ in range(chance.randint(2, 5))]
        self.layers = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in self.kinds)
        self.up = nn.Linear(FEATURES, chance.choice((FEATURES, 700)))
        self.down = nn.Linear(self.up.out_features, FEATURES)
        self.scale = nn.Parameter(torch.ones(FEATURES))
        for layer in self.layers:
            layer.weight.requires_grad_(chance.random() < 0.85)

    def forward(self, batch: torch.Tensor, skips: bool) -> torch.Tensor:
        x = batch * self.scale
        for kind, layer in zip(self.kinds, self.layers, strict=True):
            x = self.one(kind, layer, x, skips)
        result: torch.Tensor = self.down(self.up(x).sigmoid())
        return result

    def one(self, kind: str, layer: nn.Module, x: torch.Tensor, skips: bool) -> torch.Tensor:
        """What a layer of a kind gives."""
        if kind == "checkpointed":
            given: torch.Tensor = checkpoint(lambda value: layer(value).tanh(), x, use_reentrant=False)
            return given
        if kind == "residual":
            return x + layer(x).relu()
        if kind == "undefined":
            scaled: torch.Tensor = _GivesNone.apply(layer(x), self.scale)
            return scaled
        if kind == "skipped" and skips:
            return x.sin()
        return layer(layer(x).tanh()) if kind == "shared" else layer(x).tanh()


def _wrapped(model: nn.Module, chance: random.Random, static: bool) -> Callable[[], DistributedDataParallel]:
    views, small = chance.random() < 0.4, chance.random() < 0.3
    how: dict[str, Any] = {"bucket_cap_mb": 1e-3} if small else {}
    how |= {"gradient_as_bucket_view": views, "static_graph": static, "find_unused_parameters": not static}
    compresses = static and chance.random() < 0.4

    def wrap() -> DistributedDataParallel:
        wrapped = DistributedDataParallel(model, **how)
        if compresses:
            wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
        return wrapped

    return wrap


def _copies(parameters: list[nn.Parameter]) -> list[torch.Tensor | None]:
    return [None if each.grad is None else each.grad.clone() for each in parameters]


def _training(rank: int, builds: Path, seed: int, enabled: bool) -> tuple[list[Any], dict[str, int]]:
    """What was seen of the gradients, and how often a backward ended how."""
    chance, seen, outcomes = random.Random(seed), [], dict.fromkeys(("hit", "missed", "left"), 0)
    with extension(builds):
        session = ca.enable(backend="eager", tune=False, **chance.choice(SETTINGS))
        torch.manual_seed(seed)
        static = chance.random() < 0.2
        model, trunk, other = Random(chance, static), nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
        wrap = _wrapped(model, chance, static)
        wrapped, last = wrap(), DistributedDataParallel(other) if chance.random() < 0.3 else other
        parameters = [each for part in (model, trunk, other) for each in part.parameters() if each.requires_grad]
        for each in parameters:
            if chance.random() < 0.15:
                each.register_hook(lambda grad: None if grad is None else grad * 1.5)
        optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
        parts, sets_none, toggles = chance.choice((1, 1, 2, 3)), chance.random() < 0.5, chance.random() < 0.2
        for step in range(STEPS):
            length = chance.choice((3, 4, 5, 9)) + (rank if chance.random() < 0.3 else 0)
            for part in range(parts):
                make = torch.Generator().manual_seed(1000 * step + 10 * part + rank)
                batch = torch.randn(length, FEATURES, generator=make)
                skips, on = chance.random() < 0.5, enabled and not (toggles and step % 2)
                with wrapped.no_sync() if part < parts - 1 and not static else contextlib.nullcontext():
                    loss = last(wrapped(trunk(batch), skips)).square().mean()
                    with session if on else contextlib.nullcontext():
                        loss.backward()
                if on and session.last is not None:
                    how = {"hit": "hit", "bypass": "left"}.get(session.last.outcome, "missed")
                    outcomes[how] += 1
            seen.append(_copies(parameters))
            optimizer.step()
            optimizer.zero_grad(set_to_none=sets_none)
            if chance.random() < 0.1:
                del wrapped
                gc.collect()
                wrapped = wrap()
        return [*seen, [each.detach().clone() for each in parameters]], outcomes


def _leaves(what: Any) -> Iterator[Any]:
    for each in what:
        yield from _leaves(each) if isinstance(each, list) else (each,)


@pytest.mark.parametrize("seed", [1, *(pytest.param(each, marks=pytest.mark.slow) for each in (0, *range(2, 120)))])
def test_a_random_training_is_bit_for_bit_eagers(pair: Pair, builds: Path, seed: int) -> None:
    eager, found = (pair.run(_training, builds, seed, enabled) for enabled in (False, True))
    for (wanted, _), (seen, outcomes) in zip(eager, found, strict=True):
        for value, other in zip(_leaves(wanted), _leaves(seen), strict=True):
            assert (value is None and other is None) or torch.allclose(value, other, rtol=0, atol=0, equal_nan=True)
        assert outcomes["hit"] + outcomes["missed"] > 0, outcomes
