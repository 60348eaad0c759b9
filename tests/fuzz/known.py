"""What random tapes find and is not mended yet: it would hide the rest. Each line goes with the mistake it names."""

WITHOUT: tuple[str, ...] = ()
"""Operators and layouts that are left out."""

IGNORED: tuple[str, ...] = ()
"""Texts of findings that are not told."""
