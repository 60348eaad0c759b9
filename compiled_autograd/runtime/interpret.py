"""Runs a tape graph's calls one by one, for real, with grad mode off: slow, and with nothing in between to fail."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from .. import ir
from ..ir import nan_checks
from ..steps.accumulate import accumulate_into
from ..steps.marks import saved_by, watched
from ..user_code.hooks import post_hook
from ..user_code.in_place import versions_of
from .opaque_calls import looked_after
from .running_backward import late_hooks

if TYPE_CHECKING:
    from ..diagnostics.node_log import NodeLog
    from ..steps.run_context import RunContext

ONE_BY_ONE = "the rest ran call by call"
"""What a :class:`~shadow_cache.Failure` says that was done instead, where the rest was finished here."""


def interpret(
    tape: ir.TapeGraph, given: Mapping[str, Sequence[Any]], log: NodeLog | None = None
) -> list[torch.Tensor | None]:
    """Run a whole tape graph.

    Args:
        given: for each kind of placeholder, what the engine handed over.
        log: is told what runs.

    Raises:
        RuntimeError: NaNs are looked for, and a node of the tape gave one.
    """
    known: dict[fx.Node, Any] = {}
    versions: dict[fx.Node, int] = {}
    *nodes, output = tape.graph.nodes
    if log is not None:
        log.begin(tape, known.__getitem__)
    for node in nodes:
        if node.op == "placeholder":
            lifted = node.meta["lifted"]
            known[node] = given[lifted.kind][lifted.index]
            continue
        if log is not None:
            log.call(node)
        if ir.runs_users_code(node.target) and not versions:
            versions = versions_of(watched(nodes), known)
        known[node] = _run(tape, node, fx.map_arg(node.args, known.__getitem__), known, versions)
    return list(fx.map_arg(output.args[0], known.__getitem__))


def finish(
    tape: ir.TapeGraph,
    last: fx.Node,
    known: dict[fx.Node, Any],
    captured: Callable[[int], list[Any]],
    context: RunContext,
    versions: Mapping[fx.Node, int],
) -> list[torch.Tensor | None]:
    """Run the rest of a tape graph, with the hooks that nodes are given while they are about to run.

    Args:
        last: the call that was run last.
        known: what is known of the values before it, as far as the rest needs them.
        captured: the post-hooks that a node of the tape had when the engine walked it.
        context: says whose users' code may have registered hooks, and which; is told what runs.
        versions: of saved tensors, at the handover.

    Raises:
        RuntimeError: a node of the tape gave a NaN, or is to use a saved tensor that was changed in place.
    """
    if context.log is not None:
        context.log.value = known.__getitem__
    *nodes, output = tape.graph.nodes
    ends = {node.meta.get("call"): node for node in nodes if node.target not in (operator.getitem, ir.check_nan)}
    for node in nodes[nodes.index(last) + 1 :]:
        if node.target is operator.getitem and node.args[0] not in known:
            continue  # of a call that ran before: what was taken from it is known
        context.call = call = node.meta["call"]
        if context.log is not None:
            context.log.call(node)
        known[node] = _run(tape, node, fx.map_arg(node.args, known.get), known, versions)
        if node is ends[call] and call in context.asked and isinstance(known[node], (list, tuple)):
            # What entered the node the engine keeps only where it had hooks before; elsewhere it has moved on.
            entered: Any = node.args[2] if ir.hook_kind(node.target) is ir.post_hook else []
            for hook in late_hooks(context.asked[call], captured(call)):
                known[node] = post_hook(hook, known[node], fx.map_arg(entered, known.get))
    return list(fx.map_arg(output.args[0], known.get))


def _run(
    tape: ir.TapeGraph, node: fx.Node, arguments: Any, known: Mapping[fx.Node, Any], versions: Mapping[fx.Node, int]
) -> Any:
    saved = [source for source in saved_by(node) if source in versions] if versions else []
    if saved:
        name = tape.calls[node.meta["call"]].name
        arguments = looked_after(node, saved, node.args, arguments, known, versions, name)
    if node.target is not ir.accumulate_grad:
        try:
            return node.target(*arguments)  # type: ignore[operator]
        except ir.NaNFoundError as found:
            raise nan_checks.in_the_engines_words(found, tape.calls[found.call].name) from None
    leaf, _, grad = arguments
    accumulate_into(leaf, grad)
    return grad
