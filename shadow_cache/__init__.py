"""The shadow graph of captured tapes: the structures that were seen, the code compiled for them, the reasons of misses.

Nothing here imports torch. The payload of a structure is the caller's. The store on disk is imported on first use.
"""

from __future__ import annotations

import importlib
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "shadow_cache":  # the name until 0.2: this import gives the package with the other one
    importlib.import_module("compiled_autograd.old_names").take_over(__name__)

from .compile_counter import TooManyCompilesError, assert_max_compiles
from .entries import Call, Entry, Input, MissEntry, Problem, Region, StoreStats, Structure, Summary, Timing
from .errors import (
    DamagedArchiveError,
    DamagedEntryError,
    InvalidEntryError,
    StoreError,
    StoreMissingError,
    StoreNewerError,
    StoreRefusedError,
    StoreUnavailableError,
)
from .graph import Key, ShadowGraph, Terminal, VariantKey
from .records import Bypass, Failure, Mismatch, Miss, unsupported

if TYPE_CHECKING:
    from .store import Store

__all__ = [
    "Bypass",
    "Call",
    "DamagedArchiveError",
    "DamagedEntryError",
    "Entry",
    "Failure",
    "Input",
    "InvalidEntryError",
    "Key",
    "Mismatch",
    "Miss",
    "MissEntry",
    "Problem",
    "Region",
    "ShadowGraph",
    "Store",
    "StoreError",
    "StoreMissingError",
    "StoreNewerError",
    "StoreRefusedError",
    "StoreStats",
    "StoreUnavailableError",
    "Structure",
    "Summary",
    "Terminal",
    "Timing",
    "TooManyCompilesError",
    "VariantKey",
    "assert_max_compiles",
    "default_dir",
    "open",
    "unsupported",
]


def open(path: str | PathLike[str] | None = None, *, max_size: int = 2 << 30, create: bool = True) -> Store:
    """Open the store in the folder ``path`` (None: :func:`default_dir`); create the folder if ``create``.

    The store's files take at most ``max_size`` bytes; the least recently used entries are evicted first.

    Raises:
        StoreRefusedError: another user owns the folder, or other users can read or write it.
        StoreNewerError: a newer version of this package made the store.
        StoreMissingError: there is no store, and ``create`` is False.
        StoreUnavailableError: the folder cannot be created or read.
    """
    from .store import Store

    return Store(default_dir() if path is None else Path(path), max_size=max_size, create=create)


def default_dir() -> Path:
    """Return the default folder of the store: the user's cache folder, by the convention of the operating system."""
    import platformdirs

    return platformdirs.user_cache_path("compiled_autograd", appauthor=False)


def __getattr__(name: str) -> Any:
    if name == "Store":  # sqlite is imported with it
        return importlib.import_module(".store", __name__).Store
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
