"""DDP where nothing has built the extension yet: the first backward waits for it, or eager runs what cannot be had."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import compiled_autograd as ca
from compiled_autograd.engine import backward
from compiled_autograd.engine.native_hits import NATIVE_HITS
from compiled_autograd.native import library
from compiled_autograd.user_code.reducers import REDUCERS

from . import both_walks
from .helpers import mlp
from .pair import Pair
from .test_ddp import DistributedDataParallel
from .test_ddp import builds as builds
from .test_distributed import Tensors, _grads, _same, own_batch


@contextlib.contextmanager
def _slow_compiler(builds: Path, folder: Path) -> Iterator[pytest.MonkeyPatch]:
    """What it compiles, after a second, is what was built for other tests."""
    built = builds / f"{both_walks.library_in(builds)._name}.so"
    script = folder / "compiler"
    act = f'for each in "$@"; do last="$each"; done\nsleep 1\ncp {built} "$last"'
    script.write_text(f"#!/bin/sh\necho called >> {folder}/calls\n{act}\n")
    script.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "name_of_build", lambda: built.stem)
        patch.setattr(library, "_compiler", lambda: str(script))
        patch.setattr(NATIVE_HITS, "library", library.Library(folder / "native"))
        patch.setattr(REDUCERS, "module", None)
        yield patch


def _train(rank: int, steps: int, session: ca.Session | None) -> tuple[list[Tensors], list[str]]:
    torch.manual_seed(0)
    model, found, outcomes = DistributedDataParallel(mlp()), [], []
    for step in range(steps):
        model.zero_grad()
        loss = model(*own_batch(step, rank)).square().mean()
        with contextlib.nullcontext() if session is None else session:
            loss.backward()
        found.append(_grads(model.parameters()))
        if session is not None and session.last is not None:
            outcomes.append(session.last.outcome)
    return found, outcomes


def _first_steps(rank: int, builds: Path, folder: Path, settings: dict[str, Any] | None) -> Any:
    if settings is None:
        return _train(rank, 4, None)
    ca.reset()
    with _slow_compiler(builds, folder):
        return _train(rank, 4, ca.enable(backend="eager", tune=False, **settings))


@pytest.mark.parametrize("extension", ["all", "auto"])
def test_the_first_backward_waits_for_the_extension(pair: Pair, builds: Path, tmp_path: Path, extension: str) -> None:
    settings = {"extension": extension} | ({"cache_dir": str(tmp_path / "store")} if extension == "auto" else {})
    eager, found = (pair.run(_first_steps, builds, tmp_path, given) for given in (None, settings))
    for (wanted, _), (grads, outcomes) in zip(eager, found, strict=True):
        _same(grads, wanted)
        assert outcomes == ["structure_miss", "hit", "hit", "hit"]
    assert (tmp_path / "calls").read_text().split() == ["called"]


@pytest.mark.parametrize(
    "settings",
    [{"extension": "all", "on_miss": "background"}, {"extension": "auto", "cache_dir": False}],
    ids=["beside", "none"],
)
def test_it_waits_for_no_build_that_is_beside_or_not_wanted(
    pair: Pair, builds: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    eager, found = (pair.run(_first_steps, builds, tmp_path, given) for given in (None, settings))
    for (wanted, _), (grads, outcomes) in zip(eager, found, strict=True):
        _same(grads, wanted)
        assert outcomes[0] == "bypass"


def _without(rank: int) -> tuple[int, list[Tensors], list[Tensors]]:
    asked: list[object] = []
    steps, hand_over = 34, backward.hand_over
    eager, _ = _train(rank, steps, None)
    ca.reset()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backward, "hand_over", lambda *given: (asked.append(given), hand_over(*given))[1])
        session = ca.enable(backend="eager", extension="off")
        grads, _ = _train(rank, steps, session)
    assert session.stats().bypasses == {"ddp_cpp_reducer": steps}
    return len(asked), grads, eager


def test_without_the_extension_the_engine_is_asked_a_few_times_alone(pair: Pair) -> None:
    """Each time, it walks the tape until it comes to a hook: that took as long as a small backward."""
    for walks, grads, eager in pair.run(_without):
        assert walks == 6, "after none, one, two, four and eight backwards without"
        _same(grads, eager)
