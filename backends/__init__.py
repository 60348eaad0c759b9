"""Backends: each makes a callable of an ATen graph. They know FX graphs and nothing of autograd."""

from .protocol import Backend, Compiled
from .registry import ENTRY_POINT_GROUP, FunctionBackend, UnknownBackendError, get_backend, list_backends

__all__ = [
    "ENTRY_POINT_GROUP",
    "Backend",
    "Compiled",
    "FunctionBackend",
    "UnknownBackendError",
    "get_backend",
    "list_backends",
]
