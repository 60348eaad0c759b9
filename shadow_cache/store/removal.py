"""Remove damaged rows, removed entries and entries over the size limit from the index, and then their files.

Rows are deleted in a transaction of the caller. Files that no entry names any more are deleted afterwards, in another
transaction. A process that ends in between leaves files without entries, never entries without files.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from ..entries import MissEntry
from ..records import Miss
from .folder import Folder, is_old
from .index import Index
from .rows import SELECT_ENTRY, entry_of, forget_names, put_miss

_TIMINGS_OF_NONE = "DELETE FROM timings WHERE entry NOT IN (SELECT id FROM entries)"
TOTAL_SIZE = "SELECT total(size) FROM (SELECT max(size) AS size FROM names GROUP BY digest)"


def damaged(table: str, row: tuple) -> MissEntry:
    """Return the miss that records a dropped row."""
    id_, structure = {"entries": (row[1], row[2]), "structures": (None, row[1]), "misses": (None, "")}[table]
    where = f"row {row[0]} of {table}"
    miss = Miss("corrupt", where, old="the stored bytes", new="other bytes", hint="the row was dropped")
    return MissEntry(time.time(), str(structure), None if id_ is None else str(id_), "", miss)


def went(row: tuple, miss: Miss) -> MissEntry:
    """Return the miss that records the removal of an entry; it explains why the entry is compiled again."""
    entry = entry_of(row)
    return MissEntry(time.time(), str(row[2]), str(row[1]), entry.name if entry else "", miss)


def delete_entry(connection: sqlite3.Connection, number: Any) -> list[str]:
    """Delete an entry, and its structure if no other entry has it; return the files that the entry named."""
    connection.execute(
        "DELETE FROM structures WHERE id = (SELECT structure FROM entries WHERE number = ?) AND NOT EXISTS"
        " (SELECT 1 FROM entries WHERE structure = structures.id AND number IS NOT ?)",
        (number, number),
    )
    connection.execute("DELETE FROM timings WHERE entry = (SELECT id FROM entries WHERE number = ?)", (number,))
    connection.execute("DELETE FROM entries WHERE number = ?", (number,))
    return forget_names(connection, number)


def over(
    connection: sqlite3.Connection, folder: Folder, limit: int, gone: set[str], keep: int | None = None
) -> dict[str, int]:
    """Return the entries to evict, id -> number, so that the files of the rest take at most ``limit`` bytes.

    The least recently used entries are evicted first. Sizes are read from the files, not from the index: one damaged
    number in the index must not evict every entry.
    """
    named = connection.execute(
        "SELECT id, number, digest FROM entries JOIN names ON entry = number ORDER BY last_used, number"
    ).fetchall()
    users: dict[str, int] = {}
    rest: dict[str, tuple[int, list[str]]] = {}
    for id_, number, digest in named:
        if id_ not in gone:
            users[digest] = users.get(digest, 0) + 1
            rest.setdefault(id_, (number, []))[1].append(digest)
    sizes = {digest: folder.size(digest) or 0 for digest in users}
    total = sum(sizes.values())
    going: dict[str, int] = {}
    for id_, (number, files) in rest.items():
        if total <= limit:
            break
        if number == keep:
            continue
        going[id_] = number
        for digest in files:
            users[digest] -= 1
            total -= sizes[digest] if not users[digest] else 0
    return going


def evict(connection: sqlite3.Connection, folder: Folder, limit: int, keep: int) -> list[str]:
    """Delete entries over the limit, but never row ``keep``; return the files that no entry may name any more."""
    (total,) = connection.execute(TOTAL_SIZE).fetchone()
    gone: list[str] = []
    if total > limit:
        for number in over(connection, folder, limit, set(), keep).values():
            row = connection.execute(f"{SELECT_ENTRY} WHERE number = ?", (number,)).fetchone()
            miss = Miss("evicted", hint=f"the cache had more than max_size={limit} bytes")
            put_miss(connection, went(row, miss))
            gone += delete_entry(connection, number)
    return gone


def remove_files(folder: Folder, index: Index, candidates: Iterable[str]) -> None:
    """Remove the candidates that no entry names, in a write transaction: no entry can begin to name one meanwhile."""
    unique = sorted(set(candidates))

    def work(connection: sqlite3.Connection) -> None:
        for digest in unique:
            if connection.execute("SELECT 1 FROM names WHERE digest = ?", (digest,)).fetchone() is None:
                folder.remove(digest)

    if unique:
        index.write(work)


def remove_unnamed(folder: Folder, index: Index) -> None:
    """Remove old files that processes left behind when they ended unexpectedly."""
    for path in folder.left_over():
        with suppress(OSError):  # not urgent: the next call tries again
            path.unlink()
    index.write(lambda connection: connection.execute(_TIMINGS_OF_NONE))
    files = [(path, status) for path, status in folder.all_files() if path == folder.file(path.name)]
    remove_files(folder, index, (path.name for path, status in files if is_old(status)))
