"""Write a record to a file, and read it: a zip archive with one JSON text and, with real values, raw bytes of tensors.

Reading runs no code of the file: JSON is decoded into records, tensors are bytes, and names (of operators, dtypes,
devices) are looked up in tables of PyTorch. The file may come from an untrusted source: its sizes are checked before
anything is read.
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
"""Maximum bytes of the JSON text, unpacked."""
_MAX_RATIO = 1000
"""Maximum ratio of the JSON text's unpacked to its packed size."""
_DAMAGED = (zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error, EOFError, OSError, RuntimeError, ValueError)
"""Errors of :mod:`zipfile` for a damaged archive, or for no archive; OSError too: the bytes are in memory already."""
_LONG_AGO = (1980, 1, 1, 0, 0, 0)
_TEXT = """\
A reproduction of one backward, written by compiled_autograd {version} with torch {torch}:
{where}

The file is data: no code, no pickle. The values of its tensors are {values}.
To run its operators one by one and compiled, and to compare and time the two:

    pip install compiled-autograd=={version} torch=={torch}
    python -m compiled_autograd.load FILE [--backend inductor]

"""


def write_file(path: str | os.PathLike[str], record: Record, stored: Mapping[int, bytes]) -> None:
    """Write a record, and the bytes of each storage if values are kept.

    Raises:
        OSError: the file cannot be written; an existing file is unchanged.
    """
    place = Path(os.fsdecode(path))
    part = place.parent / f".{uuid.uuid4()}.part"  # several threads may write the same file
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
        with contextlib.suppress(OSError):  # the first error is the one to raise
            part.unlink()
        raise


def _put(archive: zipfile.ZipFile, name: str, data: bytes, compression: int) -> None:
    archive.writestr(zipfile.ZipInfo(name, _LONG_AGO), data, compression)


def read_file(path: str | os.PathLike[str]) -> tuple[Record, dict[int, bytes]]:
    """Read a file of :func:`write_file`; return its record and the bytes of each storage.

    Raises:
        ReproductionError: the file is no reproduction, damaged, or of another version.
        OSError: the file cannot be read.
    """
    place = Path(os.fsdecode(path))
    data = place.read_bytes()
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return _read(archive, len(data))
    except ReproductionError:  # a ValueError too, and so in _DAMAGED
        raise
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ReproductionError(f"its {_RECORD} has no valid record: {error}") from error
    except _DAMAGED as error:
        raise ReproductionError(f"{place} is no reproduction, or it is damaged ({error})") from error


class _Format(msgspec.Struct):
    format: int


def _read(archive: zipfile.ZipFile, size: int) -> tuple[Record, dict[int, bytes]]:
    entries = {info.filename: info for info in archive.infolist()}
    info = entries.get(_RECORD)
    if info is None:
        raise ReproductionError(f"it has no {_RECORD}")
    if info.file_size > min(_MAX_RECORD, _MAX_RATIO * max(info.compress_size, 1)):
        raise ReproductionError(
            f"its {_RECORD} is too large: {info.file_size} bytes, packed into {info.compress_size} bytes"
        )
    text = archive.read(info)
    found = msgspec.json.decode(text, type=_Format).format
    if found != FORMAT:
        raise ReproductionError(f"it has format {found}, and this version reads format {FORMAT}")
    record = msgspec.json.decode(text, type=Record)
    stored: dict[int, bytes] = {}
    for storage in {each.storage for each in record.tensors} if record.real else ():
        each = entries.get(f"{_TENSORS}{storage}")
        if each is None:
            continue
        if each.compress_type != zipfile.ZIP_STORED or each.file_size != each.compress_size:
            raise ReproductionError(f"its {each.filename} is compressed, and should not be")
        size -= each.file_size
        if size < 0:
            raise ReproductionError(f"its parts overlap: the file is too small for {each.filename}")
        stored[storage] = archive.read(each)
    return record, stored
