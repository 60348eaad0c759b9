"""The list of the examples, their tutorials, and the main one. ``tests/test_as_users.py`` runs them as readers do."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

import pytest

from docs import tutorial_pages

from . import as_a_user
from .helpers import ROOT

_EXAMPLES = ROOT / "examples"


def test_every_example_is_listed() -> None:
    text = (_EXAMPLES / "README.md").read_text()
    assert [file.name for file in _EXAMPLES.glob("[!_]*.py") if f"`{file.name}`" not in text] == []


class _Bare(ast.NodeTransformer):
    """Code without what documents it."""

    def visit(self, node: ast.AST) -> ast.AST:
        super().visit(node)
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
        return node


@pytest.mark.parametrize("name", tutorial_pages.NAMES)
def test_a_tutorial_has_all_code_and_prose_of_its_example(name: str) -> None:
    page, text = tutorial_pages.page(name), (_EXAMPLES / f"{name}.py").read_text()
    blocks = re.findall(r"^````python\n(.*?)^````$", page, re.MULTILINE | re.DOTALL)
    whole, shown = (ast.dump(_Bare().visit(ast.parse(code))) for code in (text, "\n".join(blocks)))
    assert shown == whole
    said = re.sub(r"^````.*?^````$", "", page, flags=re.MULTILINE | re.DOTALL)
    first = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
    assert first and first in said and f"python examples/{name}.py" in page
    assert name == "train_llama" or "## What it prints" in page


def test_what_is_kept_agrees_but_for_numbers() -> None:
    said, printed = tutorial_pages.kept("hooks")
    assert said.startswith("Clipping hooks") and printed.startswith("clipping: 16 new hooks")
    assert tutorial_pages.is_as_kept("hooks", printed.replace("16", "17"))
    assert not tutorial_pages.is_as_kept("hooks", printed.replace("optimizer:", "optimiser:"))
    assert not tutorial_pages.is_as_kept("hooks", printed.partition("\n")[0])


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
