"""Format sizes, times, tables and colours for people, without access to the store. Only ``table`` takes a width."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from functools import partial

import click

from ..amounts import ago as ago
from ..amounts import date as date
from ..amounts import plural as plural
from ..amounts import seconds as seconds
from ..amounts import size as size
from ..safe_text import harmless

_SIZES = {"": 1, "B": 1, "K": 1e3, "KB": 1e3, "M": 1e6, "MB": 1e6, "G": 1e9, "GB": 1e9, "T": 1e12, "TB": 1e12}
_SIZES |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_AGES = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_NAME_WIDTH = 40

# Styles are marks in the text until the text is shown. A name that contains these marks is coloured, no more.
_STYLES = {
    "bold": {"bold": True},
    "dim": {"dim": True},
    "identifier": {"fg": "yellow"},
    "old": {"fg": "red"},
    "new": {"fg": "green"},
}
_END, *_BEGINS = (chr(0xF0000 + number) for number in range(len(_STYLES) + 1))
_MARKS = dict(zip(_STYLES, _BEGINS, strict=True))
_ANSI = {_MARKS[name]: click.style("", reset=False, **style) for name, style in _STYLES.items()}  # type: ignore[arg-type]
_ANSI[_END] = click.style("")
_MARK = re.compile(f"([{_END}{''.join(_BEGINS)}])")

# For a stream that cannot encode the characters on the left.
_ASCII = str.maketrans({"├": "|", "└": "`", "│": "|", "─": "-", "…": "~", "→": ">", "▇": "#"})


def clip(text: str, width: int) -> str:
    """Cut ``text`` to ``width`` characters."""
    return text if len(text) <= width else f"{text[: max(width - 1, 1)]}…"


def clip_middle(text: str, width: int) -> str:
    """Cut the middle out of ``text`` so that ``width`` characters remain: both ends of a name matter."""
    if len(text) <= width:
        return text
    end = (width - 1) // 2
    return f"{text[: width - 1 - end]}…{text[len(text) - end :]}"


def parse_size(text: str) -> int:
    """Parse ``2GB``, ``500 MB`` or ``1.5GiB`` to bytes; raise ValueError with the allowed forms for other text."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if found is None or found[2].upper() not in _SIZES:
        raise ValueError(f"{text!r} is not a size; write a number with B, kB, MB, GB, TB, KiB, MiB or GiB, like 2GB.")
    return int(float(found[1]) * _SIZES[found[2].upper()])


def parse_age(text: str) -> float:
    """Parse ``30d``, ``12h`` or ``2w`` to seconds; raise ValueError with the allowed forms for other text."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", text)
    if found is None or found[2] not in _AGES:
        raise ValueError(f"{text!r} is not a duration; write a number with s, m, h, d or w, like 30d.")
    return float(found[1]) * _AGES[found[2]]


def _styled(text: str, style: str) -> str:
    return f"{_MARKS[style]}{text}{_END}"


def shown(text: str) -> str:
    """Return text for a terminal: marks become styles, and non-printable characters are escaped."""
    return "".join(_ANSI.get(part) or harmless(part, lines=True) for part in _MARK.split(text))


bold = partial(_styled, style="bold")
dim = partial(_styled, style="dim")
identifier = partial(_styled, style="identifier")
old = partial(_styled, style="old")
new = partial(_styled, style="new")


def pairs(rows: Iterable[tuple[str, str]], indent: str = "  ") -> list[str]:
    """Format names and values in two columns; a value may have several lines."""
    rows = [(harmless(name), value) for name, value in rows]
    width = max((len(name) for name, _ in rows), default=0)
    lines = []
    for name, value in rows:
        first, *others = value.split("\n")
        lines.append(f"{indent}{dim(name)}{' ' * (width - len(name))}  {first}".rstrip())
        lines += [f"{indent}{' ' * width}  {other}" for other in others]
    return lines


def table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    right: Collection[int] = (),
    flexible: int | None = None,
    spare: Sequence[int] = (),
    width: int | None = None,
    indent: str = "",
) -> list[str]:
    """Format a table with columns as wide as their cells.

    Args:
        header: the names of the columns.
        rows: the cells, unstyled; the first column is shown in the style of ids.
        right: the columns that are aligned to the right.
        flexible: the column that is cut if lines would be longer than ``width``.
        spare: columns to drop, in this order, before ``flexible`` is cut to less than 40 characters.
        width: the width of the terminal; None for no limit.
        indent: text before each line.
    """
    rows = [[harmless(cell) for cell in row] for row in rows]
    columns = list(range(len(header)))
    widths = [max(len(row[column]) for row in (header, *rows)) for column in columns]
    if flexible is not None and width is not None:
        room = width - len(indent) - sum(widths[column] + 2 for column in columns if column != flexible)
        for column in spare:
            if room < min(widths[flexible], _NAME_WIDTH):
                columns.remove(column)
                room += widths[column] + 2
        widths[flexible] = min(widths[flexible], max(room, 12))

    def line(row: Sequence[str], is_header: bool) -> str:
        cells = []
        for column in columns:
            text = clip_middle(row[column], widths[column]) if column == flexible else row[column]
            space = " " * (widths[column] - len(text))
            shown = dim(text) if is_header else identifier(text) if column == 0 else text
            cells.append(space + shown if column in right else shown + space)
        return (indent + "  ".join(cells)).rstrip()

    return [line(header, True), *(line(row, False) for row in rows)]


def for_encoding(text: str, encoding: str | None) -> str:
    """Return ``text`` for a stream of this encoding: in ASCII if the encoding lacks one of its characters."""
    try:
        text.encode(encoding or "utf-8")
    except UnicodeEncodeError:
        return text.translate(_ASCII).encode("ascii", "backslashreplace").decode()
    return text
