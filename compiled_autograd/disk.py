"""Joins this process to the store on disk: a structure that it captures may have been compiled by another before.

What is found there serves as if it had been compiled here: no lowering, no backend. What the store cannot give (it is
damaged, of another version, not there) is compiled, and the reason can be read. A store that cannot be used at all is
warned of once, and graphs then live in memory alone.
"""

from __future__ import annotations

import functools
import hashlib
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import fx

import shadow_cache
from backends import Storing, get_backend
from shadow_cache import Entry, Miss, MissEntry, Region, ShadowGraph, StoreError, VariantKey
from shadow_cache.entries import name_of

from . import ir
from .ambient import Ambient
from .explain import structure_miss
from .explain_variants import state_hint, stored_miss, text_of_part
from .labels import caller, guards_of, inputs_of, loss_of, module_of, structure_of
from .places import title
from .plans import VariantPlan, plan_of, shapes_of, structure_id
from .reporting import warn_once
from .settings import Settings
from .shapes import Spec
from .specialise import Shelf, Shelved
from .steps import RegionPlan, region_plan
from .variants import Handover, Variant

if TYPE_CHECKING:
    from shadow_cache.store import Store

    from .graphs import CompiledGraph

_NEIGHBOURS = 16
"""So many structures of the store are compared with one that neither it nor this process knows."""
_LATEST = 1000
"""So many of the store's misses are looked through for what it lost."""
_opened: dict[str, Disk | None] = {}


def disk_for(settings: Settings) -> Disk | None:
    """The store that a session's settings name; None where it has none, or where it cannot be used."""
    where = settings.cache_dir
    if where is False:
        return None
    name = "" if where is None or where is True else str(Path(where).expanduser())
    if name not in _opened:
        try:
            _opened[name] = Disk(shadow_cache.open(name or None))
        except StoreError as error:
            _opened[name] = None
            _give_up(error)
    return _opened[name]


def close_all() -> None:
    """Forget which stores are open; they are opened again when they are asked for."""
    for disk in _opened.values():
        if disk is not None:
            disk.store.close()
    _opened.clear()


def _give_up(error: StoreError) -> None:
    warn_once(f"the cache on disk cannot be used, and graphs are kept in memory alone: {error}")


@dataclass(eq=False)
class Disk:
    """A store, and what this process makes of it."""

    store: Store
    usable: bool = True

    # ---- finding ---------------------------------------------------------------------------------------------------

    def find(
        self, graph: CompiledGraph, settings: Settings, surroundings: Ambient, handover: Handover
    ) -> tuple[Variant | None, Miss | None]:
        """A variant for a backward that another process made; or None, and why what is there does not serve."""
        if not self.usable or not _can_be_stored(graph.tape, settings):
            return None, None
        try:
            entries = self.store.find(_id(graph))
        except StoreError as error:
            self.usable = False
            _give_up(error)
            return None, None
        state = _state(settings, surroundings)
        nearest: Miss | None = None
        other_shapes: VariantPlan | None = None
        for entry in entries:
            miss = _other_state(entry, state)
            if miss is None:
                plan = msgspec.msgpack.decode(entry.plan, type=VariantPlan)
                if plan.serves(handover):
                    return self._load(graph, settings, surroundings, handover, entry, plan), None
                other_shapes = other_shapes or plan
                continue
            nearest = nearest or miss
        if other_shapes is not None:
            nearest = stored_miss(graph.tape, other_shapes, handover)
        return None, nearest

    def _load(
        self,
        graph: CompiledGraph,
        settings: Settings,
        surroundings: Ambient,
        handover: Handover,
        entry: Entry,
        plan: VariantPlan,
    ) -> Variant:
        nodes = list(graph.tape.graph.nodes)
        shapes = shapes_of(plan, handover)
        specs: dict[fx.Node, Spec] = {nodes[position]: spec for position, spec in plan.specs}
        specs.update(shapes.of_placeholders(graph.tape))
        untraceable = {nodes[position]: reason for position, reason in plan.untraceable}
        key = VariantKey(settings.key, surroundings, (*handover.sizes, *handover.scalars))
        backend = get_backend(settings.backend)
        variant = graph.make(key, backend, (), handover, shapes, specs, untraceable)
        shelved: dict[tuple[int, int], list[Shelved]] = {}
        for region in entry.regions:
            region_plan = msgspec.msgpack.decode(region.plan, type=RegionPlan)
            shelved.setdefault(region_plan.place, []).append(Shelved(region_plan, region.artifact, region.lowered))
        variant.program.specialiser.shelf = Shelf(shelved, self.store.read)
        variant.entry = entry.id
        variant.tensors = plan.tensors
        graph.keep(variant)
        self._quietly(lambda: self.store.loaded(entry.id))
        return variant

    def knows(self, tape_graph: ir.TapeGraph, keys: Sequence[shadow_cache.Key]) -> bool:
        """Whether it has anything of a structure."""
        try:
            return self.usable and bool(self.store.find(structure_id(tape_graph, keys)))
        except StoreError as error:
            self.usable = False
            _give_up(error)
            return False

    def explain(self, tape_graph: ir.TapeGraph, shapes: Sequence[Sequence[int]] = ()) -> Miss | None:
        """How a structure that nobody knows differs from the nearest of those in the store; None if it has none."""
        known: ShadowGraph[None] = ShadowGraph()
        try:
            ids = dict.fromkeys(entry.structure for entry in self.store.entries())
            for structure in map(self.store.structure, list(ids)[:_NEIGHBOURS]):
                if structure is not None:
                    known.insert(structure.keys, None)
        except StoreError:  # whoever wants to store something says so
            return None
        keys = tape_graph.structure()
        return structure_miss(tape_graph, keys, *known.nearest(keys), shapes) if len(known) else None

    def lost(self, graph: CompiledGraph) -> Miss | None:
        """Whether the store had something of a structure that was removed, or found to be damaged; None if it had not.

        What is said last of a structure counts: the store keeps such reasons among its misses.
        """
        try:
            said = next((each for each in self.store.misses(_LATEST) if each.structure == _id(graph)), None)
        except StoreError:
            return None
        if said is None or said.miss.kind not in ("evicted", "corrupt"):
            return None
        where, hint = said.miss.where or title(graph.tape), said.miss.hint or "it was in the cache, and was removed"
        return msgspec.structs.replace(said.miss, where=where, hint=hint, seconds=0.0)

    # ---- storing ---------------------------------------------------------------------------------------------------

    def save(
        self,
        graph: CompiledGraph,
        variant: Variant,
        settings: Settings,
        surroundings: Ambient,
        misses: Sequence[Miss],
        seconds: float,
    ) -> str:
        """Store a variant with all that was compiled of it so far, and why it was made.

        Returns:
            Why it was not stored; empty where it was.
        """
        why_not = self._save(graph, variant, settings, surroundings, misses, seconds)
        entry = None if why_not else variant.entry
        name = name_of(loss_of(graph.tape), module_of(graph.tape), caller())
        for miss in misses:
            record = MissEntry(time.time(), _id(graph), entry, name, miss)
            self._quietly(lambda record=record: self.store.record(record))
        return why_not

    def _save(
        self,
        graph: CompiledGraph,
        variant: Variant,
        settings: Settings,
        surroundings: Ambient,
        misses: Sequence[Miss],
        seconds: float,
    ) -> str:
        if not self.usable:
            return "the store cannot be used"
        if not _can_be_stored(graph.tape, settings):
            return "passes, backends without a name and C++ functions of users are not stored"
        if variant.tensors is None:
            return "a saved tensor is of a kind that is not stored"
        backend = get_backend(settings.backend)
        assert isinstance(backend, Storing)
        files: dict[str, bytes] = {}
        regions: list[Region] = []
        for step in variant.regions:
            for compiled in step.specialised():
                artifact, lowered = self._files(backend, compiled)
                if artifact is None:
                    return backend.why_not_saved(compiled.call) or "its backend does not say why"
                digests = [hashlib.sha256(data).hexdigest() for data in (artifact, lowered)]
                files.update(zip(digests, (artifact, lowered), strict=True))
                encoded = msgspec.msgpack.encode(region_plan(step, compiled))
                regions.append(Region(len(step.region.nodes), digests[0], digests[1], encoded))
        positions = {node: position for position, node in enumerate(graph.tape.graph.nodes)}
        plan = msgspec.msgpack.encode(plan_of(variant, positions))
        state = _state(settings, surroundings)
        served = msgspec.msgpack.encode((variant.tensors, variant.shapes.sizes, variant.scalars))
        identity = hashlib.sha256(msgspec.msgpack.encode((_id(graph), state)) + served).hexdigest()
        entry = Entry(
            id=identity[:12],
            structure=_id(graph),
            loss=loss_of(graph.tape),
            module=module_of(graph.tape),
            source=caller(),
            nodes=len(graph.tape.calls),
            settings=state[0],
            ambient=state[1],
            environment=state[2],
            inputs=inputs_of(graph.tape, variant),
            dynamic=variant.shapes.dynamic,
            guards=guards_of(variant),
            plan=plan,
            regions=tuple(regions),
            miss=misses[0] if misses else Miss("first_seen"),
            seconds=seconds,
            created=time.time(),
        )
        try:
            self.store.add(structure_of(graph.tape, _id(graph)), entry, files)
        except StoreError as error:
            self.usable = False
            _give_up(error)
            return str(error)
        variant.entry = entry.id
        return ""

    def _files(self, backend: Storing, compiled: Any) -> tuple[bytes | None, bytes]:
        lowering = compiled.aten
        if isinstance(lowering, Shelved):
            return self.store.read(lowering.artifact), self.store.read(lowering.lowered)
        return backend.save(compiled.call), lowering.text().encode()

    def _quietly(self, work: Any) -> None:
        """Write what nobody will miss."""
        if not self.usable:
            return
        try:
            work()
        except StoreError as error:
            self.usable = False
            _give_up(error)


def _can_be_stored(tape_graph: ir.TapeGraph, settings: Settings) -> bool:
    """Whether what a graph compiles to depends on nothing but what the key of an entry says."""
    if settings.passes or not isinstance(settings.backend, str):
        return False
    if not isinstance(get_backend(settings.backend), Storing):
        return False
    return not any(
        isinstance(node.target, ir.AOTBackward) or (isinstance(node.target, ir.OpaqueOp) and node.target.custom)
        for node in tape_graph.graph.nodes
    )


State = tuple[dict[str, str], dict[str, str], dict[str, str]]


def _state(settings: Settings, surroundings: Ambient) -> State:
    """Settings, ambient state and environment, as named parts."""
    backend = get_backend(settings.backend)
    assert isinstance(backend, Storing)
    environment = {**_versions(), **backend.environment()}
    chosen = {"backend": str(settings.backend), "dynamic": str(settings.dynamic)}
    return chosen, {name: text_of_part(name, value) for name, value in surroundings}, environment


def _other_state(entry: Entry, state: State) -> Miss | None:
    """The first part in which an entry was made under another state."""
    kinds = ("backend_or_settings", "ambient_state", "environment")
    for kind, old, new in zip(kinds, (entry.settings, entry.ambient, entry.environment), state, strict=True):
        for name in sorted({*old, *new}):
            if old.get(name) != new.get(name):
                texts = old.get(name, "nothing"), new.get(name, "nothing")
                return Miss(kind, name, *texts, hint=state_hint(kind))
    return None


@functools.cache
def _versions() -> Mapping[str, str]:
    import backends

    from . import __version__

    digest = hashlib.sha256()
    for module in (sys.modules[__package__], backends, shadow_cache):
        for file in sorted(Path(str(module.__file__)).parent.glob("*.py")):
            digest.update(file.read_bytes())
    return {
        "package": f"{__version__} {digest.hexdigest()[:12]}",
        "torch": f"{torch.__version__} {torch.version.git_version}",
        "python": f"{platform.python_implementation()} {platform.python_version()}",
    }


def _id(graph: CompiledGraph) -> str:
    if graph.structure is None:
        graph.structure = structure_id(graph.tape, graph.tape.structure())
    return graph.structure
