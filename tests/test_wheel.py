"""What ``python -m build`` makes: a wheel from which a model trains, without the checkout."""

from __future__ import annotations

import os
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
import compiled_autograd as ca
from compiled_autograd import backends, shadow_cache
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


def _run(*command: str, folder: Path, environment: dict[str, str] | None = None) -> None:
    ended = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=300
    )
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
    inside = {name if name.startswith(_PACKAGES[0]) else f"{_PACKAGES[0]}/{name}" for name in tracked.stdout.split()}
    assert files == inside - {f"{_PACKAGES[0]}/{link}" for link in _PACKAGES[1:]}
    assert {f"compiled_autograd/{package}py.typed" for package in ("", "backends/", "shadow_cache/")} <= files
    assert any(name.endswith(".cpp") for name in files)


def _installed(wheel: Path, folder: Path) -> str:
    pip = sys.executable, "-m", "pip", "install", "--no-deps", "--no-index"
    _run(*pip, "--target", str(folder / "site"), str(wheel), folder=folder)
    return str(folder / "site")


def test_a_model_trains_from_it(wheel: Path, tmp_path: Path) -> None:
    _run(sys.executable, "-I", "-c", _TRAINS, _installed(wheel, tmp_path), folder=tmp_path)


def _python_path(way: str, wheel: Path, folder: Path) -> str:
    """Install the package as ``way`` says, and return the entry of ``PYTHONPATH`` for it."""
    if way == "checkout":
        return str(ROOT)
    if way == "wheel":
        return _installed(wheel, folder)
    (folder / "compiled_autograd.pth").write_text(f"{ROOT}\n")  # as hatchling has it installed
    (folder / "sitecustomize.py").write_text(
        "import pathlib, site, sys\n"  # other checkouts that this Python has are left out
        "sys.path[:] = [each for each in sys.path if not pathlib.Path(each, 'compiled_autograd').exists()]\n"
        f"site.addsitedir({str(folder)!r})\n"
    )
    return str(folder)


_IMPORTS = """
import backends, shadow_cache
from shadow_cache import mine
assert backends.mine and mine, "the user's own"
"""
_COMPILES = """
import compiled_autograd as ca, torch
from compiled_autograd.shadow_cache import assert_max_compiles
x = torch.randn(3, requires_grad=True)
with ca.enable(backend="inductor", cache_dir="store", on_miss="background") as session, assert_max_compiles(1):
    for _ in range(2):
        x.grad = None
        x.square().sum().backward()
        assert session.wait(200)
assert torch.allclose(x.grad, 2 * x) and session.stats().hits == 1 and session.stats().compiles == 1, session.stats()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "script"),
    [
        pytest.param(way, script, id=f"{way}-{order}")
        for way in ("wheel", "editable", "checkout")
        for order, script in {"imported before": _IMPORTS + _COMPILES, "and after": _COMPILES + _IMPORTS}.items()
    ],
)
def test_a_program_may_have_modules_of_the_same_names(way: str, script: str, wheel: Path, tmp_path: Path) -> None:
    path = _python_path(way, wheel, tmp_path)
    program = tmp_path / "program"
    (program / "backends").mkdir(parents=True)
    for name in ("backends/__init__.py", "shadow_cache.py"):
        (program / name).write_text("mine = True\n")
    (program / "script.py").write_text(script)
    environment = {**os.environ, "PYTHONPATH": path}
    for command in (["script.py"], ["-m", "compiled_autograd.shadow_cache", "--cache-dir", "store", "ls"]):
        _run(sys.executable, *command, folder=program, environment=environment)
