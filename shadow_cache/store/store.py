"""The store: entries on disk that outlive the process, an index of them, and the files that they name.

The store returns only intact data: every row has a checksum, and every file is named by its own. Several processes and
threads may use one folder. A store raises only :class:`StoreError`.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from ..entries import Entry, MissEntry, Problem, StoreStats, Structure, Summary, Timing
from ..errors import DamagedEntryError, StoreUnavailableError
from ..miss_kinds import NO_MISSES
from ..records import Miss
from .archive import export, import_
from .folder import Folder, is_digest
from .index import Index
from .removal import TOTAL_SIZE, damaged, delete_entry, evict, over, remove_files, remove_unnamed, went
from .rows import (
    SELECT_ENTRY,
    SELECT_MISS,
    SELECT_STRUCTURE,
    entry_of,
    forget_names,
    miss_of,
    put_entry,
    put_miss,
    put_structure,
    put_timing,
    refuse_mismatch,
    structure_of,
    summary_of,
    timings,
    whole,
)
from .verify import verify

_TIDY_SECONDS = 86400.0
_E = TypeVar("_E", bound=Summary)
_LAST_USED_FIRST = "ORDER BY last_used DESC, number DESC"


class Store:
    """An open store. Use :func:`shadow_cache.open`.

    Attributes:
        path: the folder.
        max_size: maximum total bytes of the files, without the index.
        read_only: True if this process may not write to the folder; ``loaded``, ``timed`` and ``record`` are no-ops.
    """

    def __init__(self, path: Path, *, max_size: int, create: bool) -> None:
        self._folder = Folder(path, create=create)
        self._index = Index(self._folder)
        self.path = self._folder.path
        self.max_size = max_size
        self._tidied = False

    @property
    def read_only(self) -> bool:
        return self._folder.read_only

    @property
    def damage(self) -> tuple[MissEntry, ...]:
        """The damage that this object found and skipped, oldest first; also recorded among the misses."""
        return tuple(self._index.reasons)

    def close(self) -> None:
        """Close the store; later calls raise StoreUnavailableError."""
        self._index.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    # ---- reading -----------------------------------------------------------------------------------------------------

    def entries(self) -> tuple[Entry, ...]:
        """Return all entries, last used first."""
        return self._timed(self._good("entries", entry_of, f"{SELECT_ENTRY} {_LAST_USED_FIRST}"))

    def summaries(self) -> tuple[Summary, ...]:
        """Return all entries without their long fields, last used first, for lists."""
        return self._timed(self._good("entries", summary_of, f"{SELECT_ENTRY} {_LAST_USED_FIRST}"))

    def find(self, structure: str) -> tuple[Entry, ...]:
        """Return the entries of one structure, last used first."""
        found = self._good("entries", entry_of, f"{SELECT_ENTRY} WHERE structure = ? {_LAST_USED_FIRST}", structure)
        return self._timed(found, "WHERE entry IN (SELECT id FROM entries WHERE structure = ?)", structure)

    def structure(self, id: str) -> Structure | None:
        """Return the structure with this id, or None."""
        found = self._good("structures", structure_of, f"{SELECT_STRUCTURE} WHERE id = ?", id)
        return found[0] if found else None

    def misses(self, limit: int | None = None) -> tuple[MissEntry, ...]:
        """Return the last misses, newest first. The store keeps 10,000."""
        count = -1 if limit is None else limit
        return tuple(self._good("misses", miss_of, f"{SELECT_MISS} ORDER BY number DESC LIMIT ?", count))

    def stats(self) -> StoreStats:
        """Return the totals of the store."""

        def work(connection: sqlite3.Connection) -> StoreStats:
            entries, loads, seconds, saved = connection.execute(
                "SELECT count(*), total(loads), total(seconds), total(loads * seconds) FROM entries"
            ).fetchone()
            (structures,) = connection.execute("SELECT count(*) FROM structures").fetchone()
            (size,) = connection.execute(TOTAL_SIZE).fetchone()
            recorded = connection.execute("SELECT kind, count(*) FROM misses GROUP BY kind ORDER BY kind").fetchall()
            counts = {str(kind): count for kind, count in recorded}
            misses = {kind: count for kind, count in counts.items() if kind not in NO_MISSES}
            timed = timings(connection, "WHERE entry IN (SELECT id FROM entries)").values()
            return StoreStats(
                *(entries, structures, whole(size), self.max_size, whole(loads), misses, seconds, saved),
                timed=len(timed),
                left_to_eager=sum(timing.on_eager for timing in timed),
                bypasses={kind: count for kind, count in counts.items() if kind in NO_MISSES},
            )

        return self._index.read(work)

    def read(self, digest: str) -> bytes:
        """Return the bytes of a file. Raises DamagedEntryError if the file is missing or damaged, and drops the entries
        that name it."""
        try:
            return self._folder.read(digest)
        except DamagedEntryError as error:
            if is_digest(digest) and not self.read_only:
                with suppress(StoreUnavailableError):  # the next reader will find the damage again
                    self._drop_file(digest)
            raise error

    def _timed(self, entries: list[_E], where: str = "", *arguments: Any) -> tuple[_E, ...]:
        """Return the entries with their timings."""
        found = self._index.read(lambda connection: timings(connection, where, *arguments)) if entries else {}
        if not found:
            return tuple(entries)
        return tuple(msgspec.structs.replace(each, timing=found.get(each.id)) for each in entries)

    def _good(self, table: str, decode: Callable[[tuple], Any], select: str, *arguments: Any) -> list[Any]:
        """Return the records of the intact rows; drop the damaged rows, with a reason."""
        rows = self._index.read(lambda connection: connection.execute(select, arguments).fetchall())
        records = [decode(row) for row in rows]
        bad = [row for row, record in zip(rows, records, strict=True) if record is None]
        if bad:
            self._drop_rows(table, bad)
        return [record for record in records if record is not None]

    # ---- damage ------------------------------------------------------------------------------------------------------

    def _drop_rows(self, table: str, rows: list[tuple]) -> None:
        reasons = [damaged(table, row) for row in rows]
        known = {(reason.entry, reason.miss.where) for reason in self._index.reasons}
        self._index.reasons += [reason for reason in reasons if (reason.entry, reason.miss.where) not in known]
        if self.read_only:
            return
        checksum = 4 if table == "entries" else -1

        def work(connection: sqlite3.Connection) -> list[str]:
            gone: list[str] = []
            for row, reason in zip(rows, reasons, strict=True):
                # Delete only this very row: another process may have replaced it.
                found = connection.execute(
                    f"DELETE FROM {table} WHERE number IS ? AND checksum IS ?", (row[0], row[checksum])
                )
                if found.rowcount:
                    put_miss(connection, reason)
                    if table == "entries":
                        gone += forget_names(connection, row[0])
            return gone

        with suppress(StoreUnavailableError):  # the rows are skipped anyway, and the next reader drops them
            remove_files(self._folder, self._index, self._index.write(work))

    def _drop_file(self, digest: str) -> None:
        def work(connection: sqlite3.Connection) -> list[str]:
            found = self._folder.damage(digest)
            if found is None:
                return []  # another process has written the file again
            rows = connection.execute(
                f"{SELECT_ENTRY} WHERE number IN (SELECT entry FROM names WHERE digest = ?)", (digest,)
            ).fetchall()
            gone: list[str] = []
            for row in rows:
                where = f"file {digest[:12]}"
                miss = Miss("corrupt", where, old="the stored bytes", new=found, hint="it will be compiled again")
                reason = went(row, miss)
                self._index.reasons.append(reason)
                put_miss(connection, reason)
                gone += delete_entry(connection, row[0])
            return [*gone, digest]

        remove_files(self._folder, self._index, self._index.write(work))

    # ---- writing -----------------------------------------------------------------------------------------------------

    def add(self, structure: Structure, entry: Entry, files: Mapping[str, bytes]) -> None:
        """Store an entry and the files that its regions name. An entry with the same id is replaced.

        After the return, the entry survives a crash of the process or the machine. Least recently used entries are
        evicted until the files take at most ``max_size`` bytes; the new entry is never evicted.

        Raises:
            InvalidEntryError: ``files`` are not the files that the entry names, or do not match their names.
            StoreUnavailableError: nothing was stored: the disk is full, the folder is read-only, and the like.
        """
        refuse_mismatch(structure, entry, files)
        if self.read_only:
            raise StoreUnavailableError(self.path, "this process may only read it", "Name a folder of your own")
        self._tidy()
        for digest, data in files.items():
            self._folder.write(digest, data)
        sizes = {digest: len(data) for digest, data in files.items()}

        def work(connection: sqlite3.Connection) -> list[str]:
            for digest, data in files.items():
                # Another process may have removed a file that existed before, with the last entry that named it.
                # Files are removed only in transactions (remove_files): a file that exists now stays.
                if self._folder.size(digest) != len(data):
                    self._folder.write(digest, data)
            put_structure(connection, structure)
            number, before = put_entry(connection, entry, sizes, time.time())
            return [*before, *evict(connection, self._folder, self.max_size, keep=number)]

        gone = self._index.write(work, durable=True)
        with suppress(StoreUnavailableError):  # the entry is stored, and _tidy finds leftover files again
            remove_files(self._folder, self._index, gone)

    def loaded(self, entry_id: str) -> None:
        """Count a load of an entry, and mark the entry as the last one used."""
        if not self.read_only:
            statement = "UPDATE entries SET loads = loads + 1, last_used = ? WHERE id = ?"
            self._index.write(lambda connection: connection.execute(statement, (time.time(), entry_id)))

    def timed(self, entry_id: str, timing: Timing) -> None:
        """Store the tuning trial of an entry in place of the earlier one; no-op if the entry was removed."""
        if not self.read_only:
            self._index.write(lambda connection: put_timing(connection, entry_id, timing))

    def record(self, miss: MissEntry) -> None:
        """Store a miss."""
        if not self.read_only:
            self._index.write(lambda connection: put_miss(connection, miss))

    def remove(self, ids: Iterable[str], reason: str = "removed") -> int:
        """Remove entries and the files that no other entry names; return the number of removed entries.

        A ``reason`` other than the default is recorded as a miss of that kind, to explain why an entry is compiled
        again.
        """
        wanted = tuple(ids)

        def work(connection: sqlite3.Connection) -> tuple[int, list[str]]:
            gone: list[str] = []
            count = 0
            for id_ in wanted:
                for row in connection.execute(f"{SELECT_ENTRY} WHERE id = ?", (id_,)).fetchall():
                    count += 1
                    if reason != "removed":
                        put_miss(connection, went(row, Miss(reason)))
                    gone += delete_entry(connection, row[0])
            return count, gone

        count, gone = self._index.write(work, durable=True)
        remove_files(self._folder, self._index, gone)
        return count

    def prune(
        self, older_than: float | None = None, max_size: int | None = None, dry_run: bool = False
    ) -> tuple[Entry, ...]:
        """Remove entries that were not used for ``older_than`` seconds, then the least recently used entries until the
        files take at most ``max_size`` bytes (None: the store's own limit), and files that no entry names.

        Returns:
            The removed entries in order of removal; with ``dry_run``, the entries that would be removed.
        """
        limit = self.max_size if max_size is None else max_size
        entries = self.entries()[::-1]
        going = [entry for entry in entries if older_than is not None and entry.last_used < time.time() - older_than]
        left = entries[len(going) :]
        excess = self._index.read(
            lambda connection: over(connection, self._folder, limit, {entry.id for entry in going})
        )
        chosen = (*going, *(entry for entry in left if entry.id in excess))
        if not dry_run:
            self.remove([entry.id for entry in chosen], "evicted")
            remove_unnamed(self._folder, self._index)
        return chosen

    # ---- the whole store ---------------------------------------------------------------------------------------------

    def verify(self) -> tuple[Problem, ...]:
        """Check every row and every file; return the problems. Nothing is changed."""
        return verify(self._folder, self._index)

    def export(self, file: str | PathLike[str], ids: Iterable[str] | None = None) -> int:
        """Write entries (all, or those of ``ids``) with their files into one file; return the number of entries.

        Raises:
            InvalidEntryError: the store has no entry with one of the ids.
            OSError: ``file`` cannot be written.
        """
        return export(self, Path(file), ids)

    def import_(self, file: str | PathLike[str]) -> int:
        """Add the entries of an exported file; return the number of entries. The file contains code that will run:
        import only files that you trust.

        Raises:
            DamagedArchiveError: ``file`` is no exported file, or entries were refused. The error names the refused
                entries; the others were added.
            StoreUnavailableError: see :meth:`add`.
            OSError: ``file`` cannot be read.
        """
        return import_(self, Path(file))

    def _tidy(self) -> None:
        """Remove leftover files, at most once per process and once per day."""
        if self._tidied:
            return
        self._tidied = True
        mark = self._folder.temporary / ".tidied"
        with suppress(OSError):  # no entry depends on this
            if mark.exists() and abs(time.time() - mark.stat().st_mtime) < _TIDY_SECONDS:
                return
            mark.touch(mode=0o600)
            remove_unnamed(self._folder, self._index)
