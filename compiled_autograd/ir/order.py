"""The order in which the eager engine would run the nodes of a tape, and the tape graph put into it.

The seam reports nodes in the order of its own walk. The engine runs them from a ready queue: of the nodes whose
gradients are all there, the one made last in the forward goes first, and leaves go at once (``CompareNodeTaskTime`` in
``torch/csrc/autograd/engine.cpp``, 2.13). Where several edges meet, the order decides how a sum of three or more
gradients is rounded; bit for bit equality with eager needs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import fx

from .. import ir


class ReadyQueue:
    """A binary heap in which equal elements come out as they do from ``std::priority_queue`` of libstdc++.

    All leaves have the same sequence number, so it is the heap's own moves that say in which order their hooks run. The
    moves are those of ``std::push_heap`` and ``std::pop_heap``; Python's ``heapq`` makes others.
    """

    def __init__(self, priority: Sequence[int]) -> None:
        self._priority = priority
        self._heap: list[int] = []

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, item: int) -> None:
        """Add an index into ``priority``."""
        self._heap.append(item)
        self._rise(len(self._heap) - 1, item)

    def pop(self) -> int:
        """Take out the index with the highest priority."""
        heap = self._heap
        top, last = heap[0], heap.pop()
        if heap:
            self._sink(last)
        return top

    def _rise(self, hole: int, item: int) -> None:
        heap = self._heap
        parent = (hole - 1) // 2
        while hole and self._priority[heap[parent]] < self._priority[item]:
            heap[hole] = heap[parent]
            hole, parent = parent, (parent - 1) // 2
        heap[hole] = item

    def _sink(self, item: int) -> None:
        """Move the hole at the top down along the greater children, then let ``item`` rise from where it ends."""
        heap, size = self._heap, len(self._heap)
        hole = child = 0
        while child < (size - 1) // 2:
            child = 2 * (child + 1)
            if self._priority[heap[child]] < self._priority[heap[child - 1]]:
                child -= 1
            heap[hole] = heap[child]
            hole = child
        if size % 2 == 0 and child == (size - 2) // 2:
            child = 2 * child + 1
            heap[hole] = heap[child]
            hole = child
        self._rise(hole, item)


def engine_order(calls: Sequence[ir.TapeCall]) -> list[int]:
    """Indices into the calls of a tape as the engine's ready queue would bring them.

    Where the tape could not be read from Python, the order of the walk is kept: it is a legal one.
    """
    if any(call.edges is None for call in calls):
        return [call.index for call in calls]
    waits = [0] * len(calls)
    for call in calls:
        for after in call.edges or ():
            waits[after] += 1
    ready = ReadyQueue([call.sequence or 0 for call in calls])
    ready.push(0)
    order = []
    while ready:
        index = ready.pop()
        order.append(index)
        for after in calls[index].edges or ():
            waits[after] -= 1
            if waits[after] == 0:
                ready.push(after)
    return order


def in_engine_order(tape: ir.TapeGraph) -> ir.TapeGraph:
    """Move the calls of a tape graph, and the terms of its sums, into the engine's order, and return the graph.

    Sums are then added as the engine adds them, term by term: the weights of a loop get a gradient in each step, and
    the gradients of all steps may need a thousand times the memory of their sum.
    """
    order = engine_order(tape.calls)
    _made_at_once(tape.graph)
    position = {index: place for place, index in enumerate(order)}
    groups = tape.by_call()
    call_of = {node: node.meta.get("call", 0) for node in tape.graph.nodes}
    output = tape.graph.find_nodes(op="output")[0]
    done = set(tape.graph.find_nodes(op="placeholder"))

    def emit(root: fx.Node, call: int) -> None:
        stack = [root]
        while stack:
            node = stack[-1]
            missing = [source for source in node.all_input_nodes if source not in done]
            if missing:
                stack.extend(missing)
                continue
            stack.pop()
            if node in done:
                continue
            done.add(node)
            output.prepend(node)
            if node.target is ir.sum_gradients:
                node.args = tuple(sorted(node.args, key=lambda term: position[call_of[term]]))
                node.meta["call"] = call

    for index in order:
        for node in groups.get(index, ()):
            if node.target is not ir.sum_gradients:
                emit(node, index)
    for node in output.all_input_nodes:
        if node not in done:
            emit(node, node.meta["call"])
    _made_as_they_come(tape.graph)
    return replace(tape, order=order)


def _made_at_once(graph: fx.Graph) -> None:
    """Join the sums that :func:`_made_as_they_come` has split."""
    sums = graph.find_nodes(op="call_function", target=ir.sum_gradients)
    for node in sums:
        if isinstance(node.args[0], fx.Node) and ir.PART_OF_SUM in node.args[0].meta:
            node.args = tuple(ir.terms(node))
    for node in reversed(sums):
        if ir.PART_OF_SUM in node.meta:
            graph.erase_node(node)


def _made_as_they_come(graph: fx.Graph) -> None:
    """Split sums into sums of two, each placed where its second term is computed. The rounding stays the same."""
    sums = graph.find_nodes(op="call_function", target=ir.sum_gradients)
    sums = [node for node in sums if len(node.args) > 2 and len(node.args) == len(node.all_input_nodes)]
    if not sums:
        return
    place = {node: number for number, node in enumerate(graph.nodes)}
    before = graph.find_nodes(op="placeholder")[-1]
    for node in sums:
        first, *terms = node.all_input_nodes
        for term in terms[:-1]:
            last = max(before, first, term, key=place.__getitem__)
            with graph.inserting_after(last):
                made = graph.call_function(ir.sum_gradients, (first, term))
            made.meta |= {"call": last.meta.get("call", 0), ir.PART_OF_SUM: True}
            place[made] = place[last]
            first = made
        node.args = (first, terms[-1])


def order_shows(tape: ir.TapeGraph, bitwise: bool) -> bool:
    """Return whether the order of the nodes shows: to users' code, or in the rounding of a sum.

    Args:
        bitwise: round sums as eager rounds them.
    """
    if any(call.edges is None for call in tape.calls):
        return False  # then it is that of the walk, always
    return tape.runs_users_code or (
        bitwise
        and any(
            node.target is ir.sum_gradients and (len(node.args) > 2 or ir.PART_OF_SUM in node.meta)
            for node in tape.graph.nodes
        )
    )


def reordered(tape: ir.TapeGraph, sequences: Sequence[int]) -> ir.TapeGraph:
    """A tape graph for a tape of the same structure whose nodes have other sequence numbers.

    Args:
        sequences: of the nodes in the order of the walk, the root left out.

    Returns:
        The same tape graph, where they run in the same order.
    """
    numbers = (None, *sequences)
    calls = [call.made_at(number) for call, number in zip(tape.calls, numbers, strict=True)]
    return tape if engine_order(calls) == tape.order else in_engine_order(tape.copy(calls))
