"""A compiled backward that is under way, and its answers in the engine's place."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .. import ir
from ..capture import tape
from ..process_state import PROCESS
from ..steps.profiling import Profile
from ..steps.run_context import RunContext

_task_ids = PROCESS.register(itertools.count(1 << 62))  # far above the engine's own


@dataclass(eq=False)
class Ends:
    """The arguments of a backward: the roots of its tape, and the requested inputs, if any."""

    outputs: Sequence[Any]
    inputs: Sequence[Any]
    _nodes: list[Any] | None = field(default=None, init=False)
    _numbers: dict[Any, int] | None = field(default=None, init=False)

    @property
    def nodes(self) -> list[Any]:
        """The tape's nodes in the order of the walk; read at the first request."""
        if self._nodes is None:
            self._nodes = [each.node for each in tape.walk(self.outputs, self.inputs)]
        return self._nodes

    @property
    def numbers(self) -> dict[Any, int]:
        """Indices into ``TapeGraph.calls``, by node."""
        if self._numbers is None:
            self._numbers = {node: number for number, node in enumerate(self.nodes, 1)}
        return self._numbers


@dataclass
class Running:
    """A compiled backward that is under way in this thread."""

    ends: Ends
    accumulates: bool
    keep_graph: bool
    context: RunContext
    order: Sequence[int]
    task_id: int = field(default_factory=_task_ids.__next__)
    callbacks: list[Callable[[], None]] = field(default_factory=list)
    _node_set: set[Any] | None = field(default=None, init=False)

    @property
    def nodes(self) -> list[Any]:
        """The tape's nodes in the order of the walk."""
        return self.ends.nodes

    def profile(self, tape_graph: ir.TapeGraph) -> Profile:
        """Return the object that makes the events of this backward in a profiler."""
        short = len(tape_graph.calls) <= tape.MAX_NODES_READ
        sequences = [type(node)._sequence_nr(node) for node in self.nodes] if short else []
        return Profile([call.name for call in tape_graph.calls], sequences)

    @property
    def checkpoint_valid(self) -> bool:
        """Return whether reentrant checkpointing may run its own backward meanwhile."""
        return self.accumulates and not self.ends.inputs

    @property
    def node_set(self) -> set[Any]:
        """The nodes that the engine says it will run. It leaves out an only root (``compute_dependencies``, 2.13)."""
        if self._node_set is None:
            found = set(self.nodes)
            if len(self.ends.outputs) == 1:
                found.difference_update(tape.root_nodes(self.ends.outputs))
            self._node_set = found
        return self._node_set

    def execution_order(self) -> list[Any]:
        """Return the nodes in the order in which they run; like the engine, only with multithreading off."""
        if torch._C._is_multithreading_enabled():
            raise RuntimeError(
                "_current_graph_task_execution_order expects the current backward to be executed with multithreading "
                "disabled, e.g. by running torch.autograd.set_multithreading_enabled(False)"
            )
        return [self.nodes[index - 1] for index in self.order if index]

    def will_execute(self, node: Any) -> bool:
        """Return whether a node runs in this backward."""
        if not self.accumulates and type(node).name(node).endswith(tape.LEAF):
            raise RuntimeError(
                "A leaf node was passed to _will_engine_execute_node but we are currently running autograd.grad(). "
                "This is currently not supported."
            )
        return node in self.node_set

    def current_node(self) -> Any:
        """The node whose hooks or function are running."""
        call = self.context.call
        return self.nodes[call - 1] if call else None
