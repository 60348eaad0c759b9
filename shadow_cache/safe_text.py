"""Text of others, made harmless where it is shown: a terminal obeys what it is sent, and a name may say anything."""

from __future__ import annotations

import html
import json


def harmless(text: str, lines: bool = False) -> str:
    """The same with every character that is none to be seen as an escape sequence: ``\\x1b``.

    Control characters are such, and those that turn the direction of what follows.

    Args:
        text: any.
        lines: it may have several lines, and tabs.
    """
    if text.isprintable():
        return text
    kept = "\n\t" if lines else ""
    escaped = (each if each.isprintable() or each in kept else each.encode("unicode_escape").decode() for each in text)
    return "".join(escaped)


def preformatted(text: str) -> str:
    """HTML that shows text as it is, for a notebook."""
    return f"<pre>{html.escape(text)}</pre>"


def harmless_json(text: str) -> str:
    """JSON that says the same, in several lines, without such characters."""
    return "".join(each if each.isprintable() or each == "\n" else json.dumps(each)[1:-1] for each in text)
