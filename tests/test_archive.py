"""Archives that somebody made up: each gives an error that says what and where, or does no harm where it is shown."""

from __future__ import annotations

import hashlib
import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import pytest

import shadow_cache
from shadow_cache import DamagedArchiveError, Entry, InvalidEntryError, Structure
from shadow_cache.cli import main
from shadow_cache.entries import Call
from shadow_cache.safe_text import harmless, harmless_json
from shadow_cache.store.archive import _MAGIC

from .store_entries import made

Table = list[tuple[str, int, str]]


def _table(members: dict[str, bytes]) -> Table:
    return [(name, len(data), hashlib.sha256(data).hexdigest()) for name, data in members.items()]


def _archive(path: Path, members: dict[str, bytes], table: Any = None) -> Path:
    packed = table if isinstance(table, bytes) else msgspec.msgpack.encode(table or _table(members))
    head = _MAGIC + len(packed).to_bytes(8, "big") + hashlib.sha256(packed).digest()
    path.write_bytes(head + packed + b"".join(members.values()))
    return path


def _members(number: int = 0, structure: dict[str, Any] | None = None, **changes: Any) -> dict[str, bytes]:
    made_structure, entry, files = made(number)
    entry = msgspec.structs.replace(entry, **changes)
    made_structure = msgspec.structs.replace(made_structure, **(structure or {}))
    encode = msgspec.msgpack.encode
    records = {f"structure {made_structure.id}": encode(made_structure), f"entry {entry.id}": encode(entry)}
    return {**records, **{f"file {digest}": data for digest, data in files.items()}}


def _imported(tmp_path: Path, archive: Path) -> tuple[int, str]:
    """How many entries came in, and what is said of the others. What was there stays, and the index is whole."""
    structure, entry, files = made(99)
    folder = tmp_path / "cache"
    with shadow_cache.open(folder) as store:
        store.add(structure, entry, files)
        try:
            count, said = store.import_(archive), ""
        except DamagedArchiveError as error:
            count, said = error.imported, str(error)
            assert str(archive) in said and error.refused
        assert len(store.entries()) == count + 1 and store.structure(structure.id) is not None
        assert store.verify() == () and store.damage == ()
        assert {each.name for each in folder.iterdir()} == {"files", "index", "lock", "temporary"}
    return count, said


def test_what_is_as_it_should_be_comes_in(tmp_path: Path) -> None:
    assert _imported(tmp_path, _archive(tmp_path / "file", _members())) == (1, "")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"seconds": float("nan")}, "its seconds is nan"),
        ({"seconds": float("inf")}, "its seconds is inf"),
        ({"seconds": -1.0}, "its seconds is -1.0"),
        ({"created": 1e300}, "its created is 1e"),
        ({"last_used": float("-inf")}, "its last_used is -inf"),
        ({"nodes": -3}, "its nodes is -3"),
        ({"size": 1 << 63}, "its size is 9223372036854775808"),
        ({"loads": -1}, "its loads is -1"),
        ({"id": "a\0b"}, r"its id is 'a\x00b'"),
        ({"id": ""}, "its id is ''"),
        ({"id": "../../etc"}, "its id is '../../etc'"),
        ({"id": "\x1b[31mred"}, r"its id is '\x1b[31mred'"),
    ],
)
def test_entries_that_cannot_be_are_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    count, error = _imported(tmp_path, _archive(tmp_path / "file", _members(**changes)))
    assert count == 0 and said in error
    assert "\x1b" not in error and "\0" not in error


def test_the_store_itself_refuses_them(tmp_path: Path) -> None:
    structure, entry, files = made(1)
    with shadow_cache.open(tmp_path / "cache") as store:
        with pytest.raises(InvalidEntryError, match="its seconds is nan"):
            store.add(structure, msgspec.structs.replace(entry, seconds=float("nan")), files)
        assert store.damage == () and store.entries() == ()


@pytest.mark.parametrize("length", [1 << 62, (1 << 64) - 1, -5000, 1 << 40, 100_000])
@pytest.mark.parametrize("position", [0, 1, -1])
def test_lengths_are_checked_before_anything_is_read(tmp_path: Path, length: int, position: int) -> None:
    members = _members()
    table = _table(members)
    name, _, digest = table[position]
    table[position] = (name, length, digest)
    file = _archive(tmp_path / "file", members, table)
    tracemalloc.start()
    count, error = _imported(tmp_path, file)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert count == 0 and f"{name} should have {length} bytes" in error
    assert peak < 50_000_000


@pytest.mark.parametrize(
    "packed",
    [
        b"\x91" * 1_000_000 + b"\xc0",
        b"\xdd\xff\xff\xff\xff",
        b"\x91\x93\xdb\xff\xff\xff\xff",
        b"\x91\x93\xa2\xff\xfe\x01\xa0",  # a name that is no UTF-8
        b"",
        b"\xc0",
    ],
)
def test_tables_that_are_none(tmp_path: Path, packed: bytes) -> None:
    count, error = _imported(tmp_path, _archive(tmp_path / "file", {}, packed or b"\xc1"))
    assert count == 0 and "the whole file: another version wrote it" in error


@pytest.mark.parametrize(
    "record",
    [
        b"\x91" * 1_000_000 + b"\xc0",
        b"\x81\xa1x" + b"\x91" * 1_000_000 + b"\xc0",
        b"\x81\xa2id\xdb\xff\xff\xff\xff",
        b"\x81\xa2id\xa2\xff\xfe",
        b"\x81\xa5calls\xdd\xff\xff\xff\xff",
    ],
)
@pytest.mark.parametrize("which", ["entry 000000", "structure s0"])
def test_records_that_are_none(tmp_path: Path, record: bytes, which: str) -> None:
    count, error = _imported(tmp_path, _archive(tmp_path / "file", {**_members(), which: record}))
    assert count == 0 and f"{which} was written by another version" in error


def test_a_length_of_the_table_that_is_longer_than_the_file(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(_MAGIC + ((1 << 63) - 1).to_bytes(8, "big") + b"0" * 32)
    count, error = _imported(tmp_path, file)
    assert count == 0 and "table of contents" in error


def test_names_with_escape_sequences_are_told_without_them(tmp_path: Path) -> None:
    members = _members()
    file = _archive(tmp_path / "file", {**members, "entry \x1b[2J\0": b"\xc0"})
    count, error = _imported(tmp_path, file)
    assert count == 1 and r"entry \x1b[2J\x00 was written by another version" in error
    assert error.isprintable()


# ---- what is shown ---------------------------------------------------------------------------------------------------

EVIL = "\x1b]0;owned\x07\x1b[31mred\x9b1m\u202e\nfake  line\r\U000f0001"


def _evil(tmp_path: Path) -> Path:
    """A store full of such texts."""
    calls = (Call(EVIL, (EVIL,), parameter=EVIL, source=EVIL, edges=(1, -7, 10**9)), Call("", (), edges=(0,)))
    nodes = (-7, 10**9, 0)
    folder = tmp_path / "evil"
    with shadow_cache.open(folder) as store:
        for number in range(3):
            structure, entry, _ = made(number)
            lowered = f"{EVIL} {number}".encode() + b"\xff"
            digest = hashlib.sha256(lowered).hexdigest()
            entry = msgspec.structs.replace(
                entry,
                loss=EVIL,
                module=EVIL,
                source=EVIL,
                settings={"backend": EVIL, EVIL: f"{EVIL} {number}"},
                ambient={EVIL: EVIL},
                environment={},
                guards=(EVIL,),
                miss=msgspec.structs.replace(
                    entry.miss, kind=EVIL, where=EVIL, hint=EVIL, old=EVIL, node=nodes[number]
                ),
                inputs=(entry.inputs[0], msgspec.structs.replace(entry.inputs[0], where=EVIL, dtype=EVIL)),
                regions=(msgspec.structs.replace(entry.regions[0], artifact=digest, lowered=digest),),
            )
            structure = msgspec.structs.replace(structure, calls=calls, end=(EVIL,), text=f"{EVIL}\n\ttext")
            store.add(structure, entry, {digest: lowered})
            store.record(shadow_cache.MissEntry(1.0, structure.id, entry.id, EVIL, entry.miss))
    return folder


_VERBS = [
    ("ls",),
    ("show", "000001"),
    ("show", "s1"),
    ("tree",),
    ("stats",),
    ("why",),
    ("why", "000001"),
    ("diff", "000000", "000001"),
    ("graph", "000001"),
    ("graph", "000001", "--lowered"),
    ("graph", "000001", "--format", "dot"),
    ("graph", "000001", "--format", "mermaid"),
    ("graph", "000001", "--format", "json"),
    ("why", "0"),
    ("show", "none"),
    ("verify",),
    ("prune", "--older", "0s", "--dry-run"),
    ("rm", "000001"),
]


@pytest.mark.parametrize("form", ["human", "json", "quiet"])
def test_no_verb_prints_a_character_that_a_terminal_obeys(
    tmp_path: Path, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = _evil(tmp_path)
    for verb in _VERBS:
        arguments = [*verb] if "--format" in verb else [*verb, "--format", form] if verb[0] != "graph" else [*verb]
        with pytest.raises(SystemExit) as ended:
            main([*arguments, "--cache-dir", str(folder)])
        assert ended.value.code in (0, 1), verb
        shown = capsys.readouterr()
        for text in (shown.out, shown.err):
            assert all(line.isprintable() for line in text.replace("\t", " ").split("\n")), (verb, text)
            assert "Traceback" not in text
            assert not any(line.startswith("fake  line") for line in text.split("\n")) or verb[0] == "graph"
        if form == "json" and verb[0] != "graph" and ended.value.code == 0:
            msgspec.json.decode(shown.out)


def test_a_tape_that_is_the_beginning_of_another_has_its_place_in_the_tree(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "cache"
    with shadow_cache.open(folder) as store:
        keys = [[("a",), ("b",)], [("a",), ("b",)], [("a",), ("b",), ("c",)]]
        for number, own in enumerate(keys):
            structure, entry, files = made(number)
            calls = tuple(Call(f"{key[0]}Backward0", key) for key in own[:-1])
            store.add(Structure(structure.id, calls, own[-1], ""), entry, files)
    with pytest.raises(SystemExit) as ended:
        main(["tree", "--cache-dir", str(folder)])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert all(f"s{number}" in shown and f"{number:06x}" in shown for number in range(3))


def test_harmless() -> None:
    assert harmless("plain, ünïcode, 漢字, 😀") == "plain, ünïcode, 漢字, 😀"
    assert harmless("\x1b[1m\0\x9b\u202e\n\U000e0001") == r"\x1b[1m\x00\x9b\u202e\n\U000e0001"
    assert harmless("one\n\ttwo\r", lines=True) == "one\n\ttwo\\r"
    text = '{\n  "a": "\x7f\x9b\u2028\U000e0001é"\n}'
    assert harmless_json(text).replace("\n", "").isprintable()
    assert msgspec.json.decode(harmless_json(text)) == msgspec.json.decode(text)


def test_entries_are_what_they_were(tmp_path: Path) -> None:
    """All of the checks let pass what is right."""
    with shadow_cache.open(tmp_path / "one") as store, shadow_cache.open(tmp_path / "two") as other:
        for number in range(4):
            store.add(*made(number))
        assert store.export(tmp_path / "file") == other.import_(tmp_path / "file") == 4
        by_id: dict[str, Entry] = {entry.id: entry for entry in store.entries()}
        assert {entry.id: entry.record for entry in other.entries()} == {id: each.record for id, each in by_id.items()}
