"""Export entries to one file, and import them into a store on another machine. The format of the file:

    magic, 16 bytes | length of the table, 8 bytes | SHA-256 of the table, 32 bytes | table | members, one by one

The table is msgpack, with the name, size in bytes and SHA-256 of each member. Members are structures, entries, files.
"""

from __future__ import annotations

import hashlib
import operator
import os
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import BinaryIO, Protocol, TypeVar

import msgspec

from ..entries import Entry, Structure
from ..errors import DamagedArchiveError, DamagedEntryError, InvalidEntryError
from ..safe_text import harmless
from .folder import written_whole
from .rows import digests

_MAGIC = b"shadow cache 1\n\0"
R = TypeVar("R", Entry, Structure)
_Table = list[tuple[str, int, str]]
_NO_RECORD = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Errors of decoding msgpack: another record, invalid UTF-8, or too deeply nested lists."""


class Keeper(Protocol):
    """The store from which entries are exported, or to which they are imported."""

    @property
    def path(self) -> Path: ...

    def entries(self) -> Iterable[Entry]: ...

    def structure(self, id_: str) -> Structure | None: ...

    def read(self, digest: str) -> bytes: ...

    def add(self, structure: Structure, entry: Entry, files: Mapping[str, bytes]) -> None: ...


def export(store: Keeper, file: Path, ids: Iterable[str] | None) -> int:
    """Write entries with their structures and files, and return their number. Damaged entries are dropped, and not
    counted."""
    entries = {entry.id: entry for entry in store.entries()}
    if ids is not None:
        wanted = tuple(dict.fromkeys(ids))
        missing = [id_ for id_ in wanted if id_ not in entries]
        if missing:
            raise InvalidEntryError(f"{store.path} has no entry {', '.join(missing)}; entries() lists its entries")
        entries = {id_: entries[id_] for id_ in wanted}
    members: dict[str, tuple[int, str, bytes | None]] = {}  # None: a file of the store, read again when written
    count = 0
    for entry in entries.values():
        structure = store.structure(entry.structure)
        try:
            sizes = {digest: len(store.read(digest)) for digest in digests(entry)}
        except DamagedEntryError:
            continue  # the store has dropped the entry, and recorded the reason
        if structure is None:
            continue
        count += 1
        for name, record in ((f"structure {structure.id}", structure), (f"entry {entry.id}", entry)):
            data = msgspec.msgpack.encode(record)
            members[name] = len(data), hashlib.sha256(data).hexdigest(), data
        members.update({f"file {digest}": (size, digest, None) for digest, size in sizes.items()})
    packed = msgspec.msgpack.encode([(name, size, digest) for name, (size, digest, _) in members.items()])
    with written_whole(file, file.with_name(f".{file.name}.{secrets.token_hex(4)}"), 0o666) as out:
        out.write(_MAGIC + len(packed).to_bytes(8, "big") + hashlib.sha256(packed).digest() + packed)
        for name, (_, _, part) in members.items():
            out.write(store.read(name.removeprefix("file ")) if part is None else part)
    return count


def import_(store: Keeper, file: Path) -> int:
    """Add the entries of ``file``, the least recently used first, and return their number."""
    with file.open("rb") as opened:
        archive = _Archive(file, opened)
        count = 0
        refused: list[str] = []
        for name in [*filter(operator.methodcaller("startswith", "entry "), reversed(archive.members))]:
            try:
                entry = archive.record(name, Entry)
                structure = archive.record(f"structure {entry.structure}", Structure)
                store.add(structure, entry, {digest: archive.read(f"file {digest}") for digest in digests(entry)})
                count += 1
            except _RefusedError as error:
                refused.append(f"{harmless(name)}: {error}")
            except InvalidEntryError as error:
                refused.append(harmless(str(error)))
        if refused:
            raise DamagedArchiveError(file, refused, count)
    return count


class _RefusedError(Exception):
    """A missing or damaged member of an exported file."""


class _Archive:
    """The members of an exported file; each read checks the checksum."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._file = file
        if file.read(len(_MAGIC)) != _MAGIC:
            raise DamagedArchiveError(path, ["the whole file: it is no exported cache (wrong first bytes)"])
        size = int.from_bytes(file.read(8), "big")
        checksum = file.read(32)
        all_bytes = os.fstat(file.fileno()).st_size
        packed = file.read(size) if size <= all_bytes - file.tell() else b""
        if hashlib.sha256(packed).digest() != checksum:
            raise DamagedArchiveError(path, ["the whole file: its table of contents does not match its checksum"])
        self.members: dict[str, tuple[int, int, str]] = {}
        offset = file.tell()
        try:
            table = msgspec.msgpack.decode(packed, type=_Table)
        except _NO_RECORD as error:
            raise DamagedArchiveError(path, [f"the whole file: another version wrote it ({error})"]) from error
        for name, length, digest in table:
            if not 0 <= length <= all_bytes - offset:
                found = f"{harmless(name)} should have {length} bytes, and only {all_bytes - offset} are left"
                raise DamagedArchiveError(path, [f"the whole file: {found}"])
            self.members[name] = (offset, length, digest)
            offset += length

    def read(self, name: str) -> bytes:
        if name not in self.members:
            raise _RefusedError(f"{harmless(name)} is not in the file")
        offset, length, digest = self.members[name]
        self._file.seek(offset)
        data = self._file.read(length)
        if len(data) != length:
            raise _RefusedError(f"{harmless(name)} is truncated: it has {len(data)} of {length} bytes")
        if hashlib.sha256(data).hexdigest() != digest:
            raise _RefusedError(f"{harmless(name)} does not match its checksum")
        return data

    def record(self, name: str, kind: type[R]) -> R:
        try:
            return msgspec.msgpack.decode(self.read(name), type=kind)
        except _NO_RECORD as error:
            raise _RefusedError(f"{harmless(name)} was written by another version: {error}") from error
