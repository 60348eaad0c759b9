"""A store that is damaged, or whose writers are killed: nothing wrong is given back, and nothing stored is lost."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import shadow_cache
from shadow_cache import DamagedEntryError, Store, StoreError, StoreNewerError, StoreRefusedError

from .helpers import ROOT
from .store_entries import made, stored, timed

COUNT = 12


@pytest.fixture(scope="module")
def pattern(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of a few entries, to be copied and damaged. Three were loaded and timed, and one was evicted."""
    path = tmp_path_factory.mktemp("pattern") / "store"
    with shadow_cache.open(path) as store:
        for number in range(COUNT):
            store.add(*made(number))
        for number in (1, 5, 6):
            store.loaded(f"{number:06x}")
            store.timed(f"{number:06x}", timed(number))
        store.add(*made(COUNT))
        store.remove([f"{COUNT:06x}"], "evicted")
    return path


@pytest.fixture
def copy(pattern: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pattern, tmp_path / "store"))


def look(path: Path) -> tuple[set[int], set[int]]:
    """Call all that reads, and compare with what was stored. Gives the entries listed, and those with all files."""
    listed: set[int] = set()
    whole: set[int] = set()
    with shadow_cache.open(path) as store:
        entries = store.entries()
        found = [entry for number in range(5) for entry in store.find(f"s{number}")]
        store.stats()
        for miss in store.misses():
            assert miss.miss.kind in {"evicted", "corrupt"} and str(miss.miss)
        for entry in (*entries, *found):
            number = int(entry.id, 16)
            structure, expected, files = made(number)
            assert number < COUNT and stored(entry) == expected and entry.timing in (None, timed(number))
            assert store.structure(entry.structure) in (None, structure)
            listed.add(number)
            try:
                for digest, data in files.items():
                    assert store.read(digest) == data
                whole.add(number)
            except DamagedEntryError as error:
                assert error.found
        assert all(problem.what and problem.do for problem in store.verify())
        # And it can be written again: what was lost is made anew.
        store.add(*made(0))
        assert 0 in {int(entry.id, 16) for entry in store.find("s0")}
        assert all(store.read(digest) == data for digest, data in made(0)[2].items())
    return listed, whole


def files_of(path: Path) -> list[Path]:
    return sorted(file for file in (path / "files").rglob("*") if file.is_file())


def flip(file: Path, rng: random.Random, count: int) -> None:
    data = bytearray(file.read_bytes())
    for _ in range(count):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    file.write_bytes(data)


def cut(file: Path, rng: random.Random) -> None:
    os.truncate(file, rng.randrange(file.stat().st_size))


# ---- damage at random ------------------------------------------------------------------------------------------------


def damaged_at_random(pattern: Path, place: Path, trials: int, seed: int) -> dict[str, int]:
    """Copies of the store, each damaged in one way. Counts of what was found."""
    rng = random.Random(seed)
    counts = {"refused": 0, "set aside": 0, "listed": 0, "whole": 0}
    for trial in range(trials):
        path = Path(shutil.copytree(pattern, place / str(trial)))
        index, artifact = path / "index" / "index.db", rng.choice(files_of(path))
        action: Callable[[], None] = rng.choice(
            [
                lambda index=index: flip(index, rng, 1),
                lambda index=index: flip(index, rng, 1),
                lambda index=index: flip(index, rng, 40),
                lambda index=index: cut(index, rng),
                lambda artifact=artifact: flip(artifact, rng, 1),
                lambda artifact=artifact: cut(artifact, rng),
                lambda artifact=artifact: artifact.unlink(),
            ]
        )
        action()
        try:
            listed, whole = look(path)
        except StoreNewerError:  # the flipped byte was that of the version
            counts["refused"] += 1
        else:
            counts["listed"] += len(listed)
            counts["whole"] += len(whole)
        counts["set aside"] += bool(list(path.glob("index.corrupt-*")))
        shutil.rmtree(path)
    return counts


def test_damage_at_random(pattern: Path, tmp_path: Path) -> None:
    counts = damaged_at_random(pattern, tmp_path, 60, seed=1)
    assert counts["set aside"] > 0
    assert counts["whole"] > 60 * COUNT * 0.6, "most entries outlive most damage"


@pytest.mark.slow
def test_much_damage_at_random(pattern: Path, tmp_path: Path) -> None:
    counts = damaged_at_random(pattern, tmp_path, 1000, seed=2)
    assert counts["whole"] > 1000 * COUNT * 0.6


def test_damage_to_the_log(tmp_path: Path) -> None:
    """What a killed writer had stored is in sqlite's log, and not in the database yet."""
    rng = random.Random(3)
    with shadow_cache.open(tmp_path / "writer") as store:
        for number in range(COUNT):
            store.add(*made(number))
        shutil.copytree(tmp_path / "writer", tmp_path / "killed")
    assert look(Path(shutil.copytree(tmp_path / "killed", tmp_path / "whole"))) == (set(range(COUNT)),) * 2
    found = []
    for trial in range(30):
        path = Path(shutil.copytree(tmp_path / "killed", tmp_path / str(trial)))
        (flip if trial % 2 else cut)(path / "index" / "index.db-wal", rng, *((1,) if trial % 2 else ()))
        (path / "index" / "index.db-shm").unlink()
        listed, whole = look(path)
        assert listed == whole == set(range(len(listed))), "what was stored before the damage"
        found.append(len(listed))
    assert max(found) > COUNT // 2


# ---- damage of one kind ----------------------------------------------------------------------------------------------


def test_a_flipped_byte_in_a_row_costs_that_entry_only(copy: Path) -> None:
    index = copy / "index" / "index.db"
    record = made(3)[1].record[:64]
    data = index.read_bytes()
    assert record in data
    index.write_bytes(data.replace(record, bytes([record[0] ^ 1]) + record[1:]))
    with shadow_cache.open(copy) as store:
        assert {int(entry.id, 16) for entry in store.entries()} == set(range(COUNT)) - {3}
        (reason,) = store.damage
        assert (reason.entry, reason.structure, reason.miss.kind) == ("000003", "s3", "corrupt")
        assert store.misses(1) == (reason,) and store.stats().misses == {"corrupt": 1, "evicted": 1}
        assert not store.verify()
    artifact, lowered = made(3)[1].regions[0].artifact, made(3)[1].regions[0].lowered
    names = {file.name for file in files_of(copy)}
    assert artifact not in names and lowered in names, "two others name the lowered graph"


def test_every_flipped_byte_of_an_artifact_is_found(copy: Path) -> None:
    rng = random.Random(0)
    for number in range(COUNT):
        digest = made(number)[1].regions[0].artifact
        flip(copy / "files" / digest[:2] / digest, rng, 1)
    listed, whole = look(copy)
    assert listed == set(range(COUNT)) and not whole
    with shadow_cache.open(copy) as store:
        assert [entry.id for entry in store.entries()] == ["000000"], "the others were dropped, this one stored again"
        assert store.stats().misses["corrupt"] == COUNT


def test_damage_to_the_first_page_costs_nothing(pattern: Path, tmp_path: Path) -> None:
    """It holds the header and the schema, without which sqlite reads nothing."""
    index = pattern / "index" / "index.db"
    first = index.read_bytes()[:4096]
    places = [0, 7, 16, 30, 100, 103, 105, first.index(b"names_by_digest"), -30]
    places += [found.start() for found in re.finditer(b"checksum BLOB", first)]  # of each table
    for number, place in enumerate(places):
        path = Path(shutil.copytree(pattern, tmp_path / str(number)))
        data = bytearray(index.read_bytes())
        data[range(4096)[place]] ^= 0x81
        (path / "index" / "index.db").write_bytes(data)
        with shadow_cache.open(path) as store:
            assert {int(entry.id, 16): (entry.loads, entry.timing) for entry in store.entries()} == {
                number: (1, timed(number)) if number in (1, 5, 6) else (0, None) for number in range(COUNT)
            }, place
            assert not list((path / "index").glob("repaired*")) and store.stats().misses["evicted"] == 1
    path = Path(shutil.copytree(pattern, tmp_path / "page"))
    (path / "index" / "index.db").write_bytes(bytes(4096) + index.read_bytes()[4096:])
    listed, whole = look(path)
    assert listed == whole == set(range(COUNT))


def test_an_index_that_is_no_database_is_moved_aside(copy: Path) -> None:
    (copy / "index" / "index.db").write_bytes(b"not a database" * 1000)
    with shadow_cache.open(copy) as store:
        assert store.entries() == ()
        (reason,) = store.misses()
        assert reason.miss.kind == "corrupt" and "not a database" in reason.miss.new and store.damage == (reason,)
        (aside,) = copy.glob("index.corrupt-*")
        assert aside.name in reason.miss.hint
        assert (aside / "index.db").read_bytes().startswith(b"not a database")
        store.add(*made(1))
        assert [problem.where for problem in store.verify()] == [aside.name]


def test_what_can_be_read_of_a_damaged_index_is_saved(tmp_path: Path) -> None:
    with shadow_cache.open(tmp_path / "store") as store:
        for number in range(60):
            store.add(*made(number, size=100))
    index = tmp_path / "store" / "index" / "index.db"
    data = bytearray(index.read_bytes())
    page = data.index(made(30)[1].record[:64]) // 4096
    data[page * 4096 : (page + 1) * 4096] = bytes(4096)
    index.write_bytes(data)
    with shadow_cache.open(tmp_path / "store") as store:
        saved = {int(entry.id, 16): entry for entry in store.entries()}
        assert 50 < len(saved) < 60 and 30 not in saved
        for number, entry in saved.items():
            assert stored(entry) == made(number, size=100)[1]
            assert store.read(entry.regions[0].artifact) == made(number, size=100)[2][entry.regions[0].artifact]
        assert f"{len(saved)} entries were saved" in store.misses(1)[0].miss.hint


def test_rows_that_are_gone(copy: Path) -> None:
    import sqlite3

    for statement, expected in (
        ("DELETE FROM names WHERE entry = 2", set(range(COUNT))),
        ("DELETE FROM structures WHERE id = 's1'", set(range(COUNT))),
        ("DELETE FROM entries WHERE id = '000004'", set(range(COUNT)) - {4}),
    ):
        connection = sqlite3.connect(copy / "index" / "index.db")
        connection.execute(statement)
        connection.commit()
        connection.close()
        with shadow_cache.open(copy) as store:
            assert store.structure("s1") is None or "structures" not in statement
            assert {int(entry.id, 16) for entry in store.entries()} == expected
            assert bool(store.verify()) == ("entries" not in statement or len(expected) < COUNT)
    listed, whole = look(copy)
    assert listed == whole == set(range(COUNT)) - {4}


def test_a_table_that_is_gone_is_damage(copy: Path) -> None:
    import sqlite3

    connection = sqlite3.connect(copy / "index" / "index.db")
    connection.execute("DROP TABLE names")
    connection.commit()
    connection.close()
    with shadow_cache.open(copy) as store:
        store.add(*made(COUNT))
        assert len(store.entries()) == COUNT + 1, "the others were saved"
        assert store.damage[0].miss.kind == "corrupt" and "names" in store.damage[0].miss.new


def test_a_name_in_the_schema_that_is_no_text(copy: Path) -> None:
    """sqlite's message then is no text either, and Python raises that instead."""
    index = copy / "index" / "index.db"
    data = index.read_bytes()
    index.write_bytes(
        data.replace(b"CREATE INDEX entries_by_use ON entries", b"CREATE INDEX entries_by_use ON entr\xf3es")
    )
    listed, whole = look(copy)
    assert listed == whole == set(range(COUNT)) and len(list(copy.glob("index.corrupt-*"))) == 1


@pytest.mark.parametrize("in_log", [False, True])
def test_a_schema_from_the_future_is_not_touched(copy: Path, in_log: bool) -> None:
    import sqlite3

    connection = sqlite3.connect(copy / "index" / "index.db")
    connection.execute("PRAGMA user_version = 7")
    connection.commit()
    if not in_log:
        connection.close()
    before = {file: file.read_bytes() for file in copy.rglob("*") if file.is_file() and file.suffix == ".db"}
    with pytest.raises(StoreNewerError, match="schema 7; this version of compiled_autograd reads schemas up to 2"):
        shadow_cache.open(copy)
    assert before == {file: file.read_bytes() for file in before}
    assert not list(copy.glob("index.corrupt-*"))
    connection.close()


def test_permission_bits(copy: Path) -> None:
    for mode in (0o750, 0o705, 0o722, 0o777):
        copy.chmod(mode)
        with pytest.raises(StoreRefusedError, match=f"{mode:04o}.*chmod 700"):
            shadow_cache.open(copy)
    copy.chmod(0o700)
    for file in copy.rglob("*"):
        file.chmod(0o777)  # nobody comes through the folder above
    listed, whole = look(copy)
    assert listed == whole == set(range(COUNT))


def test_links_are_not_followed(copy: Path, tmp_path: Path) -> None:
    digest = made(2)[1].regions[0].artifact
    file = copy / "files" / digest[:2] / digest
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    with shadow_cache.open(copy) as store:
        with pytest.raises(DamagedEntryError):
            store.read(digest)
        store.add(*made(2))
        assert store.read(digest) == made(2)[2][digest]
    assert not file.is_symlink()
    (copy / "files").rename(tmp_path / "files")
    (copy / "files").symlink_to(tmp_path / "files")
    with pytest.raises(StoreRefusedError, match="no plain folder"):
        shadow_cache.open(copy)


def test_damage_while_it_is_open(copy: Path) -> None:
    """Another process has moved the index aside: who had it open goes on in the new one."""
    with shadow_cache.open(copy) as first, shadow_cache.open(copy) as second:
        assert len(first.entries()) == len(second.entries()) == COUNT
        process = first._index._process()
        seen = process.opened
        first._index._replace(process, _corrupt(), seen)
        first._index._replace(process, _corrupt(), seen)  # by then it is another index, which stays
        assert len(list(copy.glob("index.corrupt-*"))) == 1 and not list(copy.glob("index.new-*"))
        second.add(*made(COUNT))
        assert {entry.id for entry in first.entries()} == {f"{number:06x}" for number in range(COUNT + 1)}
        shutil.rmtree(copy)
        assert first.entries() == () == second.entries()
        second.add(*made(1))
        assert [entry.id for entry in first.entries()] == ["000001"]


def _corrupt() -> Exception:
    import sqlite3

    return sqlite3.DatabaseError("database disk image is malformed")


# ---- processes -------------------------------------------------------------------------------------------------------


def child(what: str, place: Path, amount: int, seed: int = 1) -> dict[str, int]:
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("store_child.py")), what, str(place), str(amount), str(seed)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=250,
        check=False,
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    return json.loads(done.stdout)


def test_a_writer_killed_in_the_middle_loses_nothing_that_was_stored(tmp_path: Path) -> None:
    done = child("kill", tmp_path / "store", 20)
    assert done["trials"] == 20 and done["stored"] > 0


@pytest.mark.slow
def test_a_writer_killed_500_times_loses_nothing_that_was_stored(tmp_path: Path) -> None:
    assert child("kill", tmp_path / "store", 500)["stored"] > 200


def test_eight_processes_killed_at_random(tmp_path: Path) -> None:
    done = child("many", tmp_path / "store", 3)
    assert done["killed"] > 20 and done["stored"] > 20


@pytest.mark.slow
def test_eight_processes_killed_at_random_for_a_while(tmp_path: Path) -> None:
    assert child("many", tmp_path / "store", 40, seed=2)["killed"] > 200


def test_two_writers(tmp_path: Path) -> None:
    with shadow_cache.open(tmp_path / "store") as one, shadow_cache.open(tmp_path / "store") as other:
        for number in range(0, 20, 2):
            one.add(*made(number))
            other.add(*made(number + 1))
            other.add(*made(number))
        assert {int(entry.id, 16) for entry in one.entries()} == set(range(20))
        assert one.entries() == other.entries() and not one.verify()


def test_a_file_that_is_removed_while_an_entry_with_it_is_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with shadow_cache.open(tmp_path / "store") as one, shadow_cache.open(tmp_path / "store") as other:
        one.add(*made(3))
        write = one._folder.write

        def write_and_be_overtaken(digest: str, data: bytes) -> None:
            write(digest, data)
            if digest == made(3)[1].regions[0].lowered:
                monkeypatch.undo()
                assert other.remove(["000003"]) == 1
                assert one._folder.size(digest) is None, "no entry named it at that moment"

        monkeypatch.setattr(one._folder, "write", write_and_be_overtaken)
        one.add(*made(4))  # the same lowered graph
        assert [stored(entry) for entry in one.entries()] == [made(4)[1]] and not one.verify()


def test_nothing_but_store_errors(copy: Path) -> None:
    """A folder taken away altogether, by something that is no folder."""
    with shadow_cache.open(copy) as store:
        shutil.rmtree(copy)
        copy.write_text("a file")
        calls: list[Callable[[Store], object]] = [
            lambda store: store.entries(),
            lambda store: store.find("s1"),
            lambda store: store.stats(),
            lambda store: store.add(*made(1)),
            lambda store: store.loaded("000001"),
            lambda store: store.verify(),
            lambda store: store.read(made(1)[1].regions[0].artifact),
        ]
        for call in calls:
            with pytest.raises(StoreError):
                call(store)
