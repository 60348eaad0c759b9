"""The shadow graph: a trie in which each captured tape is a path, and tapes share the path as far as they agree.

An edge is the key of one node of the tape: a tuple of the node's name and parts. Keys are not hashed together, so that
two keys can be compared and their difference shown. A terminal is a structure. Its payload is the caller's: the
variants, one for each set of shapes, ambient state and settings. This package knows nothing of autograd.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

Key = tuple[Any, ...]
"""The name of a node, and hashable parts."""
P = TypeVar("P")


@dataclass(frozen=True, slots=True)
class VariantKey:
    """Settings and process state of one variant of a structure, as named parts that are compared by value."""

    settings: tuple[tuple[str, Any], ...]
    ambient: tuple[tuple[str, Any], ...]


@dataclass(slots=True)
class Terminal(Generic[P]):
    """A structure: its number, unique for the life of the process, and the caller's payload."""

    number: int
    payload: P


@dataclass(slots=True)
class _TrieNode:
    children: dict[Key, _TrieNode] = field(default_factory=dict)
    terminal: Terminal[Any] | None = None


@dataclass(slots=True, eq=False)
class _All(Generic[P]):
    root: _TrieNode = field(default_factory=_TrieNode)
    terminals: dict[int, Terminal[P]] = field(default_factory=dict)


class ShadowGraph(Generic[P]):
    """All structures of a process.

    Safe to use from several threads without a lock. With a lock, code that ``gc`` or a signal handler runs while the
    lock is held could wait for a thread that waits for the lock. Each change is one C call. A structure that is added
    during a removal may be lost; the next lookup then adds it again.
    """

    def __init__(self) -> None:
        self._all: _All[P] = _All()
        self._numbers = itertools.count()

    def find(self, keys: Sequence[Key]) -> Terminal[P] | None:
        """Return the terminal for ``keys``, or None. :meth:`nearest` compares them with other structures."""
        depth, path = self._follow(keys)
        return path[-1].terminal if depth == len(keys) else None

    def nearest(self, keys: Sequence[Key]) -> tuple[int, Key | None]:
        """Return the number of leading ``keys`` that form a known path, and the key on that path that is most like the
        next one (None: the path has no more keys, or all of ``keys`` are known)."""
        depth, path = self._follow(keys)
        known = _nearest_first([*path[-1].children], keys[depth]) if depth < len(keys) else []
        return depth, known[0] if known else None

    def nearest_among(self, keys: Sequence[Key], counts: Callable[[P], bool]) -> tuple[int, Key | None, list[P]]:
        """Compare like :meth:`nearest`, but only with structures whose payloads satisfy ``counts``.

        Returns:
            The number of shared keys, the nearest other key, and the payloads below this key; 0, None and an empty
            list if no payload satisfies ``counts``. ``keys`` must be those of a new structure.
        """
        _, path = self._follow(keys)
        while path:
            depth, node = len(path) - 1, path.pop()
            beyond = node.children.copy()
            beyond.pop(keys[depth], None)  # looked at before
            for key in _nearest_first([*beyond], keys[depth]):
                found = [*filter(counts, _payloads(beyond[key]))]
                if found:
                    return depth, key, found
        return 0, None, []

    def _follow(self, keys: Sequence[Key]) -> tuple[int, list[_TrieNode]]:
        path = [self._all.root]
        for depth, key in enumerate(keys):
            child = path[-1].children.get(key)
            if child is None:
                return depth, path
            path.append(child)
        return len(keys), path

    def insert(self, keys: Sequence[Key], payload: P) -> Terminal[P]:
        """Add a path and return its terminal. If the path exists already, ``payload`` is not used."""
        all_ = self._all  # a concurrent clear() drops this insertion too
        node = all_.root
        for key in keys:
            node = node.children.setdefault(key, _TrieNode())
        known = node.terminal
        if known is None:
            new = Terminal(next(self._numbers), payload)
            known = node.terminal  # no call between this line and the assignment: no other thread can intervene
            if known is None:
                known = node.terminal = all_.terminals[new.number] = new
        return known

    def remove(self, numbers: Container[int]) -> None:
        """Remove structures, and the parts of their paths that no other structure has."""
        all_ = self._all
        for number in [*all_.terminals]:
            if number in numbers:
                all_.terminals.pop(number, None)
        nodes = [all_.root]
        for node in nodes:  # grows while it is read: each node after its parent
            nodes.extend(node.children.values())
        for node in reversed(nodes):
            if node.terminal is not None and node.terminal.number in numbers:
                node.terminal = None
            for key, child in node.children.copy().items():
                if not (child.children or child.terminal):
                    node.children.pop(key, None)

    def clear(self) -> None:
        self._all = _All()

    def __iter__(self) -> Iterator[Terminal[P]]:
        return iter([*self._all.terminals.values()])

    def __len__(self) -> int:
        return len(self._all.terminals)


def _payloads(node: _TrieNode) -> list[Any]:
    """Return the payloads of the structures whose paths run through a node."""
    nodes = [node]
    for each in nodes:  # grows while it is read
        nodes.extend(each.children.copy().values())
    return [terminal.payload for each in nodes if (terminal := each.terminal) is not None]


def _nearest_first(known: Sequence[Key], key: Key) -> list[Key]:
    return sorted(known, key=lambda other: (other[0] == key[0], sum(map(operator.eq, other, key))), reverse=True)
