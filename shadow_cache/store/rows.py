"""Convert records to rows of the index and back: msgpack with a checksum, so that damage is found before use."""

from __future__ import annotations

import functools
import hashlib
import math
import re
from collections.abc import Mapping
from sqlite3 import Connection
from typing import Any, TypeVar

import msgspec

from ..entries import Entry, MissEntry, Structure, Summary, Timing
from ..errors import InvalidEntryError
from ..safe_text import harmless

# Tables of later schemas stand last: salvage.py relies on the earlier tables beginning at the same pages.
TABLES = """
CREATE TABLE IF NOT EXISTS structures (
    number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, record BLOB NOT NULL, checksum BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS entries (
    number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, structure TEXT NOT NULL, record BLOB NOT NULL,
    checksum BLOB NOT NULL, size INTEGER NOT NULL, loads INTEGER NOT NULL, last_used REAL NOT NULL,
    seconds REAL NOT NULL);
CREATE INDEX IF NOT EXISTS entries_by_structure ON entries (structure);
CREATE INDEX IF NOT EXISTS entries_by_use ON entries (last_used);
CREATE TABLE IF NOT EXISTS names (
    entry INTEGER NOT NULL, digest TEXT NOT NULL, size INTEGER NOT NULL, PRIMARY KEY (entry, digest)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS names_by_digest ON names (digest);
CREATE TABLE IF NOT EXISTS misses (
    number INTEGER PRIMARY KEY, kind TEXT NOT NULL, record BLOB NOT NULL, checksum BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS timings (
    number INTEGER PRIMARY KEY, entry TEXT NOT NULL UNIQUE, record BLOB NOT NULL, checksum BLOB NOT NULL);
"""
HAS_TIMINGS = 2
"""The first schema with the table of timings. A read-only store of an older schema stays without this table."""

KEPT_MISSES = 10_000
_NO_TIME = float(1 << 35)  # seconds: more than a thousand years from now
_NO_COUNT = 1 << 53  # floats cannot represent every larger integer
_ID = re.compile(r"[0-9A-Za-z_.-]{1,128}")
_MAX_BYTES = 1 << 28  # of a record; sqlite's own limit is about four times that
SELECT_ENTRY = "SELECT number, id, structure, record, checksum, size, loads, last_used FROM entries"
SELECT_STRUCTURE = "SELECT number, id, record, checksum FROM structures"
SELECT_MISS = "SELECT number, record, checksum FROM misses"
SELECT_TIMING = "SELECT number, entry, record, checksum FROM timings"

R = TypeVar("R")
E = TypeVar("E", bound=Summary)
_decoders: dict[type, msgspec.msgpack.Decoder[Any]] = {
    kind: msgspec.msgpack.Decoder(kind) for kind in (Entry, Summary, Structure, MissEntry, Timing)
}


def encode(record: Any, name: str) -> tuple[bytes, bytes]:
    """Encode ``record``; return the bytes and their checksum, which covers ``name``, the identity of the row, too."""
    data = msgspec.msgpack.encode(record)
    if len(data) > _MAX_BYTES:
        raise InvalidEntryError(f"{harmless(name)} has {len(data)} bytes, and a record may have at most {_MAX_BYTES}")
    return data, _checksum(name, data)


def decode(kind: type[R], name: str, data: Any, checksum: Any) -> R | None:
    """Decode a record; return None if it is damaged or of another version."""
    if not isinstance(data, bytes) or checksum != _checksum(name, data):
        return None
    try:
        return _decoders[kind].decode(data)
    except (msgspec.DecodeError, RecursionError):  # intact, but written by a version with other fields
        return None


def _checksum(name: str, data: bytes) -> bytes:
    return hashlib.sha256(name.encode(errors="replace") + b"\0" + data).digest()


def _entry_of(kind: type[E], row: tuple[Any, ...]) -> E | None:
    """Return the entry of a row of SELECT_ENTRY, with the row's size and counts; None if it is damaged."""
    _, id_, structure, data, checksum, size, loads, last_used = row
    if not (isinstance(id_, str) and isinstance(size, int) and isinstance(loads, int) and isinstance(last_used, float)):
        return None
    if size < 0 or loads < 0 or not 0 <= last_used < _NO_TIME:
        return None
    entry = decode(kind, f"entry {id_}", data, checksum)
    if entry is None or entry.id != id_ or entry.structure != structure or what_is_wrong(entry):
        return None
    return msgspec.structs.replace(entry, size=size, loads=loads, last_used=last_used, timing=None)


entry_of = functools.partial(_entry_of, Entry)
summary_of = functools.partial(_entry_of, Summary)


def what_is_wrong(entry: Summary) -> str:
    """Return in words an invalid value of an entry, which the index or a display could not handle; empty if valid."""
    for name, text in (("id", entry.id), ("structure", entry.structure)):
        if not _ID.fullmatch(text):
            return f"its {name} is {text[:80]!r}, and should be at most 128 letters, digits, '_', '.' and '-'"
    for name, number in (("seconds", entry.seconds), ("created", entry.created), ("last_used", entry.last_used)):
        if not 0 <= number < _NO_TIME:
            return f"its {name} is {number}, which is no possible time in seconds"
    for name, count in (("nodes", entry.nodes), ("loads", entry.loads), ("size", entry.size)):
        if not 0 <= count < _NO_COUNT:
            return f"its {name} is {count}, which is no possible count"
    return ""


def whole(total: float) -> int:
    """Convert the sum of a column to an int; 0 if a damaged number made the sum infinite or NaN."""
    return int(total) if math.isfinite(total) else 0


def structure_of(row: tuple[Any, ...]) -> Structure | None:
    """Return the structure of a row of SELECT_STRUCTURE; None if it is damaged."""
    _, id_, data, checksum = row
    return decode(Structure, f"structure {id_}", data, checksum)


def miss_of(row: tuple[Any, ...]) -> MissEntry | None:
    """Return the miss of a row of SELECT_MISS; None if it is damaged."""
    return decode(MissEntry, "miss", row[1], row[2])


def timing_of(row: tuple[Any, ...]) -> Timing | None:
    """Return the timing of a row of SELECT_TIMING; None if it is damaged."""
    _, entry, data, checksum = row
    return decode(Timing, f"timing of {entry}", data, checksum)


def timings(connection: Connection, where: str = "", *arguments: Any) -> dict[str, Timing]:
    """Return timings by the ids of their entries. Damaged ones are left out; the next tuning trial replaces them."""
    if connection.execute("PRAGMA user_version").fetchone()[0] < HAS_TIMINGS:
        return {}
    rows = connection.execute(f"{SELECT_TIMING} {where}", arguments).fetchall()
    return {row[1]: timing for row in rows if (timing := timing_of(row)) is not None}


def digests(entry: Entry) -> set[str]:
    """Return the files that an entry names. An empty name is no file."""
    return {name for region in entry.regions for name in (region.artifact, region.lowered) if name}


def refuse_mismatch(structure: Structure, entry: Entry, files: Mapping[str, bytes]) -> None:
    """Raise InvalidEntryError unless an entry can be stored, with this structure and these files."""
    wrong = what_is_wrong(entry)
    if wrong:
        raise InvalidEntryError(f"entry {entry.id[:80]!r}: {wrong}")
    if entry.structure != structure.id:
        raise InvalidEntryError(f"entry {entry.id} has structure {entry.structure!r}, and {structure.id!r} was given")
    named = digests(entry)
    if named != set(files):
        missing, unnamed = sorted(named - set(files)), sorted(set(files) - named)
        raise InvalidEntryError(f"entry {entry.id}: files not given: {missing}, files not named: {unnamed}")
    for digest, data in files.items():
        found = hashlib.sha256(data).hexdigest()
        if found != digest:
            raise InvalidEntryError(f"entry {entry.id}: the bytes given for file {digest} have the SHA-256 {found}")


def put_structure(connection: Connection, structure: Structure) -> None:
    """Insert a structure, or replace a row that differs."""
    data, checksum = encode(structure, f"structure {structure.id}")
    connection.execute(
        "INSERT INTO structures (id, record, checksum) VALUES (?, ?, ?) ON CONFLICT (id) DO UPDATE"
        " SET record = excluded.record, checksum = excluded.checksum"
        " WHERE record IS NOT excluded.record OR checksum IS NOT excluded.checksum",
        (structure.id, data, checksum),
    )


def put_entry(
    connection: Connection, entry: Entry, sizes: dict[str, int], last_used: float, loads: int = 0
) -> tuple[int, list[str]]:
    """Insert an entry, or replace the entry with its id and keep that entry's loads.

    Returns:
        The number of the row, and the files that the replaced entry named.
    """
    data, checksum = encode(entry, f"entry {entry.id}")
    connection.execute(
        "INSERT INTO entries (id, structure, record, checksum, size, loads, last_used, seconds)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET structure = excluded.structure,"
        " record = excluded.record, checksum = excluded.checksum, size = excluded.size,"
        " last_used = excluded.last_used, seconds = excluded.seconds",
        (entry.id, entry.structure, data, checksum, sum(sizes.values()), loads, last_used, float(entry.seconds)),
    )
    (number,) = connection.execute("SELECT number FROM entries WHERE id = ?", (entry.id,)).fetchone()
    before = forget_names(connection, number)
    connection.executemany("INSERT INTO names VALUES (?, ?, ?)", [(number, *each) for each in sizes.items()])
    return number, before


def forget_names(connection: Connection, number: Any) -> list[str]:
    """Delete the names of the files of an entry's row, and return them."""
    names = [name for (name,) in connection.execute("SELECT digest FROM names WHERE entry = ?", (number,)).fetchall()]
    connection.execute("DELETE FROM names WHERE entry = ?", (number,))
    return names


def put_timing(connection: Connection, entry: str, timing: Timing) -> None:
    """Store a tuning trial of an entry in place of the earlier one; no-op if the entry was removed."""
    data, checksum = encode(timing, f"timing of {entry}")
    connection.execute(
        "INSERT INTO timings (entry, record, checksum) SELECT id, ?, ? FROM entries WHERE id = ?"
        " ON CONFLICT (entry) DO UPDATE SET record = excluded.record, checksum = excluded.checksum",
        (data, checksum, entry),
    )


def put_miss(connection: Connection, miss: MissEntry) -> None:
    """Append a miss; delete all but the last :data:`KEPT_MISSES`."""
    data, checksum = encode(miss, "miss")
    connection.execute("INSERT INTO misses (kind, record, checksum) VALUES (?, ?, ?)", (miss.miss.kind, data, checksum))
    connection.execute("DELETE FROM misses WHERE number <= (SELECT max(number) FROM misses) - ?", (KEPT_MISSES,))
