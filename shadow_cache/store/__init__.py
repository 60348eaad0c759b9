"""The store on disk: a folder of files, an index of them, eviction and recovery from damage."""

from .store import Store

__all__ = ["Store"]
