"""A capture: the graph, the nodes of the tape that it was made of, and its views (text, keys, networkx)."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import networkx as nx
from torch import fx

from .operations import USERS_CODE, OpaqueOp, accumulate_grad


@dataclass(slots=True)
class TapeCall:
    """One node of the tape, as the engine reported it, with what was read of it from Python.

    Attributes:
        index: its place in the engine's walk; 0 is the root.
        name: the engine's.
        sequence: its sequence number; None where it could not be read.
        edges: indices of the nodes that its gradients go to, edge by edge; None where they could not be read.
        parameter: for a leaf, the name of the parameter that it writes to, where a living module has it.
        module: the class of the outermost module that has it.
        source: ``file:line in function`` of the forward, where anomaly mode recorded it.
        saved: names of what the node saved, with its text; None for tensors. Only for people: nothing is decided by it.
    """

    index: int
    name: str
    sequence: int | None = None
    edges: list[int] | None = None
    parameter: str | None = None
    module: str | None = None
    source: str | None = None
    saved: tuple[tuple[str, str | None], ...] = ()


@dataclass(slots=True)
class TapeGraph:
    """A capture: the graph, the nodes of the tape it was made of, and what the lifted tensors are.

    Attributes:
        graph: calls in the order in which they run; ``node.meta["call"]`` is the index into ``calls``.
        calls: the tape's nodes in the engine's walk; index 0 is the root.
        inputs: for each lifted tensor, dtype, device and ``requires_grad``: all that the structure says of it.
        order: indices into ``calls`` in the order in which the eager engine would run them.
        accumulates: True for ``backward``, False for ``autograd.grad``.
        needs_engine: it has calls that can be run only while the engine's own call is under way.
        cuda_device: the index of the CUDA device that it lies on; None where it lies on none.
    """

    graph: fx.Graph
    calls: list[TapeCall]
    inputs: list[str]
    accumulates: bool
    needs_engine: bool = False
    order: list[int] = field(default_factory=list)
    cuda_device: int | None = None

    def by_call(self) -> dict[int, list[fx.Node]]:
        """The graph's calls, grouped by the node of the tape that they belong to, in the graph's order."""
        groups: dict[int, list[fx.Node]] = {}
        for node in self.graph.nodes:
            if node.op == "call_function":
                groups.setdefault(node.meta["call"], []).append(node)
        return groups

    @property
    def runs_users_code(self) -> bool:
        """Whether it has hooks or Python functions."""
        return any(node.target in USERS_CODE for node in self.graph.nodes)

    def copy(self, calls: list[TapeCall]) -> TapeGraph:
        """The same calls of a graph of its own, with other facts about the tape's nodes."""
        graph = fx.Graph()
        graph.output(graph.graph_copy(self.graph, {}))
        return replace(self, graph=graph, calls=calls)

    def readable(self) -> str:
        """The one text form: stable, and complete but for tensors, sizes and scalars, which are no part of it."""
        lines = [f"tape graph: {len(self.calls)} nodes, {len(self.inputs)} tensors"]
        for node in self.graph.find_nodes(op="placeholder"):
            lines.extend(f"  {line}" for line in self._described(node))
        last = None
        for node, line in self._lines():
            call = node.meta.get("call")
            if call is not None and call != last:
                lines.append(f"{self._title(self.calls[call])}")
                last = call
            lines.append("  " + line)
        return "\n".join(lines) + "\n"

    def _title(self, call: TapeCall) -> str:
        title = f"#{call.index} {call.name}"
        if call.parameter is not None:
            title += f" parameter={call.parameter}"
        if call.source is not None:
            title += f" at {call.source}"
        return title

    def _lines(self, by_call: bool = False) -> Iterator[tuple[fx.Node, str]]:
        """Each call with its text. Values are numbered as they come; ``by_call``, within the node they belong to."""
        names = {node: str(node.target) for node in self.graph.nodes if node.op == "placeholder"}
        placeholders = len(names)
        counts: dict[int, int] = {}
        for node in self.graph.nodes:
            if node.op == "output":
                yield node, f"return {_text(node.args[0], names)}"
            elif by_call and node.target is operator.getitem:
                names[node] = f"{names[node.args[0]]}.{node.args[1]}"  # in whatever order they are taken
            elif node.op == "call_function":
                call = node.meta.get("call")
                counts[call] = counts.get(call, -1) + 1
                names[node] = f"%{call}.{counts[call]}" if by_call else f"%{len(names) - placeholders}"
                arguments = ", ".join(_text(argument, names) for argument in node.args)
                yield node, f"{names[node]} = {target_name(node)}({arguments})"

    def structure(self) -> list[tuple[str, ...]]:
        """The key parts of each node of the tape, in the order of the engine's walk, and of its end.

        A lifted tensor is described where it is first used, and a value is named after its node, so that tapes share
        their keys as far as they agree. Of the order in which nodes run it says what users' code can see.
        """
        lines: dict[int | None, list[tuple[fx.Node, str]]] = {}
        for node, line in self._lines(by_call=True):
            lines.setdefault(node.meta.get("call"), []).append((node, line))
        described: set[fx.Node] = set()

        def key(call: int | None, *begin: str) -> tuple[str, ...]:
            parts = list(begin)
            for node, line in lines.get(call, ()):
                parts.append(line)
                for source in node.all_input_nodes:
                    if source.op == "placeholder" and source not in described:
                        described.add(source)
                        parts.extend(self._described(source))
            return tuple(parts)

        root, *others = self.calls
        keys = [key(0, root.name, f"accumulates={self.accumulates}"), *(key(call.index, call.name) for call in others)]
        return [*keys, (*key(None, "end"), *self._seen_order())]

    def _seen_order(self) -> list[str]:
        """Where users' code runs, the order of nodes that have some, or write to a leaf; unless it is the walk's."""
        if not self.runs_users_code:
            return []
        shows = {
            node.meta["call"]
            for node in self.graph.nodes
            if node.target in USERS_CODE or node.target is accumulate_grad
        }
        seen = [index for index in self.order if index in shows]
        return [] if seen == sorted(seen) else [f"order: {seen}"]

    def _described(self, placeholder: fx.Node) -> list[str]:
        kind, index = str(placeholder.target).split("_")
        return [f"{placeholder.target}: {self.inputs[int(index)]}"] if kind == "input" else []

    def to_networkx(self) -> nx.DiGraph:
        """The tape as a directed graph: nodes are indices into ``calls``; edges go along the flow of gradients.

        Node attributes: ``name``, ``sequence``, ``parameter``, ``source``.
        """
        result = nx.DiGraph()
        for call in self.calls:
            result.add_node(
                call.index, name=call.name, sequence=call.sequence, parameter=call.parameter, source=call.source
            )
        for node in self.graph.nodes:
            if node.op != "call_function":
                continue
            for source in node.all_input_nodes:
                before, after = source.meta.get("call"), node.meta["call"]
                if before is not None and before != after:
                    result.add_edge(before, after)
        return result


def target_name(node: fx.Node) -> str:
    """How the text form names a call."""
    if isinstance(node.target, OpaqueOp):
        return repr(node.target)
    return str(getattr(node.target, "__name__", node.target))


def text_of(value: Any) -> str:
    """A constant, as the text form has it."""
    return _text(value, {})


def _text(value: Any, names: dict[fx.Node, str]) -> str:
    if isinstance(value, fx.Node):
        return names[value]
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_text(each, names) for each in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_text(each, names)}" for key, each in sorted(value.items())) + "}"
    return str(value)
