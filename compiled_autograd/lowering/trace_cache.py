"""Traces of the engine's functions, kept for the next region with an equal call.

A trace depends on the function, the metadata of its tensors and their shared memory, the other arguments, the table of
decompositions, and the state of the process (``guards/ambient.py``). The key has all of these. A call whose arguments
have anything else in them (a symbol, a constant that is known by value) runs. A trace is kept only if the call made
nothing but operators on its own arguments, and wrote into none of them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

from torch import fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from .. import ir
from ..guards.ambient import ambient
from ..process_state import PROCESS
from .trace_replay import Arguments, NotACopyError, NotAKeyError, TracedCall, recorded

MAX_TRACES = 4096
"""The largest number of traces for one table of decompositions; the one that was used longest ago goes first."""
_MAX_TABLES = 4
_PURE = frozenset({ir.sum_gradients, ir.copy_slices_prologue, ir.copy_slices_epilogue})
Table = Mapping[Any, Callable[..., Any]] | None
TRACED: OrderedDict[int, tuple[Table, OrderedDict[Hashable, TracedCall]]] = OrderedDict()
"""By the ``id`` of a table of decompositions: the table, kept alive so that the ``id`` stays unique, and the calls
traced with it."""
PROCESS.register(TRACED, reset=TRACED.clear)


class TracedCalls:
    """The calls of one trace: to be made within it.

    Args:
        decompositions: the table that the trace has.
    """

    def __init__(self, decompositions: Table) -> None:
        _, self._known = TRACED.setdefault(id(decompositions), (decompositions, OrderedDict()))
        TRACED.move_to_end(id(decompositions))
        while len(TRACED) > _MAX_TABLES:
            TRACED.popitem(last=False)
        self._ambient = ambient()
        mode = get_proxy_mode()
        assert mode is not None
        self._tracer: Any = mode.tracer

    def call(self, target: Any, arguments: Sequence[Any], run: Callable[..., Any]) -> Any:
        """Return ``run(*arguments)``, and add its operators to the graph that is being traced.

        Args:
            target: of the tape graph's call.
            arguments: fake tensors, and all other arguments of the call.
            run: makes the call; may raise.
        """
        if not _is_pure(target):
            return run(*arguments)
        given = Arguments(self._tracer)
        try:
            key = (target, self._ambient, given.key(arguments))
        except NotAKeyError:
            return run(*arguments)
        known = self._known.get(key)
        if known is not None:
            self._known.move_to_end(key)
            return known.again(given)
        last = last_of(self._tracer.graph)
        result = run(*arguments)
        made = list(nodes_after(last, self._tracer.graph))
        try:
            self._known[key] = recorded(made, result, given)
        except NotACopyError:
            return result
        if len(self._known) > MAX_TRACES:
            self._known.popitem(last=False)
        return result


def last_of(graph: fx.Graph) -> fx.Node:
    """Return the last node of a graph so far, or its root."""
    return graph._root._prev


def nodes_after(last: fx.Node, graph: fx.Graph) -> Iterator[fx.Node]:
    """Yield the nodes after the node that was last."""
    node = last._next
    while node is not graph._root:
        yield node
        node = node._next


def _is_pure(target: Any) -> bool:
    """Return whether equal arguments give equal results. Code of users, in any language, may do anything."""
    return target in _PURE or (isinstance(target, ir.OpaqueOp) and target.traceable and not target.custom)
