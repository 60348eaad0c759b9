"""Whole backwards beside the eager engine's own: which are compared, and how."""
