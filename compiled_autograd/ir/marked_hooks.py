"""A tape graph whose calls of hooks that are marked as traceable may be traced.

The engine's key has the number of hooks, but not which hooks. So a capture treats no hook as marked. Each run finds the
marked hooks, and they are part of the state of a form of the tape graph.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping

from torch import fx

from ..user_code.hooks import post_hook, pre_hook, tensor_hook
from ..user_code.traced_hooks import TracedHook
from .operations import accumulate_grad
from .tape_graph import TapeGraph

_KINDS = (tensor_hook, pre_hook, post_hook)


def candidates(tape: TapeGraph) -> dict[fx.Node, TracedHook]:
    """The calls of hooks that see gradients and nothing else, each with what may run in its place.

    A hook that runs after a leaf was written may look at the leaf, as one for that purpose does.
    """
    writes = {node.meta["call"] for node in tape.graph.nodes if node.target is accumulate_grad}
    found = {}
    for node in tape.graph.nodes:
        if node.target not in _KINDS or (node.target is post_hook and node.meta["call"] in writes):
            continue
        grads = itertools.chain(*[each if isinstance(each, (list, tuple)) else (each,) for each in node.args[1:]])
        if any(isinstance(grad, fx.Node) for grad in grads):
            found[node] = TracedHook(node.target)
    return found


def with_traced(tape: TapeGraph, calls: Mapping[fx.Node, TracedHook], hooks: Collection[TracedHook]) -> TapeGraph:
    """The tape graph with some of its :func:`candidates` in place of the calls that they stand for."""
    copy = tape.copy(tape.calls)
    for node, made in zip(tape.graph.nodes, copy.graph.nodes, strict=True):
        if node in calls and calls[node] in hooks:
            made.target = calls[node]
    return copy
