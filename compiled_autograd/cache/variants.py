"""The handed-over values of one backward, and the shapes, state and settings of a variant."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import torch
from torch import fx

from .. import ir
from ..diagnostics.variant_misses import TensorKind, tensor_kind
from ..guards.ambient import Ambient
from ..guards.shapes import Spec, is_static, marked, promoted, static_parts, widened, with_strides
from ..guards.value_kinds import kind_of_value
from ..process_state import WeaklyReferred
from ..reproduction.recording import Sample
from ..runtime.native_run import NativeRuns
from ..runtime.program import Program
from ..shadow_cache import Timing, VariantKey
from ..steps.steps import RegionStep
from ..torch_api import attributes
from ..user_code.reducers import Groups

# Checks type, dtype, device, layout, sizes, strides and dispatch keys of many tensors in one call; private in 2.13.
from torch._C._dynamo.guards import TensorGuards  # isort: skip


@dataclass(slots=True)
class Handover:
    """The engine's values for one backward, in the order of the tape graph's placeholders.

    ``reduced`` are the leaves with hooks of DDP's reducer; ``unwritten`` others with such hooks, whose gradient is
    undefined.
    """

    tensors: list[torch.Tensor]
    sizes: list[int]
    scalars: list[Any]
    objects: Sequence[Any]
    packed: Sequence[Any]
    reduced: Groups = ()
    unwritten: Sequence[torch.Tensor] = ()

    def kinds(self) -> tuple[Sequence[Any], ...]:
        """Return the values for each kind of placeholder, in the order of :data:`ir.PLACEHOLDERS`."""
        return (self.tensors, self.sizes, self.scalars, self.objects, self.packed)

    def by_kind(self) -> dict[str, Sequence[Any]]:
        """Return the values by the name of their kind."""
        return dict(zip(ir.PLACEHOLDERS, self.kinds(), strict=True))

    def slots(self) -> list[Any]:
        """Move all values into one list, which is then the only holder: packed values can be as large as any tensor."""
        slots = list(itertools.chain(*self.kinds()))
        self.tensors.clear()
        self.objects = self.packed = ()
        return slots


@dataclass(slots=True)
class Shapes:
    """The shapes that one variant serves: a spec for each lifted tensor, and one for all sizes.

    ``strides`` are those of the tensors that it was made with, None for one that has none; ``kinds`` has their other
    properties, for people.
    """

    tensors: list[Spec]
    sizes: Spec
    strides: list[tuple[int, ...] | None]
    kinds: list[TensorKind]
    dynamic: bool = field(init=False)
    _static_sizes: list[tuple[int, int]] = field(init=False)
    _sizes: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.dynamic = not all(is_static(spec) for spec in (*self.tensors, self.sizes))
        self._static_sizes = [(index, size) for index, size in enumerate(self.sizes) if isinstance(size, int)]
        self._sizes = [size for _, size in self._static_sizes]

    @staticmethod
    def of(handover: Handover, dynamic: bool | None = False) -> Shapes:
        """For what was handed over, as it is.

        Args:
            dynamic: True makes symbols of all dimensions but those of parameters; None of those that
                ``torch._dynamo.mark_dynamic`` marked, and of what has the same size.
        """
        changing = set() if dynamic is False else marked(handover.tensors, everything=dynamic is True)
        tensors = [promoted(tensor, changing) for tensor in handover.tensors]
        sizes = tuple((size, size) if size in changing else size for size in handover.sizes)
        strides = [attributes.stride(tensor) if ir.is_plain(tensor) else None for tensor in handover.tensors]
        return Shapes(tensors, sizes, strides, [tensor_kind(tensor) for tensor in handover.tensors])

    def fits(self, handover: Handover) -> bool:
        """Return whether as many tensors of as many dimensions were handed over."""
        return [len(spec) for spec in self.tensors] == [attributes.dim(tensor) for tensor in handover.tensors]

    def widened(self, handover: Handover, added_to: Container[int]) -> Shapes:
        """With a history for whatever differs from what was handed over.

        Args:
            added_to: of which of the tensors the strides do not matter (:meth:`ir.TapeGraph.added_to`).
        """
        tensors = [widened(spec, tensor) or () for spec, tensor in zip(self.tensors, handover.tensors, strict=True)]
        for index, tensor in enumerate(handover.tensors):
            if index not in added_to and ir.is_plain(tensor):
                tensors[index] = with_strides(tensors[index], tensor, self.strides[index])
        sizes = widened(self.sizes, tuple(handover.sizes)) or ()
        return replace(Shapes.of(handover), tensors=tensors, sizes=sizes)

    def serves(self, sizes: list[int]) -> bool:
        """Return whether all sizes that do not change are equal."""
        if not self.dynamic:
            return self._sizes == sizes
        return all(sizes[index] == size for index, size in self._static_sizes)

    def of_placeholders(self, tape: ir.TapeGraph) -> dict[fx.Node, Spec]:
        """The specs, by the tape graph's placeholders."""
        specs: dict[fx.Node, Spec] = {}
        for node in tape.graph.find_nodes(op="placeholder"):
            lifted = node.meta["lifted"]
            if lifted.kind == "input":
                specs[node] = self.tensors[lifted.index]
            elif lifted.kind == "size":
                specs[node] = (self.sizes[lifted.index],)
        return specs


class TensorRecord(msgspec.Struct, frozen=True, array_like=True):
    """A lifted tensor: its spec, its strides if they matter and no size changes, the properties that operators depend
    on, and the properties shown to people (:class:`TensorKind`)."""

    spec: Spec
    strides: tuple[int, ...] | None
    kind: str
    properties: tuple[str, ...]

    @staticmethod
    def of(spec: Spec, tensor: torch.Tensor) -> TensorRecord:
        """Make the record of a plain tensor."""
        kind = f"{type(tensor).__name__} {tensor.dtype} {tensor.device} {torch._C._dispatch_keys(tensor)}"
        strides = tuple(tensor.stride()) if is_static(spec) else None
        return TensorRecord(spec, strides, kind, tensor_kind(tensor).properties)

    def serves(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is like the one that this record was made of."""
        if not ir.is_plain(tensor) or not fits(self.spec, tensor.shape):
            return False
        made = TensorRecord.of(self.spec, tensor)
        return made == self or (self.strides is None and msgspec.structs.replace(made, strides=None) == self)


def tensor_records(
    shapes: Shapes, tensors: Sequence[torch.Tensor], added_to: Container[int]
) -> list[TensorRecord] | None:
    """Return the records of all lifted tensors; None if one has a kind that is not stored. The strides of those in
    ``added_to`` do not matter (:meth:`ir.TapeGraph.added_to`)."""
    if not all(map(ir.is_plain, tensors)):
        return None
    records = [TensorRecord.of(spec, tensor) for spec, tensor in zip(shapes.tensors, tensors, strict=True)]
    return [
        msgspec.structs.replace(record, strides=None) if index in added_to else record
        for index, record in enumerate(records)
    ]


def fits(spec: Spec, sizes: Sequence[int]) -> bool:
    """Return whether there are as many sizes as in ``spec``, and those that do not change are equal."""
    pairs = zip(static_parts(spec), sizes, strict=False)
    return len(spec) == len(sizes) and all(part is None or part == size for part, size in pairs)


@dataclass(slots=True, eq=False)
class Variant(WeaklyReferred):
    """A graph made ready for one set of shapes, ambient state and settings.

    ``hits`` counts how often it served, which took ``ran`` seconds in all. ``devices`` are the types of devices that
    its tensors are on.

    ``timing`` says how it did when it was last timed: in this process, or, until then, in the one that the store on
    disk heard it from. None where it never was.

    ``sample`` is what it was made with, without what lay in the tensors: a reproduction is made of it.

    ``cut_short`` is what ``hits`` was when users' code last changed the rest of a run, whose calls ran one by one then.

    ``served`` counts the runs under settings that compare every Nth of them. ``rounding`` has, of gradients whose
    regions were all found to be right and that were yet not plainly eager's, how far from those they were.

    ``used`` orders variants by their last use. ``entry`` is the id of what the store on disk has of it, and
    ``store_timing`` tells that store how it did; ``not_stored`` says why it has nothing, and ``tensors`` says of the
    lifted tensors what the store must know; None of unusual ones.
    """

    key: VariantKey
    shapes: Shapes
    scalars: list[Any]
    check: Callable[..., bool]
    program: Program
    sample: Sample
    used: int = 0
    hits: int = 0
    cut_short: int = -1
    ran: float = 0.0
    devices: frozenset[str] = frozenset()
    timing: Timing | None = None
    entry: str | None = None
    store_timing: Callable[[Timing], None] | None = None
    not_stored: str = ""
    tensors: Sequence[TensorRecord] | None = None
    native: NativeRuns = field(default_factory=NativeRuns)
    served: int = 0
    rounding: dict[int, float] = field(default_factory=dict)

    @property
    def structure(self) -> fx.Graph:
        """The graph of the tape that it was made of: one object for all variants of a structure."""
        tape = self.program.region_compiler.tape
        assert tape is not None, "a variant is made of a tape"
        return tape.graph

    def serves(self, settings: tuple[Any, ...], ambient: Ambient, handover: Handover) -> bool:
        """Return whether this variant is the one for a backward. This takes microseconds, and no Python for each
        tensor."""
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
        return [step for step in self.program.schedule.steps if isinstance(step, RegionStep)]

    def missing(self) -> list[RegionStep]:
        """Return the regions without any code, neither in memory nor in the store."""
        may_load = self.program.region_compiler.may_load
        return [step for step in self.regions if not step.compiled and not may_load(step)]


def tensor_check(
    tensors: Sequence[torch.Tensor], specs: Sequence[Spec], added_to: Container[int] = ()
) -> Callable[..., bool]:
    """Makes a function that says whether as many tensors have the kinds, sizes and strides that ``tensors`` have.

    Of those whose sizes change, what changes is not asked, nor are the strides: that is left to each region's guards.

    Args:
        added_to: of which of them the strides do not matter (:meth:`ir.TapeGraph.added_to`).
    """
    plain = [index for index, tensor in enumerate(tensors) if ir.is_plain(tensor)]
    sizes: Any = [static_parts(specs[index]) for index in plain]
    strides: Any = [
        list(tensors[index].stride())
        if is_static(specs[index]) and index not in added_to
        else [None] * len(specs[index])
        for index in plain
    ]
    if all(None not in each for each in strides):
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
