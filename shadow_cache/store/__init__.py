"""The store on disk: a folder of files, an index over them, and what keeps both small and whole."""

from .store import Store

__all__ = ["Store"]
