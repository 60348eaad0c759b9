"""Every form of DDP over fifty steps in two and four processes, bit for bit as eager DDP; and ranks that are late.

Gloo sums what four ranks have in an order that depends on where in a bucket it lies: with buckets of other contents or
in another order, bits differ.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

import compiled_autograd as ca

from .helpers import expect
from .pair import Pair
from .test_ddp import DistributedDataParallel, Join, compiled, extension, powerSGD_hook
from .test_ddp import builds as builds
from .test_distributed import (
    Branches,
    Case,
    Record,
    Tensors,
    _grads,
    _same,
    assert_as_eager,
    assert_averaged,
    branch_used_by_some,
    ddp_with_hook,
    default_hooks,
    own_batch,
    static_after_one_step,
    with_batch_norm,
)

RANKS, STEPS = 4, 50


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    started = Pair(tmp_path_factory.mktemp("four"), RANKS)
    yield started
    started.close()


def deep() -> nn.Module:
    """Layers of several sizes: with buckets of 16 KiB, each backward fills several."""
    sizes = (8, 60, 70, 80, 50, 40, 3)
    layers: list[nn.Module] = []
    for size, following in pairwise(sizes):
        layers += [nn.Linear(size, following), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


SMALL = {"bucket_cap_mb": 16 / 1024}


def power_sgd(model: nn.Module) -> nn.Module:
    """With one bucket: the hook communicates from callbacks, which for several buckets run in no order of their own."""
    wrapped = DistributedDataParallel(model)
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=10)
    wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return wrapped


def to_bf16(state, bucket):
    """The hook by another name: DDP refuses it by its own where there is no NCCL."""
    return default_hooks.bf16_compress_hook(state, bucket)


FORMS = {
    "buckets": Case(partial(DistributedDataParallel, **SMALL), deep),
    "one_bucket": Case(DistributedDataParallel, deep),
    "bucket_views": Case(partial(DistributedDataParallel, gradient_as_bucket_view=True, **SMALL), deep, batches=2),
    "no_sync": Case(partial(DistributedDataParallel, **SMALL), deep, batches=3),
    "static_graph": Case(partial(DistributedDataParallel, static_graph=True, **SMALL), deep),
    "static_graph_no_sync": Case(static_after_one_step, deep, batches=2),
    "unused": Case(partial(DistributedDataParallel, find_unused_parameters=True), Branches, branch_used_by_some),
    "buffers": Case(DistributedDataParallel, with_batch_norm),
    "fp16": Case(partial(ddp_with_hook, hook=default_hooks.fp16_compress_hook), deep),
    "bf16": Case(partial(ddp_with_hook, hook=to_bf16), deep),
    "power_sgd": Case(power_sgd, deep),
}
HALVED = ("fp16", "bf16")
TUNED = "buckets_tuned"
TWO_STRUCTURES = ("static_graph", "unused")
"""Leaves that are told to the reducer in the first backward alone; a layer that is used in turn."""


def steady(rank: int, builds: Path, case: Case, tune: bool) -> Record:
    """As :func:`compiled`; without ``tune`` nothing is timed on eager."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMPILED_AUTOGRAD_TUNE", str(tune).lower())
        return compiled(rank, builds, case)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", ["pair", "four"])
@pytest.mark.parametrize("name", [*FORMS, TUNED])
def test_every_form_is_bit_for_bit_eagers(request: pytest.FixtureRequest, builds: Path, name: str, ranks: str) -> None:
    """With ``tune``, each rank runs other backwards on eager than the others do."""
    case = replace(FORMS[name.removesuffix("_tuned")], steps=STEPS)
    processes: Pair = request.getfixturevalue(ranks)
    records = processes.run(steady, builds, case, name == TUNED, seconds=300.0)
    assert_as_eager(records)
    assert_averaged(records, case, low=name in HALVED)
    misses = 2 if case.batches > 1 or name in TWO_STRUCTURES else 1  # with .grad and without
    for each in records:
        stats = each.stats
        assert (stats.tuning > 0) == (name == TUNED) and set(stats.bypasses) <= {"not_worth_it"}
        expect(
            stats,
            structure_misses=misses,
            hits=STEPS * case.batches - misses - stats.tuning - sum(stats.bypasses.values()),
            bypasses=stats.bypasses,
            captures=misses,
            tuning=stats.tuning,
        )


# ---- ranks that do not do the same ---------------------------------------------------------------------------------


def _uneven(rank: int, builds: Path, enabled: bool) -> tuple[Tensors, ca.Stats]:
    """A rank has the more batches the higher its number."""
    with extension(builds):
        session = ca.enable(backend="eager", tune=False)
        torch.manual_seed(0)
        model = DistributedDataParallel(deep(), **SMALL)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Join([model]):
            for step in range(STEPS + 5 * rank):
                loss = model(*own_batch(step, rank)).square().mean()
                with session if enabled else contextlib.nullcontext():
                    loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        return {name: each.detach().clone() for name, each in model.named_parameters()}, session.stats()


@pytest.mark.slow
def test_ranks_with_uneven_inputs(four: Pair, builds: Path) -> None:
    """Those that are through go on with the communication of the others."""
    eager, found = (four.run(_uneven, builds, enabled, seconds=200.0) for enabled in (False, True))
    _same([weights for weights, _ in found], [weights for weights, _ in eager])
    for rank, (_, stats) in enumerate(found):
        expect(stats, structure_misses=1, hits=STEPS + 5 * rank - 1)


def _late(rank: int, builds: Path, seed: int, enabled: bool) -> tuple[list[Tensors], ca.Stats]:
    """Each rank by itself is late, comes with another size, forgets all that it knows or goes on with eager."""
    chance = random.Random(10 * seed + rank)
    with extension(builds):
        session = ca.enable(backend="eager", dynamic=False, on_miss=("compile", "background")[seed % 2])
        torch.manual_seed(0)
        model = DistributedDataParallel(deep(), **SMALL)

        def wait(grad: torch.Tensor) -> None:
            if chance.random() < 0.2:
                time.sleep(chance.random() / 5)

        found = []
        for step in range(STEPS // 2):
            batch = torch.randn(chance.choice((3, 5, 5, 5, 5 + step)), 8)
            forgets, compiles = chance.random() < 0.1, chance.random() < 0.8
            if forgets and enabled:
                ca.reset()
            if step % 2:
                session.wait(30)  # on a busy machine nothing that is compiled beside would be ready before the end
            hidden = model.module[:5](batch) * 0  # so that there is code of the user's in the middle
            hidden.register_hook(wait)
            loss = model(batch).square().mean() + hidden.sum()
            with session if enabled and compiles else contextlib.nullcontext():
                loss.backward()
            found.append(_grads(model.parameters()))
            model.zero_grad()
        return found, session.stats()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_ranks_that_are_late_or_miss_while_others_hit(four: Pair, builds: Path, seed: int) -> None:
    eager, found = (four.run(_late, builds, seed, enabled, seconds=100.0) for enabled in (False, True))
    for (grads, stats), (wanted, _) in zip(found, eager, strict=True):
        _same(grads, wanted)
        assert stats.hits and stats.shape_misses + stats.structure_misses + stats.bypasses.get("compiling", 0) > 1
        assert set(stats.bypasses) <= {"compiling", "not_worth_it"}
