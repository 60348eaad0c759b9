"""Every ``python`` block of the README and of the pages of docs/ runs, and prints what stands beside it.

How blocks are found and compared stands in :mod:`tests.pages`. Here they run in the process of the tests, with the
settings of the tests; ``tests/test_as_users.py`` runs them as a reader does.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from compiled_autograd.process_state import PROCESS

from .pages import PAGES, WrongOutputError, blocks, run_page


@pytest.fixture
def as_a_reader_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty folder, nothing on disk, and the backend that compiles fastest where a block does not name one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COMPILED_AUTOGRAD_CACHE_DIR", "false")
    monkeypatch.setenv("COMPILED_AUTOGRAD_BACKEND", "eager")
    yield
    PROCESS.restart()  # closes the stores in this folder


@pytest.mark.usefixtures("as_a_reader_would")
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page.read_text())], ids=lambda page: page.stem)
def test_the_blocks_of_a_page_run(page: Path) -> None:
    run_page(page, page.read_text())


def test_the_readme_and_most_guides_have_blocks() -> None:
    with_blocks = {page.stem for page in PAGES if blocks(page.read_text())}
    assert {"README", "quickstart", "first_miss", "settings", "backends", "bypasses", "cache"} <= with_blocks


def test_every_block_is_found() -> None:
    for page in PAGES:
        text = page.read_text()
        assert len(blocks(text)) == len(re.findall(r"^```python", text, re.MULTILINE)), page.name


def test_few_blocks_do_not_run() -> None:
    assert sorted(block.reason for page in PAGES for block in blocks(page.read_text()) if block.reason) == [
        "not run: it needs Lightning and a model",
        "not run: it needs accelerate and a model",
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
        run_page(Path("planted.md"), text)


def test_a_block_that_raises_fails() -> None:
    with pytest.raises(ZeroDivisionError):
        run_page(Path("planted.md"), "```python\n1 / 0\n```\n")
    assert "planted" not in sys.modules
