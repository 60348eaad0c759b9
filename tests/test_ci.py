"""The workflow runs each piece of ``.ci/run`` and nothing else, on the oldest and the newest release of torch."""

from __future__ import annotations

import re
import subprocess

import pytest

from .helpers import ROOT

_SCRIPT, _WORKFLOW = ROOT / ".ci" / "run", ROOT / ".github" / "workflows" / "ci.yml"
pytestmark = pytest.mark.skipif(not _WORKFLOW.exists(), reason="this is no checkout: it has no workflow")


def _pieces() -> set[str]:
    """Every piece, as the error of a wrong name lists them."""
    ended = subprocess.run([str(_SCRIPT), "no-piece"], capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == 2 and not ended.stdout
    return set(ended.stderr.strip().partition("there are ")[2].split(", "))


def _commands() -> list[str]:
    return re.findall(r"^\s*- run: (.+)$", _WORKFLOW.read_text(), re.MULTILINE)


def _matrix(name: str) -> set[str]:
    """Every value of a variable in the matrices of the jobs."""
    text = _WORKFLOW.read_text()
    listed = re.findall(rf"^\s*{name}: \[(.+)\]$", text, re.MULTILINE)
    included = re.findall(rf'[{{,] ?{name}: ("[^"{{}}]+")', text)
    return {value.strip('"') for values in (*listed, *included) for value in values.split(", ")}


def test_every_piece_is_a_function_of_the_script() -> None:
    functions = re.findall(r"^([\w-]+)\(\) \{$", _SCRIPT.read_text(), re.MULTILINE)
    assert _pieces() == set(functions) - {"install_torch"}


def test_the_workflow_runs_each_piece_and_nothing_else() -> None:
    arguments = [command.removeprefix(".ci/run ") for command in _commands()]
    assert all(map(str.startswith, _commands(), [".ci/run "] * len(arguments)))
    by_matrix = "${{ matrix.piece }}"
    assert by_matrix in arguments
    assert set(arguments) - {by_matrix} | _matrix("piece") == _pieces()


def test_without_a_name_the_pieces_of_a_pull_request_run_and_the_tests_last() -> None:
    (default,) = re.findall(r"^\[ \$# -gt 0 \] \|\| pieces=\((.+)\)$", _SCRIPT.read_text(), re.MULTILINE)
    assert default.split()[-1] == "tests"
    assert _pieces() - set(default.split()) == {"as-users-slow", "package", "selftest"}


def test_the_matrix_has_the_oldest_release_the_newest_and_the_one_of_the_readme() -> None:
    (pinned,) = re.findall(r"^pip install torch==(\S+) && .*pytest", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert {"2.11.0", "2.13.0", "2.15.0", pinned} == _matrix("torch")
    assert {"3.10", "3.11", "3.12", "3.13", "3.14"} == _matrix("python")
