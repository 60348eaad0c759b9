"""The house: imports go from a room to those below it, and files, functions and folders stay small."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grimp
import networkx as nx
import pytest

from .helpers import ROOT

_PACKAGES = ("compiled_autograd", "backends", "shadow_cache")
"""Folders. As packages, the last two are in the first."""
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
    copied = tmp_path / "compiled_autograd"
    shutil.copytree(ROOT / "compiled_autograd", copied, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    file = tmp_path / "compiled_autograd" / "lowering" / "aten.py"
    file.write_text(f"{file.read_text()}\n\n{planted}\n")
    ended = _lint(tmp_path)
    assert ended.returncode == 1
    assert "compiled_autograd.lowering.aten -> compiled_autograd.engine.session" in ended.stdout


def _circles(*packages: str) -> list[set[str]]:
    """Files that import one another, lazily and for types alone too."""
    graph = grimp.build_graph(*packages, cache_dir=None)
    imports = nx.DiGraph(
        (file, other) for file in graph.modules for other in graph.find_modules_directly_imported_by(file)
    )
    return [found for found in nx.strongly_connected_components(imports) if len(found) > 1]


def test_no_files_import_one_another() -> None:
    assert _circles("compiled_autograd") == []


def test_files_that_import_one_another_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "planted_circle"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "one.py").write_text("from .other import f\n")
    (folder / "other.py").write_text(
        "TYPE_CHECKING = False\nif TYPE_CHECKING:\n    from .one import g\n\ndef f(): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert _circles("planted_circle") == [{"planted_circle.one", "planted_circle.other"}]


def _lines(node: ast.FunctionDef) -> int:
    """Lines of a function; its docstring counts as none, since that of ``enable`` has a paragraph for each setting."""
    first = node.body[0]
    text = (first.end_lineno or 0) - first.lineno + 1 if ast.get_docstring(node) is not None else 0
    return (node.end_lineno or 0) - node.lineno + 1 - text


def _too_large(folder: Path) -> Iterator[str]:
    """What is over the limits that CONTRIBUTING sets."""
    for package in _PACKAGES:
        for path in sorted(folder.joinpath(package).rglob("*")):
            name = path.relative_to(folder).as_posix()
            if path.is_dir() and len([*path.glob("*.py"), *path.glob("*.cpp")]) > 16:
                yield f"{name} has more than sixteen files"
            if path.suffix != ".py":
                continue
            text = path.read_text()
            if len(text.splitlines()) > 400:
                yield f"{name} has more than 400 lines"
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.FunctionDef) and _lines(node) > 60:
                    yield f"{name}: {node.name} has more than 60 lines"


def test_files_functions_and_folders_are_small() -> None:
    assert [*_too_large(ROOT)] == []


def test_what_is_too_large_is_found(tmp_path: Path) -> None:
    for package in _PACKAGES:
        (tmp_path / package).mkdir()
    room = tmp_path / "backends" / "room"
    room.mkdir()
    for number in range(16):
        (room / f"file{number}.py").touch()
    assert [*_too_large(tmp_path)] == []
    (room / "more.py").write_text("def long():\n" + "    pass\n" * 60 + "\n" * 340)
    assert [*_too_large(tmp_path)] == [
        "backends/room has more than sixteen files",
        "backends/room/more.py has more than 400 lines",
        "backends/room/more.py: long has more than 60 lines",
    ]


_IN_STEPS = ("cache", "capture", "diagnostics", "engine", "native", "proving", "reproduction", "runtime")
"""Rooms whose code runs in the thread of a step, where Python calls handlers of signals. Compiling has its own thread,
and tools tell their users each error."""
_MAY_SWALLOW_ALL = {
    "account.py": "it is logged, and the user's error raised",
    "reporting.py": "the text of an error that is told",
}


def _swallowing(code: str) -> Iterator[int]:
    """Lines where any error is caught and not raised, those of handlers of signals included."""
    for each in ast.walk(ast.parse(code)):
        if isinstance(each, ast.ExceptHandler) and getattr(each.type, "id", None) == "Exception":
            first = each.body[0]
            raises = isinstance(first, ast.Expr) and "raise_what_a_handler_raised(" in ast.unparse(first)
            if not raises and not any(isinstance(node, ast.Raise) and not node.exc for node in each.body):
                yield each.lineno


def test_no_error_of_a_handler_is_swallowed() -> None:
    found = {
        f"{file.name}:{line}"
        for room in _IN_STEPS
        for file in (ROOT / "compiled_autograd" / room).rglob("*.py")
        for line in _swallowing(file.read_text())
        if file.name not in _MAY_SWALLOW_ALL
    }
    assert not found, "begin such an `except` with raise_what_a_handler_raised"


def test_an_error_of_a_handler_that_is_swallowed_is_found() -> None:
    swallows = "try:\n    work()\nexcept Exception as error:\n    {}\n"
    assert list(_swallowing(swallows.format("tell(error)"))) == [3]
    assert not list(_swallowing(swallows.format("raise_what_a_handler_raised(error)\n    tell(error)")))
    assert not list(_swallowing(swallows.format("tell(error)\n    raise")))
    assert list(_swallowing(swallows.format("if not no_memory(error): raise"))) == [3]
