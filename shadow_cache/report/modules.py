"""Infer the module of each node of a tape from the parameters on the tape.

A leaf belongs to the module of its parameter, and so does the node that takes the parameter. Any other node lies
between two such nodes of the forward. That node belongs to the innermost module that contains both, or, in a list of
layers, to the layer of the earlier one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_Path = tuple[str, ...]
_PASSES_ON = re.compile(
    r"(T|Transpose|View|UnsafeView|Reshape|Expand|Permute|ToCopy|Unsqueeze|Squeeze|Clone|Alias)Back"
)
"""Nodes that may lie between a parameter and the node that takes it."""


def modules_of(names: Sequence[str], parameters: Sequence[str | None], edges: Sequence[Sequence[int]]) -> list[str]:
    """Return a dotted module name for each node; empty for the outermost module, and for unknown modules.

    Args:
        names: the names of the nodes.
        parameters: for each node, the name of its parameter if it is the leaf of one, else None.
        edges: for each node, the indices of the nodes that receive its gradients.
    """
    order = _topological(edges)
    own: list[_Path | None] = [None if name is None else tuple(name.split(".")[:-1]) for name in parameters]
    carries = [path is not None for path in own]  # a parameter or a view of one
    for node in reversed(order):
        taken = [own[edge] for edge in edges[node] if carries[edge]]
        if not carries[node] and taken:
            own[node] = _shared(taken)
            carries[node] = len(edges[node]) == 1 and _PASSES_ON.match(names[node]) is not None
    places = {node: place for place, node in enumerate(order)}
    before: list[int | None] = [None if path is None else node for node, path in enumerate(own)]  # in the forward
    after = list(before)
    for node in reversed(order):
        if before[node] is None:  # the latest of them
            known = [each for edge in edges[node] if (each := before[edge]) is not None]
            before[node] = min(known, key=places.__getitem__, default=None)
    for node in order:
        for edge in edges[node]:
            one, other = after[edge], after[node]
            if own[edge] is None and other is not None and (one is None or places[other] > places[one]):
                after[edge] = other
    return [".".join(_between(own, before[node], after[node])) for node in range(len(names))]


def _shared(paths: Sequence[_Path | None]) -> _Path:
    """Return the common prefix of all paths."""
    shared: list[str] = []
    for parts in zip(*(path or () for path in paths), strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return tuple(shared)


def _between(own: Sequence[_Path | None], before: int | None, after: int | None) -> _Path:
    """Return the module of a node that lies after one node and before another. Nodes before the first and after the
    last one belong to the outermost module and the loss."""
    if before is None or after is None:
        return ()
    path = own[before] or ()
    shared = len(_shared((path, own[after])))
    for layer in (shared, shared + 1):  # a layer of a list, or the last layer of a list that ends here
        if path[layer : layer + 1] and path[layer].isdigit() and (layer == shared or path[layer + 1 :]):
            return path[: layer + 1]
    return path[:shared]


def _topological(edges: Sequence[Sequence[int]]) -> list[int]:
    """Return the nodes in topological order, each before the nodes that receive its gradients. Nodes of cycles, which
    no tape has, are left out."""
    waits = [0] * len(edges)
    for targets in edges:
        for target in targets:
            waits[target] += 1
    order = [node for node, count in enumerate(waits) if not count]
    for node in order:  # grows while it is read
        for target in edges[node]:
            waits[target] -= 1
            if not waits[target]:
                order.append(target)
    return order
