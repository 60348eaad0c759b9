"""What ``python -m build`` makes: a wheel from which a model trains, without the checkout."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from .helpers import ROOT

_PACKAGES = ("compiled_autograd", "backends", "shadow_cache")
_TRAINS = """
import importlib.metadata, sys
sys.path.insert(0, sys.argv[1])
import torch
import compiled_autograd as ca, backends, shadow_cache
for package in (ca, backends, shadow_cache):
    assert package.__file__.startswith(sys.argv[1]), package.__file__
assert set(backends.list_backends()) >= {"eager", "inductor"}
names = {each.name for each in importlib.metadata.distribution("compiled-autograd").entry_points}
assert names == {"eager", "inductor", "shadow-cache"}, names
x = torch.randn(3, requires_grad=True)
with ca.enable(backend="eager", cache_dir=False) as session:
    for _ in range(2):
        x.grad = None
        x.square().sum().backward()
assert torch.equal(x.grad, 2 * x) and session.stats().hits == 1, session.stats()
"""


def _run(*command: str, folder: Path) -> None:
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=300)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    _run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT), folder=folder)
    (found,) = folder.glob("*.whl")
    return found


def test_it_has_every_source_file_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        files = {name for name in archive.namelist() if ".dist-info/" not in name}
    tracked = subprocess.run(["git", "ls-files", *_PACKAGES], cwd=ROOT, capture_output=True, text=True, check=True)
    assert files == set(tracked.stdout.split())
    assert {f"{package}/py.typed" for package in _PACKAGES} <= files and any(name.endswith(".cpp") for name in files)


def test_a_model_trains_from_it(wheel: Path, tmp_path: Path) -> None:
    target = str(tmp_path / "site")
    _run(
        sys.executable,
        "-m",
        "pip",
        "install",
        "--no-deps",
        "--no-index",
        "--target",
        target,
        str(wheel),
        folder=tmp_path,
    )
    _run(sys.executable, "-I", "-c", _TRAINS, target, folder=tmp_path)
