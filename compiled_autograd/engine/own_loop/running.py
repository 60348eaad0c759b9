"""Runs a backward that is left to eager: on the eager engine, or, with the extension, node by node in the own loop.

The loop runs the same nodes in the same order, so all numbers are the same. It lacks the engine's queue, and the thread
state that the engine sets for each node. The engine calls the whole loop as one node (``native/own_loop/loop.h``). So
all that depends on the engine is unchanged, except the current node.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...diagnostics.reporting import warn_once
from ...native.interface import Module
from ...native.library import BEING_BUILT
from ...policies.ledger import LEDGER
from ...policies.own_loop import OWN_LOOPS, why_off
from ...settings import Settings
from ...torch_api.op_registry import others_are_on
from ..call import Call
from ..execution import on_eager
from ..native_hits import NATIVE_HITS
from ..records import record_of
from ..session import Here
from .self_check import NOT_NOW, why_wrong

LEAST_NODES = 16
"""Tapes of fewer nodes take the engine less than it takes to call it for another node, some ten microseconds."""
NOT_THERE = 16
"""Number of backwards until the extension is looked for again."""
LEFT_WORTH_LOADING = 16
"""Number of searches after which the extension is loaded and checked, if no setting asks for it and nothing was
compiled. That takes as long as ten steps of a small model. For a single tape, this is at each 17th backward."""
LEFT_WORTH_BUILDING = 1000
"""Number of backwards left to eager after which the extension is built, if no setting asks for it."""


def runner(here: Here, call: Call) -> Callable[..., Any]:
    """Return the function that runs a backward that the calling thread's session leaves to eager. Its arguments are
    those of :func:`on_eager`."""
    session = here.stack[-1] if here.stack else None
    if session is None or not session.may_loop or call.create_graph or call.inputs or not call.accumulate_grad:
        return on_eager
    tries = record_of(call).loop
    if tries.left:
        tries.left -= 1
        return on_eager
    here.tries = tries
    return in_own_loop


def in_own_loop(
    here: Here,
    outputs: Sequence[Any],
    grads: Sequence[torch.Tensor | None],
    keep_graph: bool,
    create_graph: bool,
    inputs: Sequence[Any],
    allow_unreachable: bool,
    accumulate_grad: bool,
) -> Any:
    """Run a backward as :func:`on_eager` does, without the engine's queue if all leaves are requested and the tape
    allows it. ``here.tries`` gets the result."""
    session, tries = here.stack[-1], here.tries
    assert session is not None
    if accumulate_grad and not inputs and not create_graph:
        module = _find(session.settings, left=True)
        made = None
        if module is None or others_are_on():
            tries.left = NOT_THERE
        else:
            made = _number(module, outputs, grads, keep_graph)
            if made is None:
                tries.fail()
        if made is not None:
            tries.succeed()
            session.in_own_loop()
            number, gradient = made
            return on_eager(here, (number,), (gradient,), keep_graph, False, (), allow_unreachable, True)
    return on_eager(here, outputs, grads, keep_graph, create_graph, inputs, allow_unreachable, accumulate_grad)


def _number(
    module: Module, outputs: Sequence[Any], grads: Sequence[torch.Tensor | None], keep_graph: bool
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """A number and its gradient, whose backward is the one that was asked for."""
    found = module.in_own_loop(outputs, grads, keep_graph, LEAST_NODES)
    return None if isinstance(found, str) else found


# ---- whether there is one -------------------------------------------------------------------------------------------


def find(settings: Settings) -> Module | None:
    """Return the extension, if it runs tapes as the engine does; else :data:`OWN_LOOPS` has the reason."""
    return _find(settings, left=False)


def _find(settings: Settings, left: bool) -> Module | None:
    if why_off(settings):
        return None
    OWN_LOOPS.left += left
    if left and OWN_LOOPS.left <= LEFT_WORTH_LOADING and OWN_LOOPS.module is None and not settings.own_loop:
        return None
    module = NATIVE_HITS.module(settings, build=bool(settings.own_loop) or OWN_LOOPS.left >= LEFT_WORTH_BUILDING)
    if module is not None and module is OWN_LOOPS.module:
        return module
    return _first(settings, module)


def _first(settings: Settings, module: Module | None) -> Module | None:
    """Check an extension at its first use, or note that there is none."""
    library = NATIVE_HITS.library
    if module is None:
        OWN_LOOPS.reason = "" if library is None else library.reason
        if settings.own_loop and OWN_LOOPS.reason != BEING_BUILT:
            warn_once(f"extension='all' has no effect: {OWN_LOOPS.reason}.")
        return None
    if module is OWN_LOOPS.wrong or others_are_on():
        return None
    OWN_LOOPS.reason = wrong = why_wrong(module)
    if wrong.startswith(NOT_NOW):
        return None
    if wrong:
        OWN_LOOPS.wrong = module
        warn_once(f"the own loop is not used, and eager backwards are slower: {wrong}. Please report this bug.")
        return None
    OWN_LOOPS.module = module
    LEDGER.time_again()
    return module


# ---- answers during the loop ----------------------------------------------------------------------------------------


def _node() -> Any:
    module = OWN_LOOPS.module
    return None if module is None else module.node_in_own_loop()


def _order() -> list[Any] | None:
    module = OWN_LOOPS.module
    if module is None or torch._C._is_multithreading_enabled():  # then the engine raises
        return None
    return module.order_in_own_loop()


def _show(node: Any) -> None:
    module = OWN_LOOPS.module
    if module is not None:
        module.show_own_loop()


def _flat(needs: Any) -> list[bool]:
    """Flatten ``ctx.needs_input_grad``, which custom operators nest for lists (``torch/_library/autograd.py``)."""
    return [each for need in needs for each in _flat(need)] if isinstance(needs, list | tuple) else [bool(needs)]


def buffers(ctx: Any) -> tuple[torch.Tensor | None, ...] | None:
    """Return ``ctx.input_grad_buffers`` of the function that the own loop is running; None if the engine has to answer.

    Raises:
        RuntimeError: eager raises too, with the same text.
    """
    module = OWN_LOOPS.module
    sums = None if module is None else module.buffers_in_own_loop(ctx)
    if sums is None:
        return None
    given = [each for each, (node, _) in zip(sums, ctx.next_functions, strict=True) if node is not None]
    needs = _flat(ctx.needs_input_grad)
    if sum(needs) != len(given):  # the user has set other values: the sums cannot be matched with arguments
        return (None,) * len(needs)
    left = iter(given)
    return tuple([next(left) if need else None for need in needs])


ANSWERS: dict[str, Callable[..., Any]] = {
    "_current_autograd_node": _node,
    "_current_graph_task_execution_order": _order,
    "_will_engine_execute_node": _show,
}
"""Questions about the backward that is under way which the engine would answer with the node that stands for all. Where
one gives None here the engine answers: it may have been told of what it has to know."""


def answering(original: Callable[..., Any], answer: Callable[..., Any]) -> Callable[..., Any]:
    """A function of ``torch._C`` that asks here first."""

    @functools.wraps(original)
    def function(*args: Any) -> Any:
        found = answer(*args)
        return original(*args) if found is None else found

    return function
