"""The index: a sqlite database in WAL mode, one connection for a process, and what is done when it is damaged.

Rows are read and written by functions of a connection, given to :meth:`Index.read` and :meth:`Index.write`; they may be
called twice. Errors of sqlite become those of the store here, and nowhere else.
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
"""2 has the table of timings. An older store gets what it lacks when it is opened (:func:`_make`); its rows stay."""
T = TypeVar("T")

# sqlite's primary result codes for what lies outside the database: PERM, BUSY, LOCKED, NOMEM, READONLY, INTERRUPT,
# IOERR, FULL, CANTOPEN, PROTOCOL, NOLFS, AUTH. All our statements are fixed, so that anything else ("no such table",
# a constraint that does not hold) says as much of the database as CORRUPT and NOTADB do.
_OUTSIDE = {3, 5, 6, 7, 8, 9, 10, 13, 14, 15, 22, 23}
_SHORT_READ = 522  # an IOERR: the file ends before its last page
_OUTSIDE_WORDS = ("locked", "readonly", "read-only", "full", "unable to open", "disk I/O error", "interrupted")


class _Process:
    """What belongs to one process: its connection, the file that it is to, and a lock for the threads."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.connection: sqlite3.Connection | None = None
        self.opened: tuple[int, int] | None = None


class Index:
    """The database of a :class:`Folder`. ``reasons`` are what was found damaged by this object, oldest first."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._file = folder.index / "index.db"
        self._processes: dict[int, _Process] = {}
        self._closed = False
        self.reasons: list[MissEntry] = []
        self.read(lambda connection: None)

    def read(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """What ``work`` gives. It should fetch all that it asks for."""
        process = self._process()
        for last in (False, True):
            seen = None
            try:
                with self._alone(process), self._folder.locked():
                    if self._closed:
                        raise StoreUnavailableError(self._folder.path, "it was closed", "Open it anew")
                    try:
                        return work(self._connected(process))
                    finally:
                        seen = process.opened
            except (sqlite3.ProgrammingError, sqlite3.InterfaceError):
                raise  # a mistake of the caller's, a value of the wrong type: it says nothing of the database
            except SQLITE_ERRORS as error:
                if not _is_damage(error) or self._folder.read_only or last:
                    raise self._folder.unavailable(error) from error
                self._replace(process, error, seen)
        raise AssertionError("the second time returns or raises")

    def write(self, work: Callable[[sqlite3.Connection], T], *, durable: bool = False) -> T:
        """What ``work`` gives, in one transaction; ``durable`` if it must outlast a loss of power too."""

        def whole(connection: sqlite3.Connection) -> T:
            connection.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
            return in_transaction(connection, lambda: work(connection))

        return self.read(whole)

    @contextmanager
    def _alone(self, process: _Process) -> Iterator[None]:
        """No other thread is in the midst of it. Not waited for for ever: such a one may be waiting for this thread, in
        what ``gc`` or a signal's handler runs there."""
        acquired: list[bool] = []
        try:
            acquired += map(process.lock.acquire, (True,), (folders.BUSY_SECONDS,))  # in one go, as Ctrl-C may come
            if not acquired[0]:
                raise StoreUnavailableError(self._folder.path, "another thread has it", "Wait for that")
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
        """The connection, made anew where the file is no longer the one that it is to."""
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
        # In a folder where sqlite can make no files of its own, it reads only what is declared never to change. If it
        # does change, checksums tell.
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
        """Put a new index, with what can still be read, in place of the damaged one, which is moved aside."""
        with process.lock, self._folder.locked(alone=True):
            if seen != _identity(self._file):
                return  # another process or thread was first
            self._disconnect(process)
            token = f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{os.urandom(3).hex()}"
            fresh, aside = (self._folder.path / f"index.{word}-{token}" for word in ("new", "corrupt"))
            try:
                # Whole before it takes the place: a process that ends in here loses nothing.
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
    """Keep a connection that a fork left in this process: sqlite allows it neither to be used nor to be closed here.

    One more reference than there is keeps it through the end of the interpreter too.
    """
    if connection is not None:
        import ctypes

        ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection))


def _create_file(file: Path) -> None:
    os.close(os.open(file, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o600))


def _make(connection: sqlite3.Connection) -> None:
    # sqlite does not wait by itself when the journal's mode is changed.
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
    """The schema as the file's header has it (bytes 60 to 64 of the format), read before sqlite touches the file."""
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
