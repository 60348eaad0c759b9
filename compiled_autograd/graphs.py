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
from .interpret import interpret
from .runtime import Program, RegionStep, kind_of_value
from .settings import Settings

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


def _tensor_check(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """Makes a function that says whether as many tensors have the kinds, sizes and strides that ``tensors`` have."""
    plain = [index for index, tensor in enumerate(tensors) if ir.is_plain(tensor)]
    guards = TensorGuards(*[tensors[index] for index in plain], dynamic_dims_sizes=None, dynamic_dims_strides=None)
    if len(plain) == len(tensors):
        return guards.check
    # Asked for the strides of a sparse tensor, TensorGuards ends the process (2.13).
    others = sorted(set(range(len(tensors))).difference(plain))
    expected = [kind_of_value(tensors[index]) for index in others]

    def check(*given: torch.Tensor) -> bool:
        if [kind_of_value(given[index]) for index in others] != expected:
            return False
        return guards.check(*[given[index] for index in plain])

    return check


@dataclass(slots=True, eq=False)
class Variant:
    """A graph made ready for one set of shapes, ambient state and settings."""

    key: VariantKey
    sizes: list[int]
    scalars: list[Any]
    check: Callable[..., bool]
    program: Program

    def serves(self, settings: tuple[Any, ...], ambient: Ambient, handover: Handover) -> bool:
        """Whether this variant is the one for a backward; microseconds, and no Python work for each tensor."""
        return (
            self.sizes == handover.sizes
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
        program = Program(self.tape, get_backend(settings.backend), settings.passes, counts)
        check = _tensor_check(handover.tensors)
        variant = Variant(key, list(handover.sizes), list(handover.scalars), check, program)
        with self._lock:
            miss = explain_variant(key, [other.key for other in self.variants])
            self.variants.append(variant)
        return variant, miss

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

    def find_or_add(self, tape: ir.TapeGraph) -> tuple[CompiledGraph, Miss | None]:
        """The graph for a capture; a record of how it differs from the nearest one where it is new."""
        keys: list[Key] = tape.structure()
        leaf, miss = self._shadow.find(keys)
        if leaf is not None:
            return leaf.payload, None
        added: Leaf[CompiledGraph] = self._shadow.insert(keys, CompiledGraph(tape))
        added.payload.number = added.number
        return added.payload, miss

    def clear(self) -> None:
        """Forget all of them."""
        self._shadow.clear()

    def __iter__(self) -> Iterator[CompiledGraph]:
        return (leaf.payload for leaf in self._shadow)

    def __len__(self) -> int:
        return len(self._shadow)


GRAPHS = Graphs()
