"""The order in which the eager engine would run the nodes of a tape, and the tape graph put into it.

The seam reports nodes in the order of its own walk. The engine runs them from a ready queue: of the nodes whose
gradients are all there, the one made last in the forward goes first, and leaves go at once (``CompareNodeTaskTime`` in
``torch/csrc/autograd/engine.cpp``, 2.13). Where several edges meet, the order decides how a sum of three or more
gradients is rounded; bit for bit equality with eager needs it.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from . import ir


def engine_order(tape: ir.TapeGraph) -> list[int]:
    """Indices into ``tape.calls`` as the engine's ready queue would bring them.

    Where the sequence number of a node could not be read, the order of the walk is kept: it is a legal one.
    """
    if any(call.sequence is None for call in tape.calls[1:]):
        return [call.index for call in tape.calls]
    waits: dict[int, int] = {call.index: 0 for call in tape.calls}
    feeds: dict[int, list[int]] = {call.index: [] for call in tape.calls}
    for after, nodes in tape.by_call().items():
        for before in _producers(nodes, after):
            waits[after] += 1
            feeds[before].append(after)
    arrival = 0
    ready = [(_priority(tape.calls[index]), index) for index, count in waits.items() if count == 0]
    heapq.heapify(ready)
    order = []
    while ready:
        index = heapq.heappop(ready)[-1]
        order.append(index)
        for after in feeds[index]:
            waits[after] -= 1
            if waits[after] == 0:
                arrival += 1
                heapq.heappush(ready, (_priority(tape.calls[after]), after))
    return order


def _priority(call: ir.TapeCall) -> int:
    return -(call.sequence if call.index and call.sequence is not None else 2**64)


def _producers(nodes: Sequence[fx.Node], call: int) -> set[int]:
    found: set[int] = set()
    # A sum is recorded with the last of the nodes that feed it, but it is the node that takes it that waits for them.
    worklist = [source for node in nodes if node.target is not ir.sum_gradients for source in node.all_input_nodes]
    while worklist:
        node = worklist.pop()
        if node.target is ir.sum_gradients:
            worklist.extend(node.all_input_nodes)
        elif "call" in node.meta and node.meta["call"] != call:
            found.add(node.meta["call"])
    return found


def in_engine_order(tape: ir.TapeGraph) -> ir.TapeGraph:
    """The same tape graph with its calls, and the terms of its sums, in the engine's order."""
    order = engine_order(tape)
    position = {index: place for place, index in enumerate(order)}
    groups = tape.by_call()
    copies: dict[fx.Node, fx.Node] = {}
    graph = fx.Graph()
    for node in tape.graph.nodes:
        if node.op == "placeholder":
            copies[node] = graph.node_copy(node)

    def emit(root: fx.Node, call: int) -> None:
        stack = [root]
        while stack:
            node = stack[-1]
            missing = [source for source in node.all_input_nodes if source not in copies]
            if missing:
                stack.extend(missing)
                continue
            stack.pop()
            if node in copies:
                continue
            copy = graph.node_copy(node, copies.__getitem__)
            copies[node] = copy
            if node.target is ir.sum_gradients:
                terms = sorted(range(len(node.args)), key=lambda i: position[_call_of(node.args[i])])
                copy.args = tuple(copy.args[i] for i in terms)
                copy.meta["call"] = call

    for index in order:
        for node in groups.get(index, ()):
            if node.target is not ir.sum_gradients:
                emit(node, index)
    output = tape.graph.find_nodes(op="output")[0]
    for node in output.all_input_nodes:
        if node not in copies:
            emit(node, node.meta["call"])
    graph.node_copy(output, copies.__getitem__)
    return replace(tape, graph=graph, order=order)


def _call_of(value: Any) -> int:
    return value.meta.get("call", 0)
