"""A program run as a user runs it: a process of its own, without a variable of this project or of its tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from .helpers import ROOT

SECONDS = 900.0
"""Time limit of one program: far above what it takes, since nothing here may depend on the clock."""
SMALL_LLAMA = ["--width", "16", "--heads", "2", "--layers", "1", "--batch-size", "2", "--block-size", "16"]
"""Options of ``examples/train_llama.py``."""
_OF_TESTS = ("COMPILED_AUTOGRAD_", "TESTS_", "PYTEST_", "PYTHON", "OMP_", "MKL_", "KMP_", "GOMP_", "TORCH", "XDG_")


def environment(home: Path) -> dict[str, str]:
    """Return the environment of a user whose home, caches and temporary files are in the folder ``home``.

    Every setting of this project has its default. The caches of this project and of Inductor are empty if ``home`` is.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_OF_TESTS)}
    temporary = home / "tmp"
    temporary.mkdir(parents=True, exist_ok=True)
    return {**kept, "HOME": str(home), "TMPDIR": str(temporary), "PYTHONPATH": str(ROOT)}


def _on_cores_of_its_own() -> list[str]:
    """Prefix that gives a program its share of the cores, where several run at once (pytest-xdist). With more threads
    than cores, OpenMP's would spin while they wait for one another, and take several times as long."""
    workers, worker = (os.environ.get(f"PYTEST_XDIST_WORKER{end}", "") for end in ("_COUNT", ""))
    if not worker or shutil.which("taskset") is None:
        return []
    cores = sorted(os.sched_getaffinity(0))
    share = cores[int(worker.removeprefix("gw")) % len(cores) :: int(workers)]
    return ["taskset", "--cpu-list", ",".join(map(str, share))]


def run(arguments: Sequence[str], home: Path, **variables: str) -> str:
    """Run Python with ``arguments`` in an empty folder of ``home``, and return the standard output.

    Args:
        variables: environment variables in addition to :func:`environment`.

    Raises:
        AssertionError: the exit status is not 0. The message has all output.
    """
    folder = home / "work"
    folder.mkdir(parents=True, exist_ok=True)
    ended = subprocess.run(
        [*_on_cores_of_its_own(), sys.executable, *arguments],
        cwd=folder,
        env=environment(home) | variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS,
    )
    assert ended.returncode == 0, f"exit status {ended.returncode}\n{ended.stdout}{ended.stderr}"
    return ended.stdout
