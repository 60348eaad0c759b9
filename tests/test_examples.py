"""The tutorials run as their readers run them; each asserts its own claim."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from .helpers import ROOT

_EXAMPLES = ROOT / "examples"
_TUTORIALS = sorted(file.stem for file in _EXAMPLES.glob("[!_]*.py") if file.stem != "train_llama")
_BY_DEFAULT = ("simple_grad",)
"""The others take longer, those that compile with Inductor longest."""


def _run(name: str, folder: Path, *arguments: str) -> str:
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "COMPILED_AUTOGRAD_CACHE_DIR": str(folder / "cache"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
    }
    command = [sys.executable, str(_EXAMPLES / f"{name}.py"), *arguments]
    ended = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=600
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in _BY_DEFAULT else pytest.mark.slow) for name in _TUTORIALS]
)
def test_a_tutorial_runs(name: str, tmp_path: Path) -> None:
    assert _run(name, tmp_path).strip()


def test_every_example_is_listed() -> None:
    text = (_EXAMPLES / "README.md").read_text()
    assert [file.name for file in _EXAMPLES.glob("[!_]*.py") if f"`{file.name}`" not in text] == []


def test_the_main_job_trains_both_ways(tmp_path: Path) -> None:
    small = (
        "--steps",
        "12",
        "--width",
        "16",
        "--heads",
        "2",
        "--layers",
        "1",
        "--batch-size",
        "2",
        "--block-size",
        "16",
    )
    printed = _run("train_llama", tmp_path, *small, "--backend", "eager", "--on-miss", "compile", "--picture", "a.svg")
    assert "Of 13 backwards: 12 hits, 1 misses" in printed.replace("\n", " ")
    drawn = (tmp_path / "a.svg").exists()
    assert drawn == (importlib.util.find_spec("matplotlib") is not None)
