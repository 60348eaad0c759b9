"""Python blocks of the README and of docs/: found, run and compared with the text beside them.

The blocks of one page run in their order and in one namespace. The output of a statement is compared with the comment
behind it (``print(outcome)  # hit``) or with the ``text`` block right below its own. There ``...`` stands for anything.
A block that cannot run has a comment above it with the reason: ``<!-- not run: ... -->``.

    python -m tests.pages docs/quickstart.md     run one page, in the current folder

This file imports neither torch nor the package: the first import is the page's, as in a reader's own program.
"""

from __future__ import annotations

import ast
import contextlib
import io
import re
import sys
import tokenize
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
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


def blocks(text: str) -> list[Block]:
    """Every block of a page, in order."""
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
    found = found.replace("UnsafeViewBackward0", "ViewBackward0")  # the name in torch 2.15 of the view behind a Linear
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
    # Since 2.15 the output of a `Linear` for three dimensions is no view of its product; pages have the older name.
    whole = whole.replace("UnsafeViewBackward0", "ViewBackward0")
    if block.printed is not None and not _agrees(whole, block.printed):
        raise WrongOutputError(f"{name}:{block.line} prints\n{whole}\nand not\n{block.printed}")


def run_page(page: Path, text: str) -> None:
    """Run the blocks of a page. ``text`` is its text, and ``page`` gives its name.

    Raises:
        WrongOutputError: with the line of the page.
    """
    namespace: dict[str, Any] = {"__name__": page.stem}
    for block in blocks(text):
        if block.reason is None:
            _run(block, page.name, namespace)


if __name__ == "__main__":
    run_page(Path(sys.argv[1]), Path(sys.argv[1]).read_text())
