"""A tape graph with the hooks of DDP's reducer, each group of leaves after the last of them is written."""

from __future__ import annotations

from torch import fx

from ..user_code.reducers import Groups, reducer_hooks
from .operations import USERS_CODE, OpaqueOp, accumulate_grad, post_accumulate_hook
from .tape_graph import TapeGraph


def runs_of_leaves(tape: TapeGraph) -> list[list[int]]:
    """Return the lifted tensors that are written to, in order: one list for each stretch in which only PyTorch's own
    functions run.

    Users' code may communicate, and ranks match their communication by order alone. One rank may run a backward
    compiled, and another one on eager. So the reducer may not communicate after such code.
    """
    runs: list[list[int]] = [[]]
    for node in tape.graph.nodes if tape.accumulates else ():
        if node.target is accumulate_grad:
            runs[-1].append(_leaf(node))
        elif node.target is post_accumulate_hook:  # the reducer's hook of that leaf comes after this one
            leaf = runs[-1].pop() if runs[-1] and runs[-1][-1] == _leaf(node, 1) else None
            runs.append([] if leaf is None else [leaf])
        elif node.target in USERS_CODE or (isinstance(node.target, OpaqueOp) and node.target.custom):
            runs.append([])
    return [run for run in runs if run]


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


def _leaf(call: fx.Node, argument: int = 0) -> int:
    return int(call.args[argument].meta["lifted"].index)  # type: ignore[union-attr]
