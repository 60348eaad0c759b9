"""Draw a structure: the nodes of its tape, with edges to the nodes that receive their gradients."""

from __future__ import annotations

from ..entries import Call, Structure
from ..safe_text import harmless


def dot(structure: Structure) -> str:
    """Return a Graphviz graph, for ``dot -Tsvg``. Leaves are boxes."""
    lines = ["digraph tape {", "  node [shape=ellipse, fontname=Helvetica];"]
    for index, call in enumerate(structure.calls):
        label = "\\n".join(_escape(line) for line in _label(call))
        shape = ", shape=box" if call.parameter else ""
        lines.append(f'  n{index} [label="{label}"{shape}];')
    lines += [f"  n{start} -> n{end};" for start, end in _edges(structure)]
    return "\n".join([*lines, "}"])


def mermaid(structure: Structure) -> str:
    """Return a Mermaid flowchart. Leaves are boxes, other nodes are rounded."""
    lines = ["flowchart TD"]
    for index, call in enumerate(structure.calls):
        label = "<br>".join(line.replace('"', "#quot;").replace("<", "#lt;") for line in _label(call))
        lines.append(f'  n{index}["{label}"]' if call.parameter else f'  n{index}("{label}")')
    return "\n".join([*lines, *(f"  n{start} --> n{end}" for start, end in _edges(structure))])


def _label(call: Call) -> list[str]:
    return [harmless(part) for part in (call.name, call.parameter, call.source) if part]


def _edges(structure: Structure) -> list[tuple[int, int]]:
    return [(start, end) for start, call in enumerate(structure.calls) for end in call.edges]


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')
