"""Generated code as a syntax tree."""

from __future__ import annotations

import ast

_TRIES = 20


def parsed(source: str) -> ast.Module:
    """The tree of Python code.

    Python below 3.11.8 and 3.12.2 keeps one count of how deep it is in a tree for all threads (CPython's issue 106905),
    and raises ``SystemError`` where another thread, or a finalizer, has parsed something meanwhile. The next try knows
    nothing of the one before.

    Raises:
        SyntaxError: it is no Python code.
        SystemError: others disturbed each of many tries.
    """
    for _ in range(_TRIES - 1):
        try:
            return ast.parse(source)
        except SystemError:
            continue
    return ast.parse(source)
