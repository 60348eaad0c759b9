"""Walks a tape in C++ as the engine does. ``docs/internals/native.md``."""
