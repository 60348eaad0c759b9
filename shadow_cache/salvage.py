"""What can still be read of a damaged index, copied to a new one. Checksums say which rows are as they were stored."""

from __future__ import annotations

import sqlite3
from contextlib import suppress

from .folder import Folder
from .rows import (
    SELECT_ENTRY,
    SELECT_MISS,
    SELECT_STRUCTURE,
    digests,
    entry_of,
    miss_of,
    put_entry,
    put_miss,
    put_structure,
    structure_of,
)

# A damaged name in an error's message is no text, and Python then says that instead of the error.
SQLITE_ERRORS = (sqlite3.Error, UnicodeDecodeError)


def salvage(folder: Folder, old: sqlite3.Connection, new: sqlite3.Connection) -> int:
    """Copy structures, entries whose files are there, and misses; gives how many entries."""
    count = 0
    new.execute("BEGIN IMMEDIATE")
    for row in _rows(old, SELECT_STRUCTURE):
        structure = structure_of(row)
        if structure is not None:
            put_structure(new, structure)
    for row in _rows(old, SELECT_ENTRY):
        entry = entry_of(row)
        if entry is not None:
            sizes = {name: folder.size(name) for name in digests(entry)}
            whole = {name: size for name, size in sizes.items() if size is not None}
            if len(whole) == len(sizes):
                put_entry(new, entry, whole, entry.last_used, entry.loads)
                count += 1
    for row in sorted(_rows(old, SELECT_MISS)):
        miss = miss_of(row)
        if miss is not None:
            put_miss(new, miss)
    new.execute("COMMIT")
    return count


def _rows(connection: sqlite3.Connection, select: str) -> list[tuple]:
    """All rows of a table that can be read: pages that cannot are come up to from both ends."""
    rows: dict[object, tuple] = {}
    for order in ("ASC", "DESC"):
        with suppress(*SQLITE_ERRORS):  # the end of what can be read from this side
            for row in connection.execute(f"{select} ORDER BY number {order}"):
                rows[row[0]] = row
    return list(rows.values())
