"""A tape graph planned: the steps of a run, the slots that values lie in between them, and when each slot is emptied.

There is a slot for each lifted tensor, size, scalar and object that the engine hands over, and for each value that one
step hands to another.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import msgspec
import torch
from torch import fx

from ..backends.protocol import keeps_inputs
from ..guards.shapes import Condition, Guard, Origin
from ..guards.value_kinds import check_of
from ..ir.partition import Region
from ..user_code.inlined import Marked
from .proof import Proof

Slots = list[Any]


class Lowering(Protocol):
    """The ATen graph of something compiled, at hand or in the store.

    Attributes:
        origins: for its nodes, by name, the node of the tape whose call they came from, as far as that is known.
    """

    @property
    def origins(self) -> Mapping[str, int]: ...

    def graph_module(self) -> fx.GraphModule: ...

    def text(self) -> str: ...  # the graph as code of Python

    def functions(self) -> str: ...  # names all that it calls, as that code does, in less time


class Wiring(msgspec.Struct, frozen=True):
    """Inputs and results of a compiled region, as indices into the region's inputs, outputs and fresh leaves, and into
    the results of the compiled function.

    Attributes:
        taken: the inputs that it takes, in order.
        values: outputs of the region, and the index of the result of each.
        fresh: fresh leaves, and the index of the result that each of them keeps.
        copied: fresh leaves that keep a copy, because something else sees the result's memory.
        other_strides: fresh leaves whose result has, or may have at other sizes, other strides than the leaf wants; the
            leaf copies such a result.
        apart: those of ``values`` that share memory with nothing, according to the graph.
        copied_values: those of ``apart`` that are handed on as copies, because something else sees the result's memory.
        passed: fresh leaves, and the input that each gets unchanged.
        flags: if NaNs are looked for, calls of the region and the numbers of their results. The last result says which
            are NaN.
        permuted: outputs of the region that are handed on as copies: the index of the result, and the order of its
            dimensions in memory as the real calls make it, outermost first, without repeated ones.
        plain: those of ``taken`` that are passed as copies, because the compiled function would ignore conjugate or
            negative bits, or zeros without memory.
    """

    taken: tuple[int, ...]
    values: tuple[tuple[int, int], ...]
    fresh: tuple[tuple[int, int], ...]
    copied: tuple[tuple[int, int], ...]
    passed: tuple[tuple[int, int], ...]
    flags: tuple[tuple[int, int], ...] = ()
    apart: tuple[tuple[int, int], ...] = ()
    copied_values: tuple[tuple[int, int], ...] = ()
    plain: tuple[int, ...] = ()
    other_strides: tuple[tuple[int, int], ...] = ()
    permuted: tuple[tuple[int, int, tuple[int, ...]], ...] = ()


def lies_apart(wiring: Wiring, output: int) -> bool:
    """Return whether an output of the region is handed on unchanged, and shares memory with nothing."""
    return (output, dict(wiring.values).get(output)) in wiring.apart


class RegionRecord(msgspec.Struct, frozen=True):
    """A compiled region in the store: its span and kind, its wiring, and its forms that were found to be wrong."""

    span: tuple[int, int]
    kind: str
    each_shape: bool
    wiring: Wiring
    origins: tuple[tuple[str, Origin], ...] | None
    conditions: tuple[Condition, ...]
    dropped: tuple[str, ...] = ()

    def guard(self) -> Guard | None:
        """Return the guard of the region's arguments; None if no size changes."""
        return None if self.origins is None else Guard(self.origins, self.conditions)


@dataclass(slots=True)
class CompiledRegion:
    """A compiled region for one set of inputs.

    Attributes:
        aten: the graph that the backend was given.
        call: the compiled function.
        kind: the kinds of earlier steps' values that it was compiled for.
        arguments, plain, results, copied, permuted, passed, flags: the contents of ``wiring``, as slots of the step and
            nodes of the tape.
        keeps_inputs: it leaves its arguments in their list.
        guard: the condition on the arguments' sizes; None if no size changes.
        checked: it has run, and it is known which results share memory.
        proof: the state of the comparisons with the real calls.
        through: if the code only passes values on, pairs of slots, target and source; None before the first request.
    """

    aten: Lowering
    call: Callable[[list[Any]], Sequence[Any]]
    wiring: Wiring
    kind: tuple[Any, ...]
    arguments: list[int]
    plain: tuple[int, ...]
    results: list[tuple[int, int]]
    copied: list[tuple[int, int]]
    permuted: list[tuple[int, int, tuple[int, ...]]]
    passed: list[tuple[int, int]]
    flags: list[tuple[int, int]]
    keeps_inputs: bool
    guard: Guard | None
    checked: bool = True
    proof: Proof = field(default_factory=Proof)
    through: list[tuple[int, int]] | None = None


@dataclass(slots=True)
class FreshLeaf:
    """A leaf without a ``.grad`` that a region makes the gradient of: the ``accumulate_grad`` call, the leaf's slot,
    that of a gradient which the leaf can keep, and that of one which it may have to copy."""

    call: fx.Node
    leaf: int
    owned: int
    shared: int


@dataclass(slots=True)
class Spent:
    """Time of a step under a profiler: the number of runs, the seconds of all runs, and those of the shortest.
    Compiling is excluded."""

    runs: int = 0
    seconds: float = 0.0
    least: float = 0.0

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """Measure the block as one run. A run that raises does not count."""
        started = time.perf_counter()
        yield
        seconds = time.perf_counter() - started
        self.least = min(self.least, seconds) if self.runs else seconds
        self.runs += 1
        self.seconds += seconds


class Quick(NamedTuple):
    """A check of what earlier steps hand on, and what was compiled for such."""

    check: Callable[..., bool]
    compiled: list[CompiledRegion | None]


@dataclass(slots=True, eq=False)
class RegionStep:
    """A region, and what was compiled for it, for each kind of what earlier steps hand to it; newest last.

    ``span`` is the region's first call and the number of its calls; ``each_shape`` says that it could not be compiled
    with symbols, so that each set of shapes is compiled by itself. ``saved`` are the slots of saved tensors that users'
    code may have changed in place. ``marked`` are its calls of what is marked as traceable, with the slots of the
    ``ctx``s and hooks; ``asks_again`` says that calls which run as they are may have changed what these depend on.
    """

    region: Region
    span: tuple[int, int]
    inputs: list[int]
    outputs: list[tuple[fx.Node, int]]
    handed_on: list[int]
    fresh: list[FreshLeaf]
    compiled: dict[Any, list[CompiledRegion | None]] = field(default_factory=dict)
    each_shape: bool = False
    drops: list[int] = field(default_factory=list)
    saved: list[int] = field(default_factory=list)
    marked: list[tuple[Marked, int]] = field(default_factory=list)
    asks_again: bool = False
    quick: Quick | None = None
    spent: Spent = field(default_factory=Spent)

    def made(self) -> Iterator[tuple[fx.Node, int]]:
        """The inputs that earlier steps made, and their slots."""
        return ((node, slot) for node, slot in zip(self.region.inputs, self.inputs, strict=True) if not is_given(node))

    def asked(self) -> list[tuple[fx.Node, int]]:
        """Return the inputs whose kinds select compiled code, and their slots: those that earlier steps made. If each
        set of shapes is compiled by itself, all inputs except objects, which differ at each step."""
        if not self.each_shape:
            return list(self.made())
        pairs = zip(self.region.inputs, self.inputs, strict=True)
        return [(node, slot) for node, slot in pairs if not is_given(node) or node.meta["lifted"].kind != "object"]

    def compiled_regions(self) -> list[CompiledRegion]:
        """Return all compiled code of the region."""
        return [each for some in [*self.compiled.values()] for each in some if each is not None]

    def add(self, kind: tuple[Any, ...], compiled: list[CompiledRegion | None]) -> None:
        """Set the compiled code for a kind of earlier steps' values."""
        self.compiled[kind] = compiled
        self.quick = None

    def known_quickly(self, slots: Slots) -> list[CompiledRegion | None] | None:
        """Return the compiled code for the last kind, if a check in C++ says that the kind is the same; None if it
        differs, or if the check cannot say."""
        quick = self.quick
        if quick is None or self.asks_again or not quick.check(*[slots[slot] for slot in self.handed_on]):
            return None
        return quick.compiled

    def known(self, kind: tuple[Any, ...], slots: Slots, changes: bool) -> list[CompiledRegion | None]:
        """Return the compiled code for a kind. The next run finds it by the quick check, unless a size ``changes``."""
        found = self.compiled.get(kind, [])
        if found and not changes and not self.asks_again:
            check = check_of([slots[slot] for slot in self.handed_on])
            self.quick = None if check is None else Quick(check, found)
            if self.compiled.get(kind) is not found:  # another thread has added to it
                self.quick = None
        return found

    def put_in_place(self, old: CompiledRegion, new: CompiledRegion | None) -> None:
        """Replace something compiled by what is fed another way; None where it cannot run."""
        self.add(old.kind, [new if each is old else each for each in self.compiled[old.kind]])

    def run_instead(self, compiled: CompiledRegion, call: Callable[[list[Any]], Sequence[Any]], wiring: Wiring) -> None:
        """Have something else run in place of what was compiled; the wiring holds for the results of both."""
        made = self.bind(compiled.aten, call, wiring, compiled.kind, compiled.guard)
        compiled.wiring, compiled.checked = wiring, True
        compiled.results, compiled.copied, compiled.keeps_inputs = made.results, made.copied, made.keeps_inputs
        compiled.call = call  # last: a thread that sees it sees the rest

    def bind(
        self,
        aten: Lowering,
        call: Callable[[list[Any]], Sequence[Any]],
        wiring: Wiring,
        kind: tuple[Any, ...],
        guard: Guard | None,
    ) -> CompiledRegion:
        """Join something compiled to this step's slots."""
        results = [(self.fresh[position].shared, index) for position, index in wiring.other_strides]
        results += [(self.outputs[position][1], index) for position, index in wiring.values]  # after: others see these
        results += [(self.fresh[position].owned, index) for position, index in wiring.fresh]
        return CompiledRegion(
            aten,
            call,
            wiring,
            kind,
            [self.inputs[position] for position in wiring.taken],
            wiring.plain,
            results,
            [(self.fresh[position].owned, index) for position, index in wiring.copied]
            + [(self.outputs[position][1], index) for position, index in wiring.copied_values],
            [(self.outputs[position][1], index, order) for position, index, order in wiring.permuted],
            [(self.fresh[position].shared, self.inputs[source]) for position, source in wiring.passed],
            [(self.region.nodes[position].meta["call"], number) for position, number in wiring.flags],
            keeps_inputs(call),
            guard,
        )

    def rebind(self, compiled: CompiledRegion, wiring: Wiring) -> CompiledRegion:
        """Return the same code and proof with another wiring."""
        made = self.bind(compiled.aten, compiled.call, wiring, compiled.kind, compiled.guard)
        made.proof = compiled.proof
        return made


def region_record(step: RegionStep, compiled: CompiledRegion) -> RegionRecord:
    """The record of a compiled region."""
    guard, dropped = compiled.guard, compiled.proof.dropped
    origins, conditions = (None, ()) if guard is None else (guard.origins, guard.conditions)
    return RegionRecord(step.span, repr(compiled.kind), step.each_shape, compiled.wiring, origins, conditions, dropped)


@dataclass(slots=True, eq=False)
class OpaqueStep:
    """A call that runs as it is. ``added_to`` are the slots of ``.grad`` of leaves, where what it gives may be memory
    of one before this is added to."""

    node: fx.Node
    arguments: Any
    uses: list[int]
    items: list[tuple[int, int]]
    result: int | None
    drops: list[int] = field(default_factory=list)
    saved: list[int] = field(default_factory=list)
    spent: Spent = field(default_factory=Spent)
    added_to: list[int] = field(default_factory=list)
    ways: list[tuple[Any, Any]] | None = None
    """The access path of each of ``arguments``; None before the first run."""


@dataclass(slots=True, eq=False)
class AccumulateStep:
    """Leaves, their nodes of the tape, and for each the slot of a gradient that it can keep, and of one that it must
    copy.

    ``dropped`` are the slots of ``drops``, to be asked quickly. ``after_users_code`` says that a leaf may not require
    grad any more. ``dtypes`` are those that the gradients have, where the tape says it.
    """

    leaves: list[int]
    owned: list[int]
    shared: list[int]
    calls: list[int]
    drops: list[int] = field(default_factory=list)
    dropped: frozenset[int] = frozenset()
    after_users_code: bool = False
    dtypes: list[torch.dtype | None] = field(default_factory=list)

    def of(self, calls: Container[int]) -> AccumulateStep:
        """Return a step for some of the leaves, which empties no slots."""
        kept = [index for index, call in enumerate(self.calls) if call in calls]
        leaves, owned, shared, of = (
            [column[index] for index in kept] for column in (self.leaves, self.owned, self.shared, self.calls)
        )
        return AccumulateStep(leaves, owned, shared, of, dtypes=[self.dtypes[each] for each in kept if self.dtypes])


Executor = RegionStep | OpaqueStep | AccumulateStep


def is_given(node: fx.Node) -> bool:
    return node.op == "placeholder"


class Slot(int):
    """A slot's number among the arguments of an opaque call, where a plain int is a constant."""
