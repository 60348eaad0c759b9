"""The store on disk: what is put in comes out, in order, within the size limit, and by its owner only."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shadow_cache
from shadow_cache import (
    DamagedArchiveError,
    DamagedEntryError,
    Entry,
    InvalidEntryError,
    Miss,
    MissEntry,
    Region,
    Store,
    StoreMissingError,
    StoreRefusedError,
    StoreUnavailableError,
)
from shadow_cache.store import folder
from shadow_cache.store.rows import decode, encode

from .helpers import ROOT, in_subprocess
from .store_entries import content, made, stored


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with shadow_cache.open(tmp_path / "store") as opened:
        yield opened


def ids(entries: tuple[Entry, ...]) -> list[int]:
    return [int(entry.id, 16) for entry in entries]


def files_of(store: Store) -> set[str]:
    return {file.name for file in (store.path / "files").rglob("*") if file.is_file()}


def in_child(code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process without torch, which has ``made``, ``stored``, ``shadow_cache``, ``os`` and ``sys``."""
    first = f"""
        import msgspec, os, sys, tempfile
        sys.path.insert(0, {str(ROOT / "tests")!r})
        from store_entries import made, stored
        import shadow_cache
        from shadow_cache import Store, MissEntry, StoreUnavailableError, Miss
        import shadow_cache.store, platformdirs
    """
    return in_subprocess(textwrap.dedent(first) + textwrap.dedent(code) + "\nassert 'torch' not in sys.modules")


# ---- import ----------------------------------------------------------------------------------------------------------


def test_importing_the_package_imports_no_database() -> None:
    code = "import sys, shadow_cache; print(sorted({'sqlite3', 'platformdirs', 'torch'} & set(sys.modules)))"
    done = in_subprocess(code)
    assert done.stdout.strip() == "[]", done.stderr


def test_the_default_place() -> None:
    done = in_subprocess("import shadow_cache; print(shadow_cache.default_dir())", XDG_CACHE_HOME="/nowhere")
    assert Path(done.stdout.strip()).name == "compiled_autograd" and not Path("/nowhere").exists()


# ---- what is put in comes out ----------------------------------------------------------------------------------------


def test_what_is_added_is_found_with_its_files(store: Store) -> None:
    structure, entry, files = made(1)
    store.add(structure, entry, files)
    (added,) = store.find("s1")
    assert stored(added) == entry and added.size == sum(map(len, files.values())) and added.loads == 0
    assert store.entries() == (added,) and store.find("s2") == ()
    assert store.structure("s1") == structure and store.structure("s2") is None
    assert {digest: store.read(digest) for digest in files} == files
    assert store.verify() == () and store.damage == ()


def test_it_outlives_its_process(tmp_path: Path) -> None:
    code = f"store = shadow_cache.open({str(tmp_path / 'store')!r}); store.add(*made(7)); os._exit(0)"
    assert in_child(code).returncode == 0
    with shadow_cache.open(tmp_path / "store", create=False) as store:
        assert [stored(entry) for entry in store.entries()] == [made(7)[1]]


def test_a_new_store_is_empty(store: Store) -> None:
    assert store.entries() == store.misses() == store.verify() == store.prune() == ()
    stats = store.stats()
    assert (stats.entries, stats.structures, stats.size, stats.loads, stats.misses) == (0, 0, 0, 0, {})
    assert store.remove(["000001"]) == 0


def test_adding_again_puts_the_entry_in_its_place(store: Store) -> None:
    structure, entry, files = made(1)
    store.add(structure, entry, files)
    store.loaded(entry.id)
    data = content(99, 500)
    digest = hashlib.sha256(data).hexdigest()
    changed = msgspec.structs.replace(entry, regions=(Region(1, digest, digest, b""),), seconds=3.0)
    store.add(structure, changed, {digest: data})
    (added,) = store.entries()
    assert stored(added) == changed and added.loads == 1 and added.size == 500
    assert files_of(store) == {digest}, "files that no entry names are gone"


def test_a_damaged_file_is_put_right_by_adding_again(store: Store) -> None:
    structure, entry, files = made(1)
    store.add(structure, entry, files)
    digest = entry.regions[0].artifact
    file = store.path / "files" / digest[:2] / digest
    file.write_bytes(bytes(len(files[digest])))
    store.add(structure, entry, files)
    assert store.read(digest) == files[digest] and not store.verify()


def test_an_entry_without_regions(store: Store) -> None:
    structure, entry, _ = made(1)
    store.add(structure, msgspec.structs.replace(entry, regions=()), {})
    (added,) = store.entries()
    assert added.size == 0 and added.regions == ()


def test_last_used_first(store: Store) -> None:
    for number in (1, 6, 11, 2):
        store.add(*made(number))
    assert ids(store.entries()) == [2, 11, 6, 1] and ids(store.find("s1")) == [11, 6, 1]
    store.loaded("000006")
    store.loaded("000006")
    store.loaded("ffffff")
    assert ids(store.entries()) == [6, 2, 11, 1]
    assert store.entries()[0].loads == 2 and store.stats().seconds_saved == 4.0 and store.stats().loads == 2


def test_misses_are_newest_first(store: Store) -> None:
    misses = [MissEntry(float(number), "s1", None, "name", Miss("shape", new=str(number))) for number in range(5)]
    for miss in misses:
        store.record(miss)
    store.record(MissEntry(9.0, "s2", "000001", "name", Miss("first_seen")))
    assert store.misses()[1:] == tuple(misses[::-1]) and store.misses(2)[1] == misses[4]
    assert store.stats().misses == {"shape": 5, "first_seen": 1} and store.misses(0) == ()


def test_ctrl_c_as_a_transaction_begins_leaves_none_open(store: Store) -> None:
    miss = MissEntry(1.0, "structure", None, "name", Miss("first_seen"))

    def interrupt(frame: FrameType, event: str, argument: object) -> None:
        connection = frame.f_locals.get("connection")
        if event == "c_return" and isinstance(connection, sqlite3.Connection) and connection.in_transaction:
            sys.setprofile(None)
            raise KeyboardInterrupt

    sys.setprofile(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            store.record(miss)
    finally:
        sys.setprofile(None)
    (index,) = store.path.rglob("*.db")
    with contextlib.closing(sqlite3.connect(index, timeout=0.1, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        other.execute("ROLLBACK")
    store.record(miss)
    assert [each.miss.kind for each in store.misses()] == ["first_seen"]


def test_the_oldest_misses_go(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shadow_cache.store.rows.KEPT_MISSES", 3)
    for number in range(5):
        store.record(MissEntry(float(number), "s1", None, "", Miss("shape")))
    assert [miss.when for miss in store.misses()] == [4.0, 3.0, 2.0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda files, first: files.pop(first), "files not given"),
        (lambda files, first: files.update({"0" * 64: b""}), "files not named: .'0000"),
        (lambda files, first: files.update({first: b"other"}), "have the SHA-256"),
    ],
)
def test_an_entry_and_files_that_do_not_belong_together(store: Store, change, message: str) -> None:
    structure, entry, files = made(1)
    change(files, entry.regions[0].artifact)
    with pytest.raises(InvalidEntryError, match=message):
        store.add(structure, entry, files)
    with pytest.raises(InvalidEntryError, match="has structure 's1', and 's2'"):
        store.add(made(2)[0], entry, made(1)[2])
    assert store.entries() == () and not files_of(store)


@pytest.mark.parametrize("name", ["", "../../../etc/passwd", "0" * 63, "A" * 64, "0" * 64])
def test_a_name_that_is_no_file(store: Store, name: str) -> None:
    with pytest.raises(DamagedEntryError):
        store.read(name)


def test_a_damaged_name_leads_nowhere(tmp_path: Path) -> None:
    with shadow_cache.open(tmp_path / "folder" / "store") as store:
        name = "../../other"
        other = store._folder.file(name).resolve()
        assert other == tmp_path / "other"
        other.write_text("not of the store")
        with pytest.raises(DamagedEntryError):
            store.read(name)
        store.add(*made(1))
        damage = "UPDATE names SET digest = ? WHERE digest = ?"
        store._index.write(lambda index: index.execute(damage, (name, made(1)[1].regions[0].artifact)))
        assert store.remove(["000001"]) == 1
        assert other.exists()


def test_a_mistake_of_the_caller_is_no_damage(store: Store) -> None:
    store.add(*made(1))
    with pytest.raises((sqlite3.ProgrammingError, sqlite3.InterfaceError)):
        store.find(("s1",))  # type: ignore[arg-type]
    assert len(store.find("s1")) == 1 and not store.damage


# ---- removing --------------------------------------------------------------------------------------------------------


def test_a_file_goes_with_the_last_entry_that_names_it(store: Store) -> None:
    for number in (3, 4):  # both name the same lowered graph
        store.add(*made(number))
    assert store.remove(["000003", "000003", "nothing"]) == 1
    assert files_of(store) == set(made(4)[2]) and store.structure("s3") is None
    assert store.misses() == () and store.remove(["000004"], "environment") == 1
    assert files_of(store) == set() and store.misses()[0].miss.kind == "environment"


def test_the_size_limit(tmp_path: Path) -> None:
    with shadow_cache.open(tmp_path / "store", max_size=5100) as store:
        for number in range(3):  # 2,000 bytes each, and 7 that all three share
            store.add(*made(number))
            store.loaded("000000")
        assert ids(store.entries()) == [0, 2], "1 was the least recently used one"
        assert store.stats().size == 4007 == sum(file.stat().st_size for file in (store.path / "files").glob("*/*"))
        (miss,) = store.misses()
        assert (miss.entry, miss.miss.kind) == ("000001", "evicted") and "max_size=5100" in miss.miss.hint
        store.add(*made(9, size=9000))
        assert ids(store.entries()) == [9], "the one just added stays, whatever its size"


def test_prune(store: Store) -> None:
    for number in range(6):
        store.add(*made(number))
    everything = store.entries()
    assert ids(store.prune(max_size=4100, dry_run=True)) == [0, 1, 2, 3] and store.entries() == everything
    assert ids(store.prune(max_size=4100)) == [0, 1, 2, 3] and ids(store.entries()) == [5, 4]
    assert store.prune(older_than=3600) == () and store.prune() == ()
    assert ids(store.prune(older_than=0)) == [4, 5] and not files_of(store)


def test_what_a_killed_writer_left_is_removed_once_it_is_old(store: Store) -> None:
    store.add(*made(1))
    left = [store.path / "temporary" / "1-abc", store.path / "files" / "00" / ("0" * 64)]
    for file in left:
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(b"half")
    store.prune()
    assert all(file.exists() for file in left) and not store.verify(), "someone may be about to name it"
    for file in left:
        os.utime(file, (1e9, 1e9))
    assert len(store.verify()) == 2
    store.prune()
    assert not any(file.exists() for file in left) and not store.verify()
    assert store.read(made(1)[1].regions[0].artifact)


# ---- whose it is -----------------------------------------------------------------------------------------------------


def test_only_the_owner_can_read_it(store: Store) -> None:
    store.add(*made(1))
    assert store.path.stat().st_mode & 0o777 == 0o700
    assert not [file for file in store.path.rglob("*") if file.is_file() and file.stat().st_mode & 0o077]


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="only root can give files away")
def test_what_belongs_to_someone_else_is_refused(store: Store) -> None:
    structure, entry, files = made(1)
    store.add(structure, entry, files)
    digest = entry.regions[0].artifact
    os.chown(store.path / "files" / digest[:2] / digest, 12345, -1)
    with pytest.raises(DamagedEntryError, match="belongs to user 12345"):
        store.read(digest)
    index = store.path / "index" / "index.db"
    os.chown(index, 12345, -1)
    with pytest.raises(StoreRefusedError, match=r"index.db .* belongs to user 12345"):
        shadow_cache.open(store.path)
    os.chown(index, 0, -1)
    os.chown(store.path, 12345, -1)
    with pytest.raises(StoreRefusedError, match="belongs to user 12345, and this process runs as user 0"):
        shadow_cache.open(store.path)


def test_no_store_where_none_is_to_be_made(tmp_path: Path) -> None:
    with pytest.raises(StoreMissingError, match="the folder has no cache"):
        shadow_cache.open(tmp_path / "nowhere", create=False)
    assert not (tmp_path / "nowhere").exists()
    (tmp_path / "empty").mkdir(mode=0o700)
    with pytest.raises(StoreMissingError):
        shadow_cache.open(tmp_path / "empty", create=False)
    (tmp_path / "file").touch()
    with pytest.raises(StoreUnavailableError):
        shadow_cache.open(tmp_path / "file" / "below")


# ---- full disks, read-only folders -----------------------------------------------------------------------------------


@pytest.mark.skipif(os.name != "posix", reason="file size limits are POSIX's")
def test_a_full_disk_is_said_and_loses_nothing(tmp_path: Path) -> None:
    done = in_child(f"""
        import resource
        store = shadow_cache.open({str(tmp_path / "store")!r})
        store.add(*made(1))
        before = store.entries()
        structure, entry, files = made(2)
        no_files = (structure, msgspec.structs.replace(entry, regions=()), {{}})
        for limit, arguments in ((1000, (structure, entry, files)), (1, no_files)):  # a file of an entry; the index
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            try:
                store.add(*arguments)
            except StoreUnavailableError as error:
                assert isinstance(error, OSError)
                print(error)
            assert store.entries() == before
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert not os.listdir(store.path / "temporary") or os.listdir(store.path / "temporary") == [".tidied"]
        store.add(*made(2))
        assert len(store.entries()) == 2 and not store.verify() and not store.damage
    """)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 2 and "cannot be used: file too large" in done.stdout


@pytest.mark.skipif(os.name != "posix", reason="needs folder modes")
@pytest.mark.parametrize("writer", ["closed", "open", "killed"])
def test_a_read_only_folder_can_be_read(writer: str) -> None:
    """Run as a user who is not root, whom no mode would hold back."""
    done = in_child(f"""
        import time
        if os.geteuid() == 0:
            os.setgid(65534); os.setuid(65534)
        path = tempfile.mkdtemp()
        print(path)
        store = shadow_cache.open(path)
        store.add(*made(1))
        if {writer!r} == "closed":
            store.close()
        if {writer!r} == "killed":
            store.close()
            if os.fork() == 0:
                store = shadow_cache.open(path)
                store.record(MissEntry(1.0, "", None, "", Miss("shape")))
                os._exit(0)
            os.wait()
        for folder in (path, path + "/index", path + "/files", path + "/temporary"):
            os.chmod(folder, 0o500)
        other = shadow_cache.open(path, create=False)
        assert other.read_only
        (entry,) = other.find("s1")
        assert stored(entry) == made(1)[1] and other.structure("s1") and other.stats().entries == 1
        assert {{digest: other.read(digest) for digest in made(1)[2]}} == made(1)[2]
        other.loaded(entry.id)
        other.record(MissEntry(0.0, "s1", None, "", Miss("shape")))
        assert other.entries() == (entry,) and not other.damage and not other.verify()
        try:
            other.add(*made(2))
        except StoreUnavailableError as error:
            print(error)
        try:
            other.remove(["000001"])
        except StoreUnavailableError as error:
            print(error)
        other.close()
        for folder in (path, path + "/index", path + "/files", path + "/temporary"):
            os.chmod(folder, 0o700)
        assert len(shadow_cache.open(path).entries()) == 1
    """)
    path = Path(done.stdout.split("\n")[0])
    if path.name:
        shutil.rmtree(path)
    assert done.returncode == 0, done.stderr
    assert "this process may only read it" in done.stdout and len(done.stdout.splitlines()) == 3


@pytest.mark.skipif(os.name != "posix", reason="needs folder modes")
def test_what_may_not_even_be_read_is_said_in_the_words_of_the_store() -> None:
    done = in_child("""
        if os.geteuid() == 0:
            os.setgid(65534); os.setuid(65534)
        with tempfile.TemporaryDirectory() as path:
            store = os.path.join(path, "store")
            shadow_cache.open(store).close()
            for closed in (store + "/index/index.db", store + "/index", path):
                os.chmod(closed, 0)
                try:
                    shadow_cache.open(store)
                except StoreUnavailableError as error:
                    print(error)
                os.chmod(closed, 0o700)
    """)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("permission denied") == 3


def test_after_close(store: Store) -> None:
    store.close()
    store.close()
    with pytest.raises(StoreUnavailableError, match="it was closed"):
        store.entries()


# ---- threads, forks --------------------------------------------------------------------------------------------------


def test_a_thread_that_has_the_store_is_not_waited_for_for_ever(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be waiting for the one that asks now."""
    monkeypatch.setattr(folder, "BUSY_SECONDS", 0.1)
    errors: list[StoreUnavailableError] = []

    def ask() -> None:
        try:
            store.find("a")
        except StoreUnavailableError as error:
            errors.append(error)

    with store._index._process().lock:
        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(20)
        assert not thread.is_alive()
    assert "another thread is using it" in str(errors[0])
    assert store.find("a") == ()


def test_threads_share_a_store(store: Store) -> None:
    errors: list[BaseException] = []

    def work(first: int) -> None:
        try:
            for number in range(first, first + 5):
                structure, entry, files = made(number)
                store.add(structure, entry, files)
                assert entry in [stored(each) for each in store.find(structure.id)]
                store.loaded(entry.id)
        except BaseException as error:  # noqa: BLE001  # raised again in the test's own thread
            errors.append(error)

    threads = [threading.Thread(target=work, args=(first,)) for first in range(0, 40, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors and set(ids(store.entries())) == set(range(40)) and store.stats().loads == 40


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_store_can_be_used_on_both_sides_of_a_fork(tmp_path: Path) -> None:
    done = in_child(f"""
        store = shadow_cache.open({str(tmp_path / "store")!r})
        store.add(*made(1))
        connection = store._index._process().connection
        held = sys.getrefcount(connection)
        children = []
        for number in range(2, 6):
            pid = os.fork()
            if not pid:
                assert len(store.find("s1")) == 1
                store.add(*made(number))
                assert store._index._process().connection is not connection
                assert sys.getrefcount(connection) > held, "nothing must close it here, the interpreter's end neither"
                sys.exit(0)  # the whole way through the end of the interpreter
            children.append(pid)
            store.add(*made(number + 10))
        assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * 4
        assert {{int(entry.id, 16) for entry in store.entries()}} == {{1, *range(2, 6), *range(12, 16)}}
        assert not store.verify()
    """)
    assert done.returncode == 0, done.stderr


# ---- export and import -----------------------------------------------------------------------------------------------


def test_export_and_import(store: Store, tmp_path: Path) -> None:
    for number in range(6):
        store.add(*made(number))
    store.loaded("000002")
    assert store.export(tmp_path / "all") == 6 and store.export(tmp_path / "two", ["000001", "000004"]) == 2
    with shadow_cache.open(tmp_path / "other") as other:
        assert other.import_(tmp_path / "two") == 2 and set(ids(other.entries())) == {1, 4}
        assert other.import_(tmp_path / "all") == 6
        assert ids(other.entries()) == ids(store.entries()) == [2, 5, 4, 3, 1, 0], "what was used last comes last"
        assert [stored(entry) for entry in other.entries()] == [stored(entry) for entry in store.entries()]
        assert other.structure("s2") == made(2)[0] and not other.verify() and other.stats().loads == 0
        assert all(other.read(digest) == data for digest, data in made(3)[2].items())
    with pytest.raises(InvalidEntryError, match="has no entry ffffff"):
        store.export(tmp_path / "none", ["ffffff"])
    assert not (tmp_path / "none").exists() and not list(tmp_path.glob(".*"))


def test_a_damaged_member_is_refused_by_name(store: Store, tmp_path: Path) -> None:
    for number in (3, 4, 7):
        store.add(*made(number))
    store.export(tmp_path / "file")
    data = (tmp_path / "file").read_bytes()
    (tmp_path / "file").write_bytes(data.replace(made(4)[2][made(4)[1].regions[0].artifact], bytes(2000)))
    with shadow_cache.open(tmp_path / "other") as other:
        with pytest.raises(DamagedArchiveError, match=r"2 entries .*entry 000004: file .* checksum") as error:
            other.import_(tmp_path / "file")
        assert len(error.value.refused) == 1 and error.value.imported == 2 == len(other.entries())
        (tmp_path / "file").write_bytes(b"something else")
        with pytest.raises(DamagedArchiveError, match="it is no exported cache"):
            other.import_(tmp_path / "file")
    with pytest.raises(FileNotFoundError):
        store.import_(tmp_path / "nothing")


def test_a_damaged_entry_is_not_exported(store: Store, tmp_path: Path) -> None:
    for number in (1, 2):
        store.add(*made(number))
    digest = made(1)[1].regions[0].artifact
    (store.path / "files" / digest[:2] / digest).write_bytes(b"")
    assert store.export(tmp_path / "file") == 1 and ids(store.entries()) == [2]


def test_any_damage_to_an_exported_file_is_found(tmp_path: Path) -> None:
    with shadow_cache.open(tmp_path / "store") as store:
        for number in range(3):
            store.add(*made(number, size=100))
        store.export(tmp_path / "file")
    data = (tmp_path / "file").read_bytes()

    @settings(max_examples=40)
    @given(st.integers(0, len(data) - 1), st.integers(1, 255), st.booleans())
    def damage(place: int, bits: int, cut: bool) -> None:
        damaged = data[:place] if cut else data[:place] + bytes([data[place] ^ bits]) + data[place + 1 :]
        (tmp_path / "file").write_bytes(damaged)
        with tempfile.TemporaryDirectory() as folder, shadow_cache.open(folder) as other:
            with pytest.raises(DamagedArchiveError):
                other.import_(tmp_path / "file")
            assert not other.verify()
            for entry in other.entries():
                assert stored(entry) == made(int(entry.id, 16), size=100)[1]

    damage()


# ---- against a model -------------------------------------------------------------------------------------------------


_STEPS = st.lists(
    st.tuples(st.sampled_from(["add", "add", "load", "remove", "prune", "reopen"]), st.integers(0, 6)), max_size=14
)


@settings(max_examples=25)
@given(_STEPS)
def test_it_is_a_list_of_what_was_used_last(steps: list[tuple[str, int]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = shadow_cache.open(folder, max_size=4100)
        model: dict[int, int] = {}  # number -> loads, least recently used first
        for step, number in steps:
            if step == "add":
                store.add(*made(number))
                model[number] = model.pop(number, 0)
                while len(model) > 2:
                    del model[next(iter(model))]
            elif step == "load":
                store.loaded(f"{number:06x}")
                if number in model:
                    model[number] = model.pop(number) + 1
            elif step == "remove":
                assert store.remove([f"{number:06x}"]) == (model.pop(number, None) is not None)
            elif step == "prune":
                gone = store.prune(max_size=number * 1000)
                assert ids(gone) == list(model)[: len(gone)]
                for each in ids(gone):
                    del model[each]
            else:
                store.close()
                store = shadow_cache.open(folder, max_size=4100)
            assert {int(entry.id, 16): entry.loads for entry in store.entries()[::-1]} == model
            assert ids(store.entries()[::-1]) == list(model)
        assert files_of(store) == {name for number in model for name in made(number)[2]}
        assert not store.verify()
        store.close()


@given(st.integers(0, 10**6), st.integers(1, 255), st.booleans())
def test_a_flipped_byte_makes_a_record_none(place: int, bits: int, in_checksum: bool) -> None:
    entry = made(1)[1]
    data, checksum = encode(entry, "entry 000001")
    assert decode(Entry, "entry 000001", data, checksum) == entry
    assert decode(Entry, "entry 000002", data, checksum) is None
    parts = [bytearray(data), bytearray(checksum)]
    damaged = parts[in_checksum]
    damaged[place % len(damaged)] ^= bits
    assert decode(Entry, "entry 000001", bytes(parts[0]), bytes(parts[1])) is None
