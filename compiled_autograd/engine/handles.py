"""The engine's objects for structures, and the graphs of these structures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import ir
from ..backends import get_backend
from ..cache.graphs import GRAPHS, MAX_NODES, MAX_STRUCTURES, CompiledGraph
from ..cache.stores import disk_for
from ..cache.variants import Handover
from ..capture import tape
from ..capture.grad_dtypes import GradDtypes, with_grad_dtypes
from ..diagnostics.reporting import warn_once
from ..ir.order import order_shows, reordered
from ..process_state import PROCESS
from ..settings import Settings
from ..shadow_cache import Key, Miss
from .call import Call

_MAX_OTHERS = 64
"""The largest number of graphs for tapes with one key of the engine's; then they are forgotten, and found anew."""


class Handle:
    """The engine's object for a structure, shared by all tapes of the structure. The engine never releases it, even
    when it clears its cache (2.13). So this object releases its contents.

    The engine's key lacks the order in which nodes were made, which decides the order of execution, and the dtypes that
    leaves want. ``others`` has the graphs for orders and dtypes other than those of ``graph``. ``outputs`` is the
    number of results that the engine expects.
    """

    __slots__ = ("dtypes", "graph", "others", "outputs", "shows", "shows_bitwise")

    def __init__(self, graph: CompiledGraph) -> None:
        self.graph: CompiledGraph | None = graph
        self.others: dict[tuple[Any, ...], CompiledGraph] = {}
        self.dtypes = GradDtypes(graph.tape)
        self.outputs = len(graph.tape.graph.find_nodes(op="output")[0].args[0])
        self.shows = order_shows(graph.tape, bitwise=False)
        self.shows_bitwise = order_shows(graph.tape, bitwise=True)

    def forget(self) -> None:
        """Release the graphs."""
        self.graph = None
        del self.others, self.dtypes

    def graph_for(
        self, call: Call, settings: Settings, tensors: Sequence[torch.Tensor]
    ) -> tuple[CompiledGraph, Miss | None]:
        """Return the graph for the order and the dtypes of the tape that was handed over.

        Also return the difference from known structures, if this process did not know it.
        """
        assert self.graph is not None, "the engine called what it had forgotten"
        dtypes = self.dtypes.now(tensors, call.outputs, call.inputs)
        in_order = not self.shows and not (self.shows_bitwise and get_backend(settings.backend_in_mode).bitwise)
        same_dtypes = dtypes == self.dtypes.captured
        if in_order and same_dtypes:
            return self.graph, None
        key = (None if in_order else tape.made_when(call.outputs), *dtypes)
        known = self.others.get(key)
        if known is not None:
            return known, None
        other = self.graph.tape if same_dtypes else with_grad_dtypes(self.graph.tape, dtypes)
        graph, miss, is_kept = _of_other_tape(call, settings, self.graph, other, in_order)
        if is_kept:
            if len(self.others) >= _MAX_OTHERS:
                self.others.clear()
            self.others[key] = graph
        return graph, miss

    def __call__(self, handover: Handover) -> list[torch.Tensor | None]:
        """Run it. The engine insists on something that can be called."""
        assert self.graph is not None, "the engine called what it had forgotten"
        return self.graph(handover)


class Kept:
    """Objects that the engine holds since its cache was last cleared, and tapes for which it need not be called.

    Attributes:
        handles: for each graph, the pair of a function and its handle, which the engine calls at a hit and also holds.
        left_to_eager: descriptions of tapes that ``on_miss="eager"`` found not to be in the cache.
        reports: the number of tapes that the engine has reported.
        must_forget: the engine's cache is cleared before the next walk, since single entries cannot be removed.
        captures_of_others: the number of structures that PyTorch's own compiled autograd had captured at the last
            check.
    """

    def __init__(self) -> None:
        self.handles: dict[CompiledGraph, tuple[Callable[..., Any], Handle]] = {}
        self.left_to_eager: set[int] = set()
        self.reports = 0
        self.must_forget = False
        self.captures_of_others = 0

    def clear(self) -> None:
        """Release all handles, since the engine's cache was cleared."""
        while self.handles:
            self.handles.popitem()[1][1].forget()
        self.left_to_eager.clear()

    def new_graph(self, ordered: ir.TapeGraph, keys: Sequence[Key]) -> CompiledGraph:
        """Keep a structure that this process has not met."""
        graph, crowded = GRAPHS.add(ordered, keys)
        self.left_to_eager.clear()
        if crowded:  # others had to go, which the engine still knows
            self.must_forget = True
            warn_once(
                f"more than {MAX_STRUCTURES} structures were captured, or more than {MAX_NODES} nodes in all, and "
                "the least recently used half was evicted. If a tape differs in every step, put ca.disable() around "
                "its backward to avoid the captures."
            )
        return graph


KEPT = PROCESS.register(Kept())


def _of_other_tape(
    call: Call, settings: Settings, graph: CompiledGraph, other: ir.TapeGraph, in_order: bool
) -> tuple[CompiledGraph, Miss | None, bool]:
    """Return the graph for a tape with a known key of the engine, but a new order of nodes, or other gradient dtypes
    (those of ``other``).

    Also return the difference from known structures, if this process did not know it, and whether the graph is kept:
    not if nothing may be compiled.
    """
    sequences = [] if in_order else [each.sequence for each in tape.walk(call.outputs, call.inputs)]
    ordered = other if in_order else reordered(other, sequences)
    if ordered is graph.tape:
        return graph, None, True
    keys = ordered.structure()
    known = GRAPHS.find(keys)
    if known is not None:
        return known, None, True
    miss = GRAPHS.explain(ordered, keys, other_order=other is graph.tape)
    if not may_be_kept(settings, ordered, keys):
        return CompiledGraph(ordered), miss, False
    return KEPT.new_graph(ordered, keys), miss, True


def may_be_kept(settings: Settings, ordered: ir.TapeGraph, keys: Sequence[Key], may_compile: bool = True) -> bool:
    """Return whether a new structure will be compiled, or loaded from the store on disk."""
    compiles = settings.compiles and may_compile
    disk = None if compiles else disk_for(settings)
    return compiles or (disk is not None and disk.knows(ordered, keys))
