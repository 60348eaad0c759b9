"""Events of a compiled backward in a profiler.

``docs/internals/steps.md`` says which parts are one event, and which run node by node. The nodes that are made for the
engine are a chain, on which the eager engine is called. The chain ends at a leaf, as each tape does. So there is one
``AccumulateGrad`` event for each region, not for each parameter.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from threading import get_ident
from typing import Any

import torch
from torch import fx
from torch._C import _ImperativeEngine
from torch._C._autograd import _enable_record_function as enable_events
from torch.autograd import Variable
from torch.autograd.function import BackwardCFunction
from torch.profiler import record_function

from .. import ir
from ..threads.gate import GATE

_MAX_SHOWN = 4


class _Event(torch.autograd.Function):
    """A node of a tape that runs calls of a tape graph, whatever gradient it is given."""

    @staticmethod
    def forward(ctx: Any, previous: torch.Tensor, run: Callable[[fx.Node], None], nodes: list[fx.Node]) -> torch.Tensor:
        ctx.run, ctx.nodes = run, nodes
        return torch.zeros(())  # looked at in anomaly mode

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        for node in ctx.nodes:
            ctx.run(node)
        return grad, None, None


@functools.cache
def _event_named(name: str) -> type[_Event]:
    """Make an event class. The name of a Python function's node is that of its context's class."""
    cls = type(name, (_Event,), {})
    cls._backward_cls = type(name, (BackwardCFunction,), {"_forward_cls": cls})  # type: ignore[attr-defined]
    return cls


class Profile:
    """A backward that is profiled.

    Args:
        names: of the tape's nodes, the root first.
        sequences: their sequence numbers, without the root; empty where they are not known.
    """

    def __init__(self, names: Sequence[str], sequences: Sequence[int]) -> None:
        self._names = names
        self._sequences = sequences

    def node_by_node(self, nodes: Sequence[fx.Node], run: Callable[[fx.Node], None]) -> None:
        """Run calls of a tape graph in order, those of each node of the tape in the engine's two events."""
        of_root = list(itertools.takewhile(lambda node: node.meta["call"] == 0, nodes))
        for node in of_root:
            run(node)  # the engine makes no event for a root
        value, leaf, start = self._chain(nodes[len(of_root) :], run)
        me = get_ident()
        try:
            GATE.idents.append(me)
            GATE.enter_eager(me)
            _ImperativeEngine.run_backward(
                Variable._execution_engine,
                (value,),
                (start,),
                False,
                False,
                (leaf,),
                allow_unreachable=True,
                accumulate_grad=False,
            )
        finally:
            GATE.idents.remove(me)

    def _chain(self, nodes: Sequence[fx.Node], run: Callable[[fx.Node], None]) -> tuple[torch.Tensor, ...]:
        groups = [(call, list(group)) for call, group in itertools.groupby(nodes, lambda node: node.meta["call"])]
        enable_events(False)  # what is done for the events' sake is not shown
        try:
            with torch.enable_grad():
                value = leaf = torch.zeros((), requires_grad=True)
                for call, group in reversed(groups):
                    value = self._with_event(call, value, run, group)
            return value, leaf, torch.zeros(())
        finally:
            enable_events(True)

    def _with_event(self, call: int, value: torch.Tensor, run: Callable[[fx.Node], None], group: list[fx.Node]) -> Any:
        named = _event_named(self._names[call]).apply(value, run, group)
        if self._sequences:
            named.grad_fn._set_sequence_nr(self._sequences[call - 1])
        return named

    def region(self, nodes: Sequence[fx.Node]) -> AbstractContextManager[Any]:
        """Around a compiled region: an event that says what it computes."""
        names = [self._names[call] for call in dict.fromkeys(node.meta["call"] for node in nodes) if call]
        kinds = list(dict.fromkeys(names))
        shown = kinds if len(kinds) <= _MAX_SHOWN else [*kinds[:_MAX_SHOWN], f"{len(kinds) - _MAX_SHOWN} more"]
        return record_function(f"compiled_autograd: {len(names)} nodes: {', '.join(shown)}")

    def call(self, node: fx.Node) -> AbstractContextManager[Any]:
        """Around a call that runs as it is: a Python function or a hook. The engine has no event for a check."""
        if node.target is ir.check_nan:
            return nullcontext()
        name = self._names[node.meta["call"]]
        is_hook = ir.hook_kind(node.target) in ir.USERS_CODE and node.target is not ir.call_backward
        return record_function(f"{node.target.__name__} of {name}" if is_hook else name)  # type: ignore[union-attr]
