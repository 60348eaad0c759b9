"""Fold structures into a trie for display: shared nodes stand once, and each fork shows the differing part."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from .entries import Structure

Key = tuple[str, ...]
_Path = tuple[Structure, tuple[Key, ...]]


class Branch(msgspec.Struct, frozen=True):
    """A run of nodes without a fork.

    Attributes:
        parent: index of the branch before this one; None for the first branches.
        start: index of the branch's first node on the tape.
        nodes: the names of the branch's nodes.
        differs: at a fork, the part of the first node's key that differs from the other branches; empty if the names
            differ.
        shared: the number of structures that share this branch.
        structure: the id of the structure that ends here; None if the branch forks.
    """

    parent: int | None
    start: int
    nodes: tuple[str, ...]
    differs: str
    shared: int
    structure: str | None


def fold(structures: Iterable[Structure]) -> tuple[Branch, ...]:
    """Return the branches of all structures, each after its parent. The list is flat: tapes of many lengths make a deep
    trie."""
    branches: list[Branch] = []
    paths = [(structure, structure.keys) for structure in structures]
    waiting: list[tuple[int | None, int, str, list[_Path]]] = [
        (None, 0, "", group) for group in reversed(_groups(paths, 0))
    ]
    while waiting:
        parent, start, differs, group = waiting.pop()
        first = group[0][0]
        stop = _shared([keys for _, keys in group], start)
        index = len(branches)
        alone = first.id if len(group) == 1 else None
        names = tuple(" ".join(filter(None, (call.name, call.parameter))) for call in first.calls[start:stop])
        branches.append(Branch(parent, start, names, differs, len(group), alone))
        if alone is None:
            groups = _groups(group, stop)
            forks = [each[0][1][stop] if stop < len(each[0][1]) else () for each in groups]
            same_name = len({key[:1] for key in forks}) == 1
            differences = differing_parts(forks) if same_name else [""] * len(forks)
            pairs = zip(groups, differences, strict=True)
            waiting += [(index, stop, difference, each) for each, difference in reversed(list(pairs))]
    return tuple(branches)


def guides(branches: Sequence[Branch]) -> Iterator[tuple[Branch, str, str]]:
    """Yield each branch, the guide before its first line, and the guide before the lines below."""
    last = {branch.parent: index for index, branch in enumerate(branches)}
    below: list[str] = []
    for index, branch in enumerate(branches):
        if branch.parent is None:
            below.append("")
            yield branch, "", ""
            continue
        before = below[branch.parent]
        is_last = last[branch.parent] == index
        below.append(before + ("   " if is_last else "│  "))
        yield branch, before + ("└─ " if is_last else "├─ "), below[index]


def _groups(paths: list[_Path], depth: int) -> list[list[_Path]]:
    """Group paths by their next keys. A path that has ended is a group of its own: tapes that differ only in the order
    of their calls have equal keys."""
    by_key: dict[Key | str, list[_Path]] = {}
    for path in paths:
        by_key.setdefault(path[1][depth] if depth < len(path[1]) else path[0].id, []).append(path)
    return list(by_key.values())


def _shared(paths: Sequence[tuple[Key, ...]], start: int) -> int:
    first, *others = paths
    for depth in range(start, len(first)):
        if any(path[depth : depth + 1] != first[depth : depth + 1] for path in others):
            return depth
    return len(first)


def differing_parts(keys: Sequence[Key]) -> list[str]:
    """Return the first part of each key in which the keys differ, or else the number of parts of each."""
    for parts in zip(*keys, strict=False):
        if len(set(parts)) > 1:
            return list(parts)
    return [f"{len(key)} parts" for key in keys]
