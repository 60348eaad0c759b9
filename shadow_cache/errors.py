"""One class for each thing that can go wrong with the store. A message says what was found, where, and what to do."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path


def _sentence(text: str, path: Path) -> str:
    """End a sentence; a command that ends in the path is to be pasted, and has no full stop behind it."""
    return text if text.endswith(shlex.quote(str(path))) else f"{text}."


class StoreError(Exception):
    """Base class: whoever catches it goes on without the store."""


class StoreRefusedError(StoreError):
    """A folder or file that others could have written, or can read: compiled code is not taken from there."""

    def __init__(self, path: Path, found: str, do: str) -> None:
        super().__init__(f"{path} is not used as a cache: {found}. {_sentence(do, path)}")


class StoreNewerError(StoreError):
    """A store that a newer version of this package made. It was not touched."""

    def __init__(self, path: Path, found: int, known: int) -> None:
        super().__init__(
            f"{path} has schema {found}, and this version knows {known}: a newer version made it. "
            "It was left as it is. Update this package, or use another folder."
        )


class StoreUnavailableError(StoreError, OSError):
    """The store cannot be read or written now: a full disk, a read-only folder, a lock that is not given back."""

    def __init__(self, path: Path, found: str, do: str) -> None:
        super().__init__(f"the cache in {path} cannot be used: {found}. {_sentence(do, path)}")


class StoreMissingError(StoreUnavailableError):
    """There is no store, and none was to be made."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "there is none", "Name a folder that has one, or let it be made (create=True)")


class DamagedEntryError(StoreError):
    """A file of an entry is not there, or does not hold what was stored. What it was for has to be made anew."""

    def __init__(self, file: str, found: str) -> None:
        super().__init__(f"{file} of the cache: {found}. Its entries are not used; compile anew.")
        self.found = found


class InvalidEntryError(StoreError, ValueError):
    """Something that cannot be stored: an entry and its files do not belong together."""


class DamagedArchiveError(StoreError, ValueError):
    """An exported file with damage in it. ``refused`` names what was not taken, ``imported`` counts what was."""

    def __init__(self, path: Path, refused: Sequence[str], imported: int = 0) -> None:
        super().__init__(
            f"{path}: {imported} entries were imported, and these were refused: {'; '.join(refused)}. Export it anew."
        )
        self.refused = tuple(refused)
        self.imported = imported
