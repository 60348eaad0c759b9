"""A tape graph -> the steps that run it, and the slots that their values lie in."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import fx

from .. import ir
from ..capture.grad_dtypes import dtype_of
from ..ir.partition import Opaque, Region, Step, cut, partition
from .marks import mark_saved
from .steps import AccumulateStep, Executor, FreshLeaf, OpaqueStep, RegionStep, Slot, is_given


class Schedule:
    """The steps of a tape graph.

    Args:
        tape: the tape graph, in the engine's order.
        counts: the number of values that the engine hands over, for each kind of placeholder.
        bitwise: compiled code must compute the engine's results bit for bit.
        untraceable: further calls that stay opaque, and the reasons.
        max_calls: the largest number of calls of a region; None for any number.

    Attributes:
        steps: the steps, in order.
        size: the number of slots. The engine fills the first ones, beginning with ``tensors`` tensors.
        slot_of: the slot of each value that has one.
        outputs: slots of the gradients that the caller asked for; None for undefined ones.
        watched: slots of saved tensors that are used after users' code has run.
    """

    def __init__(
        self,
        tape: ir.TapeGraph,
        counts: Sequence[int],
        bitwise: bool,
        untraceable: dict[fx.Node, str],
        max_calls: int | None = None,
    ) -> None:
        self.bitwise = bitwise
        self.max_calls = max_calls
        self.untraceable = untraceable
        self.slot_of: dict[fx.Node, int] = {}
        starts = dict(zip(ir.PLACEHOLDERS, itertools.accumulate([0, *counts[:-1]]), strict=True))
        self.size, self.tensors = sum(counts), counts[0]
        self._fresh: dict[fx.Node, list[fx.Node]] = {}
        self._positions: dict[fx.Node, int] = {}
        self._writes: dict[int, fx.Node] = {}
        self._added_to: list[int] = []
        for position, node in enumerate(tape.graph.nodes):
            self._positions[node] = position
            if node.target is ir.accumulate_grad:
                self._writes[node.meta["call"]] = node
            if node.op == "placeholder":
                lifted = node.meta["lifted"]
                self.slot_of[node] = starts[lifted.kind] + lifted.index
            elif node.target is ir.accumulate_grad and node.args[1] is None and not node.users:  # no hook sees it
                self._fresh.setdefault(node.args[2], []).append(node)
            elif node.target is ir.accumulate_grad and isinstance(node.args[1], fx.Node):
                self._added_to.append(self.slot_of[node.args[1]])
        self.outputs = [
            None if value is None else self._slot(value) for value in tape.graph.find_nodes(op="output")[0].args[0]
        ]
        parts = partition(tape.graph, bitwise, untraceable, max_calls)
        self.steps: list[Executor] = [self._executor(part) for part in parts]
        self._plan()

    def split(self, steps: list[Executor], position: int, untraceable: dict[fx.Node, str]) -> list[Executor]:
        """Steps in which some calls of the region at ``position`` are opaque. Leaves that the engine would have written
        before it came to one of them are written before it: it may be users' code, which sees that. Other threads keep
        the steps they run."""
        self.untraceable.update(untraceable)
        nodes, after = self._with_writes(steps, position)
        parts = [self._executor(part) for part in cut(nodes, self.bitwise, self.untraceable, self.max_calls)]
        self.steps = [*steps[:position], *parts, *after]
        self._plan()
        return self.steps

    def before(self, steps: Sequence[Executor], position: int) -> fx.Node:
        """Return the node of the tape graph before a region and the leaves that are written after it."""
        first = self._with_writes(steps, position)[0][0]
        return next(node for node, place in self._positions.items() if place == self._positions[first] - 1)

    def _with_writes(self, steps: Sequence[Executor], position: int) -> tuple[list[fx.Node], list[Executor]]:
        """The calls of a region, with those that write to leaves after it, in the tape's order; and the steps after."""
        step, after = steps[position], list(steps[position + 1 :])
        assert isinstance(step, RegionStep)
        nodes = list(step.region.nodes)
        if after and isinstance(after[0], AccumulateStep):
            nodes += [self._writes[call] for call in after[0].calls]
            nodes.sort(key=self._positions.__getitem__)
            del after[0]
        return nodes, after

    def _slot(self, node: fx.Node) -> int:
        if node not in self.slot_of:
            self.slot_of[node] = self.size
            self.size += 1
        return self.slot_of[node]

    def _executor(self, step: Step) -> Executor:
        if isinstance(step, Region):
            calls = [call for node in step.nodes for call in self._fresh.get(node, ())]
            fresh = [FreshLeaf(call, *map(self._slot, (call.args[0], call, call.args[2]))) for call in calls]  # type: ignore[arg-type]
            span = (self._positions[step.nodes[0]], len(step.nodes))
            inputs = [self._slot(node) for node in step.inputs]
            outputs = [(node, self._slot(node)) for node in step.outputs]
            handed_on = [self._slot(node) for node in step.inputs if not is_given(node)]
            return RegionStep(step, span, inputs, outputs, handed_on, fresh)
        if isinstance(step, Opaque):
            uses = [self._slot(source) for source in step.node.all_input_nodes]
            items = [(self._slot(item), int(str(item.args[1]))) for item in step.items]
            arguments = fx.map_arg(step.node.args, lambda node: Slot(self._slot(node)))
            result = self._slot(step.node) if len(step.items) < len(step.node.users) else None
            added_to = self._added_to if "early" in step.node.meta else []
            return OpaqueStep(step.node, arguments, uses, items, result, added_to=added_to)
        return AccumulateStep(
            [self._slot(call.args[0]) for call in step.nodes],  # type: ignore[arg-type]
            [self._slot(call) for call in step.nodes],
            [self._slot(call.args[2]) for call in step.nodes],  # type: ignore[arg-type]
            [call.meta["call"] for call in step.nodes],
            dtypes=[dtype_of(call.args[2]) for call in step.nodes],
        )

    def _plan(self) -> None:
        """Tell each step which slots can be emptied after it, and what it has to look after."""
        kept = set(self.outputs)
        for step in reversed(self.steps):
            if isinstance(step, RegionStep):
                uses = step.inputs
            elif isinstance(step, OpaqueStep):
                uses = step.uses
            else:
                uses = [*step.leaves, *step.owned, *step.shared]
            step.drops = [slot for slot in dict.fromkeys(uses) if slot not in kept]
            if isinstance(step, AccumulateStep):
                step.dropped = frozenset(step.drops)
            kept.update(step.drops)
        self.watched = mark_saved(self.steps, self.slot_of)
