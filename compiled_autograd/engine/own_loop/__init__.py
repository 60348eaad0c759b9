"""Backwards that are left to eager, without the engine's queue."""
