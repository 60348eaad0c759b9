"""Eight processes train with one store and one folder of Inductor's: none is in the way of another."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import shadow_cache

from .helpers import ROOT

pytestmark = pytest.mark.slow

PROCESSES, STEPS, SECONDS = 8, 3, 500.0


class Folders:
    """A store, and a folder of Inductor's."""

    def __init__(self, where: Path) -> None:
        self.store, self.inductor = where / "store", where / "inductor"

    def environment(self, **more: str) -> dict[str, str]:
        """Of a process that has both."""
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith(("COMPILED_AUTOGRAD_", "TESTS_"))
        }
        places = {"PYTHONPATH": str(ROOT), "TORCHINDUCTOR_CACHE_DIR": str(self.inductor)}
        return {**kept, **places, "TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1", **more}

    def locks(self) -> list[Path]:
        """Locks that somebody holds."""
        held = []
        for path in [*self.store.rglob("*lock"), *self.inductor.rglob("*.lock")]:
            with path.open("a") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    held.append(path)
        return held

    def assert_whole(self, killed: int = 0) -> int:
        """No damage, no lock, nothing half written; gives the number of entries."""
        with shadow_cache.open(self.store) as store:
            assert store.verify() == () and not store.damage
            assert not [each for each in store.misses() if each.miss.kind == "corrupt"]
            entries = store.entries()
        half = [path for path in (self.store / "temporary").iterdir() if path.name[0] != "."]
        assert len(half) <= killed  # until they are an hour old
        assert not self.locks()
        return len(entries)


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    return Folders(tmp_path)


def start(folders: Folders, backend: str, killed: Sequence[int] = (), **more: str) -> list[subprocess.Popen[str]]:
    """The first of them kill themselves, at these writes."""
    command = [sys.executable, "-m", "tests.training_child", str(folders.store), str(STEPS)]
    processes = []
    for number in range(PROCESSES):
        environment = folders.environment(TESTS_BACKEND=backend, **more)
        if number < len(killed):
            environment["TESTS_KILLED_AT"] = str(killed[number])
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
        )
        processes.append(process)
    return processes


def ended(processes: Sequence[subprocess.Popen[str]], killed: int = 0) -> list[dict[str, Any]]:
    """What those have found that were not killed."""
    said = [process.communicate(timeout=SECONDS) for process in processes]
    assert [process.returncode for process in processes] == [-signal.SIGKILL] * killed + [0] * (len(said) - killed), (
        said
    )
    return [{**json.loads(out), "said": said_too} for out, said_too in said[killed:]]


def assert_all_hit(found: Sequence[dict[str, Any]], steps: int = STEPS) -> None:
    for each in found:
        assert each["outcomes"] == ["hit"] * steps and not each["compiles"] and each["loads"], each


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_eight_processes_begin_with_nothing(folders: Folders, backend: str) -> None:
    first = ended(start(folders, backend))
    for each in first:
        assert each["outcomes"][1:] == ["hit"] * (STEPS - 1)
        assert bool(each["compiles"]) != bool(each["loads"])  # it was compiled there, or by one that was sooner
    assert any(each["compiles"] for each in first)
    entries = folders.assert_whole()
    second = ended(start(folders, backend))
    assert_all_hit(second)
    assert not any(each["inductor"] for each in second)
    assert folders.assert_whole() == entries == 1


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_processes_are_killed_while_they_write(folders: Folders, backend: str) -> None:
    """Each at another of its writes."""
    killed = (1, 2, 4, 6)
    others = ended(start(folders, backend, killed), len(killed))
    for each in others:
        assert each["outcomes"][1:] == ["hit"] * (STEPS - 1)
    assert folders.assert_whole(len(killed)) == 1
    assert_all_hit(ended(start(folders, backend)))
