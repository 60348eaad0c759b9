"""Runs one variant of a tape graph: its regions, the opaque calls between them, and what the leaves receive.

A region is lowered and compiled when it is first reached, with the values that it then has in hand: what a Python
function gave is known only there. Values lie in slots, one for each lifted tensor, size, scalar and object and one for
each value that steps hand on; a slot is emptied after its last use, so that memory is freed as under eager.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.fx._lazy_graph_module import _LazyGraphModule

from backends import Backend
from shadow_cache import Failure, Miss

from . import ir
from .accumulate import accumulate, stealable
from .cpp_warnings import issuing_warnings
from .errors import UntraceableError
from .interpret import finish
from .lower import Lowered, lower
from .partition import Opaque, Region, Step, cut, partition

Slots = list[Any]
Pass = Callable[[fx.GraphModule], fx.GraphModule | None]


def no_hooks(captured: Sequence[Any]) -> list[Any]:
    """Nobody registers hooks while nothing runs."""
    return []


@dataclass(slots=True)
class RunLog:
    """What one run did besides computing: seconds by stage, regions compiled, and what failed on the way."""

    seconds: dict[str, float] = field(default_factory=dict)
    compiles: int = 0
    failures: list[Failure] = field(default_factory=list)
    misses: list[Miss] = field(default_factory=list)
    call: int = 0
    """Which node of the tape runs users' code now: an index into ``TapeGraph.calls``."""
    asked: set[int] = field(default_factory=set)
    """Nodes whose users' code asked which node is running; it may have registered more hooks on it."""
    late_hooks: Callable[[Sequence[Any]], list[Any]] = no_hooks
    """Post-hooks of the running node that are none of those captured."""

    def add(self, stage: str, seconds: float) -> None:
        self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds


@dataclass(slots=True)
class Specialised:
    """A compiled region for one set of inputs.

    Attributes:
        aten: the graph that the backend was given.
        call: what it made of it.
        arguments: slots of the tensors that it takes.
        results: slots, and the outputs that go into them.
        passed: slots, and those of values that go there as they are.
        copied: as ``results``, for outputs that the backend gave in memory that something else sees: copies go there.
    """

    aten: fx.GraphModule
    call: Callable[[list[Any]], Sequence[Any]]
    arguments: list[int]
    results: list[tuple[int, int]]
    copied: list[tuple[int, int]]
    passed: list[tuple[int, int]]


@dataclass(slots=True, eq=False)
class RegionStep:
    """A region, and what was compiled for it: one for each kind of what earlier steps hand to it."""

    region: Region
    inputs: list[int]
    outputs: list[tuple[fx.Node, int]]
    handed_on: list[int]
    fresh: dict[fx.Node, int]
    compiled: dict[Any, Specialised | None] = field(default_factory=dict)
    drops: list[int] = field(default_factory=list)

    def aten(self) -> list[fx.GraphModule]:
        """The ATen graphs that were compiled for it."""
        return [each.aten for each in self.compiled.values() if each is not None]


@dataclass(slots=True, eq=False)
class OpaqueStep:
    """A call that runs as it is."""

    node: fx.Node
    arguments: Any
    uses: list[int]
    items: list[tuple[int, int]]
    result: int | None
    drops: list[int] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class AccumulateStep:
    """Leaves, and for each the slot of a gradient that it can keep, and of one that it must copy."""

    leaves: list[int]
    owned: list[int]
    shared: list[int]
    drops: list[int] = field(default_factory=list)


Executor = RegionStep | OpaqueStep | AccumulateStep
_COMPILING = threading.RLock()  # neither tracing nor Inductor can be used by two threads at once


class Program:
    """A tape graph made ready to run for one set of shapes.

    Args:
        tape: the tape graph, in the engine's order.
        backend: what compiles regions.
        passes: functions over each region's ATen graph; each gives a new one, or None where it changed it in place.
        counts: how many values of each kind of placeholder the engine hands over.

    Attributes:
        steps: what runs, in order.
        untraceable: calls that stay opaque, and why.
    """

    def __init__(self, tape: ir.TapeGraph, backend: Backend, passes: Sequence[Pass], counts: Sequence[int]) -> None:
        self.tape = tape
        self.backend = backend
        self.passes = tuple(passes)
        self.untraceable = {node: node.meta["untraceable"] for node in tape.graph.nodes if "untraceable" in node.meta}
        self._slot_of: dict[fx.Node, int] = {}
        starts = dict(zip(ir.PLACEHOLDERS, _running_sums(counts), strict=True))
        self._size = sum(counts)
        self._given = self._size
        self._fresh: dict[fx.Node, list[fx.Node]] = {}
        self._post_hooks: dict[int, list[int]] = {}
        for node in tape.graph.nodes:
            if node.op == "placeholder":
                kind, index = str(node.target).split("_")
                self._slot_of[node] = starts[kind] + int(index)
            elif node.target is ir.accumulate_grad and node.args[1] is None:
                self._fresh.setdefault(node.args[2], []).append(node)
            elif node.target is ir.post_hook:
                self._post_hooks.setdefault(node.meta["call"], []).append(self._slot_of[node.args[0]])
        self._outputs = [
            None if value is None else self._slot(value) for value in tape.graph.find_nodes(op="output")[0].args[0]
        ]
        steps = partition(tape.graph, backend.bitwise, self.untraceable)
        self.steps: list[Executor] = [self._executor(step) for step in steps]
        self._plan_drops()

    # ---- running ---------------------------------------------------------------------------------------------------

    def run(self, given: Slots, log: RunLog) -> list[torch.Tensor | None]:
        """Run everything, with grad mode off.

        Args:
            given: what the engine handed over, kind after kind. The list is emptied.
            log: is told what was done.

        Returns:
            The gradients that ``autograd.grad`` asked for; empty for ``backward``.
        """
        slots = given
        slots.extend([None] * (self._size - self._given))
        steps = self.steps
        position = 0
        while position < len(steps):
            step = steps[position]
            if isinstance(step, RegionStep):
                try:
                    self._run_region(step, slots, log)
                except UntraceableError as error:
                    steps = self._split(steps, position, error)
                    slots.extend([None] * (self._size - len(slots)))
                    continue
            elif isinstance(step, OpaqueStep):
                log.call = step.node.meta["call"]
                _run_opaque(step, slots, self.tape.calls[log.call].name)
                if log.call in log.asked and log.late_hooks(self._captured_hooks(log.call, slots)):
                    known = {node: slots[slot] for node, slot in self._slot_of.items()}
                    return finish(self.tape, step.node, known, lambda call: self._captured_hooks(call, slots), log)
            else:
                with torch._C.DisableTorchFunctionSubclass():
                    _run_accumulate(step, slots)
            for slot in step.drops:
                slots[slot] = None
            position += 1
        return [None if slot is None else slots[slot] for slot in self._outputs]

    def _captured_hooks(self, call: int, slots: Slots) -> list[Any]:
        """The post-hooks that a node had when the engine walked the tape."""
        return [slots[slot] for slot in self._post_hooks.get(call, ())]

    def _run_region(self, step: RegionStep, slots: Slots, log: RunLog) -> None:
        key = tuple([kind_of_value(slots[slot]) for slot in step.handed_on])
        if key not in step.compiled:
            with _COMPILING:
                if key not in step.compiled:
                    if step.compiled:
                        log.misses.append(_other_kind(step, key, next(reversed(step.compiled))))
                    step.compiled[key] = self._first_run(step, slots, log)
                    return
        compiled = step.compiled[key]
        if compiled is None:
            _interpret(step, slots)
            return
        arguments = [slots[slot] for slot in compiled.arguments]
        for to, source in compiled.passed:
            slots[to] = slots[source]
        if not getattr(compiled.call, "keeps_inputs", False):
            for slot in step.drops:
                slots[slot] = None
            results = _call(compiled.call, arguments)
        else:
            try:
                results = _call(compiled.call, arguments)
            except Exception as error:  # noqa: BLE001  the inputs are still there: the step goes on
                log.failures.append(_failure("run", self.backend.name, step.region, error))
                _interpret(step, slots)
                return
        for slot, index in compiled.results:
            slots[slot] = results[index]
        for slot, index in compiled.copied:
            slots[slot] = results[index].clone()

    # ---- compiling -------------------------------------------------------------------------------------------------

    def _first_run(self, step: RegionStep, slots: Slots, log: RunLog) -> Specialised | None:
        """Lower, compile and run a region. None: the backend failed, and the region's calls ran one by one."""
        started = time.perf_counter()
        try:
            lowered = self._lower(step, slots)
        except UntraceableError:
            raise
        except Exception as error:  # noqa: BLE001  whatever tracing throws, the step goes on
            log.failures.append(_failure("lower", self.backend.name, step.region, error))
            _interpret(step, slots)
            return None
        finally:
            log.add("lower", time.perf_counter() - started)
        started = time.perf_counter()
        arguments = [step.inputs[index] for index in lowered.tensors]
        tensors = [slots[slot] for slot in arguments]
        try:
            aten = _copy(lowered.graph_module)
            call = self.backend.compile(lowered.graph_module, lowered.examples)
            results = _call(call, list(tensors))
        except Exception as error:  # noqa: BLE001  whatever a backend throws, the step goes on
            log.failures.append(_failure("compile", self.backend.name, step.region, error))
            _interpret(step, slots)
            return None
        finally:
            log.add("compile", time.perf_counter() - started)
        log.compiles += 1
        values = [(self._slot_of[node], index) for node, index in lowered.values.items() if index is not None]
        fresh = [(step.fresh[call], index) for call, index in lowered.leaves.items() if index is not None]
        passed = [
            (self._slot(call.args[2]), step.inputs[index])  # type: ignore[arg-type]
            for call, index in lowered.passed.items()
        ]
        for to, source in passed:
            slots[to] = slots[source]
        shared = _not_owned(results, [index for _, index in fresh], tensors)
        for slot, index in values + fresh:
            slots[slot] = results[index].clone() if index in shared else results[index]
        return Specialised(
            aten,
            call,
            arguments,
            values + [(slot, index) for slot, index in fresh if index not in shared],
            [(slot, index) for slot, index in fresh if index in shared],
            passed,
        )

    def _lower(self, step: RegionStep, slots: Slots) -> Lowered:
        given = [slots[slot] for slot in step.inputs]
        leaves = {call: slots[self._slot_of[call.args[0]]] for call in step.fresh}  # type: ignore[index]
        leaves = {call: leaf for call, leaf in leaves.items() if ir.is_plain(leaf)}
        lowered = lower(step.region, given, leaves, self.backend.decompositions())
        for each in self.passes:
            lowered.graph_module = each(lowered.graph_module) or lowered.graph_module
        return lowered

    def _split(self, steps: list[Executor], position: int, error: UntraceableError) -> list[Executor]:
        """Calls of a region cannot be traced: they become opaque. Other threads keep the steps they run."""
        step = steps[position]
        assert isinstance(step, RegionStep)
        reason = f"{type(error.cause).__name__}: {error.cause}"
        self.untraceable.update(dict.fromkeys(error.nodes, reason))
        if error.always:  # then the next variants know it too
            for node in error.nodes:
                node.meta["untraceable"] = reason
        parts = [self._executor(part) for part in cut(step.region.nodes, self.backend.bitwise, self.untraceable)]
        self.steps = [*steps[:position], *parts, *steps[position + 1 :]]
        self._plan_drops()
        return self.steps

    # ---- planning --------------------------------------------------------------------------------------------------

    def _slot(self, node: fx.Node) -> int:
        if node not in self._slot_of:
            self._slot_of[node] = self._size
            self._size += 1
        return self._slot_of[node]

    def _executor(self, step: Step) -> Executor:
        if isinstance(step, Region):
            fresh = {call: self._slot(call) for node in step.nodes for call in self._fresh.get(node, ())}
            inputs = [self._slot(node) for node in step.inputs]
            outputs = [(node, self._slot(node)) for node in step.outputs]
            handed_on = [self._slot(node) for node in step.inputs if node.op != "placeholder"]
            return RegionStep(step, inputs, outputs, handed_on, fresh)
        if isinstance(step, Opaque):
            uses = [self._slot(source) for source in step.node.all_input_nodes]
            items = [(self._slot(item), int(str(item.args[1]))) for item in step.items]
            arguments = fx.map_arg(step.node.args, lambda node: _Slot(self._slot(node)))
            result = self._slot(step.node) if len(step.items) < len(step.node.users) else None
            return OpaqueStep(step.node, arguments, uses, items, result)
        return AccumulateStep(
            [self._slot(call.args[0]) for call in step.nodes],  # type: ignore[arg-type]
            [self._slot(call) for call in step.nodes],
            [self._slot(call.args[2]) for call in step.nodes],  # type: ignore[arg-type]
        )

    def _plan_drops(self) -> None:
        """After which step each slot can be emptied."""
        kept = set(self._outputs)
        for step in reversed(self.steps):
            if isinstance(step, RegionStep):
                uses = step.inputs
            elif isinstance(step, OpaqueStep):
                uses = step.uses
            else:
                uses = [*step.leaves, *step.owned, *step.shared]
            step.drops = [slot for slot in dict.fromkeys(uses) if slot not in kept]
            kept.update(step.drops)


class _Slot(int):
    """A slot's number among the arguments of an opaque call, where a plain int is a constant."""


def _running_sums(counts: Sequence[int]) -> list[int]:
    return [sum(counts[:index]) for index in range(len(counts))]


def kind_of_value(value: Any) -> Any:
    """What compiled code depends on, of one of its inputs."""
    if not isinstance(value, torch.Tensor):
        return value
    with torch._C.DisableTorchFunctionSubclass():
        stride = value.stride() if value.layout is torch.strided else None
        kind = (value.shape, stride, value.dtype, value.device, value.layout, value.is_conj(), value.is_neg())
    return (type(value), *kind)


def _not_owned(results: Sequence[Any], fresh: Sequence[int], arguments: Sequence[Any]) -> set[int]:
    """Which fresh gradients a backend gave in memory that something else sees, against what the graph says."""
    seen = {_memory(value) for value in arguments}
    seen.update(_memory(value) for index, value in enumerate(results) if index not in set(fresh))
    shared = set()
    for index in fresh:
        memory = _memory(results[index])
        if memory is not None and memory in seen:
            shared.add(index)
        seen.add(memory)
    return shared


def _memory(value: Any) -> int | None:
    if not isinstance(value, torch.Tensor) or not ir.is_plain(value):
        return None
    if value.numel() == 0 or value._is_zerotensor():  # zeros without memory
        return None
    return value.untyped_storage().data_ptr()


def _call(call: Callable[[list[Any]], Sequence[Any]], arguments: list[Any]) -> Sequence[Any]:
    if torch._C._is_any_autocast_enabled():
        with torch._C._DisableAutocast():  # the graph has its casts in it
            return call(arguments)
    return call(arguments)


def _other_kind(step: RegionStep, new: tuple[Any, ...], old: tuple[Any, ...]) -> Miss:
    """What an earlier step handed on differs in shape, strides, dtype or definedness from what was compiled for."""
    made = [node for node in step.region.inputs if node.op != "placeholder"]
    for node, one, other in zip(made, old, new, strict=True):
        if one != other:
            source = node.args[0] if isinstance(node.args[0], fx.Node) else node
            return Miss("layout", f"what {source.name} gave", str(one), str(other))
    raise ir.IllegalGraphError(f"two equal kinds of inputs taken for different: {new}")


def _copy(graph_module: fx.GraphModule) -> fx.GraphModule:
    """The graph as it is now, without the fake tensors in its nodes; backends change the one that they get."""
    graph = fx.Graph()
    output = graph.graph_copy(graph_module.graph, {})
    graph.output(output)
    for node in graph.nodes:
        node.meta = {}
    return _LazyGraphModule(graph_module, graph)


def _failure(stage: str, backend: str, region: Region, error: Exception) -> Failure:
    first_line = str(error).partition("\n")[0]
    where = f"backend {backend!r}, a region of {len(region.nodes)} calls"
    return Failure(stage, where, f"{type(error).__name__}: {first_line[:300]}", "the region's calls run one by one")


def _interpret(step: RegionStep, slots: Slots) -> None:
    """Run a region's opaque calls one by one, for real."""
    known = {node: slots[slot] for node, slot in zip(step.region.inputs, step.inputs, strict=True)}
    for node in step.region.nodes:
        known[node] = node.target(*fx.map_arg(node.args, known.__getitem__))  # type: ignore[operator]
    for node, slot in step.outputs:
        slots[slot] = known[node]


def _run_opaque(step: OpaqueStep, slots: Slots, name: str) -> None:
    arguments = _filled(step.arguments, slots)
    try:
        if step.node.target in ir.USERS_CODE:
            result = step.node.target(*arguments)  # type: ignore[operator]
        else:
            with torch._C.DisableTorchFunctionSubclass():  # the engine's own operators are not the user's
                result = issuing_warnings(step.node.target, *arguments)  # type: ignore[arg-type]
    except RuntimeError as error:
        raise _in_eagers_words(error, name) from error.__cause__
    for slot, index in step.items:
        slots[slot] = result[index]
    if step.result is not None:
        slots[step.result] = result


_TRACING = "[Compiled Autograd Tracing:]"


def _in_eagers_words(error: RuntimeError, name: str) -> RuntimeError:
    """``validate_outputs`` of the seam words its errors for itself; the engine names the node instead."""
    text = str(error)
    if not text.startswith(_TRACING):
        return error
    return RuntimeError(f"Function {name} returned an {text.removeprefix(_TRACING)}")


def _filled(template: Any, slots: Slots) -> Any:
    if type(template) is _Slot:
        return slots[template]
    if isinstance(template, (list, tuple)):
        return [_filled(each, slots) for each in template]
    return template


def _run_accumulate(step: AccumulateStep, slots: Slots) -> None:
    leaves: list[torch.Tensor] = []
    grads: list[torch.Tensor | None] = []
    for leaf, own, shared in zip(step.leaves, step.owned, step.shared, strict=True):
        grad = slots[own]
        if grad is not None:
            if own in step.drops:
                slots[own] = None
            leaves.append(slots[leaf])
            grads.append(grad)
            continue
        grad = slots[shared]
        if grad is None:
            continue
        if shared in step.drops:  # else a later step needs it, and that reference keeps the leaf from stealing it
            slots[shared] = None
        if slots[leaf].grad is None:
            can_keep = stealable(grad, slots[leaf])
            accumulate([slots[leaf]], [grad], [can_keep])
        else:
            leaves.append(slots[leaf])
            grads.append(grad)
        if own not in step.drops:  # a hook of the leaf's node sees what the leaf may have kept
            slots[own] = grad
    accumulate(leaves, grads, [True] * len(leaves))
