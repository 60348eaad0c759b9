"""A tape graph with the hooks of DDP's reducer, each group of leaves after the last of them is written."""

from __future__ import annotations

from torch import fx

from ..user_code.reducers import Groups, reducer_hooks
from .operations import accumulate_grad, post_accumulate_hook
from .tape_graph import TapeGraph


def leaves(tape: TapeGraph) -> list[int]:
    """Which of the lifted tensors are written to, in order."""
    return [_leaf(node) for node in _writes(tape)] if tape.accumulates else []


def with_reducer_hooks(tape: TapeGraph, groups: Groups) -> TapeGraph:
    """The tape graph with their calls. Python's post-accumulate hooks of a leaf come before the reducer's."""
    tape = tape.copy(tape.calls)
    written = {_leaf(node): node for node in _writes(tape)}
    for group in groups:
        last = written[group[-1]]
        call, place = last.meta["call"], last
        for node in last.args[0].users:  # type: ignore[union-attr]
            if node.target is post_accumulate_hook and node > place:
                place = node
        with tape.graph.inserting_after(place):
            made = tape.graph.call_function(reducer_hooks, tuple(written[leaf].args[0] for leaf in group))
        made.meta["call"] = call
    return tape


def _writes(tape: TapeGraph) -> list[fx.Node]:
    return tape.graph.find_nodes(op="call_function", target=accumulate_grad, sort=True)


def _leaf(write: fx.Node) -> int:
    return int(write.args[0].meta["lifted"].index)  # type: ignore[union-attr]
