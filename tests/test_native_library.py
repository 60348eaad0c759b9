"""The extension is built once, in the background, for what it is loaded into; else there is a reason."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import compiled_autograd as ca
import shadow_cache
from compiled_autograd.native import build, library
from compiled_autograd.native.library import BEING_BUILT, Library, name_of_build, why_unsupported

from .helpers import ROOT

_SECONDS = 60.0
_ASK = """
import os, sys, time
from pathlib import Path
from compiled_autograd.native import library
children = []
for _ in range(8):
    child = os.fork()
    if child == 0:
        found = library.Library(Path(sys.argv[1]))
        while found.module() is None and found.reason == library.BEING_BUILT:
            time.sleep(0.05)
        os.write(1, f"{found.reason}\\n".encode())
        os._exit(0)
    children.append(child)
assert not any(os.waitpid(child, 0)[1] for child in children)
"""
"""Eight processes, of which none has to import PyTorch for itself."""

pytestmark = pytest.mark.skipif(bool(why_unsupported()), reason=f"there is no extension here: {why_unsupported()}")


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Makes the compiler one that does something else; gives a file with a line for each time that it was called."""

    def make(act: str) -> Path:
        script, calls = tmp_path / "compiler", tmp_path / "calls"
        script.write_text(f'#!/bin/sh\necho called "$@" >> {calls}\n{act}\n')
        script.chmod(0o755)
        monkeypatch.setenv("CXX", str(script))
        return calls

    monkeypatch.setattr(library, "_SECONDS_BETWEEN_LOOKS", 0.0)
    return make


def _reason(found: Library) -> str:
    """The reason, once it is there."""
    deadline = time.monotonic() + _SECONDS
    while found.module() is None and found.reason == BEING_BUILT and time.monotonic() < deadline:
        time.sleep(0.01)
    assert found.module() is None
    return found.reason


_WRITES = 'for each in "$@"; do last="$each"; done; sleep 0.5; echo no library > "$last"'


def test_nobody_waits(compiler: Callable[[str], Path], tmp_path: Path) -> None:
    compiler("sleep 3; exit 1")
    found = Library(tmp_path / "builds")
    began = time.monotonic()
    assert found.module() is None
    assert time.monotonic() - began < 2
    assert found.reason == BEING_BUILT


def test_who_needs_it_waits_for_whoever_builds_it(compiler: Callable[[str], Path], tmp_path: Path) -> None:
    calls = compiler("sleep 1; echo no such header >&2; exit 1")
    folder = tmp_path / "builds"
    Library(folder).module()
    while not calls.exists():
        time.sleep(0.01)
    found = Library(folder)
    assert found.built() is None
    assert found.reason.startswith("the compiler failed")
    assert len(calls.read_text().splitlines()) == 1


def test_it_is_built_for_who_needs_it(compiler: Callable[[str], Path], tmp_path: Path) -> None:
    compiler("exit 1")
    found = Library(tmp_path / "builds")
    assert found.built() is None
    assert found.reason.startswith("the compiler failed")


def test_its_folder_can_be_a_store_s(compiler: Callable[[str], Path], tmp_path: Path) -> None:
    """The store refuses a folder that others can read, which the one around the builds was made to be."""
    compiler("exit 1")
    Library(tmp_path / "cache" / "native").module()
    shadow_cache.open(tmp_path / "cache", create=True).close()


def test_the_compiler_is_no_child_of_this_process(compiler: Callable[[str], Path], tmp_path: Path) -> None:
    """Nobody has to wait for it, and no ``os.wait`` of the user's finds it."""
    calls = compiler("ps -o ppid= $PPID >> $(dirname $0)/calls; sleep 1; exit 1")
    Library(tmp_path / "builds").module()
    until = time.monotonic() + _SECONDS
    while time.monotonic() < until and (not calls.exists() or len(calls.read_text().split()) < 2):
        time.sleep(0.05)
    assert str(os.getpid()) not in calls.read_text().split()[-1:]


def test_eight_processes_build_once(compiler: Callable[[str], Path], tmp_path: Path) -> None:
    calls = compiler(_WRITES)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", _ASK, str(tmp_path / "builds")]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_SECONDS, check=True)
    said = ended.stdout.splitlines()
    assert len(said) == 8
    assert len(calls.read_text().splitlines()) == 1
    assert len({*said}) == 1  # what was made is no library
    assert "file too short" in said[0]
    names = sorted(path.suffix for path in (tmp_path / "builds").iterdir())
    assert names == [".lock", ".so"]


def test_the_compiler_runs_at_low_priority(compiler: Callable[[str], Path], tmp_path: Path) -> None:
    calls = compiler("nice >> $(dirname $0)/calls; exit 1")
    _reason(Library(tmp_path / "builds"))
    assert calls.read_text().splitlines()[1] == "19"


def test_what_the_compiler_says_is_kept(compiler: Callable[[str], Path], tmp_path: Path) -> None:
    calls = compiler("echo no such header >&2; exit 1")
    reason = _reason(Library(tmp_path / "builds"))
    (failed,) = (tmp_path / "builds").glob(f"*{build.FAILED}")
    assert reason == f"the compiler failed, as {failed} says"
    assert failed.read_text() == "no such header\n"
    assert _reason(Library(tmp_path / "builds")) == reason  # it is not asked again
    assert len(calls.read_text().splitlines()) == 1


def test_one_that_was_ended_is_begun_again(
    compiler: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = compiler("[ $(wc -l < $(dirname $0)/calls) = 1 ] && kill -9 $$; exit 1")
    monkeypatch.setattr(library, "_SECONDS_BETWEEN_BUILDS", 0.5)
    assert "the compiler failed" in _reason(Library(tmp_path / "builds"))
    assert len(calls.read_text().splitlines()) == 2


def test_one_whose_builder_was_killed_is_not_compiled_by_two_at_once(
    compiler: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler goes on without it, and writes where the next one would."""
    first = "[ $(grep -c called $(dirname $0)/calls) = 1 ] && kill -9 $PPID"
    calls = compiler(f"{first}; sleep 1; {_WRITES}; echo ended >> $(dirname $0)/calls")
    monkeypatch.setattr(library, "_SECONDS_BETWEEN_BUILDS", 0.2)
    assert "file too short" in _reason(Library(tmp_path / "builds"))
    assert [line.split()[0] for line in calls.read_text().splitlines()] == ["called", "ended"] * 2
    assert sorted(path.suffix for path in (tmp_path / "builds").iterdir()) == [".lock", ".so"]


@pytest.mark.parametrize("how", ["Killed", "Terminated"])
def test_a_compiler_whose_program_was_ended_is_begun_again(
    compiler: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Where memory runs out, it is not the driver that is killed; and after some times it is a failure."""
    says = f"echo g++: fatal error: {how} signal terminated program cc1plus >&2"
    calls = compiler(f"[ $(wc -l < $(dirname $0)/calls) = 1 ] || exit 1; {says}; exit 1")
    monkeypatch.setattr(library, "_SECONDS_BETWEEN_BUILDS", 0.2)
    assert "the compiler failed" in _reason(Library(tmp_path / "builds"))
    assert len(calls.read_text().splitlines()) == 2
    calls = compiler(f"{says}; exit 1")
    found = Library(tmp_path / "others")
    reason = _reason(found)
    assert "the compiler failed" in reason
    assert how in Path(reason.split()[-2]).read_text()
    assert len(calls.read_text().splitlines()) == 2 + build.MOST_ENDED


def test_a_folder_that_others_can_write_is_refused(compiler: Callable[[str], Path], tmp_path: Path) -> None:
    calls = compiler("exit 1")
    folder = tmp_path / "builds"
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    assert "only this user can access" in _reason(Library(folder))
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    assert "only this user can access" in _reason(Library(link))
    assert not calls.exists()


def test_there_is_a_reason_where_there_can_be_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "platform", "win32")
        assert "win32" in _reason(Library(tmp_path / "builds"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert "no C++ compiler" in _reason(Library(tmp_path / "builds"))
    assert not (tmp_path / "builds").exists()


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="on CUDA a session needs none")
@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            {"backend": "eager", "tune": True},
            "without the extension, which is slower than no session. tune=True runs",
        ),
        (
            {"backend": "inductor", "extension": "off", "tune": False},
            "runs backwards call by call, .* tune=True would run",
        ),
        ({"backend": "eager", "extension": "off"}, ""),
        ({"backend": lambda graph, inputs: graph}, ""),
        ({"backend": lambda graph, inputs: graph, "extension": "all"}, "extension='all' has no effect: "),
    ],
)
def test_enable_says_what_follows_from_no_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], says: str
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "/nonexistent")
    monkeypatch.setattr(Library, "LATEST", None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):  # it is said once
            session = ca.enable(**{"extension": "auto", **settings})
    texts = [str(each.message) for each in caught]
    assert len(texts) == bool(says)
    for warning, text in zip(caught, texts, strict=True):
        assert re.search(says, text) and "no C++ compiler" in text
        assert warning.filename == __file__
    assert session.native == "off: extension='off'" or "no C++ compiler" in session.native


def test_the_name_says_what_it_was_built_for(compiler: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    names = [name_of_build()]
    compiler("exit 1")
    names.append(name_of_build())
    monkeypatch.setattr("torch.__version__", "2.13.1")
    names.append(name_of_build())
    monkeypatch.setattr("torch.version.git_version", "another")
    names.append(name_of_build())
    assert len(set(names)) == 4


def test_no_name_is_used_that_python_keeps_to_itself() -> None:
    """3.13 has taken `_PyMethodWrapper_Type` out of its headers: the extension could not be compiled there."""
    sources = [*(ROOT / "compiled_autograd").rglob("*.cpp"), *(ROOT / "backends").rglob("*.cpp")]
    sources += (ROOT / "compiled_autograd").rglob("*.h")
    found = {name for each in sources for name in re.findall(r"\b_Py[A-Z]\w*", each.read_text())}
    assert len(sources) > 20 and found == set()


@pytest.mark.slow
def test_it_compiles_without_a_warning(tmp_path: Path) -> None:
    command = [*library._command("any"), "-Werror", "-c", "-o", str(tmp_path / "all.o")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
