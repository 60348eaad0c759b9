"""Text of others, made harmless where it is shown: a terminal obeys what it is sent, and a name may say anything."""

from __future__ import annotations

import re

_LINES = re.compile(r"([\n\t])")


def harmless(text: str, lines: bool = False) -> str:
    """The same with every character that is none to be seen as an escape sequence: ``\\x1b``.

    Control characters are such, and those that turn the direction of what follows.

    Args:
        text: any.
        lines: it may have several lines, and tabs.
    """
    if text.isprintable():
        return text
    if lines:
        return "".join(part if part in "\n\t" else harmless(part) for part in _LINES.split(text))
    return "".join(each if each.isprintable() else escaped(each) for each in text)


def escaped(character: str) -> str:
    """As Python would write it in a string."""
    number = ord(character)
    if character in "\n\r\t":
        return {"\n": "\\n", "\r": "\\r", "\t": "\\t"}[character]
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


def harmless_json(text: str) -> str:
    """JSON that says the same, in several lines, without such characters."""
    return "".join(each if each.isprintable() or each == "\n" else _in_json(each) for each in text)


def _in_json(character: str) -> str:
    units = character.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at] << 8 | units[at + 1]:04x}" for at in range(0, len(units), 2))
