"""What can still be read of a damaged index, copied to a new one. Checksums say which rows are as they were stored."""

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
# A damaged name in an error's message is no text, and Python then says that instead of the error.
SQLITE_ERRORS = (sqlite3.Error, UnicodeDecodeError)


def open_index(file: Path, how: str) -> sqlite3.Connection:
    """A connection to an index, damaged or not."""
    connection = sqlite3.connect(
        f"file:{quote(os.fsencode(file))}?{how}",  # the folder's name need not be UTF-8
        uri=True,
        timeout=BUSY_SECONDS,
        isolation_level=None,
        check_same_thread=False,
    )
    # Damaged text must not raise: what it says is then not what was stored, and the row's checksum tells.
    connection.text_factory = lambda data: data.decode(errors="replace")
    return connection


def in_transaction(connection: sqlite3.Connection, work: Callable[[], T]) -> T:
    """What ``work`` gives; all that it does is done, or nothing of it.

    Beginning is part of what is undone: it waits for other processes, and Ctrl-C may come as it returns.
    """
    try:
        connection.execute("BEGIN IMMEDIATE")
        result = work()
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            with suppress(*SQLITE_ERRORS):  # the first error says more
                connection.execute("ROLLBACK")
        raise
    return result


def salvage(folder: Folder, damaged: Path, new: sqlite3.Connection, new_file: Path) -> int:
    """Copy what can be read of ``damaged`` into the index ``new``, which is empty; gives the count of entries.

    Where nothing can be read of a table, it may be for the first page, which holds the header and the schema: it is
    tried once more with that of the new index, whose tables begin at the same pages.
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
    first[92:96] = bytes(4)  # the header's count of pages does not hold: sqlite then asks for the file's size
    repaired.write_bytes(first + damaged.read_bytes()[size:])
    log = damaged.with_name(f"{damaged.name}-wal")
    if log.exists():
        shutil.copyfile(log, repaired.with_name(f"{repaired.name}-wal"))


def _tables(source: Path) -> list[list[tuple]]:
    """The rows that can be read of each table."""
    with closing(open_index(source, "mode=rw")) as old:
        with suppress(*SQLITE_ERRORS):  # read what there is of a schema in which something is damaged
            old.execute("PRAGMA writable_schema = ON")
        return [_rows(old, select) for select in (SELECT_STRUCTURE, SELECT_ENTRY, SELECT_MISS, SELECT_TIMING)]


def _copy_rows(folder: Folder, tables: list[list[tuple]], new: sqlite3.Connection) -> int:
    """Copy structures, entries whose files are there, misses, and timings of those entries; gives how many entries."""
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
    """All rows of a table that can be read: pages that cannot are come up to from both ends."""
    rows: dict[object, tuple] = {}
    for order in ("ASC", "DESC"):
        with suppress(*SQLITE_ERRORS):  # the end of what can be read from this side
            for row in connection.execute(f"{select} ORDER BY number {order}"):
                rows[row[0]] = row
    return list(rows.values())
