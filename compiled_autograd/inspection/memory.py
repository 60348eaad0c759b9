"""Sum the memory that the forward keeps alive for a backward, by module and by node.

Each storage counts once, for the node that ran first in the forward among those that hold it. Parameters, buffers and
inputs of the program exist without the tape: their bytes are reported but not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ..shadow_cache.safe_text import harmless, preformatted
from .folding import folded_names
from .nodes import COUNTED, TapeNode, size


@dataclass(frozen=True, slots=True, repr=False)
class TapeMemory:
    """The memory that a tape keeps alive.

    Attributes:
        bytes: the total.
        by_module: bytes by module path, without inner modules, the largest first.
        by_node: bytes by index of the node, the largest first; nodes without bytes are left out.
        there_anyway: bytes saved but not counted, by kind: ``parameter``, ``buffer`` and ``input``.
        unknown: the number of saved tensors of unknown size: a hook packed them into something other than tensors, or
            they have no storage.
        folded: like :attr:`by_module`, but with equal layers summed: bytes by folded name.
        lines: a line for each node of :attr:`by_node`; equal nodes of equal layers share a line.
    """

    bytes: int
    by_module: dict[str, int]
    by_node: dict[int, int]
    there_anyway: dict[str, int]
    unknown: int
    folded: dict[str, int]
    lines: tuple[str, ...]

    def __str__(self) -> str:
        anyway = ", ".join(f"{size(count)} of {kind}s" for kind, count in self.there_anyway.items() if count)
        lines = [f"the forward keeps {size(self.bytes)} alive" + (f", besides {anyway}" if anyway else "")]
        if self.unknown:
            lines.append(f"{self.unknown:,} saved tensors are of unknown size")
        of_modules = _with_bars({name or "(the model itself)": count for name, count in self.folded.items()})
        lines += ["", "by module", *_most(of_modules, "by_module"), "", "by node", *_most(self.lines, "by_node")]
        return "\n".join(map(harmless, lines)) + "\n"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return preformatted(str(self))


_MOST = 20
_BAR = 12
"""Length of the longest bar, in characters."""


def _with_bars(counts: Mapping[str, int]) -> list[str]:
    """Return a line for each text, with its bytes and a bar, the largest first."""
    most = max(counts.values(), default=0)
    bars = {text: "█" * round(_BAR * count / most) or "▏" for text, count in counts.items()}
    return [f"{size(counts[text]):>10}  {bars[text]:<{_BAR}}  {text}" for text in _largest(Counter(counts))]


def _most(lines: Sequence[str], where: str) -> list[str]:
    left_out = len(lines) - _MOST
    return [*lines[:_MOST], *([f"{'':>10}  and {left_out:,} more lines: see {where}"] if left_out > 0 else [])]


def memory_of(nodes: Sequence[TapeNode]) -> TapeMemory:
    """Sum the saved tensors of a tape's nodes."""
    by_node: Counter[int] = Counter()
    there_anyway: Counter[str] = Counter({"parameter": 0, "buffer": 0, "input": 0})
    unknown = 0
    seen: set[int] = set()
    for index in _in_the_order_of_the_forward(nodes):
        for saved in nodes[index].saved:
            if saved.bytes is None:
                unknown += 1
            for number, count in saved.memory:
                if number in seen:
                    continue
                seen.add(number)
                if saved.kind in COUNTED:
                    by_node[index] += count
                else:
                    there_anyway[saved.kind] += count
    names = folded_names(nodes)
    by_module: Counter[str] = Counter()
    folded: Counter[str] = Counter()
    for index, count in by_node.items():
        by_module[nodes[index].module] += count
        folded[names[nodes[index].module]] += count
    largest = _largest(by_node)
    return TapeMemory(
        sum(by_node.values()),
        _largest(by_module),
        largest,
        dict(there_anyway),
        unknown,
        _largest(folded),
        _lines(nodes, largest, names),
    )


_Key = TypeVar("_Key", int, str)


def _largest(counts: Counter[_Key]) -> dict[_Key, int]:
    return {key: count for key, count in counts.most_common() if count}


def _lines(nodes: Sequence[TapeNode], by_node: dict[int, int], names: dict[str, str]) -> tuple[str, ...]:
    alike: dict[str, list[int]] = {}
    for index in by_node:
        node = nodes[index]
        held = ", ".join(str(saved) for saved in node.saved if saved.kind in COUNTED)
        of = f" of {names[node.module]}" if node.module else ""
        alike.setdefault(f"{node.name}{of}: {held}", []).append(index)
    kept = {text: sum(by_node[index] for index in indices) for text, indices in alike.items()}
    return tuple(_with_bars({f"{_numbered(alike[text])} {text}": count for text, count in kept.items()}))


def _numbered(indices: Sequence[int]) -> str:
    return f"#{indices[0]}" if len(indices) == 1 else f"{len(indices):,} times"


def _in_the_order_of_the_forward(nodes: Sequence[TapeNode]) -> list[int]:
    """Return the indices of the nodes in the order of the forward, the leaves last."""
    return sorted(range(len(nodes)), key=lambda index: (nodes[index].sequence, -index))
