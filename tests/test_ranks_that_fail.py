"""A rank is killed, or stops: the others have a clear error within the process group's timeout, and train on."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import compiled_autograd as ca

from .helpers import mlp
from .pair import Pair, RankFailedError
from .test_ddp import DistributedDataParallel, extension
from .test_ddp import builds as builds
from .test_distributed import _same, fully_shard, own_batch

RANKS, LAST, TIMEOUT = 4, 4, 4.0
SLACK = 6.0
"""Seconds that may go by beside the timeout, where the machine has other things to do."""


@pytest.fixture
def four(tmp_path: Path) -> Iterator[Pair]:
    started = Pair(tmp_path, RANKS, timeout=TIMEOUT, patience=2 * TIMEOUT + SLACK)
    yield started
    started.close()


def _die(*_: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop(*_: Any) -> None:
    time.sleep(2 * TIMEOUT)


def _sharded(model: Any) -> nn.Module:
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


WAYS = {"ddp": DistributedDataParallel, "fsdp2": _sharded}


def _train(rank: int, builds: Path, way: str, where: str) -> None:
    """The last step is that in which one rank fails. What the others catch, they raise after they have looked about."""
    with extension(builds):
        session = ca.enable(backend="eager", tune=False)
        model = WAYS[way](mlp())
        for step in range(LAST + 1):
            fails = (rank, step) == (RANKS - 1, LAST)
            output = model(*own_batch(step, rank))
            began = time.monotonic()
            if fails and where in ("killed", "stopped"):
                output.register_hook(_die if where == "killed" else _stop)
            if fails and where == "killed while it compiles":
                session = ca.enable(backend=_die)
            try:
                with session:
                    output.square().mean().backward()
            except RuntimeError as error:
                seconds = time.monotonic() - began
                assert step == LAST and (fails or seconds < TIMEOUT + SLACK), (step, seconds)
                assert session.last is not None
                _look_about(session)
                raise RuntimeError(f"{error}: after {session.last.outcome}") from error


def _look_about(session: ca.Session) -> None:
    """A model of this rank alone trains on, compiled and with eager's gradients."""
    grads = []
    for compiles in (False, True, True):
        torch.manual_seed(1)
        alone = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2))
        with session if compiles else ca.disable():
            alone(torch.randn(4, 5)).square().mean().backward()
        grads.append({name: each.grad for name, each in alone.named_parameters()})
    _same(grads[1:], [grads[0]] * 2)
    assert session.last is not None and session.last.outcome == "hit"


CASES = [(way, where) for way in WAYS for where in ("killed", "killed while it compiles", "stopped")]


@pytest.mark.slow
@pytest.mark.parametrize(("way", "where"), CASES)
def test_the_others_have_an_error_within_the_timeout(four: Pair, builds: Path, way: str, where: str) -> None:
    with pytest.raises(RankFailedError) as raised:
        four.run(_train, builds, way, where, seconds=90.0)
    *others, failed = re.split(r"^rank \d: ", str(raised.value), flags=re.MULTILINE)[1:]
    assert len(others) == RANKS - 1
    for each in others:
        last = each.strip().splitlines()[-1]
        assert re.match(r"RuntimeError: .*(Connection|Timed out|timeout).*: after hit$", last), each
    assert "died with exit code -9" in failed or where == "stopped"


# ---- two ranks, which fail at once ---------------------------------------------------------------------------------


def _raises(rank: int, builds: Path) -> None:
    with extension(builds):
        session = ca.enable(backend="eager")
        model = DistributedDataParallel(mlp())

        def refuse(leaf: torch.Tensor) -> None:
            raise ZeroDivisionError("of the user's")

        if rank == 0:
            next(model.parameters()).register_post_accumulate_grad_hook(refuse)
        with session:
            model(*own_batch(0, rank)).square().mean().backward()


@pytest.mark.slow
def test_an_exception_in_a_hook_of_one_rank_is_raised(pair: Pair, builds: Path) -> None:
    with pytest.raises(RankFailedError, match="of the user's"):
        pair.run(_raises, builds, seconds=20.0)


def _dies(rank: int, builds: Path) -> None:
    with extension(builds):
        session = ca.enable(backend="eager")
        model = DistributedDataParallel(mlp())
        for step in range(4):
            loss = model(*own_batch(step, rank)).square().mean()
            if (rank, step) == (1, 2):
                os._exit(1)
            with session:
                loss.backward()


@pytest.mark.slow
def test_a_rank_that_dies_is_an_error_of_the_others(pair: Pair, builds: Path) -> None:
    with pytest.raises(RankFailedError, match=r"(?s)rank 0.*RuntimeError.*[Cc]onnection"):
        pair.run(_dies, builds, seconds=20.0)
