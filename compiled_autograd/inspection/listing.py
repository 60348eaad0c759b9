"""List a tape as text, by module. Equal layers and repeated stretches appear once.

A parameter stands in the line of the node that takes it. A chain of nodes that save nothing is one line.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ..capture import tape
from ..shadow_cache.safe_text import harmless
from .folding import Layers, Module, differences, parts_of, shown, tree_of
from .memory import TapeMemory
from .nodes import COUNTED, SavedTensor, TapeNode, counted, size

_MOST_LINES = 2_000
_WIDTH = 150
"""Maximum characters of a line with a chain of nodes."""

_MOST_ON_THE_WAY = 4
"""Maximum number of nodes from a parameter's leaf to the node that takes the parameter that stand in that node's line;
the leaf counts."""


@dataclass(slots=True)
class Listing:
    """The nodes, models and memory of a tape, formatted as text."""

    nodes: Sequence[TapeNode]
    models: Sequence[str]
    memory: TapeMemory
    _in_lines: dict[int, tuple[int, ...]] = field(init=False)
    """Nodes shown in the line of the node that leads to them; for each, the nodes on the way to a parameter's leaf."""

    def __post_init__(self) -> None:
        nodes = self.nodes
        reached = Counter(edge[0] for node in nodes for edge in node.edges if edge is not None)
        found: dict[int, tuple[int, ...]] = {}
        for index in range(len(nodes) - 1, -1, -1):  # backwards: edges lead to later nodes
            node = nodes[index]
            if reached[index] != 1 or node.saved or node.hooks:
                continue
            if node.name == tape.LEAF:
                if node.parameter:
                    found[index] = (index,)
            elif len(node.edges) == 1 and node.edges[0] is not None:
                on = found.get(node.edges[0][0])
                if on is not None and len(on) < _MOST_ON_THE_WAY and nodes[on[-1]].module == node.module:
                    found[index] = (index, *on)
        takers = {edge[0]: node for node in nodes for edge in node.edges if edge is not None}
        self._in_lines = {
            index: way
            for index, way in found.items()
            if takers[index].module == nodes[index].module and nodes[index].source in (None, takers[index].source)
        }

    @property
    def title(self) -> str:
        """The heading: the models, the number of nodes, and the memory."""
        leaves = sum(node.name == tape.LEAF for node in self.nodes)
        of = f"tape of {', '.join(self.models)}" if self.models else "tape"
        counts = f"{len(self.nodes):,} nodes, {leaves:,} of them leaves"
        return f"{of}: {counts}; the forward keeps {size(self.memory.bytes)} alive"

    def __str__(self) -> str:
        lines: list[str] = [self.title]
        every = self._module(tree_of(self.nodes), "")
        for line in every:
            if len(lines) > _MOST_LINES:
                lines.append(f"... {1 + sum(1 for _ in every):,} more lines: readable() lists all nodes")
                break
            lines.append(line)
        return "\n".join(map(harmless, lines)) + "\n"

    def _module(self, module: Module, indent: str) -> Iterator[str]:
        for part in parts_of(module, self.nodes):
            if isinstance(part, Layers):
                yield f"{indent}{self.of_layers(part)}"
                yield from (f"{indent}  ({line})" for line in differences(part, self.nodes))
                yield from self._module(shown(part), f"{indent}  ")
                continue
            inner = indent
            if part.times > 1:
                yield f"{indent}{part.times:,} times {counted(len(part.indices))}:"
                inner += "  "
            for chain in self._chains(part.indices, len(inner)):
                yield from (f"{inner}{line}" for line in self._of_chain(chain, module.path))

    def _chains(self, indices: Sequence[int], indent: int) -> Iterator[list[int]]:
        """Yield the nodes of each line: one node, or a chain of nodes that each lead only to the next one and have
        nothing else to show."""
        chain: list[int] = []
        for index in indices:
            if index in self._in_lines:
                continue
            node = self.nodes[index]
            if chain:
                before = self.nodes[chain[-1]]
                goes_on = before.edges == ((index, 0),) and before.source == node.source
                plain = not (before.saved or before.hooks or node.saved or node.hooks or node.name == tape.LEAF)
                length = indent + sum(len(self._head(each, ())) + 4 for each in (*chain, index))
                if goes_on and plain and length < _WIDTH:
                    chain.append(index)
                    continue
                yield chain
            chain = [index]
        if chain:
            yield chain

    def of_layers(self, layers: Layers) -> str:
        """Return the heading of a run of equal layers, or of one module."""
        counts = sorted({each.count() for each in layers.modules})
        nodes = counted(counts[0]) if len(counts) == 1 else f"{counts[0]:,} to {counted(counts[-1])}"
        kept = [sum(self.memory.by_node.get(index, 0) for index in each.indices()) for each in layers.modules]
        times = len(layers.modules)
        if times == 1:
            text = f"{layers.name}: {nodes}"
            return f"{text}, {size(kept[0])}" if kept[0] else text
        text = f"{layers.name}: {times} times {nodes}"
        return f"{text}, {size(sum(kept))} in all" if any(kept) else text

    def _head(self, index: int, path: tuple[str, ...]) -> str:
        node = self.nodes[index]
        text = f"#{index} {node.name}"
        if node.name == tape.LEAF:
            text += f" {_in_module(node.parameter, path) or '(no parameter)'}"
        return f"{text} {_gradients(node)}" if node.gradients else text

    def _edges(self, node: TapeNode, path: tuple[str, ...]) -> str:
        """Format the edges like :func:`edges_of`, with parameters: ``weight f32[3,2] #4 (TBackward0)``."""
        texts = edges_of(node).split(", ")
        for place, edge in enumerate(node.edges):
            way = () if edge is None else self._in_lines.get(edge[0], ())
            if way:
                leaf, between = self.nodes[way[-1]], ", ".join(self.nodes[each].name for each in way[:-1])
                texts[place] = f"{_in_module(leaf.parameter, path)} {_gradients(leaf)} #{way[-1]}"
                texts[place] += f" ({between})" if between else ""
        return ", ".join(texts)

    def _of_chain(self, chain: Sequence[int], path: tuple[str, ...]) -> list[str]:
        """Return the line of the nodes, and below it the last node's saved tensors, hooks and source line."""
        node = self.nodes[chain[-1]]
        text = " -> ".join(self._head(index, path) for index in chain)
        lines = [f"{text} -> {self._edges(node, path)}" if node.edges else text]
        if node.saved:
            lines.append(f"    saved {', '.join(map(saved_as, node.saved))}")
        if node.hooks:
            lines.append(f"    hooks {', '.join(node.hooks)}")
        if node.source:
            lines.append(f"    at {node.source}")
        return lines


def edges_of(node: TapeNode) -> str:
    """Format edges as ``#3[0], -``: the next node and its input; ``-`` is an edge to nowhere."""
    return ", ".join("-" if edge is None else f"#{edge[0]}[{edge[1]}]" for edge in node.edges)


def _gradients(node: TapeNode) -> str:
    return " ".join(map(str, node.gradients))


def saved_as(saved: SavedTensor) -> str:
    """Format a saved tensor with the bytes that it keeps alive, or with its kind."""
    if saved.kind not in COUNTED:
        return f"{saved} ({saved.kind})"
    return str(saved) if saved.bytes is None else f"{saved} {size(saved.bytes)}"


def _in_module(parameter: str | None, path: tuple[str, ...]) -> str | None:
    """Return the name of a parameter inside its module."""
    if parameter is None:
        return None
    return parameter.removeprefix("".join(f"{name}." for name in path))
