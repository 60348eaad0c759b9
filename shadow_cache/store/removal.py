"""What leaves the index: damaged rows, entries that were removed, entries over the size limit; and what goes with them.

Rows go inside a transaction of the caller, and files afterwards, in another one, where no entry names them any more: a
process that ends in between leaves files without entries, never entries without files.
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
    """Why the row was dropped."""
    id_, structure = {"entries": (row[1], row[2]), "structures": (None, row[1]), "misses": (None, "")}[table]
    miss = Miss("corrupt", f"row {row[0]} of {table}", old="what was stored", new="other bytes", hint="it was dropped")
    return MissEntry(time.time(), str(structure), None if id_ is None else str(id_), "", miss)


def went(row: tuple, miss: Miss) -> MissEntry:
    """Why an entry is no longer there: to be found when it is made anew."""
    entry = entry_of(row)
    return MissEntry(time.time(), str(row[2]), str(row[1]), entry.name if entry else "", miss)


def delete_entry(connection: sqlite3.Connection, number: Any) -> list[str]:
    """Delete an entry, and its structure where it was the last of it; gives the files that it named."""
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
    """Which entries go, id -> number, least recently used first, until the files of the rest are within ``limit``.

    Sizes are those of the files: one damaged number in the index must not cost every entry.
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
    """Delete what is over the limit, but never row ``keep``; gives the files that may have no name left."""
    (total,) = connection.execute(TOTAL_SIZE).fetchone()
    gone: list[str] = []
    if total > limit:
        for number in over(connection, folder, limit, set(), keep).values():
            row = connection.execute(f"{SELECT_ENTRY} WHERE number = ?", (number,)).fetchone()
            miss = Miss("evicted", hint=f"the files had more than max_size={limit} bytes")
            put_miss(connection, went(row, miss))
            gone += delete_entry(connection, number)
    return gone


def remove_files(folder: Folder, index: Index, candidates: Iterable[str]) -> None:
    """Remove those that no entry names. The index is held meanwhile, so that none can begin to."""
    unique = sorted(set(candidates))

    def work(connection: sqlite3.Connection) -> None:
        for digest in unique:
            if connection.execute("SELECT 1 FROM names WHERE digest = ?", (digest,)).fetchone() is None:
                folder.remove(digest)

    if unique:
        index.write(work)


def remove_unnamed(folder: Folder, index: Index) -> None:
    """Remove what a process that ended in the middle left behind, once it is old."""
    for path in folder.left_over():
        with suppress(OSError):  # as old as it is, it can wait
            path.unlink()
    index.write(lambda connection: connection.execute(_TIMINGS_OF_NONE))
    files = [(path, status) for path, status in folder.all_files() if path == folder.file(path.name)]
    remove_files(folder, index, (path.name for path, status in files if is_old(status)))
