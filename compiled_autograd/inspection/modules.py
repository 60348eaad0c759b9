"""The module of each node, told by the parameters. Nothing of the model is changed, and no forward is watched.

1. A leaf belongs to the module that has its parameter. So does what is made of a parameter alone: a chain of nodes that
   each take one gradient, of as many elements as the parameter has, and give one (a transpose, a cast).
2. A node that such a leaf or chain leads into belongs to that module, and so does one that saved a parameter to which
   no gradient goes, since it is frozen; with several, to the innermost that has them all.
3. Any other node lies between two modules: the one below, of what it was computed from (of several, what ran last),
   and the one above, of what was computed from it (of several, what ran first), each passed on by nodes of this rule.
   It belongs to the innermost module that has both. Where they lie in different layers of a list, it belongs to the
   layer below: what a layer computes last is its own.
4. What has nothing above or nothing below, such as a loss, belongs to the model.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from ..capture import tape

_Path = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Bare:
    """What is asked of a node.

    Attributes:
        elements: of the gradient that it takes; None where it takes none or several.
        owner: for a leaf, the path of the module that has its parameter; None where no module has it.
        frozen: paths of the modules that have the parameters which the node saved, and to which no gradient goes.
    """

    sequence: int
    edges: Sequence[tuple[int, int] | None]
    elements: int | None
    owner: _Path | None
    frozen: Sequence[_Path] = ()


def modules_of(nodes: Sequence[Bare]) -> list[_Path]:
    """The path of the module of each node; nodes come as the engine walks them, so that edges lead on."""
    made_of = _made_of_one_parameter(nodes)
    known = [
        parameter.owner if parameter else _reached(node, made_of)
        for node, parameter in zip(nodes, made_of, strict=True)
    ]
    above, below = _above(nodes, known), _below(nodes, known)
    return [_between(below[index], above[index]) if path is None else path for index, path in enumerate(known)]


def _made_of_one_parameter(nodes: Sequence[Bare]) -> list[Bare | None]:
    """The leaf of which each node's value was made, and of nothing else."""
    made_of: list[Bare | None] = [None] * len(nodes)
    for index in range(len(nodes) - 1, -1, -1):
        node = nodes[index]
        if node.owner is not None:
            made_of[index] = node
        elif len(node.edges) == 1 and node.edges[0] is not None:
            parameter = made_of[node.edges[0][0]]
            if parameter is not None and parameter.elements == node.elements:
                made_of[index] = parameter
    return made_of


def _reached(node: Bare, made_of: Sequence[Bare | None]) -> _Path | None:
    """The module of the parameters that lead into a node, or that it saved."""
    leading = [made_of[edge[0]] for edge in node.edges if edge is not None]
    owners = [each.owner for each in leading if each is not None and each.owner is not None]
    return functools.reduce(_shared, [*owners, *node.frozen]) if owners or node.frozen else None


def _above(nodes: Sequence[Bare], known: Sequence[_Path | None]) -> list[_Path | None]:
    above: list[_Path | None] = [None] * len(nodes)
    ran: list[int | None] = [None] * len(nodes)
    for index, node in enumerate(nodes):
        path = above[index] if known[index] is None else known[index]
        for edge in node.edges:
            if edge is not None:
                first = ran[edge[0]]
                if first is None or node.sequence < first:
                    above[edge[0]], ran[edge[0]] = path, node.sequence
    return above


def _below(nodes: Sequence[Bare], known: Sequence[_Path | None]) -> list[_Path | None]:
    below: list[_Path | None] = [None] * len(nodes)
    for index in range(len(nodes) - 1, -1, -1):
        last = -1
        for edge in nodes[index].edges:
            if edge is None or not last < nodes[edge[0]].sequence < tape.LEAF_NUMBER:
                continue
            last = nodes[edge[0]].sequence
            path = known[edge[0]]
            below[index] = below[edge[0]] if path is None else path
    return below


def _between(below: _Path | None, above: _Path | None) -> _Path:
    if below is None or above is None:
        return ()
    shared = len(_shared(below, above))
    layer = next((end for end in range(shared, len(below)) if below[end].isdigit()), None)
    return below[:shared] if layer is None else below[: layer + 1]


def _shared(one: _Path, other: _Path) -> _Path:
    """The innermost module that has both."""
    length = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        length += 1
    return one[:length]
