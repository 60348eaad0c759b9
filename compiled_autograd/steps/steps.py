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
    """How a compiled region is fed, in terms of the region alone: indices into its inputs, its outputs, its fresh
    leaves, and into what the compiled function gives.

    Attributes:
        taken: the inputs that it takes, in order.
        values: outputs of the region, and which result each of them is.
        fresh: fresh leaves, and which result is the gradient that each of them keeps.
        copied: likewise, where the backend gave it in memory that something else sees: the leaf keeps a copy.
        other_strides: likewise, where it has other strides than the leaf wants, or may have at other sizes: the leaf
            copies such a one.
        apart: which of ``values`` share memory with nothing, as the graph has it.
        copied_values: those of them that the backend gave in memory that something else sees: a copy is handed on.
        passed: fresh leaves, and the input that goes there as it is.
        flags: where NaNs are looked for: calls of the region, and numbers of what they give. What was found is the
            last result.
        permuted: outputs of the region, which result each is, and the order of dimensions in memory that the real calls
            give it, outermost first, without those that they repeat: a copy that has it is handed on.
        plain: which of ``taken`` are given as copies, because the compiled function would ignore their conjugate or
            negative bits, or that they are zeros without memory.
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
    """Whether an output of the region is handed on as it is, and shares memory with nothing."""
    return (output, dict(wiring.values).get(output)) in wiring.apart


class RegionRecord(msgspec.Struct, frozen=True):
    """Which region was compiled, for what, and how it is fed; which forms of it were found to be wrong."""

    span: tuple[int, int]
    kind: str
    each_shape: bool
    wiring: Wiring
    origins: tuple[tuple[str, Origin], ...] | None
    conditions: tuple[Condition, ...]
    dropped: tuple[str, ...] = ()

    def guard(self) -> Guard | None:
        """Whether it holds for its arguments; None where nothing changes."""
        return None if self.origins is None else Guard(self.origins, self.conditions)


@dataclass(slots=True)
class CompiledRegion:
    """A compiled region for one set of inputs.

    Attributes:
        aten: the graph that the backend was given.
        call: what it made of it.
        kind: what it was compiled for, of what earlier steps hand on.
        arguments, plain, results, copied, permuted, passed, flags: what ``wiring`` says, in slots of the step and nodes
            of the tape.
        keeps_inputs: it leaves its arguments in their list.
        guard: says of the arguments whether their sizes are such that this holds; None where nothing changes.
        checked: it has run, and what it gives in memory that something else sees is known.
        proof: which of its forms were compared with the real calls.
        through: slots that get what lies in others as it is, where it does nothing else; None until somebody has asked.
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
    """What a step took while a profiler looked on: how often it ran so, the seconds of all these runs, and those of the
    shortest one. Compiling is not among them."""

    runs: int = 0
    seconds: float = 0.0
    least: float = 0.0

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """What is done inside is one run; nothing is counted of one that raises."""
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
        """The inputs whose kinds decide what serves, and their slots: the same; or all, where each set of shapes is
        compiled by itself, but for objects, which are others at each step."""
        if not self.each_shape:
            return list(self.made())
        pairs = zip(self.region.inputs, self.inputs, strict=True)
        return [(node, slot) for node, slot in pairs if not is_given(node) or node.meta["lifted"].kind != "object"]

    def compiled_regions(self) -> list[CompiledRegion]:
        """All that was compiled for it."""
        return [each for some in [*self.compiled.values()] for each in some if each is not None]

    def add(self, kind: tuple[Any, ...], compiled: list[CompiledRegion | None]) -> None:
        """From now on these are what was compiled for a kind of what earlier steps hand on."""
        self.compiled[kind] = compiled
        self.quick = None

    def known_quickly(self, slots: Slots) -> list[CompiledRegion | None] | None:
        """What was compiled for the kind that came last, where this is it again, as a check in C++ says; None where it
        is not, or that cannot be told."""
        quick = self.quick
        if quick is None or self.asks_again or not quick.check(*[slots[slot] for slot in self.handed_on]):
            return None
        return quick.compiled

    def known(self, kind: tuple[Any, ...], slots: Slots, changes: bool) -> list[CompiledRegion | None]:
        """What was compiled for a kind; the next run asks for it quickly, unless something of it ``changes``."""
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
        """The same code and the same proof, fed another way."""
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
    """A call that runs as it is. ``last_hook`` says that it is the last post-accumulate hook of its leaf; ``added_to``
    are the slots of ``.grad`` of leaves, where what it gives may be memory of one before this is added to."""

    node: fx.Node
    arguments: Any
    uses: list[int]
    items: list[tuple[int, int]]
    result: int | None
    drops: list[int] = field(default_factory=list)
    last_hook: bool = False
    saved: list[int] = field(default_factory=list)
    spent: Spent = field(default_factory=Spent)
    added_to: list[int] = field(default_factory=list)
    ways: list[tuple[Any, Any]] | None = None
    """How each of ``arguments`` is had, once somebody has asked."""


@dataclass(slots=True, eq=False)
class AccumulateStep:
    """Leaves, their nodes of the tape, and for each the slot of a gradient that it can keep, and of one that it must
    copy.

    ``dropped`` are the slots of ``drops``, to be asked quickly; ``hooked`` is the leaf whose post-accumulate hooks are
    the steps that follow, if any are. ``after_users_code`` says that a leaf may not require grad any more. ``dtypes``
    are those that the gradients have, where the tape says it.
    """

    leaves: list[int]
    owned: list[int]
    shared: list[int]
    calls: list[int]
    drops: list[int] = field(default_factory=list)
    dropped: frozenset[int] = frozenset()
    hooked: int | None = None
    after_users_code: bool = False
    dtypes: list[torch.dtype | None] = field(default_factory=list)

    def of(self, calls: Container[int]) -> AccumulateStep:
        """The same for some of the leaves; nothing is dropped."""
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
