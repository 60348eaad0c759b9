"""A tape as a picture, in the languages of others: Graphviz, Mermaid, networkx. By node, or by module."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import networkx as nx

from ..capture import tape
from ..shadow_cache.safe_text import harmless
from .folding import folded_names
from .nodes import TapeNode, counted


@dataclass(slots=True)
class Picture:
    """What is drawn.

    Attributes:
        labels: a text for each thing, by its number.
        leaves: numbers of those that are leaves.
        groups: which numbers lie in which module; empty where modules are what is drawn.
        edges: from a thing to what its gradients go to.
    """

    labels: dict[int, str] = field(default_factory=dict)
    leaves: set[int] = field(default_factory=set)
    groups: dict[str, list[int]] = field(default_factory=dict)
    edges: list[tuple[int, int]] = field(default_factory=list)


def of_nodes(nodes: Sequence[TapeNode]) -> Picture:
    """One thing for each node, in its module."""
    picture = Picture()
    for index, node in enumerate(nodes):
        picture.labels[index] = node.parameter if node.name == tape.LEAF and node.parameter else node.name
        if node.name == tape.LEAF:
            picture.leaves.add(index)
        if node.module:
            picture.groups.setdefault(node.module, []).append(index)
        picture.edges += [(index, edge[0]) for edge in node.edges if edge is not None]
    return picture


def of_modules(nodes: Sequence[TapeNode], model: str) -> Picture:
    """One thing for each module that has nodes of its own, and for all equal layers together."""
    names = folded_names(nodes)
    shown = [names[node.module] or model for node in nodes]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(shown))}
    count = dict.fromkeys(numbers, 0)
    for name in shown:
        count[name] += 1
    picture = Picture({number: f"{name}: {counted(count[name])}" for name, number in numbers.items()})
    edges = (
        (numbers[shown[index]], numbers[shown[edge[0]]])
        for index, node in enumerate(nodes)
        for edge in node.edges
        if edge is not None
    )
    picture.edges = [(one, other) for one, other in dict.fromkeys(edges) if one != other]
    return picture


def dot(picture: Picture) -> str:
    """For Graphviz."""
    lines = ["digraph tape {", "  node [shape=box, fontname=Helvetica, fontsize=10];"]
    for number, (name, members) in enumerate(picture.groups.items()):
        lines.append(f"  subgraph cluster_{number} {{ label={_quoted(name)}; fontname=Helvetica; fontsize=10;")
        lines += [f"    {_dot_node(picture, member)}" for member in members]
        lines.append("  }")
    lines += [f"  {_dot_node(picture, number)}" for number in _ungrouped(picture)]
    lines += [f"  n{one} -> n{other};" for one, other in picture.edges]
    return "\n".join([*lines, "}"]) + "\n"


def _dot_node(picture: Picture, number: int) -> str:
    style = ", style=rounded" if number in picture.leaves else ""
    return f"n{number} [label={_quoted(picture.labels[number])}{style}];"


def _quoted(text: str) -> str:
    """A string of DOT: a backslash would begin an escape of a label, and a quote end it."""
    escaped = _one_line(text).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _one_line(text: str) -> str:
    return harmless(" ".join(text.split()))


def mermaid(picture: Picture) -> str:
    """For Mermaid, as GitHub and notebooks draw it."""
    lines = ["flowchart TD"]
    for number, (name, members) in enumerate(picture.groups.items()):
        lines.append(f'  subgraph g{number}["{_escaped(name)}"]')
        lines += [f"    {_mermaid_node(picture, member)}" for member in members]
        lines.append("  end")
    lines += [f"  {_mermaid_node(picture, number)}" for number in _ungrouped(picture)]
    lines += [f"  n{one} --> n{other}" for one, other in picture.edges]
    return "\n".join(lines) + "\n"


def _mermaid_node(picture: Picture, number: int) -> str:
    text = _escaped(picture.labels[number])
    return f'n{number}(["{text}"])' if number in picture.leaves else f'n{number}["{text}"]'


def _escaped(text: str) -> str:
    """For a quoted label of Mermaid, which writes characters as ``#60;`` and has Markdown in backquotes."""
    return "".join(each if each.isalnum() or each in " .,:_()-" else f"#{ord(each)};" for each in _one_line(text))


def _ungrouped(picture: Picture) -> Iterable[int]:
    grouped = {number for members in picture.groups.values() for number in members}
    return (number for number in picture.labels if number not in grouped)


def network(nodes: Sequence[TapeNode]) -> nx.DiGraph:
    """Nodes are indices, with what is known of each as attributes; edges go where gradients go."""
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
