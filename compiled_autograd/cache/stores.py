"""The stores that this process has opened, by the setting that names them."""

from __future__ import annotations

from pathlib import Path

from .. import shadow_cache
from ..process_state import PROCESS
from ..settings import Settings
from ..shadow_cache import StoreError
from .disk import Disk, warn_of_memory_alone

_opened: dict[str, Disk | None] = {}


def disk_for(settings: Settings) -> Disk | None:
    """The store that a session's settings name; None where it has none, or where it cannot be used."""
    where = settings.cache_dir
    if where is False:
        return None
    name = "" if where is None or where is True else str(where)
    if name not in _opened:
        try:
            _opened[name] = Disk(shadow_cache.open(Path(name).expanduser() if name else None))
        except (StoreError, OSError, ValueError, RuntimeError) as error:  # no path at all, or the home of nobody
            _opened[name] = None
            warn_of_memory_alone(error)
    return _opened[name]


def close_all() -> None:
    """Forget which stores are open; they are opened again when they are asked for."""
    for disk in _opened.values():
        if disk is not None:
            disk.store.close()
    _opened.clear()


PROCESS.register(_opened, reset=close_all)
