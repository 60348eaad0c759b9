"""Compute the sizes of all values of a variant, by running its ATen graphs on tensors without memory.

Tensors on the device ``meta`` have only shapes, strides and dtypes. If a graph cannot run on this device, its sizes are
unknown, and the report says so.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ..cache.variants import Variant
from ..guards.shapes import size_in
from ..steps.steps import CompiledRegion, RegionStep
from ..torch_api.dtype_names import short_name

_META = torch.device("meta")
_SAVED, _GIVEN, _MADE, _KEPT = "saved", "given", "made", "kept"


@dataclass(slots=True)
class Use:
    """The state after one operator of a region: the operator's name, its result in words, the live bytes that the
    forward saved, and the live bytes that the backward made. Memory that outlives the region does not count."""

    name: str
    gave: str
    saved: int
    made: int


@dataclass(slots=True)
class RegionSizes:
    """The memory use of one region; ``error`` says why it is unknown.

    Attributes:
        saved, made: bytes of the inputs that end with the region: saved by the forward, and made by earlier steps.
        weights: placeholders of the tape graph that are weights: they live before and after.
        results: the results of the region.
    """

    saved: int = 0
    made: int = 0
    uses: list[Use] = field(default_factory=list)
    results: list[Any] = field(default_factory=list)
    weights: set[fx.Node] = field(default_factory=set)
    error: str = ""


def in_words(value: Any) -> str:
    """Format the tensors of a value: ``f32[5, 3]``."""
    if isinstance(value, torch.Tensor):
        return f"{short_name(value.dtype)}[{', '.join(map(str, value.shape))}]"
    if isinstance(value, (list, tuple)):
        return ", ".join(in_words(each) for each in value if isinstance(each, torch.Tensor))
    return ""


def size_in_bytes(value: Any) -> int:
    """Return the bytes of a tensor's storage; 0 for other values."""
    return value.untyped_storage().nbytes() if isinstance(value, torch.Tensor) else 0


def given_tensors(variant: Variant) -> dict[fx.Node, Any]:
    """Return the value of each placeholder for which the variant was compiled: a ``meta`` tensor, a size, a scalar."""
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
    """Return a size; of a size that changes, the last one seen."""
    size = size_in(part)
    return size if isinstance(size, int) else size[1]


def _empty(sizes: Any, strides: Any, dtype: str) -> torch.Tensor:
    return torch.empty_strided(sizes, strides, dtype=getattr(torch, dtype), device=_META)


def run_region(step: RegionStep, compiled: CompiledRegion, known: Mapping[fx.Node, Any]) -> RegionSizes:
    """Run a region on tensors without memory.

    Args:
        known: values of the nodes of the tape graph. A missing value is taken from the kinds for which the region was
            compiled.
    """
    sizes = RegionSizes()
    try:
        values = dict(known)
        values.update((node, each) for node, each in _kinds(step, compiled) if node not in values)
        inputs = [step.region.inputs[place] for place in compiled.wiring.taken]
        drops = set(step.drops)
        dropped = {node for node, slot in zip(step.region.inputs, step.inputs, strict=True) if slot in drops}
        _run(compiled.aten.graph_module().graph, inputs, values, dropped, sizes)
    except Exception as error:  # noqa: BLE001  the sizes are then unknown, and the report says why
        sizes.error = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
    return sizes


def _kinds(step: RegionStep, compiled: CompiledRegion) -> Iterator[tuple[fx.Node, torch.Tensor]]:
    """Yield the results of earlier steps for which the region was compiled, as ``meta`` tensors or numbers."""
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
            if node.name.startswith("arg"):  # the lowering's name for weights
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
    """Live bytes by their origin. Memory that outlives the region is not counted."""

    def __init__(self) -> None:
        self.bytes = dict.fromkeys((_SAVED, _GIVEN, _MADE, _KEPT), 0)
        self._users: dict[int, int] = {}
        self._of: dict[fx.Node, list[int]] = {}
        self._from: dict[int, tuple[str, int]] = {}
        self._alive: list[Any] = []  # keeps tensors alive, so that no address is reused

    def take(self, node: fx.Node, value: Any, where_from: str) -> None:
        """Count the memory of a node's value, unless it is counted already."""
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
        """Release the memory of a node's value after its last use."""
        for memory in self._of.pop(node, ()):
            self._users[memory] -= 1
            if not self._users[memory]:
                where_from, count = self._from[memory]
                self.bytes[where_from] -= count
