"""The list of the examples, and the main one. ``tests/test_as_users.py`` runs them all as their readers do."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from . import as_a_user
from .helpers import ROOT

_EXAMPLES = ROOT / "examples"


def test_every_example_is_listed() -> None:
    text = (_EXAMPLES / "README.md").read_text()
    assert [file.name for file in _EXAMPLES.glob("[!_]*.py") if f"`{file.name}`" not in text] == []


def test_the_main_job_trains_both_ways(tmp_path: Path) -> None:
    options = [
        *as_a_user.SMALL_LLAMA,
        "--steps",
        "12",
        "--backend",
        "eager",
        "--on-miss",
        "compile",
        "--picture",
        "a.svg",
    ]
    program = [str(_EXAMPLES / "train_llama.py"), *options]
    printed = as_a_user.run(program, tmp_path, OMP_NUM_THREADS="1", COMPILED_AUTOGRAD_TUNE="false")  # exact counts
    assert "Of 13 backwards: 12 hits, 1 misses" in printed.replace("\n", " ")
    drawn = (tmp_path / "work" / "a.svg").exists()
    assert drawn == (importlib.util.find_spec("matplotlib") is not None)
