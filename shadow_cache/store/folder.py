"""The folder of the store: its owner and permissions, and its files, each named by the SHA-256 of its bytes.

    files/ab/ab12...    files of entries
    temporary/          files that are being written
    index/index.db      the index, with sqlite's own files (index.py)
    lock                held shared to open or write the index, exclusively to replace it

The process runs code from this folder, so only the owner may have write access. Windows has no modes: there the rights
of the user's own folder have to suffice. No symbolic link inside the folder is followed.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import secrets
import shlex
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from ..errors import DamagedEntryError, StoreError, StoreMissingError, StoreRefusedError, StoreUnavailableError

try:
    import fcntl
except ImportError:  # Windows: no lock is needed, a folder in use cannot be renamed there
    fcntl = None  # type: ignore[assignment]

_DIGEST = re.compile(r"[0-9a-f]{64}\Z")
_OLD_SECONDS = 3600.0
BUSY_SECONDS = 30.0
_FLAGS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)


def is_digest(name: str) -> bool:
    """Return whether ``name`` can be the name of a file of the store."""
    return _DIGEST.match(name) is not None


def is_ours(status: os.stat_result) -> bool:
    """Return whether a file belongs to the user of this process; always True on Windows, without user ids."""
    return not hasattr(os, "geteuid") or status.st_uid == os.geteuid()


class Folder:
    """The store's folder on disk. ``read_only`` if this process may not write there. Raises the errors of ``open``."""

    def __init__(self, path: Path, *, create: bool) -> None:
        self._given = path.expanduser().absolute()
        self.path = Path(os.path.realpath(self._given))
        self.index = self.path / "index"
        self.files = self.path / "files"
        self.temporary = self.path / "temporary"
        self.read_only = False
        self.create = create
        self.prepare()

    def prepare(self) -> None:
        """Check the folder and create its missing parts. Repeated before the index is reopened."""
        with self.worded():
            self._refuse_others(self._made())
            parts = (self.files, self.temporary, self.index)
            there = [self.path, *(part for part in parts if os.path.lexists(part))]
            self.read_only = not all(os.access(part, os.W_OK | os.X_OK) for part in there)
            for part in parts:
                self._prepare_part(part)

    def _prepare_part(self, part: Path) -> None:
        if not self.read_only and not os.path.lexists(part):
            with suppress(FileExistsError):  # a file of this name is refused below
                part.mkdir(mode=0o700, exist_ok=True)
                _sync_folder(self.path)
        if os.path.lexists(part):
            refuse_unless_plain(part, folder=True)

    def _made(self) -> os.stat_result:
        if self._given.is_symlink() and not is_ours(self._given.lstat()):
            raise StoreRefusedError(self._given, "it is another user's symbolic link", f"Use {self.path} itself")
        try:
            if self.create:
                with suppress(FileExistsError):  # the caller refuses a file of this name
                    self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            return self.path.lstat()
        except FileNotFoundError as error:
            raise self.missing(error) from None

    def _refuse_others(self, status: os.stat_result) -> None:
        if not stat.S_ISDIR(status.st_mode):
            raise StoreRefusedError(self.path, "it is no folder", "Name another folder")
        if not is_ours(status):
            found = f"it belongs to user {status.st_uid}, and this process runs as user {os.geteuid()}"
            raise StoreRefusedError(self.path, found, "Name a folder of your own")
        mode = stat.S_IMODE(status.st_mode)
        if hasattr(os, "geteuid") and mode & 0o077:
            found = f"its mode {mode:04o} lets other users read or write it"
            do = f"If no other user changed it, run: chmod 700 {shlex.quote(str(self.path))}"
            raise StoreRefusedError(self.path, found, do)

    def missing(self, error: Exception | None = None) -> StoreUnavailableError:
        """Return the error for a missing store that must not, or could not, be created."""
        if not self.create:
            return StoreMissingError(self.path)
        return self.unavailable(error or PermissionError(errno.EACCES, "this process may not write there"))

    def unavailable(self, error: Exception) -> StoreUnavailableError:
        """Return a :class:`StoreUnavailableError` that says what ``error`` says."""
        found = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
        locked = isinstance(error, BlockingIOError) or "locked" in found
        do = "End the process that holds it" if locked else "Free space, make it writable"
        return StoreUnavailableError(self.path, found[:1].lower() + found[1:], f"{do}, or name another folder")

    @contextmanager
    def worded(self) -> Iterator[None]:
        """Convert OSErrors raised inside to errors of the store."""
        try:
            yield
        except StoreError:
            raise
        except OSError as error:
            raise self.unavailable(error) from error

    @contextmanager
    def locked(self, *, alone: bool = False) -> Iterator[None]:
        """Hold the lock, shared or exclusively (``alone``). The system releases the lock when the process ends."""
        if fcntl is None or self.read_only:
            yield
            return
        how = (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB
        opened: list[int] = []
        try:
            self._open_lock(opened)
            # With a timeout: a child that was forked while the lock was held keeps the lock until it ends.
            with self.worded():
                until_free(lambda: fcntl.flock(opened[0], how), BlockingIOError)
            yield
        finally:
            for handle in opened:
                os.close(handle)

    def _open_lock(self, opened: list[int]) -> None:
        """Open the lock's file and store its handle in one C call, so that Ctrl-C cannot come in between."""
        how = (str(self.path / "lock"),), (os.O_RDWR | os.O_CREAT | _FLAGS,), (0o600,)
        with self.worded():
            try:
                opened.extend(map(os.open, *how))
            except FileNotFoundError:
                self.prepare()  # the user removed the whole folder: start with an empty store
                opened.extend(map(os.open, *how))

    # ---- files -------------------------------------------------------------------------------------------------------

    def file(self, digest: str) -> Path:
        """Return the path of the file named ``digest``."""
        return self.files / digest[:2] / digest

    def write(self, digest: str, data: bytes) -> None:
        """Store ``data`` durably: first the bytes, then the name. Raises StoreUnavailableError."""
        target = self.file(digest)
        with self.worded():
            if not target.parent.is_dir() or target.parent.is_symlink():
                target.parent.mkdir(mode=0o700, exist_ok=True)
                _sync_folder(self.files)
            refuse_unless_plain(target.parent, folder=True)
            if not self._has(target, data):
                self._replace(target, data)
            _sync_folder(target.parent)

    def _has(self, target: Path, data: bytes) -> bool:
        try:
            return target.lstat().st_size == len(data) and _read(target) == data
        except (OSError, StoreRefusedError):
            return False  # missing or unreadable: written again

    def _replace(self, target: Path, data: bytes) -> None:
        temporary = self.temporary / f"{os.getpid()}-{secrets.token_hex(8)}"
        with written_whole(target, temporary, 0o600) as file:
            file.write(data)

    def size(self, digest: str) -> int | None:
        """Return the size in bytes of the file named ``digest``; None if it does not exist. Does not read the file."""
        if not is_digest(digest):
            return None
        try:
            status = self.file(digest).lstat()
        except OSError:
            return None
        return status.st_size if stat.S_ISREG(status.st_mode) else None

    def read(self, digest: str) -> bytes:
        """Return the bytes stored as ``digest``. Raises DamagedEntryError if they are missing or damaged."""
        if not is_digest(digest):
            raise DamagedEntryError(repr(digest), "this is no file name of the cache: these have 64 hexadecimal digits")
        target = self.file(digest)
        name = str(target.relative_to(self.path))
        try:
            refuse_unless_plain(target.parent, folder=True)
            data = _read(target)
        except FileNotFoundError:
            raise DamagedEntryError(name, "the file is missing") from None
        except StoreRefusedError as error:
            raise DamagedEntryError(name, str(error)) from error
        except OSError as error:
            raise DamagedEntryError(name, f"the file cannot be read: {error.strerror}") from error
        found = hashlib.sha256(data).hexdigest()
        if found != digest:
            raise DamagedEntryError(
                name, f"its {len(data)} bytes have the SHA-256 {found[:12]}..., not that of its name"
            )
        return data

    def damage(self, digest: str) -> str | None:
        """Return the damage of the file named ``digest`` in words; None if it is intact."""
        try:
            self.read(digest)
        except DamagedEntryError as error:
            return error.found
        return None

    def remove(self, digest: str) -> None:
        """Remove a file if it exists. Raises StoreUnavailableError."""
        if is_digest(digest):  # a damaged name could be any path
            with self.worded():
                self.file(digest).unlink(missing_ok=True)

    def all_files(self) -> Iterator[tuple[Path, os.stat_result]]:
        """Yield everything below ``files/`` except the subfolders, whatever its name."""
        for sub in _listed(self.files):
            for path in _listed(sub) if not sub.is_symlink() and sub.is_dir() else [sub]:
                with suppress(FileNotFoundError):  # removed by another process in between
                    yield path, path.lstat()

    def left_over(self) -> list[Path]:
        """Return the temporary files that are so old that their writers must have ended."""
        old = []
        for path in _listed(self.temporary):
            with suppress(FileNotFoundError):
                if is_old(path.lstat()):
                    old.append(path)
        return old

    def set_aside(self) -> list[Path]:
        """Return damaged indexes that were moved aside, and unfinished replacements."""
        return [path for path in _listed(self.path) if path.name.startswith(("index.corrupt-", "index.new-"))]


def until_free(take: Callable[[], object], busy: type[Exception]) -> None:
    """Call ``take`` until it no longer raises ``busy``; re-raise ``busy`` after :data:`BUSY_SECONDS`."""
    deadline = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            take()
            return
        except busy:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


@contextmanager
def written_whole(target: Path, temporary: Path, mode: int) -> Iterator[BinaryIO]:
    """Yield the new file ``temporary``. It replaces ``target`` once it is on disk, and is removed after an error."""
    try:
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FLAGS, mode)
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(handle)
        temporary.replace(target)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def is_old(status: os.stat_result) -> bool:
    """Return whether a file is so old that no process can still be about to use it."""
    return abs(time.time() - status.st_mtime) > _OLD_SECONDS


def refuse_unless_plain(path: Path, *, folder: bool, status: os.stat_result | None = None) -> None:
    """Raise StoreRefusedError unless ``path`` is a folder or file of this user, and no link."""
    status = status or path.lstat()
    kind = "folder" if folder else "file"
    if not (stat.S_ISDIR if folder else stat.S_ISREG)(status.st_mode):
        raise StoreRefusedError(path, f"it is no plain {kind}", "Remove it")
    if not is_ours(status):
        raise StoreRefusedError(path, f"this {kind} belongs to user {status.st_uid}", "Remove it")


def _read(path: Path) -> bytes:
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | _FLAGS)
    with os.fdopen(handle, "rb") as file:
        refuse_unless_plain(path, folder=False, status=os.fstat(handle))
        return file.read()


def _listed(path: Path) -> list[Path]:
    try:
        return sorted(path.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _sync_folder(path: Path) -> None:
    """Make the names in a folder durable. Windows cannot, and need not."""
    if os.name != "posix":
        return
    handle = os.open(path, os.O_RDONLY | _FLAGS)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
