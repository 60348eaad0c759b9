"""Infer the module of each node from the parameters, without changing the model or watching its forward.

1. A leaf belongs to the module that has its parameter. So does a chain of nodes computed from this parameter alone:
   each takes one gradient with the parameter's number of elements, and returns one (a transpose, a cast).
2. A node that takes such a leaf or chain belongs to the same module. So does a node that saved a frozen parameter, to
   which no gradient goes. With several parameters, the node belongs to the innermost module that contains all of them.
3. Any other node lies between two modules. The module below is that of the node's forward inputs (of several, the one
   that ran last). The module above is that of the operations on its result (of several, the one that ran first). Nodes
   of this rule pass both on. The node belongs to the innermost module that contains both. If the two are in different
   layers of a list, the node belongs to the layer below: the last operations of a layer are its own.
4. A node with nothing above or nothing below, such as a loss, belongs to the model.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from ..capture import tape

_Path = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Bare:
    """The properties of a node that decide its module.

    Attributes:
        elements: the number of elements of the node's incoming gradient; None if it takes none or several.
        owner: for a leaf, the path of the module that has its parameter; None if no module has it.
        frozen: the paths of the modules that have the frozen parameters saved by the node.
    """

    sequence: int
    edges: Sequence[tuple[int, int] | None]
    elements: int | None
    owner: _Path | None
    frozen: Sequence[_Path] = ()


def modules_of(nodes: Sequence[Bare]) -> list[_Path]:
    """Return the path of the module of each node. The nodes are in the engine's order: edges lead to later nodes."""
    made_of = _made_of_one_parameter(nodes)
    known = [
        parameter.owner if parameter else _reached(node, made_of)
        for node, parameter in zip(nodes, made_of, strict=True)
    ]
    above, below = _above(nodes, known), _below(nodes, known)
    return [_between(below[index], above[index]) if path is None else path for index, path in enumerate(known)]


def _made_of_one_parameter(nodes: Sequence[Bare]) -> list[Bare | None]:
    """Return, for each node, the leaf from which alone the node's value was computed; None if there is no such leaf."""
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
    """Return the innermost module of the parameters that a node takes or saved; None without parameters."""
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
    """Return the innermost module that contains both."""
    length = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        length += 1
    return one[:length]
