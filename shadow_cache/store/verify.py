"""Check every row, file and checksum of the store. Nothing is changed."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator

from ..entries import Problem
from .folder import Folder, is_old
from .index import Index
from .rows import (
    HAS_TIMINGS,
    SELECT_ENTRY,
    SELECT_MISS,
    SELECT_STRUCTURE,
    SELECT_TIMING,
    digests,
    entry_of,
    miss_of,
    structure_of,
    timing_of,
)

_DROPPED = "nothing: it is dropped at its next use, and compiled again"
_UNTIMED = "nothing: it is ignored until the next tuning trial"
_REMOVE = "remove the entry, so that it is compiled again"
_PRUNE = "run `shadow-cache prune`, which removes it"


def verify(folder: Folder, index: Index) -> tuple[Problem, ...]:
    """Return the problems of the store, those of the index first."""
    return index.read(lambda connection: (*_rows(folder, connection), *_files(folder, connection)))


def _rows(folder: Folder, connection: sqlite3.Connection) -> Iterator[Problem]:
    for (line,) in connection.execute("PRAGMA integrity_check(20)").fetchall():
        if line != "ok":
            yield Problem("index", line, f"export what can be read, remove {folder.path}, and import it again")
    for row in connection.execute(SELECT_STRUCTURE).fetchall():
        if structure_of(row) is None:
            yield Problem(f"structure {row[1]}", "its row does not match its checksum", _DROPPED)
    for row in connection.execute(SELECT_MISS).fetchall():
        if miss_of(row) is None:
            yield Problem(f"miss {row[0]}", "its row does not match its checksum", _DROPPED)
    for row in connection.execute(SELECT_ENTRY).fetchall():
        problems = list(_entry(folder, connection, row))
        # Report only an entry that still exists: another process may have removed or replaced it after the listing.
        same = "SELECT 1 FROM entries WHERE number = ? AND checksum IS ?"
        if problems and connection.execute(same, (row[0], row[4])).fetchone():
            yield from problems
    if connection.execute("PRAGMA user_version").fetchone()[0] >= HAS_TIMINGS:
        for row in connection.execute(SELECT_TIMING).fetchall():
            if timing_of(row) is None:
                yield Problem(str(row[1]), "the row of its tuning trial does not match its checksum", _UNTIMED)


def _entry(folder: Folder, connection: sqlite3.Connection, row: tuple) -> Iterator[Problem]:
    entry = entry_of(row)
    if entry is None:
        yield Problem(str(row[1]), "its row does not match its checksum", _DROPPED)
        return
    if connection.execute("SELECT 1 FROM structures WHERE id = ?", (entry.structure,)).fetchone() is None:
        yield Problem(entry.id, f"its structure {entry.structure} is missing", _REMOVE)
    named = connection.execute("SELECT digest FROM names WHERE entry = ?", (row[0],)).fetchall()
    if {name for (name,) in named} != digests(entry):
        yield Problem(entry.id, "the index lists other files for it than its own", _REMOVE)
    for digest in sorted(digests(entry)):
        found = folder.damage(digest)
        if found is not None:
            yield Problem(entry.id, f"file {digest}: {found}", _DROPPED)


def _files(folder: Folder, connection: sqlite3.Connection) -> Iterator[Problem]:
    named = {name for (name,) in connection.execute("SELECT digest FROM names").fetchall()}
    for path, status in folder.all_files():
        where = str(path.relative_to(folder.path))
        if path != folder.file(path.name):
            yield Problem(where, "a file with this name does not belong to the cache", "remove the file")
        elif path.name not in named and is_old(status):
            yield Problem(where, "no entry uses this file", _PRUNE)
    for path in folder.left_over():
        yield Problem(str(path.relative_to(folder.path)), "the process that wrote it ended before it was done", _PRUNE)
    for path in folder.set_aside():
        yield Problem(path.name, "a damaged index that was moved aside", "remove it if you do not need it")
