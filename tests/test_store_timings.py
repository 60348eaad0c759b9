"""How entries did against eager, in the store: kept beside them, gone with them, and no part of what may be damaged."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

import shadow_cache
from shadow_cache import Store, Timing

from .helpers import ROOT
from .store_entries import made, stored, timed

OLD = ROOT / "tests" / "golden" / "store_schema_1.sql"
"""The index of a store with ``made(0, 100)`` and ``made(1, 100)``, as the version before the timings wrote it."""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with shadow_cache.open(tmp_path / "store") as opened:
        yield opened


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """The folder of that store."""
    with shadow_cache.open(tmp_path / "old") as store:
        for number in range(2):
            store.add(*made(number, 100))
    index = tmp_path / "old" / "index"
    shutil.rmtree(index)
    index.mkdir(mode=0o700)
    connection = sqlite3.connect(index / "index.db")
    connection.executescript(OLD.read_text())
    connection.execute("PRAGMA journal_mode = WAL")
    connection.close()
    (index / "index.db").chmod(0o600)
    return tmp_path / "old"


def _schema(folder: Path) -> int:
    connection = sqlite3.connect(folder / "index" / "index.db")
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    connection.close()
    return int(version)


def _timings(store: Store) -> dict[int, Timing | None]:
    return {int(entry.id, 16): entry.timing for entry in store.entries()}


def test_a_timing_is_kept_with_its_entry(store: Store, tmp_path: Path) -> None:
    for number in range(3):
        store.add(*made(number))
        store.timed(f"{number:06x}", timed(number + 5))
        store.timed(f"{number:06x}", timed(number)) if number else None
    store.timed("ffffff", timed(9))
    expected = {0: timed(5), 1: timed(1), 2: timed(2)}
    with shadow_cache.open(store.path) as other:
        assert _timings(other) == expected, "the last one, of those entries that are there"
        assert {int(each.id, 16): each.timing for each in other.summaries()} == expected
        assert [each.timing for each in other.find("s1")] == [timed(1)]
        stats = other.stats()
        assert (stats.timed, stats.left_to_eager) == (3, 2) and not other.verify()


def test_it_stays_when_the_entry_is_stored_anew_and_goes_with_it(store: Store) -> None:
    structure, entry, files = made(1)
    store.add(structure, entry, files)
    store.timed(entry.id, timed(1))
    store.add(structure, msgspec.structs.replace(entry, seconds=3.0), files)
    assert _timings(store) == {1: timed(1)}
    store.remove([entry.id])
    store.add(structure, msgspec.structs.replace(entry, timing=timed(3)), files)
    assert _timings(store) == {1: None}, "what was timed is told to timed(), and to nobody else"
    assert store.stats().timed == store.stats().left_to_eager == 0


def test_it_does_not_go_to_other_machines(store: Store, tmp_path: Path) -> None:
    store.add(*made(1))
    store.timed("000001", timed(1))
    store.export(tmp_path / "file")
    with shadow_cache.open(tmp_path / "other") as other:
        assert other.import_(tmp_path / "file") == 1 and _timings(other) == {1: None}


def test_a_damaged_timing_costs_nothing_else(store: Store) -> None:
    for number in (1, 2):
        store.add(*made(number))
        store.timed(f"{number:06x}", timed(number))
    store._index.write(lambda index: index.execute("UPDATE timings SET record = x'00' WHERE entry = '000001'"))
    assert _timings(store) == {1: None, 2: timed(2)} and store.damage == () and store.stats().timed == 1
    (problem,) = store.verify()
    assert problem.where == "000001" and "next tuning trial" in problem.do
    store.timed("000001", timed(3))
    assert _timings(store) == {1: timed(3), 2: timed(2)} and not store.verify()


def test_what_an_older_version_left_behind_goes(store: Store) -> None:
    """It deletes entries, and knows nothing of their timings."""
    for number in (1, 2):
        store.add(*made(number))
        store.timed(f"{number:06x}", timed(number))
    store._index.write(lambda index: index.execute("DELETE FROM entries WHERE id = '000001'"))
    assert store.stats().timed == 1
    store.prune()
    rows = store._index.read(lambda index: index.execute("SELECT entry FROM timings").fetchall())
    assert rows == [("000002",)]


# ---- a store that the version before has made ------------------------------------------------------------------------


def _assert_whole(store: Store) -> None:
    assert {entry.id: (stored(entry), entry.loads) for entry in store.entries()} == {
        f"{number:06x}": (made(number, 100)[1], number) for number in range(2)
    }
    assert store.structure("s0") == made(0)[0] and store.misses(1)[0].miss.kind == "shape"
    assert all(store.read(digest) == data for digest, data in made(1, 100)[2].items())
    assert not store.verify()


def test_an_older_store_goes_on_working(old: Path) -> None:
    assert _schema(old) == 1
    for _ in range(2):
        with shadow_cache.open(old) as store:
            _assert_whole(store)
    assert _schema(old) == 2 and not list(old.glob("index.corrupt-*"))
    with shadow_cache.open(old) as store:
        assert _timings(store) == {0: None, 1: None} and store.stats().timed == 0
        store.timed("000001", timed(1))
        store.add(*made(2, 100))
        assert _timings(store) == {0: None, 1: timed(1), 2: None}


def test_an_older_store_that_may_only_be_read_is_left_as_it_is(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: mode == os.R_OK and access(path, mode))
    with shadow_cache.open(old) as store:
        assert store.read_only
        _assert_whole(store)
        store.timed("000001", timed(1))
        assert _timings(store) == {0: None, 1: None} and store.stats().timed == 0
    assert _schema(old) == 1


@pytest.mark.parametrize("upgraded", [False, True])
@pytest.mark.parametrize("place", [0, 30, 103])
def test_damage_to_the_first_page_of_an_older_store_costs_nothing(old: Path, upgraded: bool, place: int) -> None:
    if upgraded:
        with shadow_cache.open(old) as store:
            store.timed("000001", timed(1))
    index = old / "index" / "index.db"
    data = bytearray(index.read_bytes())
    data[place] ^= 0x81
    index.write_bytes(data)
    with shadow_cache.open(old) as store:
        assert {int(entry.id, 16): entry.loads for entry in store.entries()} == {0: 0, 1: 1}
