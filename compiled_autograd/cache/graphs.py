"""A structure that was captured, with everything that was made of it. Graphs belong to the process."""

from __future__ import annotations

import bisect
import functools
import itertools
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import networkx as nx
import torch
from torch import fx

from .. import ir
from ..backends import get_backend
from ..backends.garbage_collection import RARELY
from ..backends.signal_handlers import raise_what_a_handler_raised
from ..capture.unnamed import name_again
from ..diagnostics.node_names import leaf_name, node_name, title
from ..diagnostics.reporting import warn_once
from ..diagnostics.same_model import may_be_of_model_of
from ..diagnostics.structure_misses import first_seen, order_miss, structure_miss
from ..diagnostics.users_line import users_line
from ..diagnostics.variant_misses import state_miss
from ..errors import ReproductionError
from ..guards.ambient import REDUCED, Ambient, ambient, compile_state
from ..guards.shapes import Spec
from ..process_state import PROCESS, WeaklyReferred, free_in_child
from ..reproduction.recording import Sample
from ..reproduction.writing import write_sample
from ..runtime.interpret import interpret
from ..runtime.program import Program
from ..settings import Settings
from ..shadow_cache import Key, Miss, ShadowGraph, Terminal, VariantKey
from ..shadow_cache.safe_text import harmless, preformatted
from ..steps.run_context import RunContext
from ..steps.steps import RegionStep
from ..torch_api import attributes
from .forms import Forms
from .stages import about, handed_on, readable
from .value_misses import values_miss
from .variants import Handover, Shapes, Variant, tensor_check, tensor_records

MAX_VARIANTS = 32
"""The largest number of variants of one structure; see also :data:`MAX_STRUCTURES`."""
MAX_STRUCTURES = 512
MAX_NODES = 100_000
"""The largest numbers of structures, and of nodes of all their tapes together, some 20 KiB each. Where there are more,
the half that was used last stays."""
_MAX_GONE = 100_000
_EVICTED = "it was compiled before, and evicted as the least recently used"
USES = PROCESS.register(itertools.count(1))
_ADDING = free_in_child(threading.RLock())  # planning is Python alone: threads would not do it side by side anyway


@dataclass(slots=True, eq=False, repr=False)
class CompiledGraph(WeaklyReferred):
    """A structure, as :meth:`Session.graphs` gives it.

    Attributes:
        tape: the tape graph, in the order in which it runs.
        forms: the forms in which it runs.
        variants: its compiled code, for each set of shapes, ambient state and settings.
        number: counts the structures of the process.
        used: orders the structures by their last use.
        structure: its id in the store on disk, after the first request.
        identity: the hash of its keys; ``keys`` has the keys until the first request for ``structure``.
        saving: the file to which the next backward is written, with its values.
        evicted: its variants were released, because there were too many structures.
        runs_twice: its tape can run twice: it has no users' code, and changes nothing. None before the first request.
        met: how often it occurred again after its capture.
        line: the user's line that called the backward that was captured.
    """

    tape: ir.TapeGraph
    forms: Forms = field(init=False)
    number: int = -1
    variants: list[Variant] = field(default_factory=list)
    used: int = 0
    evicted: bool = False
    met: int = 0
    line: str = ""
    _called: frozenset[ir.Marked] = frozenset()
    runs_twice: bool | None = None
    structure: str | None = None
    identity: int = 0
    keys: Sequence[Key] | None = None
    saving: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        self.forms = Forms(self.tape)

    @property
    def title(self) -> str:
        """The node that the backward begins at, the model and the number of nodes."""
        return title(self.tape)

    def __call__(self, handover: Handover, context: RunContext | None = None) -> list[torch.Tensor | None]:
        """Run the tape graph's calls one by one, without a backend."""
        state = (*ambient(), (REDUCED, handover.reduced)) if handover.reduced else ambient()
        return interpret(self.forms.under(state), handover.by_kind(), context)

    def state(self, handover: Handover, settings: Settings) -> Ambient:
        """Return the state of a variant for a backward, see :meth:`Forms.state`."""
        called = self.forms.called() if self.forms.marked else frozenset()
        if called != self._called:
            self._called = called
            for variant in self.variants:  # variants that call one no longer depend on its state
                opaque = called.intersection(node.target for node in variant.program.schedule.untraceable)
                variant.key = replace(variant.key, ambient=self.forms.without(variant.key.ambient, opaque))
        return self.forms.state(handover, get_backend(settings.backend_in_mode).bitwise)

    def find(self, settings: tuple[Any, ...], ambient: Ambient, handover: Handover) -> Variant | None:
        """The variant for a backward, if there is one."""
        for variant in self.variants:
            if variant.serves(settings, ambient, handover):
                self.used = variant.used = next(USES)
                return variant
        return None

    def uses(self, variant: Variant, settings: tuple[Any, ...], ambient: Ambient) -> bool:
        """Return whether a variant that fits a backward's shapes serves under these settings and this state. It then
        counts as used."""
        serves = variant.key.ambient == ambient and variant.key.settings == settings and variant in self.variants
        if serves:
            self.used = variant.used = next(USES)
        return serves

    def add(self, settings: Settings, ambient: Ambient, handover: Handover) -> tuple[Variant, list[Miss]]:
        """A new variant, not yet compiled; and why none of those that are there serves."""
        with _ADDING, RARELY:
            key, before = self._nearest(settings, ambient, handover)
            specs: Mapping[fx.Node, Spec] = {}
            if before is None or settings.dynamic is False:
                shapes = Shapes.of(handover, settings.dynamic)
            else:
                shapes = before.shapes.widened(handover, self.tape.added_to())
                specs = before.program.region_compiler.specs
            misses = [self._why(key, before, handover, shapes.dynamic)]
            variant = self.make(settings, ambient, handover, shapes, specs)
            variant.tensors = tensor_records(shapes, handover.tensors, self.tape.added_to())
            misses += self.keep(variant)
        return variant, misses

    def make(
        self,
        settings: Settings,
        ambient: Ambient,
        handover: Handover,
        shapes: Shapes,
        specs: Mapping[fx.Node, Spec],
        untraceable: Mapping[fx.Node, str] | None = None,
    ) -> Variant:
        """A variant whose regions are not compiled yet.

        Args:
            specs: what the steps of one that was there before handed on.
        """
        counts = [len(values) for values in handover.kinds()]
        tape, backend = self.forms.under(ambient), get_backend(settings.backend_in_mode)
        specs = {**specs, **shapes.of_placeholders(tape)}
        program = Program(tape, backend, settings.passes, counts, specs, shapes.dynamic, untraceable or {})
        check = tensor_check(handover.tensors, shapes.tensors, tape.added_to())
        program.region_compiler.name_of = functools.partial(node_name, tape)
        program.region_compiler.leaf_name = functools.partial(leaf_name, tape)
        program.region_compiler.title = functools.partial(title, self.tape)
        program.region_compiler.tape = self.tape
        program.region_compiler.state = compile_state(ambient)
        program.region_compiler.marked = self.forms.described_in(ambient)
        devices = frozenset(attributes.device(tensor).type for tensor in handover.tensors)
        key = VariantKey(settings.key, ambient)
        sample = Sample.of(handover.by_kind())
        return Variant(key, shapes, list(handover.scalars), check, program, sample, next(USES), devices=devices)

    def keep(self, variant: Variant) -> list[Miss]:
        """Add a variant; where there are too many of them then, the least recently used goes."""
        self.used, self.evicted = variant.used, False
        self.variants = [*self.variants, variant]
        if len(self.variants) <= MAX_VARIANTS:
            return []
        oldest = min(self.variants, key=lambda each: each.used)
        self.variants = [each for each in self.variants if each is not oldest]
        hint = "with dynamic=None, one variant serves many sizes; an evicted variant is compiled again when needed"
        new = f"{MAX_VARIANTS + 1}, and the least recently used was evicted"
        return [Miss("variant_limit", title(self.tape), f"{MAX_VARIANTS} variants", new, hint)]

    def evict(self) -> None:
        """Release all compiled code. No lock is taken, since this also runs during a walk."""
        self.evicted = bool(self.variants) or self.evicted
        self.variants = []

    def explain(self, settings: Settings, ambient: Ambient, handover: Handover) -> list[Miss]:
        """Return why none of the existing variants serves a backward."""
        key, before = self._nearest(settings, ambient, handover)
        return [self._why(key, before, handover, dynamic=False)]

    def _nearest(self, settings: Settings, ambient: Ambient, handover: Handover) -> tuple[VariantKey, Variant | None]:
        """The key of a new variant, and the newest one that differs from it in nothing but sizes and strides."""
        key = VariantKey(settings.key, ambient)
        for variant in reversed(self.variants):
            if variant.key == key and variant.scalars == handover.scalars and variant.shapes.fits(handover):
                return key, variant
        return key, None

    def _why(self, key: VariantKey, before: Variant | None, handover: Handover, dynamic: bool) -> Miss:
        name_again(self.tape, handover.tensors)
        newest_first = self.variants[::-1]  # other threads add some, and evict all
        if not newest_first:
            if self.evicted:
                return Miss("evicted", title(self.tape), hint=_EVICTED)
            return first_seen(self.tape)
        nearest = before or next((variant for variant in newest_first if variant.key == key), None)
        if nearest is None:
            return state_miss(key, [variant.key for variant in newest_first])
        return values_miss(self.tape, nearest.shapes, nearest.scalars, handover, before is not None, dynamic)

    @property
    def aten(self) -> list[fx.GraphModule]:
        """The ATen graphs of the newest variant's regions."""
        return [each.aten.graph_module() for region in self.regions for each in region.compiled_regions()]

    @property
    def regions(self) -> list[RegionStep]:
        """The regions of the newest variant."""
        return self.variants[-1].regions if self.variants else []

    def readable(self, stage: str = "tape") -> str:
        """The text form of one stage of it; each block says of which module and line of the forward it is, if known.

        Args:
            stage: ``"tape"``, the tape graph; ``"aten"``, the ATen graphs of its regions; ``"regions"``, the steps of a
                run; ``"code"``, what the backend has generated. All but the first are those of the newest variant.

        Raises:
            ValueError: there is no such stage.
        """
        return readable(self.tape, self.variants[-1] if self.variants else None, stage)

    def save(self, path: str | os.PathLike[str], values: bool = False) -> None:
        """Write a reproduction of it, which :func:`compiled_autograd.load` reads: what the newest variant computes, for
        the shapes that it was made with. Of the user's code nothing is in it; of hooks and functions the kinds of what
        they gave.

        Args:
            path: the file; what is there is replaced.
            values: with what lies in its tensors. Those of the last backward are gone, so the next backward of this
                structure is written, before it runs. Else they are made up when the file is read, of the same
                size: it has bounds, mean and deviation, and all of tensors of at most 32 whole numbers.

        Raises:
            ReproductionError: nothing was compiled of it, or it takes a tensor of which no other can be made.
            OSError: the file cannot be written.
        """
        if values:
            self.saving = path
            return
        if not self.variants:
            raise ReproductionError("this structure was not compiled, so its shapes are unknown")
        variant = self.variants[-1]
        write_sample(path, self.tape, variant.sample, handed_on(variant), about(self.tape, variant.key))

    def save_now(self, key: VariantKey, handover: Handover) -> None:
        """Write the reproduction that :meth:`save` requested, with values. An error gives a warning. Results of users'
        code have the kinds that they had for the newest variant that serves."""
        path, self.saving = self.saving, None
        if path is None:
            return
        try:
            fits = (each for each in reversed(self.variants) if each.serves(key.settings, key.ambient, handover))
            kinds = handed_on(next(fits, None))
            given = handover.by_kind()
            write_sample(path, self.tape, Sample.of(given), kinds, about(self.tape, key), given["input"])
        except Exception as error:  # noqa: BLE001  the backward goes on
            raise_what_a_handler_raised(error)
            warn_once(f"a reproduction could not be written to {os.fspath(path)}: {error}.")

    def to_networkx(self) -> nx.DiGraph:
        """The tape as a directed graph, see :meth:`ir.TapeGraph.to_networkx`."""
        return self.tape.to_networkx()

    def __repr__(self) -> str:
        return f"<CompiledGraph {self.number}: {len(self.tape.calls)} nodes, {len(self.variants)} variants>"

    def _repr_html_(self) -> str:
        return preformatted(f"{self!r} {harmless(self.title)}")


class Graphs:
    """Every structure of the process, in the shadow graph."""

    def __init__(self) -> None:
        self._shadow: ShadowGraph[CompiledGraph] = ShadowGraph()
        self._gone: set[int] = set()  # hashes of structures that had to go, to say so when one comes back

    def find(self, keys: Sequence[Key]) -> CompiledGraph | None:
        """The graph of a structure, if it was captured before."""
        leaf = self._shadow.find(keys)
        return None if leaf is None else leaf.payload

    def explain(
        self, tape: ir.TapeGraph, keys: Sequence[Key], shapes: Sequence[Sequence[int]] = (), other_order: bool = False
    ) -> Miss:
        """Return the difference of a structure from the nearest one captured before.

        Args:
            shapes: of the lifted tensors, to be shown.
            other_order: it differs from one of them only in the order in which its nodes run.
        """
        if hash(tuple(keys)) in self._gone:
            return Miss("evicted", title(tape), hint=_EVICTED)
        if other_order:
            return order_miss(tape)
        depth, key, others = self._shadow.nearest_among(keys, may_be_of_model_of(tape))
        return structure_miss(tape, keys, depth, key, shapes, [(each.tape, each.line) for each in others])

    def add(self, tape: ir.TapeGraph, keys: Sequence[Key]) -> tuple[CompiledGraph, bool]:
        """A graph for a new structure; and whether others had to go for it, of which the engine still knows."""
        added: Terminal[CompiledGraph] = self._shadow.insert(keys, CompiledGraph(tape))
        added.payload.number, added.payload.used, added.payload.line = added.number, next(USES), str(users_line())
        added.payload.identity, added.payload.keys = hash(tuple(keys)), keys
        if not (oldest := self._too_many()):
            return added.payload, False
        for graph in oldest:
            graph.evict()
        self._gone.update(graph.identity for graph in oldest)
        if len(self._gone) > _MAX_GONE:
            self._gone.clear()
        self._shadow.remove({graph.number for graph in oldest})
        return added.payload, True

    def _too_many(self) -> list[CompiledGraph]:
        """Return the graphs to evict; never the newest."""
        newest_first = sorted(self, key=lambda graph: graph.used, reverse=True)
        until = list(itertools.accumulate(len(graph.tape.calls) for graph in newest_first))
        if len(until) <= MAX_STRUCTURES and until[-1] <= MAX_NODES:
            return []
        kept = MAX_STRUCTURES + 1 - MAX_STRUCTURES // 2
        if until[-1] > MAX_NODES:
            kept = min(kept, max(1, bisect.bisect_right(until, MAX_NODES // 2)))
        return newest_first[kept:]

    def clear(self) -> None:
        """Forget all of them."""
        self._shadow.clear()
        self._gone.clear()

    def __iter__(self) -> Iterator[CompiledGraph]:
        return (leaf.payload for leaf in self._shadow)

    def __len__(self) -> int:
        return len(self._shadow)


GRAPHS = Graphs()
PROCESS.register(GRAPHS, reset=GRAPHS.clear)
