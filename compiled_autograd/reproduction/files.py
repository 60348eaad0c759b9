"""A record as a file, and back: a zip archive with one JSON text and, where real values are kept, raw bytes of tensors.

Reading runs nothing of what is in the file: JSON is decoded into records, tensors are bytes, and what is named
(operators, dtypes, devices) is looked up in tables of PyTorch's. The file may be anybody's, so its sizes are checked
before anything is read.
"""

from __future__ import annotations

import contextlib
import io
import lzma
import os
import struct
import uuid
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path

import msgspec

from ..errors import ReproductionError
from .records import FORMAT, Record

_RECORD = "reproduction.json"
_README = "README.txt"
_TENSORS = "tensors/"
_MAX_RECORD = 1 << 28
"""The largest JSON text in bytes, unpacked."""
_MAX_RATIO = 1000
"""It may be this many times as large unpacked as packed."""
_DAMAGED = (zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error, EOFError, OSError, RuntimeError, ValueError)
"""What :mod:`zipfile` raises of an archive that is damaged, or is none; the bytes of it are in memory then."""
_LONG_AGO = (1980, 1, 1, 0, 0, 0)
_TEXT = """\
A reproduction of one backward, written by compiled_autograd {version} with torch {torch}:
{where}

It is data: no code, no pickle. The values of its tensors are {values}.
To run it on the operators one by one and compiled, and to compare and time the two:

    pip install compiled-autograd=={version} torch=={torch}
    python -m compiled_autograd.load FILE [--backend inductor]

"""


def write_file(path: str | os.PathLike[str], record: Record, stored: Mapping[int, bytes]) -> None:
    """Write a record, and what lies in the memory of each storage, where that is kept.

    Raises:
        OSError: it cannot be written; what was there before is then as it was.
    """
    place = Path(os.fsdecode(path))
    part = place.parent / f".{uuid.uuid4()}.part"  # threads may write one file at a time
    about = record.about
    values = "those of the backward" if record.real else "made up"
    text = _TEXT.format(version=about.version, torch=about.torch.partition("+")[0], where=about.where, values=values)
    try:
        with zipfile.ZipFile(part, "w") as archive:
            _put(archive, _README, text.encode(), zipfile.ZIP_STORED)
            _put(archive, _RECORD, msgspec.json.format(msgspec.json.encode(record), indent=1), zipfile.ZIP_DEFLATED)
            for storage, data in stored.items():
                _put(archive, f"{_TENSORS}{storage}", data, zipfile.ZIP_STORED)
        part.replace(place)
    except BaseException:
        with contextlib.suppress(OSError):  # it is the first error that is told
            part.unlink()
        raise


def _put(archive: zipfile.ZipFile, name: str, data: bytes, compression: int) -> None:
    archive.writestr(zipfile.ZipInfo(name, _LONG_AGO), data, compression)


def read_file(path: str | os.PathLike[str]) -> tuple[Record, dict[int, bytes]]:
    """Undo :func:`write_file`.

    Raises:
        ReproductionError: it is no such file, or it is damaged, or of another version.
        OSError: it cannot be read.
    """
    place = Path(os.fsdecode(path))
    data = place.read_bytes()
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return _read(archive, len(data))
    except ReproductionError:  # it is a ValueError
        raise
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ReproductionError(f"{_RECORD} in it has no record that is known: {error}") from error
    except _DAMAGED as error:
        raise ReproductionError(f"{place} is no reproduction, or it is damaged ({error})") from error


class _Format(msgspec.Struct):
    format: int


def _read(archive: zipfile.ZipFile, size: int) -> tuple[Record, dict[int, bytes]]:
    entries = {info.filename: info for info in archive.infolist()}
    info = entries.get(_RECORD)
    if info is None:
        raise ReproductionError(f"there is no {_RECORD} in it")
    if info.file_size > min(_MAX_RECORD, _MAX_RATIO * max(info.compress_size, 1)):
        raise ReproductionError(f"{_RECORD} in it has {info.file_size} bytes, packed into {info.compress_size}")
    text = archive.read(info)
    found = msgspec.json.decode(text, type=_Format).format
    if found != FORMAT:
        raise ReproductionError(f"it is of format {found}, and this version reads format {FORMAT}")
    record = msgspec.json.decode(text, type=Record)
    stored: dict[int, bytes] = {}
    for storage in {each.storage for each in record.tensors} if record.real else ():
        each = entries.get(f"{_TENSORS}{storage}")
        if each is None:
            continue
        if each.compress_type != zipfile.ZIP_STORED or each.file_size != each.compress_size:
            raise ReproductionError(f"{each.filename} in it is packed")
        size -= each.file_size
        if size < 0:
            raise ReproductionError(f"its parts lie in one another: there is no room for {each.filename}")
        stored[storage] = archive.read(each)
    return record, stored
