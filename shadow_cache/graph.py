"""The shadow graph: a trie in which each captured tape is a path, and tapes share the path as far as they agree.

An edge is the key of one node of the tape: a tuple of its name and of parts, kept whole, so that two keys can be
compared and the difference shown. A terminal is a structure. Below it stand its variants, one for each set of shapes,
ambient state and settings that was met. What a variant holds is the caller's: this package knows nothing of autograd.
"""

from __future__ import annotations

import itertools
import operator
import os
import threading
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

Key = tuple[Any, ...]
"""The name of a node, and parts: whatever can be hashed."""
P = TypeVar("P")


@dataclass(frozen=True, slots=True)
class VariantKey:
    """What one variant of a structure was made under, as named parts that are compared by value."""

    settings: tuple[tuple[str, Any], ...]
    ambient: tuple[tuple[str, Any], ...]


@dataclass(slots=True)
class Terminal(Generic[P]):
    """A structure: its number, which no other structure of the process ever has, and what the caller keeps for it."""

    number: int
    payload: P


@dataclass(slots=True)
class _TrieNode:
    children: dict[Key, _TrieNode] = field(default_factory=dict)
    terminal: Terminal[Any] | None = None


_LOCK = threading.RLock()
"""One for all: a child that is forked while another thread has it makes it free. What that thread was about to add is
then not found, and added again."""


def _free_in_child() -> None:
    if not _LOCK._is_owned():  # type: ignore[attr-defined]
        _LOCK._at_fork_reinit()  # type: ignore[attr-defined]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_free_in_child)


class ShadowGraph(Generic[P]):
    """All structures of a process. Safe to use from several threads."""

    def __init__(self) -> None:
        self._root = _TrieNode()
        self._terminals: list[Terminal[P]] = []
        self._numbers = itertools.count()

    def find(self, keys: Sequence[Key]) -> Terminal[P] | None:
        """The terminal for ``keys``, if there is one; :meth:`nearest` says how near they come to another's."""
        with _LOCK:
            depth, node = self._follow(keys)
            return node.terminal if depth == len(keys) else None

    def nearest(self, keys: Sequence[Key]) -> tuple[int, Key | None]:
        """How many of ``keys`` are a known path, and of what follows on that path the key nearest to the next one."""
        with _LOCK:
            depth, node = self._follow(keys)
            return depth, _closest(node, keys[depth]) if depth < len(keys) else None

    def _follow(self, keys: Sequence[Key]) -> tuple[int, _TrieNode]:
        node = self._root
        for depth, key in enumerate(keys):
            child = node.children.get(key)
            if child is None:
                return depth, node
            node = child
        return len(keys), node

    def insert(self, keys: Sequence[Key], payload: P) -> Terminal[P]:
        """Add a path; where it is there already, its terminal is given and ``payload`` is not used."""
        with _LOCK:
            node = self._root
            for key in keys:
                node = node.children.setdefault(key, _TrieNode())
            if node.terminal is None:
                node.terminal = Terminal(next(self._numbers), payload)
                self._terminals.append(node.terminal)
            return node.terminal

    def remove(self, numbers: Container[int]) -> None:
        """Forget structures, and the parts of their paths that no other has."""
        with _LOCK:
            self._terminals = [terminal for terminal in self._terminals if terminal.number not in numbers]
            nodes = [self._root]
            for node in nodes:  # grows while it is read: each node after its parent
                nodes.extend(node.children.values())
            for node in reversed(nodes):
                if node.terminal is not None and node.terminal.number in numbers:
                    node.terminal = None
                for key in [key for key, child in node.children.items() if not (child.children or child.terminal)]:
                    del node.children[key]

    def clear(self) -> None:
        """Forget everything."""
        with _LOCK:
            self._root = _TrieNode()
            self._terminals.clear()

    def __iter__(self) -> Iterator[Terminal[P]]:
        return iter(tuple(self._terminals))

    def __len__(self) -> int:
        return len(self._terminals)


def _closest(node: _TrieNode, key: Key) -> Key | None:
    same_name = [other for other in node.children if other[0] == key[0]]
    return max(same_name or node.children, key=lambda other: sum(map(operator.eq, other, key)), default=None)
