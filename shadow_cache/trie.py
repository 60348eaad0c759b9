"""Structures, folded: what they share is told once, and where they part it is said what differs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from .entries import Structure

Key = tuple[str, ...]
_Path = tuple[Structure, tuple[Key, ...]]


class Branch(msgspec.Struct, frozen=True):
    """A run of nodes without a fork.

    Attributes:
        parent: index of the branch it goes on from; None for the first ones.
        start: index of its first node on the tape.
        nodes: the names of its nodes.
        differs: at a fork, the part of its first node's key that tells it from the others; empty where the name does.
        shared: how many structures run along it.
        structure: the id of the structure that ends here; None where it forks.
    """

    parent: int | None
    start: int
    nodes: tuple[str, ...]
    differs: str
    shared: int
    structure: str | None


def fold(structures: Iterable[Structure]) -> tuple[Branch, ...]:
    """All of them as branches, each after its parent. Flat, because a tape of many lengths makes a deep trie."""
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
    """Each branch, with what stands before its first line and before the lines below it."""
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
    """By their next keys; those that have ended, as tapes do that differ only in the order of their calls, alone."""
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
    """Of each key the first part in which they are not all alike, or how many parts it has."""
    for parts in zip(*keys, strict=False):
        if len(set(parts)) > 1:
            return list(parts)
    return [f"{len(key)} parts" for key in keys]
