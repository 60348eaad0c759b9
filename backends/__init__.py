"""Backends: each makes a callable of an ATen graph. They know FX graphs and nothing of autograd."""

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
