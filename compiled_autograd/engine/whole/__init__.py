"""Whole backwards beside the eager engine's: the selection, and the comparison."""
