"""A tape as text: by module, with equal layers and equal stretches told once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..capture import tape
from ..shadow_cache.safe_text import harmless
from .folding import Layers, Module, parts_of, shown, tree_of
from .memory import TapeMemory
from .nodes import COUNTED, SavedTensor, TapeNode, counted, size

_MOST_LINES = 2_000


@dataclass(frozen=True, slots=True)
class Listing:
    """What the parts of a listing are written from."""

    nodes: Sequence[TapeNode]
    models: Sequence[str]
    memory: TapeMemory

    @property
    def title(self) -> str:
        """What the tape is of, and how large."""
        leaves = sum(node.name == tape.LEAF for node in self.nodes)
        of = f"tape of {', '.join(self.models)}" if self.models else "tape"
        counts = f"{len(self.nodes):,} nodes, {leaves:,} of them leaves"
        return f"{of}: {counts}; the forward keeps {size(self.memory.bytes)} alive"

    def __str__(self) -> str:
        lines: list[str] = [self.title]
        every = self._module(tree_of(self.nodes), "")
        for line in every:
            if len(lines) > _MOST_LINES:
                lines.append(f"... {1 + sum(1 for _ in every):,} more lines: readable() has each node")
                break
            lines.append(line)
        return "\n".join(map(harmless, lines)) + "\n"

    def _module(self, module: Module, indent: str) -> Iterator[str]:
        for part in parts_of(module, self.nodes):
            if isinstance(part, Layers):
                yield f"{indent}{self.of_layers(part)}"
                yield from self._module(shown(part), f"{indent}  ")
                continue
            inner = indent
            if part.times > 1:
                yield f"{indent}{part.times:,} times {counted(len(part.indices))}:"
                inner += "  "
            for index in part.indices:
                yield from (f"{inner}{line}" for line in self.of_node(index, module.path))

    def of_layers(self, layers: Layers) -> str:
        """The heading of some equal layers, or of one module."""
        count = shown(layers).count()
        kept = [sum(self.memory.by_node.get(index, 0) for index in each.indices()) for each in layers.modules]
        times = len(layers.modules)
        if times == 1:
            text = f"{layers.name}: {counted(count)}"
            return f"{text}, {size(kept[0])}" if kept[0] else text
        text = f"{layers.name}: {times} times {counted(count)}"
        return f"{text}, {size(sum(kept))} in all" if any(kept) else text

    def of_node(self, index: int, path: tuple[str, ...]) -> list[str]:
        """The node itself, and below it what it saved, its hooks and where it was made."""
        node = self.nodes[index]
        text = f"#{index} {node.name}"
        if node.name == tape.LEAF:
            text = f"#{index} {node.name} {_in_module(node.parameter, path) or '(no parameter)'}"
        if node.gradients:
            text += " " + " ".join(map(str, node.gradients))
        if node.edges:
            text += " -> " + edges_of(node)
        lines = [text]
        if node.saved:
            lines.append(f"    saved {', '.join(map(saved_as, node.saved))}")
        if node.hooks:
            lines.append(f"    hooks {', '.join(node.hooks)}")
        if node.source:
            lines.append(f"    at {node.source}")
        return lines


def edges_of(node: TapeNode) -> str:
    """As in ``#3[0], -``: the next node and its input; ``-`` leads nowhere."""
    return ", ".join("-" if edge is None else f"#{edge[0]}[{edge[1]}]" for edge in node.edges)


def saved_as(saved: SavedTensor) -> str:
    """A saved tensor with the bytes that it keeps alive, or with what it is."""
    if saved.kind not in COUNTED:
        return f"{saved} ({saved.kind})"
    return str(saved) if saved.bytes is None else f"{saved} {size(saved.bytes)}"


def _in_module(parameter: str | None, path: tuple[str, ...]) -> str | None:
    """The name of a parameter inside its module."""
    if parameter is None:
        return None
    return parameter.removeprefix("".join(f"{name}." for name in path))
