"""Imports go from a room to those below it: the contract in ``pyproject.toml``, and that it sees what breaks it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .helpers import ROOT

_PACKAGES = ("compiled_autograd", "backends", "shadow_cache")
_UPWARD = "from ..engine import session"


def _lint(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as run; run()", "--no-cache"]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_imports_go_down() -> None:
    ended = _lint(ROOT)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.parametrize(
    "planted",
    [
        _UPWARD,
        f"def later():\n    {_UPWARD}\n",
        f"from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    {_UPWARD}\n",
    ],
    ids=["at the top", "in a function", "for types alone"],
)
def test_an_import_that_goes_up_is_found(planted: str, tmp_path: Path) -> None:
    for package in _PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    file = tmp_path / "compiled_autograd" / "lowering" / "aten.py"
    file.write_text(f"{file.read_text()}\n\n{planted}\n")
    ended = _lint(tmp_path)
    assert ended.returncode == 1
    assert "compiled_autograd.lowering.aten -> compiled_autograd.engine.session" in ended.stdout
