"""Backends: each makes a callable of an ATen graph. They know FX graphs and nothing of autograd."""

from __future__ import annotations

import importlib
import pkgutil
from typing import TYPE_CHECKING, Any

if __name__ == "backends":  # the name until 0.2: this import gives the package with the other one
    importlib.import_module("compiled_autograd.old_names").take_over(__name__)

if TYPE_CHECKING:
    from .artifacts import ArtifactError
    from .protocol import Backend, Compiled, Storing
    from .registry import ENTRY_POINT_GROUP, FunctionBackend, UnknownBackendError, get_backend, list_backends

__all__ = [
    "ENTRY_POINT_GROUP",
    "ArtifactError",
    "Backend",
    "Compiled",
    "FunctionBackend",
    "Storing",
    "UnknownBackendError",
    "get_backend",
    "list_backends",
]
_FILES = {"ArtifactError": "artifacts", "Backend": "protocol", "Compiled": "protocol", "Storing": "protocol"}


def __getattr__(name: str) -> Any:
    """Import what is asked for: :mod:`torch_versions` and :mod:`modes` are read without torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return pkgutil.resolve_name(f"{__name__}.{_FILES.get(name, 'registry')}:{name}")
