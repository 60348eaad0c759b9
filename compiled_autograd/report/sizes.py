"""Sizes of all that a variant computes, found without computing: its ATen graphs run on tensors without memory.

The device ``meta`` has shapes, strides and dtypes alone. What cannot be run so has no sizes, and the report says it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ..backends.signal_handlers import raise_what_a_handler_raised
from ..cache.variants import Variant
from ..guards.shapes import size_in
from ..steps.steps import CompiledRegion, RegionStep
from ..torch_api.dtype_names import short_name

_META = torch.device("meta")
_SAVED, _GIVEN, _MADE, _KEPT = "saved", "given", "made", "kept"


@dataclass(slots=True)
class Use:
    """After one operator of a region: its name, what it gave in words, and the bytes then held of what the forward
    saved, and of what steps of the backward made. What is held beyond the region does not count."""

    name: str
    gave: str
    saved: int
    made: int


@dataclass(slots=True)
class RegionSizes:
    """What one region does with memory; ``error`` says why that is not known.

    Attributes:
        saved, made: bytes of what it is given and then nobody keeps: of what the forward saved, and of what earlier
            steps made.
        weights: placeholders of the tape graph that are weights: they are there before and after.
        results: what it gives.
    """

    saved: int = 0
    made: int = 0
    uses: list[Use] = field(default_factory=list)
    results: list[Any] = field(default_factory=list)
    weights: set[fx.Node] = field(default_factory=set)
    error: str = ""


def in_words(value: Any) -> str:
    """``f32[5, 3]`` of a tensor; of several, all of them."""
    if isinstance(value, torch.Tensor):
        return f"{short_name(value.dtype)}[{', '.join(map(str, value.shape))}]"
    if isinstance(value, (list, tuple)):
        return ", ".join(in_words(each) for each in value if isinstance(each, torch.Tensor))
    return ""


def size_in_bytes(value: Any) -> int:
    """Of a tensor's memory."""
    return value.untyped_storage().nbytes() if isinstance(value, torch.Tensor) else 0


def given_tensors(variant: Variant) -> dict[fx.Node, Any]:
    """For each placeholder of the tape graph what the variant was made for: a tensor on ``meta``, a size, a scalar."""
    tape, shapes = variant.program.tape, variant.shapes
    given: dict[fx.Node, Any] = {}
    for node in tape.graph.find_nodes(op="placeholder"):
        lifted = node.meta["lifted"]
        if lifted.kind == "input":
            sizes = [_last(part) for part in shapes.tensors[lifted.index]]
            strides = shapes.strides[lifted.index]
            if strides is not None:
                given[node] = _empty(sizes, strides, tape.inputs[lifted.index].dtype)
        elif lifted.kind == "size":
            given[node] = _last(shapes.sizes[lifted.index])
        elif lifted.kind == "scalar":
            given[node] = variant.scalars[lifted.index]
    return given


def _last(part: Any) -> int:
    """A size, or the one that was seen last of a size that changes."""
    size = size_in(part)
    return size if isinstance(size, int) else size[1]


def _empty(sizes: Any, strides: Any, dtype: str) -> torch.Tensor:
    return torch.empty_strided(sizes, strides, dtype=getattr(torch, dtype), device=_META)


def run_region(step: RegionStep, compiled: CompiledRegion, known: Mapping[fx.Node, Any]) -> RegionSizes:
    """Run a region on tensors without memory.

    Args:
        known: for values of the tape graph, what they are; those that are missing are taken from what the region was
            compiled for.
    """
    sizes = RegionSizes()
    try:
        values = dict(known)
        values.update((node, each) for node, each in _kinds(step, compiled) if node not in values)
        inputs = [step.region.inputs[place] for place in compiled.wiring.taken]
        drops = set(step.drops)
        dropped = {node for node, slot in zip(step.region.inputs, step.inputs, strict=True) if slot in drops}
        _run(compiled.aten.graph_module().graph, inputs, values, dropped, sizes)
    except Exception as error:  # noqa: BLE001  there are no sizes then, and the report says why
        raise_what_a_handler_raised(error)
        sizes.error = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
    return sizes


def _kinds(step: RegionStep, compiled: CompiledRegion) -> Iterator[tuple[fx.Node, torch.Tensor]]:
    """What earlier steps handed on when the region was compiled."""
    nodes = [node for node, _ in step.asked()]
    for node, kind in zip(nodes, compiled.kind, strict=False):
        if isinstance(kind, tuple) and len(kind) > 4 and isinstance(kind[0], type) and kind[2] is not None:
            if None not in kind[1]:
                yield node, torch.empty_strided(kind[1], kind[2], dtype=kind[3], device=_META)
        elif isinstance(kind, (int, float)):
            yield node, kind  # type: ignore[misc]


def _run(
    graph: fx.Graph,
    inputs: Sequence[fx.Node],
    values: Mapping[fx.Node, Any],
    dropped: Container[fx.Node],
    sizes: RegionSizes,
) -> None:
    held = _Held()
    environment: dict[fx.Node, Any] = {}
    ends: dict[fx.Node, list[fx.Node]] = {}
    last = {used: node for node in graph.nodes for used in node.all_input_nodes}
    for used, user in last.items():
        ends.setdefault(user, []).append(used)
    places = iter(inputs)
    for node in graph.nodes:
        if node.op == "placeholder":
            source = next(places)
            value = environment[node] = values[source]
            if node.name.startswith("arg"):  # as lowering names weights
                sizes.weights.add(source)
            if source in dropped and source not in sizes.weights:
                held.take(node, value, _SAVED if source.op == "placeholder" else _GIVEN)
            else:
                held.take(node, value, _KEPT)
            sizes.saved, sizes.made = held.bytes[_SAVED], held.bytes[_GIVEN]
        elif node.op == "output":
            sizes.results = list(fx.map_arg(node.args[0], environment.__getitem__))
        else:
            result = environment[node] = _result(graph, node, environment)
            for each in result if isinstance(result, (list, tuple)) else (result,):
                held.take(node, each, _MADE)
            made = held.bytes[_GIVEN] + held.bytes[_MADE]
            sizes.uses.append(Use(node.name, in_words(result), held.bytes[_SAVED], made))
            for used in ends.get(node, ()):
                held.release(used)


def _result(graph: fx.Graph, node: fx.Node, environment: dict[fx.Node, Any]) -> Any:
    if node.op == "get_attr":
        value = operator.attrgetter(str(node.target))(graph.owning_module)
        return value.to(_META) if isinstance(value, torch.Tensor) else value
    arguments, named = fx.map_arg(node.args, environment.__getitem__), {}
    named.update(fx.map_arg(node.kwargs, environment.__getitem__))
    if named.get("device") is not None:
        named["device"] = _META
    target: Callable[..., Any] = node.target  # type: ignore[assignment]
    return target(*arguments, **named)


class _Held:
    """Bytes of memory that is held, by where it comes from. What is kept beyond the region is not counted."""

    def __init__(self) -> None:
        self.bytes = dict.fromkeys((_SAVED, _GIVEN, _MADE, _KEPT), 0)
        self._users: dict[int, int] = {}
        self._of: dict[fx.Node, list[int]] = {}
        self._from: dict[int, tuple[str, int]] = {}
        self._alive: list[Any] = []  # else an address would be used again

    def take(self, node: fx.Node, value: Any, where_from: str) -> None:
        """A node of the graph has a value; memory that is known already is not counted again."""
        if not isinstance(value, torch.Tensor):
            return
        self._alive.append(value)
        memory = value.untyped_storage()._cdata
        if memory not in self._from:
            self._from[memory] = where_from, size_in_bytes(value)
            self.bytes[where_from] += size_in_bytes(value)
        self._users[memory] = self._users.get(memory, 0) + 1
        self._of.setdefault(node, []).append(memory)

    def release(self, node: fx.Node) -> None:
        """Nobody uses what the node has any more."""
        for memory in self._of.pop(node, ()):
            self._users[memory] -= 1
            if not self._users[memory]:
                where_from, count = self._from[memory]
                self.bytes[where_from] -= count
