"""Has a tape that Python has seen be freed without recursion.

A node that was once seen from Python keeps its Python object, and in PyTorch 2.13 the object lets go of the
node by which the next one is freed: each inside the other's destructor, which overflows a stack of 8 MiB in a chain of
some 50,000. The autograd engine's own loop for this (``torch/csrc/autograd/function.cpp``, 2.13) takes only nodes
that nobody else refers to, and the objects do.

So the nodes are numbered by thousands. Where an edge leads from one thousand to another, the node that it leaves also
holds the next one in its ``metadata``, by an object that lets go of such nodes one after the other, and never inside
another. A node and its ``metadata`` live equally long, as do its edges: nothing lives longer than it would.
"""

from __future__ import annotations

import threading
from typing import Any

from ..capture import tape
from ..process_state import PROCESS

_TOGETHER = 1_000
_KEY = "compiled_autograd: next nodes"


class _Waiting(threading.local):
    """Nodes that this thread is about to let go of."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.is_emptied = False


_waiting = PROCESS.register(_Waiting())


class _Next:
    """Nodes that follow one, until that one is freed."""

    __slots__ = ("_nodes",)

    def __init__(self, nodes: list[Any]) -> None:
        self._nodes = nodes

    def __del__(self, waiting: _Waiting = _waiting) -> None:
        waiting.nodes += self._nodes
        self._nodes.clear()
        if waiting.is_emptied:  # inside a destructor that was called below: that loop goes on with them
            return
        waiting.is_emptied = True
        try:
            while True:  # not a condition: see Ctrl-C in docs/internals/threads.md
                if not waiting.nodes:
                    break
                waiting.nodes.pop()
        finally:
            waiting.is_emptied = False


def have_it_freed_in_parts(outputs: tape.Ends) -> None:
    """Before all nodes of a tape are read: from now on it can be freed, whatever is kept of it. A tape of up to
    :data:`tape.MAX_NODES_READ` nodes is left alone."""
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
