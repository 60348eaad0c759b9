"""Free long tapes that Python has read without deep recursion.

A node that Python has read keeps its Python object. In PyTorch 2.13 that object releases its node, which releases the
next node, and so on, each inside the previous destructor. A chain of some 50,000 nodes overflows a stack of 8 MiB. The
autograd engine frees nodes in a loop instead (``torch/csrc/autograd/function.cpp``, 2.13), but only nodes without other
references, and the Python objects are such references.

Therefore the nodes are numbered, and each thousand is one group. If an edge leads to another group, its first node also
holds the next node in its ``metadata``, through an object that releases such nodes in a loop, never recursively. A
node, its edges and its ``metadata`` have the same lifetime: no node lives longer than otherwise.
"""

from __future__ import annotations

import threading
from typing import Any

from ..capture import tape
from ..process_state import PROCESS

_TOGETHER = 1_000
_KEY = "compiled_autograd: next nodes"


class _Waiting(threading.local):
    """Nodes that this thread is about to release."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.is_emptied = False


_waiting = PROCESS.register(_Waiting())


class _Next:
    """References to the nodes after a node, released with that node."""

    __slots__ = ("_nodes",)

    def __init__(self, nodes: list[Any]) -> None:
        self._nodes = nodes

    def __del__(self, waiting: _Waiting = _waiting) -> None:
        waiting.nodes += self._nodes
        self._nodes.clear()
        if waiting.is_emptied:  # called inside the loop below, in an outer call: that loop will release the nodes
            return
        waiting.is_emptied = True
        try:
            while True:  # no loop condition: see Ctrl-C in docs/internals/threads.md
                if not waiting.nodes:
                    break
                waiting.nodes.pop()
        finally:
            waiting.is_emptied = False


def have_it_freed_in_parts(outputs: tape.Ends) -> None:
    """Prepare a tape, before all its nodes are read, so that it can be freed without recursion. A tape of up to
    :data:`tape.MAX_NODES_READ` nodes is not changed."""
    if len(tape.first_nodes(outputs)) <= tape.MAX_NODES_READ:
        return
    worklist = list(dict.fromkeys(tape.root_nodes(outputs)))
    numbers = {node: number for number, node in enumerate(worklist)}
    while worklist:
        node = worklist.pop()
        apart = []
        for following, _ in node.next_functions:
            if following is None:
                continue
            if following not in numbers:
                numbers[following] = len(numbers)
                worklist.append(following)
            if numbers[following] // _TOGETHER != numbers[node] // _TOGETHER:
                apart.append(following)
        if apart:
            node.metadata[_KEY] = _Next(apart)
