"""What the command line is made of: sizes and times, tables, the folded trie, drawings."""

from __future__ import annotations

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shadow_cache.cli import graphs, render
from shadow_cache.cli.difference import parting, varying
from shadow_cache.entries import Call, Structure
from shadow_cache.trie import fold, guides

from . import cli_records as stored

HOUR, DAY = 3600.0, 86400.0


@pytest.mark.parametrize(
    ("count", "text"),
    [
        *((0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (999_949, "999.9 kB"), (999_950, "1.0 MB")),
        *((3_200_000, "3.2 MB"), (2 << 30, "2.1 GB"), (5e15, "5000.0 TB")),
    ],
)
def test_size(count: float, text: str) -> None:
    assert render.size(count) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *((0.0, "0 ms"), (0.0042, "4 ms"), (0.9994, "999 ms"), (0.9999, "1.0 s"), (17.34, "17.3 s"), (99.9, "99.9 s")),
        *((99.96, "1 min 40 s"), (125.0, "2 min 5 s"), (3599.6, "1 h 0 min"), (3840.0, "1 h 4 min")),
    ],
)
def test_seconds(value: float, text: str) -> None:
    assert render.seconds(value) == text


@pytest.mark.parametrize(
    ("past", "text"),
    [
        *((-5.0, "just now"), (59.0, "just now"), (60.0, "1 minute ago"), (2 * HOUR, "2 hours ago")),
        *((DAY, "1 day ago"), (45 * DAY, "1 month ago"), (800 * DAY, "2 years ago")),
    ],
)
def test_ago(past: float, text: str) -> None:
    assert render.ago(stored.NOW - past, stored.NOW) == text


def test_sizes_and_ages_are_read() -> None:
    sizes = {"2GB": 2_000_000_000, "500 mb": 500_000_000, "1.5GiB": 3 << 29, "17": 17, "3k": 3000}
    assert {text: render.parse_size(text) for text in sizes} == sizes
    ages = {"30d": 30 * DAY, "12h": 12 * HOUR, "2w": 14 * DAY, "90s": 90.0, "5 m": 300.0, "0.5d": DAY / 2}
    assert {text: render.parse_age(text) for text in ages} == ages
    for text in ("", "GB", "-1GB", "2 GBs", "1e9"):
        with pytest.raises(ValueError, match="is not a size; write a number with B, kB"):
            render.parse_size(text)
    for text in ("", "30", "d", "-2d", "3 fortnights"):
        with pytest.raises(ValueError, match="is not a duration; write a number with s, m, h, d or w"):
            render.parse_age(text)


def _plain(line: str) -> str:
    return click.unstyle(render.shown(line))


def test_a_table_is_cut_in_one_column_and_only_where_there_is_a_width() -> None:
    rows = [("aa", "a name that is long", "1"), ("b", "short", "1,000")]
    whole = [_plain(line) for line in render.table(("ID", "NAME", "N"), rows, right=(2,), flexible=1)]
    assert whole == [
        "ID  NAME                     N",
        "aa  a name that is long      1",
        "b   short                1,000",
    ]
    narrow = render.table(("ID", "NAME", "N"), rows, right=(2,), flexible=1, width=24)
    assert [_plain(line) for line in narrow] == [
        "ID  NAME               N",
        "aa  a name…s long      1",
        "b   short          1,000",
    ]


def test_spare_columns_go_before_a_name_is_cut_short() -> None:
    rows = [("aa", "n" * 60, "1", "x", "2")]
    narrow = render.table(("ID", "NAME", "N", "X", "M"), rows, flexible=1, spare=(3, 2), width=50)
    assert [_plain(line) for line in narrow][1] == f"aa  {'n' * 20}…{'n' * 19}  1  2"
    narrow = render.table(("ID", "NAME", "N", "X", "M"), rows, flexible=1, spare=(3, 2), width=30)
    assert [_plain(line) for line in narrow][1] == f"aa  {'n' * 11}…{'n' * 11}  2"


def _structure(id: str, names: str) -> Structure:
    calls = tuple(Call(name, (name, f"of {name}")) for name in names)
    return Structure(id, calls, ("end", "return []"), "")


_tapes = st.sets(st.text("ab", max_size=6), min_size=1, max_size=12)


@given(_tapes)
def test_folding_loses_nothing(tapes: set[str]) -> None:
    structures = [_structure(f"s{index}", names) for index, names in enumerate(sorted(tapes))]
    branches = fold(structures)
    leaves = {}
    for branch in branches:
        path, at = list(branch.nodes), branch
        assert branch.parent is None or branch.parent < branches.index(branch)
        while at.parent is not None:
            at = branches[at.parent]
            assert at.structure is None
            path = [*at.nodes, *path]
        assert len(path) == branch.start + len(branch.nodes)
        if branch.structure is not None:
            leaves[branch.structure] = "".join(path)
    assert leaves == {structure.id: "".join(call.name for call in structure.calls) for structure in structures}
    assert sum(branch.shared for branch in branches if branch.parent is None) == len(structures)
    assert len(list(guides(branches))) == len(branches)


def test_tapes_of_many_lengths_fold_without_recursion() -> None:
    structures = [_structure(str(length), "a" * length) for length in range(1200)]
    branches = fold(structures)
    assert len(branches) == 2 * 1200 - 2
    assert sum(branch.structure is not None for branch in branches) == 1200


def test_the_part_that_differs_is_said_only_where_the_operation_is_the_same() -> None:
    same, other, third = stored.STRUCTURES
    by_differs = {branch.differs for branch in fold([same, other])}
    added, fresh = other.calls[4].key[1], same.calls[4].key[1]
    assert by_differs == {"", fresh, added}
    assert {branch.differs for branch in fold([same, third])} == {""}


def test_where_tapes_part() -> None:
    short, long = _structure("s", "ab"), _structure("l", "abc")
    found = parting(short, long)
    assert found is not None and (found.index, found.old, found.old_part, found.new_part) == (2, None, "end", "c")
    assert found.new is not None and found.new.name == "c"
    assert parting(short, short) is None


def test_what_varies_is_only_what_varies() -> None:
    found = varying([stored.FIRST, stored.DYNAMIC])
    assert [(change.name, change.new) for change in found["3fb07e"]] == [
        ("node 2 AddmmBackward0, mat1 shape", "[s0, 3]"),
        ("node 6 AddmmBackward0, mat1 shape", "[s0, 4]"),
    ]
    assert varying([stored.FIRST]) == {"3fa91c": []}


def test_drawings_escape_what_would_end_a_label() -> None:
    call = Call('a"b\\c<d>', ("a",), source="file.py:1 in <lambda>", edges=(0,))
    structure = Structure("s", (call,), ("end",), "")
    assert '[label="a\\"b\\\\c<d>\\nfile.py:1 in <lambda>"]' in graphs.dot(structure)
    assert 'n0("a#quot;b\\c#lt;d><br>file.py:1 in #lt;lambda>")' in graphs.mermaid(structure)
    assert "n0 -> n0;" in graphs.dot(structure) and "n0 --> n0" in graphs.mermaid(structure)


def test_what_a_stream_cannot_encode_is_written_in_ascii() -> None:
    assert render.for_encoding("├─ … é", "utf-8") == "├─ … é"
    assert render.for_encoding("├─ └─ … é", "ascii") == "|- `- ~ \\xe9"
