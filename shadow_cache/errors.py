"""The errors of the store. A message says what was found, where, and what to do."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path


def _sentence(text: str, path: Path) -> str:
    """End a sentence with a full stop, except after a command that ends in the path: users paste the command."""
    return text if text.endswith(shlex.quote(str(path))) else f"{text}."


class StoreError(Exception):
    """Base class of the store's errors. A caller that catches it goes on without the store."""


class StoreRefusedError(StoreError):
    """A folder or file that other users could have written, or can read. Compiled code is not loaded from there."""

    def __init__(self, path: Path, found: str, do: str) -> None:
        super().__init__(f"{path} is not used as a cache: {found}. {_sentence(do, path)}")


class StoreNewerError(StoreError):
    """A store that a newer version of this package made. It was not touched."""

    def __init__(self, path: Path, found: int, known: int) -> None:
        super().__init__(
            f"the cache in {path} has schema {found}; this version of compiled_autograd reads schemas up to {known}. "
            "The cache was not changed. Update compiled_autograd, or use another folder."
        )


class StoreUnavailableError(StoreError, OSError):
    """The store cannot be read or written now: the disk is full, the folder is read-only, or the lock is held."""

    def __init__(self, path: Path, found: str, do: str) -> None:
        super().__init__(f"the cache in {path} cannot be used: {found}. {_sentence(do, path)}")


class StoreMissingError(StoreUnavailableError):
    """The folder has no store, and ``create`` is False."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "the folder has no cache", "Name a folder with a cache, or create one (create=True)")


class DamagedEntryError(StoreError):
    """A file of an entry is missing or damaged. The entries that name the file have to be compiled again."""

    def __init__(self, file: str, found: str) -> None:
        super().__init__(f"{file} of the cache: {found}. The entries of this file are not used; compile them again.")
        self.found = found


class InvalidEntryError(StoreError, ValueError):
    """An entry that cannot be stored: its fields or files do not match."""


class DamagedArchiveError(StoreError, ValueError):
    """A damaged exported file. ``refused`` names the refused entries; ``imported`` counts the imported ones."""

    def __init__(self, path: Path, refused: Sequence[str], imported: int = 0) -> None:
        super().__init__(
            f"{path}: {imported} entries were imported, and these were refused: {'; '.join(refused)}. "
            "Export the entries again."
        )
        self.refused = tuple(refused)
        self.imported = imported
