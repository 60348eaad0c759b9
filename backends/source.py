"""The code that a backend made of a graph, as text for people."""

from __future__ import annotations

from typing import Any

from torch import fx

from .protocol import Compiled


def source_of(compiled: Compiled) -> str | None:
    """The code that runs; None where the backend has none to show, or what was loaded does not keep it."""
    seen: set[int] = set()
    found: Any = compiled
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        for name in ("source", "source_code"):
            text = getattr(found, name, None)
            if isinstance(text, str) and text:
                return text
        owner = getattr(found, "__self__", None)
        if isinstance(owner, fx.GraphModule):
            return str(owner.code)
        found = getattr(found, "compiled", None)
    return None
