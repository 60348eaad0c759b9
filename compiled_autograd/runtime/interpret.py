"""Runs a tape graph's calls one by one, for real, with grad mode off: slow, and with nothing in between to fail."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from .. import ir
from ..ir import nan_checks
from ..steps.accumulate import accumulate_into
from ..steps.marks import saved_by, watched
from ..steps.run_context import RunContext
from ..user_code.in_place import versions_of
from .hook_places import HookPlaces
from .late_hooks import LateHooks
from .opaque_calls import looked_after

ONE_BY_ONE = "the rest ran call by call"
"""Text of a :class:`~shadow_cache.Failure` for the slower way, if the rest was finished here."""


def interpret(
    tape: ir.TapeGraph, given: Mapping[str, Sequence[Any]], context: RunContext | None = None
) -> list[torch.Tensor | None]:
    """Run a whole tape graph.

    Args:
        given: for each kind of placeholder, what the engine handed over.
        context: as of :func:`finish`.

    Raises:
        RuntimeError: NaNs are looked for, and a node of the tape gave one.
    """
    known: dict[fx.Node, Any] = {}
    *nodes, _ = tape.graph.nodes
    calls = []
    for node in nodes:
        if node.op == "placeholder":
            lifted = node.meta["lifted"]
            known[node] = given[lifted.kind][lifted.index]
        else:
            calls.append(node)
    users = any(ir.runs_users_code(node.target) for node in calls)
    versions = versions_of(watched(nodes), known) if users else {}
    if context is None:
        context = RunContext()
    if context.log is not None:
        context.log.begin(tape, known.__getitem__)
    return _run_all(tape, calls, known, context, versions)


def finish(
    tape: ir.TapeGraph, last: fx.Node, known: dict[fx.Node, Any], context: RunContext, versions: Mapping[fx.Node, int]
) -> list[torch.Tensor | None]:
    """Run the rest of a tape graph.

    Args:
        last: the call that was run last.
        known: the values before it that the rest needs.
        context: gets the running node; has the hooks that were registered or removed meanwhile.
        versions: of saved tensors, at the handover.

    Raises:
        RuntimeError: a node of the tape gave a NaN, or is to use a saved tensor that was changed in place.
    """
    if context.log is not None:
        context.log.value = known.__getitem__
    if context.late is not None:
        context.late.value_of = known.get
    *nodes, _ = tape.graph.nodes
    return _run_all(tape, nodes[nodes.index(last) + 1 :], known, context, versions)


def _run_all(
    tape: ir.TapeGraph,
    calls: Sequence[fx.Node],
    known: dict[fx.Node, Any],
    context: RunContext,
    versions: Mapping[fx.Node, int],
) -> list[torch.Tensor | None]:
    for node in calls:
        if node.target is operator.getitem and node.args[0] not in known:
            continue  # of an earlier call, whose items are known
        context.call = node.meta["call"]
        if context.log is not None:
            context.log.call(node)
        run = functools.partial(_run, tape, node, known, versions)
        arguments = fx.map_arg(node.args, known.get)
        if node.target is ir.accumulate_grad and arguments[2] is None:
            arguments = (*arguments[:2], known.get(node))  # a compiled region has made it for this leaf alone
        known[node] = run(arguments) if context.late is None else context.late.run(node, arguments, run)
        if context.changes:
            heed(tape, node, context, known.get)
    given: Any = tape.graph.output_node().args[0]
    results: list[torch.Tensor | None] = list(fx.map_arg(given, known.get))
    return results if context.late is None else context.late.outputs(results)


def heed(tape: ir.TapeGraph, last: fx.Node, context: RunContext, value_of: Callable[[fx.Node], Any]) -> bool:
    """Users' code has registered or removed hooks in a call: whether that changes what is to run after it."""
    if context.late is None:
        context.late = LateHooks(HookPlaces.of(tape), context.ends, value_of)
    return context.late.take(context.changes, last)


def _run(
    tape: ir.TapeGraph, node: fx.Node, known: Mapping[fx.Node, Any], versions: Mapping[fx.Node, int], arguments: Any
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
