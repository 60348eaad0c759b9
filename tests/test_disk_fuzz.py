"""Bytes of the store's files changed between two processes: never a crash, never a gradient that is not eager's."""

from __future__ import annotations

import os
import random
import shutil
import warnings
from pathlib import Path

import pytest

import compiled_autograd as ca

from .helpers import assert_same
from .stored import BACKWARDS, found, restart, wanted

_NAMES = ("static", "regions", "sizes", "outputs", "constants")


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with entries of several kinds, and a dynamic one."""
    folder = tmp_path_factory.mktemp("filled") / "cache"
    for name in _NAMES:
        found(BACKWARDS[name], ca.enable(backend="eager", cache_dir=folder))
    ca.reset()
    return folder


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written need not outlast a loss of power."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


def _damage(path: Path, chance: random.Random) -> str:
    """Change a file in one of several ways; says how."""
    data = bytearray(path.read_bytes())
    how = chance.choice(["flip", "flip", "many", "cut", "zeros", "grow", "swap", "remove"])
    at = chance.randrange(len(data)) if data else 0
    if how == "flip" and data:
        data[at] ^= 1 << chance.randrange(8)
    elif how == "many" and data:
        for _ in range(20):
            data[chance.randrange(len(data))] = chance.randrange(256)
    elif how == "cut":
        del data[at:]
    elif how == "zeros":
        end = min(len(data), at + chance.choice([1, 100, 4096]))
        data[at:end] = bytes(end - at)
    elif how == "grow":
        data += chance.randbytes(100)
    elif how == "swap":
        others = [other for other in path.parent.parent.rglob("*") if other.is_file()]
        data = bytearray(chance.choice(others).read_bytes())
    if how == "remove":
        path.unlink()
    else:
        path.write_bytes(bytes(data))
    return f"{how} at {at} of {path.name}"


def _trials(filled: Path, tmp_path: Path, trials: int, seed: int) -> int:
    """Damage, a process, another process. Gives how many backwards were not served from the store."""
    chance = random.Random(seed)
    right = {name: wanted(BACKWARDS[name]) for name in _NAMES}
    missed = 0
    for trial in range(trials):
        folder = tmp_path / f"cache{trial}"
        shutil.copytree(filled, folder)
        folder.chmod(0o700)
        files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "lock")
        done = [_damage(path, chance) for path in chance.sample(files, chance.choice([1, 1, 2, 3]))]
        for _ in range(2):
            restart()
            session = ca.enable(backend="eager", cache_dir=folder)
            for name in chance.sample(_NAMES, 3):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    try:
                        assert_same(found(BACKWARDS[name], session), right[name])
                    except Exception as error:
                        raise AssertionError(f"trial {trial} of seed {seed}, {name}: {'; '.join(done)}") from error
            stats = session.stats()
            assert not stats.bypasses and not stats.failures, done
            missed += stats.backwards - stats.hits
        ca.reset()
        shutil.rmtree(folder)
    return missed


def test_damage_between_two_processes(filled: Path, tmp_path: Path) -> None:
    assert _trials(filled, tmp_path, 8, seed=0) > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 5))
def test_damage_between_many_processes(filled: Path, tmp_path: Path, seed: int) -> None:
    assert _trials(filled, tmp_path, 80, seed) > 0
