"""The index: a sqlite database in WAL mode, with one connection per process, and its recovery from damage.

:meth:`Index.read` and :meth:`Index.write` take functions of a connection, and may call them twice. Only this module
converts errors of sqlite to errors of the store.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from ..entries import MissEntry
from ..errors import StoreError, StoreNewerError, StoreUnavailableError
from ..records import Miss
from . import folder as folders
from .folder import Folder, refuse_unless_plain, until_free
from .rows import TABLES, put_miss
from .salvage import SQLITE_ERRORS, in_transaction, open_index, salvage

SCHEMA = 2
"""Schema 2 added the table of timings. Opening an older store adds missing tables (:func:`_make`), and keeps all rows.
"""
T = TypeVar("T")

# sqlite's primary result codes for causes outside the database: PERM, BUSY, LOCKED, NOMEM, READONLY, INTERRUPT, IOERR,
# FULL, CANTOPEN, PROTOCOL, NOLFS, AUTH. All our statements are fixed. Any other error ("no such table", a violated
# constraint) therefore means damage, as CORRUPT and NOTADB do.
_OUTSIDE = {3, 5, 6, 7, 8, 9, 10, 13, 14, 15, 22, 23}
_SHORT_READ = 522  # an IOERR: the file ends before its last page
_OUTSIDE_WORDS = ("locked", "readonly", "read-only", "full", "unable to open", "disk I/O error", "interrupted")


class _Process:
    """State of one process: its connection, the identity of the connected file, and a lock for the threads."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.connection: sqlite3.Connection | None = None
        self.opened: tuple[int, int] | None = None


class Index:
    """The database of a :class:`Folder`. ``reasons`` records the damage that this object found, oldest first."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._file = folder.index / "index.db"
        self._processes: dict[int, _Process] = {}
        self._closed = False
        self.reasons: list[MissEntry] = []
        self.read(lambda connection: None)

    def read(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Return the result of ``work``; the function has to fetch all rows of its queries."""
        process = self._process()
        for last in (False, True):
            seen = None
            try:
                with self._alone(process), self._folder.locked():
                    if self._closed:
                        raise StoreUnavailableError(self._folder.path, "it was closed", "Open it again")
                    try:
                        return work(self._connected(process))
                    finally:
                        seen = process.opened
            except (sqlite3.ProgrammingError, sqlite3.InterfaceError):
                raise  # the caller's mistake, such as a value of a wrong type: no damage of the database
            except SQLITE_ERRORS as error:
                if not _is_damage(error) or self._folder.read_only or last:
                    raise self._folder.unavailable(error) from error
                self._replace(process, error, seen)
        raise AssertionError("the second time returns or raises")

    def write(self, work: Callable[[sqlite3.Connection], T], *, durable: bool = False) -> T:
        """Return the result of ``work``, run in one transaction; ``durable`` if it has to survive a loss of power."""

        def whole(connection: sqlite3.Connection) -> T:
            connection.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
            return in_transaction(connection, lambda: work(connection))

        return self.read(whole)

    @contextmanager
    def _alone(self, process: _Process) -> Iterator[None]:
        """Hold the lock of the threads, with a timeout: the thread that holds it may wait for this thread, in code that
        ``gc`` or a signal handler runs there."""
        acquired: list[bool] = []
        try:
            acquired += map(process.lock.acquire, (True,), (folders.BUSY_SECONDS,))  # one C call, for Ctrl-C
            if not acquired[0]:
                raise StoreUnavailableError(self._folder.path, "another thread is using it", "Wait for that thread")
            yield
        finally:
            if acquired and acquired[0]:
                process.lock.release()

    def close(self) -> None:
        """Close this process's connection."""
        self._closed = True
        process = self._process()
        with process.lock:
            self._disconnect(process)

    # ---- one connection for a process --------------------------------------------------------------------------------

    def _process(self) -> _Process:
        pid = os.getpid()
        process = self._processes.get(pid)
        if process is None:
            for inherited in list(self._processes.values()):
                _never_close(inherited.connection)
            process = self._processes.setdefault(pid, _Process())
        return process

    def _connected(self, process: _Process) -> sqlite3.Connection:
        """Return the connection; reconnect if the file was replaced."""
        with self._folder.worded():
            if process.connection is not None:
                if self._folder.read_only or process.opened == _identity(self._file):
                    return process.connection
                self._disconnect(process)
            process.connection = self._connect(process)
            return process.connection

    @staticmethod
    def _disconnect(process: _Process) -> None:
        if process.connection is not None:
            with suppress(*SQLITE_ERRORS):
                process.connection.close()
        process.connection = process.opened = None

    def _connect(self, process: _Process) -> sqlite3.Connection:
        read_only = self._folder.read_only
        if not read_only:
            self._folder.prepare()
        if _identity(self._file) is None:
            if read_only or not self._folder.create:
                raise self._folder.missing()
            _create_file(self._file)
        refuse_unless_plain(self._file, folder=False)
        if not read_only:
            self._refuse_newer(_version_in_header(self._file))
            process.opened = _identity(self._file)
            return self._open("mode=rw")
        # In a folder where sqlite cannot create its own files, it only reads a database that is declared immutable. If
        # the database does change, checksums reveal it.
        try:
            return self._open("mode=ro")
        except SQLITE_ERRORS:
            return self._open("immutable=1")

    def _open(self, mode: str) -> sqlite3.Connection:
        connection = open_index(self._file, mode)
        try:
            version = connection.execute("PRAGMA user_version").fetchone()[0]
            self._refuse_newer(version)
            if version != SCHEMA and mode == "mode=rw":
                _make(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _refuse_newer(self, version: int) -> None:
        if version > SCHEMA:
            raise StoreNewerError(self._folder.path, version, SCHEMA)

    # ---- damage ------------------------------------------------------------------------------------------------------

    def _replace(self, process: _Process, error: Exception, seen: tuple[int, int] | None) -> None:
        """Move the damaged index aside, and replace it by a new one with the rows that can still be read."""
        with process.lock, self._folder.locked(alone=True):
            if seen != _identity(self._file):
                return  # another process or thread was first
            self._disconnect(process)
            token = f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{os.urandom(3).hex()}"
            fresh, aside = (self._folder.path / f"index.{word}-{token}" for word in ("new", "corrupt"))
            try:
                # Complete before it replaces the old one: a process that ends in here loses nothing.
                fresh.mkdir(mode=0o700)
                file = fresh / self._file.name
                _create_file(file)
                with closing(open_index(file, "mode=rw")) as new:
                    _make(new)
                    count = salvage(self._folder, self._file, new, file)
                    hint = f"{count} entries were saved from it; see {aside.name}"
                    miss = Miss("corrupt", "the index", old="a database", new=str(error), hint=hint)
                    reason = MissEntry(time.time(), "", None, "index", miss)
                    put_miss(new, reason)
                self._folder.index.rename(aside)
                fresh.rename(self._folder.index)
            except StoreError:
                shutil.rmtree(fresh, ignore_errors=True)
                raise
            except (OSError, *SQLITE_ERRORS) as failed:
                shutil.rmtree(fresh, ignore_errors=True)
                raise self._folder.unavailable(failed) from error
            self.reasons.append(reason)


def _never_close(connection: sqlite3.Connection | None) -> None:
    """Keep a connection that this process inherited by a fork: sqlite forbids to use or close it here.

    An extra reference keeps the connection alive, also at the end of the interpreter.
    """
    if connection is not None:
        import ctypes

        ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection))


def _create_file(file: Path) -> None:
    os.close(os.open(file, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o600))


def _make(connection: sqlite3.Connection) -> None:
    # sqlite's own timeout does not apply to a change of the journal's mode.
    until_free(lambda: connection.execute("PRAGMA journal_mode = WAL"), sqlite3.OperationalError)

    def make() -> None:
        for statement in TABLES.split(";"):
            connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {SCHEMA}")

    in_transaction(connection, make)


def _identity(file: Path) -> tuple[int, int] | None:
    try:
        status = file.lstat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


def _version_in_header(file: Path) -> int:
    """Return the schema in the file's header (bytes 60 to 64 of the format), read before sqlite touches the file."""
    with file.open("rb") as opened:
        header = opened.read(64)
    return int.from_bytes(header[60:64], "big") if header[:16] == b"SQLite format 3\0" else 0


def _is_damage(error: Exception) -> bool:
    if isinstance(error, UnicodeDecodeError):
        return True
    code = getattr(error, "sqlite_errorcode", None)  # Python 3.11 and later
    if code is None:
        return not any(word in str(error) for word in _OUTSIDE_WORDS)
    return code == _SHORT_READ or code & 0xFF not in _OUTSIDE
