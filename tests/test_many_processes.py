"""Eight processes train with one store and one folder of Inductor's: none is in the way of another."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import compiled_autograd as ca
import shadow_cache

from .helpers import ROOT, mlp
from .pair import Pair
from .test_ddp import DistributedDataParallel, extension
from .test_ddp import builds as builds
from .training_child import account, train

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

    def locks(self) -> dict[Path, int]:
        """Locks that somebody holds, and which process it is."""
        places = {}
        for path in [*self.store.rglob("*lock"), *self.inductor.rglob("*.lock")]:
            with contextlib.suppress(FileNotFoundError):
                places[path.stat().st_ino] = path
        held = [line.split() for line in Path("/proc/locks").read_text().splitlines() if "->" not in line]
        found = {places.get(int(words[5].split(":")[2])): int(words[4]) for words in held}
        return {path: pid for path, pid in found.items() if path is not None}

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


def test_processes_are_killed_while_they_write(folders: Folders) -> None:
    """Each at another of its writes; whoever finds written what it would write makes but two."""
    processes = start(folders, "eager", killed=(1, 2, 3, 5))
    others = ended(processes[4:])
    ends = [process.wait(SECONDS) for process in processes[:4]]
    assert ends[:2] == [-signal.SIGKILL] * 2 and {*ends[2:]} <= {-signal.SIGKILL, 0}
    for each in others:
        assert each["outcomes"][1:] == ["hit"] * (STEPS - 1)
    assert folders.assert_whole(killed=4) == 1
    assert_all_hit(ended(start(folders, "eager")))


def _holder(folders: Folders, where: Path) -> int:
    """Who holds a lock there, as soon as somebody does."""
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        for path, pid in folders.locks().items():
            if path.is_relative_to(where):
                return pid
        time.sleep(0.05)
    raise TimeoutError(f"nobody has locked anything in {where}")


def test_a_process_is_killed_while_inductor_compiles(folders: Folders) -> None:
    """Its compiler may go on without it, beside that of the process that has Inductor's lock next."""
    processes = start(folders, "inductor")
    compiling = _holder(folders, folders.inductor)
    (holder,) = (process for process in processes if process.pid == compiling)
    os.kill(holder.pid, signal.SIGKILL)
    assert holder.wait(SECONDS) == -signal.SIGKILL
    for each in ended([process for process in processes if process is not holder]):
        assert each["outcomes"][1:] == ["hit"] * (STEPS - 1), each
    assert folders.assert_whole(killed=1) == 1
    assert_all_hit(ended(start(folders, "inductor")))


def test_what_builds_the_extension_is_killed(folders: Folders) -> None:
    """Those that train wait for nothing; one of them has it built again, and the next run has it."""
    processes = start(folders, "eager", TESTS_NATIVE_TOO="yes")
    builder = _holder(folders, folders.store / "native")
    time.sleep(1.0)  # now the compiler is at work
    os.kill(builder, signal.SIGKILL)
    for each in ended(processes):
        assert each["outcomes"][1:] == ["hit"] * (STEPS - 1) and each["no extension"] == "", each
    names = [path.suffix for path in (folders.store / "native").iterdir()]
    assert sorted(names) == [".lock", ".so"]
    assert folders.assert_whole() == 1
    second = ended(start(folders, "eager", TESTS_NATIVE_TOO="yes"))
    assert_all_hit(second)
    assert all(each["native"] for each in second), second


# ---- ranks ---------------------------------------------------------------------------------------------------------


def _rank(rank: int, builds: Path, folders: Folders) -> dict[str, Any]:
    with extension(builds), pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folders.inductor))
        patch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
        session = ca.enable(backend="inductor", cache_dir=folders.store, tune=False)
        torch.manual_seed(0)
        model, reference = (DistributedDataParallel(mlp()) for _ in range(2))
        reference.load_state_dict(model.state_dict())
        return account(session, train(session, model, reference, STEPS, rank))


def test_ranks_begin_with_nothing(folders: Folders, builds: Path, tmp_path: Path) -> None:
    found = []
    for _ in range(2):
        ranks = Pair(tmp_path, ranks=4)
        try:
            found.append(ranks.run(_rank, builds, folders, seconds=SECONDS))
        finally:
            ranks.close()
        assert folders.assert_whole() == 1
    first, second = found
    for each in first:
        assert each["outcomes"][1:] == ["hit"] * (STEPS - 1) and bool(each["compiles"]) != bool(each["loads"])
    assert_all_hit(second)
