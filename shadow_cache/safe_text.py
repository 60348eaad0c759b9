"""Escape untrusted text before it is shown: a name may contain control sequences, and a terminal obeys them."""

from __future__ import annotations

import html
import json

_PRE = '<pre style="font-family: ui-monospace, monospace; word-break: normal">'
"""Notebooks style ``pre`` themselves: JupyterLab 4 breaks words anywhere, and nbconvert 7 has no fixed width."""


def harmless(text: str, lines: bool = False) -> str:
    """Return ``text`` with each non-printable character as an escape sequence: ``\\x1b``.

    This covers control characters and the characters that change the direction of text.

    Args:
        text: any text.
        lines: keep newlines and tabs.
    """
    if text.isprintable():
        return text
    kept = "\n\t" if lines else ""
    escaped = (each if each.isprintable() or each in kept else each.encode("unicode_escape").decode() for each in text)
    return "".join(escaped)


def preformatted(text: str) -> str:
    """Return HTML that shows ``text`` unchanged, for a notebook."""
    return f"{_PRE}{html.escape(text)}</pre>"


def harmless_json(text: str) -> str:
    """Return equivalent JSON with each non-printable character but newlines escaped."""
    return "".join(each if each.isprintable() or each == "\n" else json.dumps(each)[1:-1] for each in text)
