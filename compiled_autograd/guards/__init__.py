"""Conditions for reuse: sizes and symbols, the state of the process."""
