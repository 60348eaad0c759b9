"""Copy the readable rows of a damaged index to a new index. Checksums show which rows are intact."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

from .folder import BUSY_SECONDS, Folder
from .rows import (
    SELECT_ENTRY,
    SELECT_MISS,
    SELECT_STRUCTURE,
    SELECT_TIMING,
    digests,
    entry_of,
    miss_of,
    put_entry,
    put_miss,
    put_structure,
    put_timing,
    structure_of,
    timing_of,
)

T = TypeVar("T")
# An error message with a damaged name is invalid UTF-8; Python then raises UnicodeDecodeError instead of the error.
SQLITE_ERRORS = (sqlite3.Error, UnicodeDecodeError)


def open_index(file: Path, how: str) -> sqlite3.Connection:
    """Connect to an index, damaged or not."""
    connection = sqlite3.connect(
        f"file:{quote(os.fsencode(file))}?{how}",  # the folder's name need not be UTF-8
        uri=True,
        timeout=BUSY_SECONDS,
        isolation_level=None,
        check_same_thread=False,
    )
    # Damaged text must not raise here: the row's checksum reveals the damage.
    connection.text_factory = lambda data: data.decode(errors="replace")
    return connection


def in_transaction(connection: sqlite3.Connection, work: Callable[[], T]) -> T:
    """Return the result of ``work``, run in one transaction. An exception rolls the transaction back.

    BEGIN stands inside the ``try``: it waits for other processes, and Ctrl-C may come just as it returns.
    """
    try:
        connection.execute("BEGIN IMMEDIATE")
        result = work()
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            with suppress(*SQLITE_ERRORS):  # the first error is the one to raise
                connection.execute("ROLLBACK")
        raise
    return result


def salvage(folder: Folder, damaged: Path, new: sqlite3.Connection, new_file: Path) -> int:
    """Copy the readable rows of ``damaged`` into the empty index ``new``; return the number of entries.

    If a table cannot be read at all, the first page may be damaged, which holds the header and the schema. A second
    attempt uses the first page of the new index, whose tables begin at the same pages.
    """
    tables = _tables(damaged)
    if not all(tables):
        repaired = new_file.with_name("repaired.db")
        try:
            _repair(damaged, new, new_file, repaired)
            tables = [rows or others for rows, others in zip(tables, _tables(repaired), strict=True)]
        finally:
            for file in new_file.parent.glob("repaired.db*"):
                file.unlink(missing_ok=True)
    return in_transaction(new, lambda: _copy_rows(folder, tables, new))


def _repair(damaged: Path, new: sqlite3.Connection, new_file: Path, repaired: Path) -> None:
    """Write ``damaged`` with the first page of the new index to ``repaired``."""
    new.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    (size,) = new.execute("PRAGMA page_size").fetchone()
    first = bytearray(new_file.read_bytes()[:size])
    first[92:96] = bytes(4)  # marks the header's page count as invalid: sqlite then uses the size of the file
    repaired.write_bytes(first + damaged.read_bytes()[size:])
    log = damaged.with_name(f"{damaged.name}-wal")
    if log.exists():
        shutil.copyfile(log, repaired.with_name(f"{repaired.name}-wal"))


def _tables(source: Path) -> list[list[tuple]]:
    """Return the readable rows of each table."""
    with closing(open_index(source, "mode=rw")) as old:
        with suppress(*SQLITE_ERRORS):  # lets sqlite read a partly damaged schema
            old.execute("PRAGMA writable_schema = ON")
        return [_rows(old, select) for select in (SELECT_STRUCTURE, SELECT_ENTRY, SELECT_MISS, SELECT_TIMING)]


def _copy_rows(folder: Folder, tables: list[list[tuple]], new: sqlite3.Connection) -> int:
    """Copy structures, entries whose files exist, misses, and timings; return the number of entries."""
    structures, entries, misses, timings = tables
    count = 0
    for structure in filter(None, map(structure_of, structures)):
        put_structure(new, structure)
    for entry in filter(None, map(entry_of, entries)):
        sizes = {name: folder.size(name) for name in digests(entry)}
        whole = {name: size for name, size in sizes.items() if size is not None}
        if len(whole) == len(sizes):
            put_entry(new, entry, whole, entry.last_used, entry.loads)
            count += 1
    for miss in filter(None, map(miss_of, sorted(misses))):
        put_miss(new, miss)
    for row in timings:
        timing = timing_of(row)
        if timing is not None:
            put_timing(new, row[1], timing)
    return count


def _rows(connection: sqlite3.Connection, select: str) -> list[tuple]:
    """Return the readable rows of a table, read from both ends up to a damaged page."""
    rows: dict[object, tuple] = {}
    for order in ("ASC", "DESC"):
        with suppress(*SQLITE_ERRORS):  # a damaged page ends the reading from this side
            for row in connection.execute(f"{select} ORDER BY number {order}"):
                rows[row[0]] = row
    return list(rows.values())
