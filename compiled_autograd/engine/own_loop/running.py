"""Runs a backward that is left to eager: on the eager engine, or with ``own_loop=True`` node by node in the extension.

There the nodes of a tape are the same, in the same order, and so is each number that comes of them. What is not there
is the engine's queue, and the state of the thread that it sets for each node. The engine calls it all as one node of
its own (``native/own_loop/loop.h``): what depends on the engine is as ever, but for the node that is under way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...native.interface import Module
from ...torch_api.op_registry import others_are_on
from ..execution import on_eager
from ..native_hits import NATIVE_HITS
from ..session import Here, Session

LEAST_NODES = 16
"""Tapes of fewer nodes take the engine less than it takes to call it for another node, some ten microseconds."""


def runner(here: Here) -> Callable[..., Any]:
    """What runs a backward that the session of the calling thread leaves to eager: called as :func:`on_eager`."""
    session = here.stack[-1] if here.stack else None
    return on_eager if session is None or not session.settings.own_loop else in_own_loop


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
    """As :func:`on_eager`, without the engine's queue where all leaves are asked for and the tape allows it."""
    session = here.stack[-1]
    assert session is not None
    if accumulate_grad and not inputs and not create_graph:
        made = _number(session, outputs, grads, keep_graph)
        if made is not None:
            session.in_own_loop()
            number, gradient = made
            return on_eager(here, (number,), (gradient,), keep_graph, False, (), allow_unreachable, True)
    return on_eager(here, outputs, grads, keep_graph, create_graph, inputs, allow_unreachable, accumulate_grad)


def _node() -> Any:
    module = _module_if_there()
    return None if module is None else module.node_in_own_loop()


def _order() -> list[Any] | None:
    module = _module_if_there()
    if module is None or torch._C._is_multithreading_enabled():  # then the engine raises
        return None
    return module.order_in_own_loop()


def _show(node: Any) -> None:
    module = _module_if_there()
    if module is not None:
        module.show_own_loop()


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


def _module_if_there() -> Module | None:
    library = NATIVE_HITS.library
    return None if library is None else library.module(build=False)


def _number(
    session: Session, outputs: Sequence[Any], grads: Sequence[torch.Tensor | None], keep_graph: bool
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """A number and its gradient, whose backward is the one that was asked for."""
    settings = session.settings
    module = None if settings.native is False else NATIVE_HITS.module(settings, wanted=True)
    if module is None or others_are_on():
        return None
    found = module.in_own_loop(outputs, grads, keep_graph, LEAST_NODES)
    return None if isinstance(found, str) else found
