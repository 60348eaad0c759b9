"""Draw a tape by module or by node, as Graphviz, Mermaid or networkx.

Boxes show the bytes that the forward keeps alive for them. Their colours show the kind of operation.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import networkx as nx

from ..capture import tape
from ..shadow_cache.safe_text import harmless
from .folding import folded_names
from .nodes import TapeNode, counted, size

LEAF, OTHER = "leaf", "other"
_KINDS = {
    "attention": "Attention",
    "convolution": "Convolution",
    "product": r"^(Linear|Addmm|Mm|Baddbmm|Bmm|Addmv|Mv|Dot)Backward",
    "norm": "Norm(?!Interface)",
    "embedding": "Embedding",
}
"""Kinds of nodes, by patterns of names. A module has the first of these kinds that occurs among its own nodes."""
_COLOURS = {
    "attention": ("#e9defa", "#7d5bb0"),
    "convolution": ("#fbe3d6", "#c8552b"),
    "product": ("#dbe8f7", "#2f6fb3"),
    "norm": ("#fdf0c9", "#b98900"),
    "embedding": ("#d9f0ee", "#2a8c82"),
    LEAF: ("#e0f2e6", "#3f8a5c"),
    OTHER: ("#f1f3f6", "#8a93a1"),
}
"""For each kind, the colours of a box's fill and border."""
_TEXT = "#1d2430"


@dataclass(slots=True)
class Picture:
    """The boxes and edges of a drawing.

    Attributes:
        labels: the lines of text of each box, by the box's number.
        kinds: the kind of each box, a key of :data:`_COLOURS`.
        groups: the numbers of the boxes in each module; empty if the boxes are modules.
        edges: from each box to the boxes that receive its gradients.
    """

    labels: dict[int, list[str]] = field(default_factory=dict)
    kinds: dict[int, str] = field(default_factory=dict)
    groups: dict[str, list[int]] = field(default_factory=dict)
    edges: list[tuple[int, int]] = field(default_factory=list)


def of_nodes(nodes: Sequence[TapeNode], kept: Mapping[int, int]) -> Picture:
    """Return a drawing with a box for each node, grouped by module. ``kept`` has the bytes that nodes keep alive."""
    picture = Picture()
    for index, node in enumerate(nodes):
        name = node.parameter if node.name == tape.LEAF and node.parameter else node.name
        picture.labels[index] = [name, *([size(kept[index])] if kept.get(index) else [])]
        picture.kinds[index] = _kind([node])
        if node.module:
            picture.groups.setdefault(node.module, []).append(index)
        picture.edges += [(index, edge[0]) for edge in node.edges if edge is not None]
    return picture


def of_modules(nodes: Sequence[TapeNode], model: str, kept: Mapping[int, int]) -> Picture:
    """Return a drawing with a box for each module that has own nodes; equal layers share a box."""
    names = folded_names(nodes)
    shown = [names[node.module] or model for node in nodes]
    members: dict[str, list[int]] = {}
    for index, name in enumerate(shown):
        members.setdefault(name, []).append(index)
    numbers = {name: number for number, name in enumerate(members)}
    picture = Picture()
    for name, number in numbers.items():
        bytes_kept = sum(kept.get(index, 0) for index in members[name])
        what = f"{counted(len(members[name]))}, {size(bytes_kept)}" if bytes_kept else counted(len(members[name]))
        picture.labels[number] = [name, what]
        picture.kinds[number] = _kind([nodes[index] for index in members[name]])
    edges = (
        (numbers[shown[index]], numbers[shown[edge[0]]])
        for index, node in enumerate(nodes)
        for edge in node.edges
        if edge is not None
    )
    picture.edges = [(one, other) for one, other in dict.fromkeys(edges) if one != other]
    return picture


def _kind(nodes: Sequence[TapeNode]) -> str:
    names = {node.name for node in nodes}
    if names == {tape.LEAF}:
        return LEAF
    return next((kind for kind, like in _KINDS.items() if any(re.search(like, name) for name in names)), OTHER)


def dot(picture: Picture) -> str:
    """Return a drawing as DOT, for Graphviz."""
    lines = [
        "digraph tape {",
        f'  node [shape=box, style=filled, fontname=Helvetica, fontsize=10, fontcolor="{_TEXT}"];',
    ]
    for number, (name, members) in enumerate(picture.groups.items()):
        lines.append(f"  subgraph cluster_{number} {{ label={_quoted([name])}; fontname=Helvetica; fontsize=10;")
        lines += [f"    {_dot_node(picture, member)}" for member in members]
        lines.append("  }")
    lines += [f"  {_dot_node(picture, number)}" for number in _ungrouped(picture)]
    lines += [f"  n{one} -> n{other};" for one, other in picture.edges]
    return "\n".join([*lines, "}"]) + "\n"


def _dot_node(picture: Picture, number: int) -> str:
    kind = picture.kinds[number]
    fill, edge = _COLOURS[kind]
    style = ', style="filled,rounded"' if kind == LEAF else ""
    return f'n{number} [label={_quoted(picture.labels[number])}{style}, fillcolor="{fill}", color="{edge}"];'


def _quoted(lines: Sequence[str]) -> str:
    """Quote a DOT string: backslashes would begin an escape of a label, and quotes would end it."""
    escaped = [_one_line(text).replace("\\", "\\\\").replace('"', '\\"') for text in lines]
    return '"' + "\\n".join(escaped) + '"'


def _one_line(text: str) -> str:
    return harmless(" ".join(text.split()))


def mermaid(picture: Picture) -> str:
    """Return a drawing as a Mermaid flowchart, which GitHub and notebooks draw."""
    lines = ["flowchart TD"]
    for number, (name, members) in enumerate(picture.groups.items()):
        lines.append(f'  subgraph g{number}["{_escaped(name)}"]')
        lines += [f"    {_mermaid_node(picture, member)}" for member in members]
        lines.append("  end")
    lines += [f"  {_mermaid_node(picture, number)}" for number in _ungrouped(picture)]
    lines += [f"  n{one} --> n{other}" for one, other in picture.edges]
    for kind, (fill, edge) in _COLOURS.items():
        of_kind = [f"n{number}" for number, own in picture.kinds.items() if own == kind]
        if of_kind:
            lines.append(f"  classDef {kind} fill:{fill},stroke:{edge},color:{_TEXT}")
            lines.append(f"  class {','.join(of_kind)} {kind}")
    return "\n".join(lines) + "\n"


def _mermaid_node(picture: Picture, number: int) -> str:
    text = "<br/>".join(map(_escaped, picture.labels[number]))
    return f'n{number}(["{text}"])' if picture.kinds[number] == LEAF else f'n{number}["{text}"]'


def _escaped(text: str) -> str:
    """Escape a quoted Mermaid label. Mermaid's escapes are ``#60;``; it reads Markdown in backquotes."""
    return "".join(each if each.isalnum() or each in " .,:_()-" else f"#{ord(each)};" for each in _one_line(text))


def _ungrouped(picture: Picture) -> Iterable[int]:
    grouped = {number for members in picture.groups.values() for number in members}
    return (number for number in picture.labels if number not in grouped)


def network(nodes: Sequence[TapeNode]) -> nx.DiGraph:
    """Return a graph of the nodes' indices with the fields of each node as attributes; edges follow the gradients."""
    graph = nx.DiGraph()
    for index, node in enumerate(nodes):
        graph.add_node(
            index,
            name=node.name,
            sequence=node.sequence,
            parameter=node.parameter,
            source=node.source,
            module=node.module,
            gradients=node.gradients,
            saved=node.saved,
            hooks=node.hooks,
        )
        graph.add_edges_from((index, edge[0]) for edge in node.edges if edge is not None)
    return graph
