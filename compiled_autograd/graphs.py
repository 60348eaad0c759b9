"""A structure that was captured, with everything that was made of it. Graphs belong to the process."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import networkx as nx
import torch
from torch import fx

from backends import get_backend
from shadow_cache import Key, Leaf, Miss, ShadowGraph, VariantKey, explain_variant

from . import ir
from .ambient import Ambient
from .explain import shape_miss, structure_miss
from .interpret import interpret
from .runtime import Program, RegionStep, kind_of_value
from .settings import Settings
from .shapes import History, Spec, is_static, static_parts, widened

# Checks type, dtype, device, layout, sizes, strides and dispatch keys of many tensors in one call; private in 2.13.
from torch._C._dynamo.guards import TensorGuards  # isort: skip


@dataclass(slots=True)
class Handover:
    """What the engine gave for one backward, in the order of the tape graph's placeholders."""

    graph: CompiledGraph
    tensors: list[torch.Tensor]
    sizes: list[int]
    scalars: list[Any]
    objects: Sequence[Any]
    packed: Sequence[Any]

    def kinds(self) -> tuple[Sequence[Any], ...]:
        """What was given for each kind of placeholder, in the order of :data:`ir.PLACEHOLDERS`."""
        return (self.tensors, self.sizes, self.scalars, self.objects, self.packed)

    def slots(self) -> list[Any]:
        """All of it in one list, which is then the only holder: what users packed can be as large as any tensor."""
        slots = list(itertools.chain(*self.kinds()))
        self.tensors.clear()
        self.objects = self.packed = ()
        return slots


@dataclass(slots=True)
class Shapes:
    """What one variant was made for: a spec for each lifted tensor, and for each size."""

    tensors: list[Spec]
    sizes: list[int | History]
    dynamic: bool = False
    _static_sizes: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.dynamic = not all(is_static(spec) for spec in (*self.tensors, tuple(self.sizes)))
        self._static_sizes = [(index, size) for index, size in enumerate(self.sizes) if type(size) is int]

    @staticmethod
    def of(handover: Handover) -> Shapes:
        """For what was handed over, as it is."""
        return Shapes([tuple(tensor.shape) for tensor in handover.tensors], list(handover.sizes))

    def fits(self, handover: Handover) -> bool:
        """Whether as many tensors of as many dimensions were handed over."""
        return [len(spec) for spec in self.tensors] == [tensor.dim() for tensor in handover.tensors]

    def widened(self, handover: Handover) -> Shapes:
        """With a history for whatever differs from what was handed over."""
        pairs = zip(self.tensors, handover.tensors, strict=True)
        tensors = [widened(spec, tensor) or () for spec, tensor in pairs]
        return Shapes(tensors, list(widened(tuple(self.sizes), tuple(handover.sizes)) or ()))

    def serves(self, sizes: list[int]) -> bool:
        """Whether the sizes that do not change are as they were."""
        if not self.dynamic:
            return self.sizes == sizes
        return all(sizes[index] == size for index, size in self._static_sizes)

    def of_placeholders(self, tape: ir.TapeGraph) -> dict[fx.Node, Spec]:
        """The specs, by the tape graph's placeholders."""
        specs: dict[fx.Node, Spec] = {}
        for node in tape.graph.find_nodes(op="placeholder"):
            kind, index = str(node.target).split("_")
            if kind == "input":
                specs[node] = self.tensors[int(index)]
            elif kind == "size":
                specs[node] = (self.sizes[int(index)],)
        return specs


def _tensor_check(tensors: Sequence[torch.Tensor], specs: Sequence[Spec]) -> Callable[..., bool]:
    """Makes a function that says whether as many tensors have the kinds, sizes and strides that ``tensors`` have.

    Of those whose sizes change, what changes is not asked, nor are the strides: that is left to each region's guards.
    """
    plain = [index for index, tensor in enumerate(tensors) if ir.is_plain(tensor)]
    sizes: Any = [static_parts(specs[index]) for index in plain]
    strides: Any = [
        list(tensors[index].stride()) if is_static(specs[index]) else [None] * len(specs[index]) for index in plain
    ]
    if all(is_static(spec) for spec in specs):
        sizes = strides = None
    guards = TensorGuards(*[tensors[index] for index in plain], dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    if len(plain) == len(tensors):
        return guards.check
    # Asked for the strides of a sparse tensor, TensorGuards ends the process (2.13).
    others = sorted(set(range(len(tensors))).difference(plain))
    expected = [kind_of_value(tensors[index], specs[index]) for index in others]

    def check(*given: torch.Tensor) -> bool:
        if [kind_of_value(given[index], specs[index]) for index in others] != expected:
            return False
        return guards.check(*[given[index] for index in plain])

    return check


@dataclass(slots=True, eq=False)
class Variant:
    """A graph made ready for one set of shapes, ambient state and settings."""

    key: VariantKey
    shapes: Shapes
    scalars: list[Any]
    check: Callable[..., bool]
    program: Program

    def serves(self, settings: tuple[Any, ...], ambient: Ambient, handover: Handover) -> bool:
        """Whether this variant is the one for a backward; microseconds, and no Python work for each tensor."""
        return (
            self.shapes.serves(handover.sizes)
            and self.scalars == handover.scalars
            and self.key.ambient == ambient
            and self.key.settings == settings
            and self.check(*handover.tensors)
        )

    @property
    def regions(self) -> list[RegionStep]:
        """The regions, in the order in which they run."""
        return [step for step in self.program.steps if isinstance(step, RegionStep)]


@dataclass(slots=True, eq=False)
class CompiledGraph:
    """A structure, as :meth:`Session.graphs` gives it.

    Attributes:
        tape: the tape graph, in the order in which it runs.
        variants: what was compiled of it, for each set of shapes, ambient state and settings.
        number: counts the structures of the process.
    """

    tape: ir.TapeGraph
    number: int = -1
    variants: list[Variant] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, handover: Handover) -> list[torch.Tensor | None]:
        """Run the tape graph's calls one by one, without a backend."""
        return interpret(self.tape, dict(zip(ir.PLACEHOLDERS, handover.kinds(), strict=True)))

    def find(self, settings: tuple[Any, ...], ambient: Ambient, handover: Handover) -> Variant | None:
        """The variant for a backward, if there is one."""
        for variant in self.variants:
            if variant.serves(settings, ambient, handover):
                return variant
        return None

    def add(self, settings: Settings, ambient: Ambient, handover: Handover) -> tuple[Variant, Miss]:
        """A new variant, not yet compiled, and why none of those that are there serves."""
        key = VariantKey(settings.key, ambient, (*handover.sizes, *handover.scalars))
        counts = [len(values) for values in handover.kinds()]
        with self._lock:
            before = self._nearest(key, handover)
            widens = before is not None and settings.dynamic is not False
            shapes = before.shapes.widened(handover) if widens else Shapes.of(handover)
            specs = dict(before.program.specs) if widens else {}
            specs.update(shapes.of_placeholders(self.tape))
            backend = get_backend(settings.backend)
            program = Program(self.tape, backend, settings.passes, counts, specs, shapes.dynamic)
            check = _tensor_check(handover.tensors, shapes.tensors)
            variant = Variant(key, shapes, list(handover.scalars), check, program)
            miss = None
            if before is not None:
                was, now = before.shapes, Shapes.of(handover)
                miss = shape_miss(
                    self.tape, (was.tensors, tuple(was.sizes)), (now.tensors, tuple(now.sizes)), shapes.dynamic
                )
            miss = miss or explain_variant(key, [other.key for other in self.variants])
            self.variants.append(variant)
        return variant, miss

    def _nearest(self, key: VariantKey, handover: Handover) -> Variant | None:
        """The newest variant that differs from a new one in nothing but sizes and strides."""
        for variant in reversed(self.variants):
            same_state = (variant.key.settings, variant.key.ambient) == (key.settings, key.ambient)
            if same_state and variant.scalars == handover.scalars and variant.shapes.fits(handover):
                return variant
        return None

    @property
    def aten(self) -> list[fx.GraphModule]:
        """The ATen graphs of the newest variant's regions."""
        return [graph for region in self.regions for graph in region.aten()]

    @property
    def regions(self) -> list[RegionStep]:
        """The regions of the newest variant."""
        return self.variants[-1].regions if self.variants else []

    def readable(self) -> str:
        """The tape graph's text form."""
        return self.tape.readable()

    def to_networkx(self) -> nx.DiGraph:
        """The tape as a directed graph, see :meth:`ir.TapeGraph.to_networkx`."""
        return self.tape.to_networkx()

    def __repr__(self) -> str:
        return f"<CompiledGraph {self.number}: {len(self.tape.calls)} nodes, {len(self.variants)} variants>"


class Graphs:
    """Every structure of the process, in the shadow graph."""

    def __init__(self) -> None:
        self._shadow: ShadowGraph[CompiledGraph] = ShadowGraph()

    def find(self, keys: Sequence[Key]) -> CompiledGraph | None:
        """The graph of a structure, if it was captured before."""
        leaf, _ = self._shadow.find(keys)
        return None if leaf is None else leaf.payload

    def explain(self, tape: ir.TapeGraph, keys: Sequence[Key]) -> Miss:
        """How a structure differs from the nearest of those that were captured before."""
        return structure_miss(tape, keys, *self._shadow.nearest(keys))

    def add(self, tape: ir.TapeGraph, keys: Sequence[Key]) -> CompiledGraph:
        """A graph for a new structure."""
        added: Leaf[CompiledGraph] = self._shadow.insert(keys, CompiledGraph(tape))
        added.payload.number = added.number
        return added.payload

    def clear(self) -> None:
        """Forget all of them."""
        self._shadow.clear()

    def __iter__(self) -> Iterator[CompiledGraph]:
        return (leaf.payload for leaf in self._shadow)

    def __len__(self) -> int:
        return len(self._shadow)


GRAPHS = Graphs()
