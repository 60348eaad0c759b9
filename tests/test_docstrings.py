"""Docstrings begin with a verb or a noun. Older ones that do not are counted, and the counts only fall."""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from .helpers import ROOT

_COUNTS = ROOT / "tests" / "docstrings.json"
_HEADLESS = re.compile(r"(What|Whether|Which|Where|Who|Of|That|Those|How many|So many|As many)\b")


def _docstrings(file: Path) -> Iterator[str]:
    """The docstrings of a file, also those of attributes."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        body = getattr(node, "body", None)
        for item in body if isinstance(body, list) else ():
            value = item.value if isinstance(item, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield value.value.strip()


def _headless() -> dict[str, int]:
    """The number of headless docstrings in each folder that has some."""
    found: Counter[str] = Counter()
    for package in ("compiled_autograd", "backends", "shadow_cache"):
        for file in (ROOT / package).rglob("*.py"):
            room = file.parent.relative_to(ROOT).as_posix()
            if not any(folder.is_symlink() for folder in (file, *file.parents)):
                found[room] += sum(map(bool, map(_HEADLESS.match, _docstrings(file))))
    return {room: count for room, count in sorted(found.items()) if count}


def test_a_headless_docstring_is_found() -> None:
    assert _HEADLESS.match("What it holds.") and _HEADLESS.match("Whether it runs.") and _HEADLESS.match("Of the tape.")
    assert not _HEADLESS.match("Return the tape.") and not _HEADLESS.match("Whatever it holds.")


def test_headless_docstrings_only_become_fewer() -> None:
    """Begin a docstring with a verb ("Return ...") or a noun. Where a count fell, lower it in the file."""
    assert _headless() == json.loads(_COUNTS.read_text())
