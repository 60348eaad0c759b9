"""Joins this process to the store on disk: a structure that it captures may have been compiled by another before.

What the store cannot give (it is damaged, of another version, not there) is compiled, and the reason can be read.
"""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from .. import ir
from ..backends import Storing, get_backend
from ..backends.signal_handlers import raise_what_a_handler_raised
from ..diagnostics.node_names import module_of, title
from ..diagnostics.reporting import warn_once
from ..diagnostics.structure_misses import structure_miss
from ..diagnostics.users_line import users_line
from ..guards.ambient import TRACED, Ambient
from ..lowering.region_compiler import MAX_GUARDED
from ..lowering.stored_regions import InMemoryGraph, Made, StoredRegion, StoredRegions
from ..settings import Settings
from ..shadow_cache import Entry, Key, Miss, MissEntry, Region, ShadowGraph, StoreError
from ..shadow_cache.entries import name_of
from ..steps.steps import CompiledRegion, RegionRecord, RegionStep, region_record
from .environment_key import differences, is_repeatable, state_of, why_not_stored
from .metadata import loss_of, structure_of
from .records import VariantRecord, entry_of, shapes_of, structure_id, undropped
from .stored_neighbours import neighbours
from .value_misses import corrupt_entry, stored_miss
from .variants import Handover, Variant

if TYPE_CHECKING:
    from ..shadow_cache.store import Store
    from .graphs import CompiledGraph

_LATEST = 1000
"""At most this many of the store's latest misses are searched for what it lost."""
_OTHER_RECORDS = "the cache has only structures of another version, which are not compared"


@dataclass(eq=False)
class Disk:
    """A store, and what this process makes of it.

    Attributes:
        usable: it can be read.
        writable: it can be written too; where it could not be once, it is not tried again.
    """

    store: Store
    usable: bool = True
    writable: bool = True
    _told: int = 0

    # ---- finding ---------------------------------------------------------------------------------------------------

    def find(
        self, graph: CompiledGraph, settings: Settings, ambient_state: Ambient, handover: Handover
    ) -> tuple[Variant | None, Miss | None]:
        """A variant for a backward that another process made; or None, and why what is there does not serve."""
        if not self.usable or why_not_stored(graph.tape, settings):
            return None, None
        entries = self._find(_id(graph))
        if not entries:  # the state is not asked for: the first time, that reads all source files
            return None, self._damaged(_id(graph))
        state = state_of(settings, ambient_state)
        corrupt: Miss | None = None
        other: tuple[str, VariantRecord] | None = None
        other_states: list[list[Miss]] = []
        for entry in sorted(entries, key=lambda entry: entry.dynamic):  # of one for all sizes and one for these, this
            differing = differences(entry, state)
            if differing:
                other_states.append(differing)
                continue
            try:
                record = msgspec.msgpack.decode(entry.record, type=VariantRecord)
                if record.serves(handover):
                    return self._load(graph, settings, ambient_state, handover, entry, record), None
                other = other or (entry.id, record)
            except Exception as error:  # noqa: BLE001  the tape is released by now: it is compiled again, and says so
                raise_what_a_handler_raised(error)
                corrupt = corrupt_entry(entry.id, error)
        nearest = min(other_states, key=len, default=[None])[0]
        other_shapes = corrupt if corrupt or other is None else stored_miss(graph.tape, *other, handover)
        return None, self._damaged(_id(graph)) or other_shapes or nearest

    def _damaged(self, structure: str) -> Miss | None:
        """Return the miss for damage found since the last call, if the damage can concern this structure."""
        found, self._told = self.store.damage[self._told :], len(self.store.damage)
        return next((each.miss for each in found if each.structure in (structure, "")), None)

    def _load(
        self,
        graph: CompiledGraph,
        settings: Settings,
        ambient_state: Ambient,
        handover: Handover,
        entry: Entry,
        record: VariantRecord,
    ) -> Variant:
        nodes = list(graph.forms.under(ambient_state).graph.nodes)
        specs = {nodes[position]: spec for position, spec in record.specs}
        untraceable = {nodes[position]: reason for position, reason in record.untraceable}
        variant = graph.make(settings, ambient_state, handover, shapes_of(record, handover), specs, untraceable)
        stored: dict[tuple[int, int], list[StoredRegion]] = {}
        for region in entry.regions:
            region_record = msgspec.msgpack.decode(region.record, type=RegionRecord)
            stored.setdefault(region_record.span, []).append(
                StoredRegion(region_record, region.artifact, region.lowered)
            )
        variant.program.region_compiler.stored = StoredRegions(stored, self.store.read)
        self._tie(variant, entry.id)
        variant.timing = entry.timing
        variant.tensors = record.tensors
        graph.keep(variant)
        self._write(lambda: self.store.loaded(entry.id))
        return variant

    def knows(self, tape_graph: ir.TapeGraph, keys: Sequence[Key]) -> bool:
        """Return whether the store has an entry of a structure."""
        return bool(self._find(structure_id(tape_graph, keys)))

    def explain(self, graph: CompiledGraph, miss: Miss, shapes: Sequence[Sequence[int]] = ()) -> Miss:
        """Return why the store has no entry of a structure: it was removed, or the difference from the nearest stored
        structure.

        Args:
            graph: the structure.
            miss: the difference from this process's structures; returned if the store has no better reason.
            shapes: of the lifted tensors.
        """
        if not self.usable:
            return miss
        if (lost := self.lost(graph)) is not None:
            return lost
        if miss.kind != "first_seen":
            return miss
        known: ShadowGraph[None] = ShadowGraph()
        try:
            stored = [*neighbours(self.store, graph.tape, shapes)]
        except StoreError:  # whoever wants to store something says so
            return miss
        paths = [(ir.decode_keys(structure.record), alike) for structure, alike in stored]
        for path, alike in paths:
            if path and alike:
                known.insert(path, None)
        if not len(known):
            is_of_other_version = bool(paths) and not any(path for path, _ in paths)
            return msgspec.structs.replace(miss, hint=_OTHER_RECORDS) if is_of_other_version else miss
        keys = graph.tape.structure()
        depth, nearest = known.nearest(keys)
        if depth == len(keys):
            hint = "the forward computed its branches in another order; rounding and hooks depend on the order"
            return Miss("node_attribute", "the order of execution", "that of another process", "another", hint)
        return structure_miss(graph.tape, keys, depth, nearest, shapes)

    def lost(self, graph: CompiledGraph) -> Miss | None:
        """Return the reason why entries of a structure are gone: removed, or found damaged; None if there were none.

        The newest reason for a structure counts: the store keeps such reasons among its misses.
        """
        try:
            said = next((each for each in self.store.misses(_LATEST) if each.structure == _id(graph)), None)
        except StoreError:
            return None
        if said is None or said.miss.kind not in ("evicted", "corrupt"):
            return None
        where, hint = said.miss.where or title(graph.tape), said.miss.hint or "the entry was removed from the cache"
        return msgspec.structs.replace(said.miss, where=where, hint=hint, seconds=0.0)

    # ---- storing ---------------------------------------------------------------------------------------------------

    def record(self, graph: CompiledGraph, entry: str | None, misses: Sequence[Miss]) -> None:
        """Keep why something was compiled, and the id of the entry that was made of it; None where none was."""
        name = name_of(loss_of(graph.tape), module_of(graph.tape), str(users_line()))
        for miss in misses:
            record = MissEntry(time.time(), _id(graph), entry, name, miss)
            self._write(functools.partial(self.store.record, record))

    def _tie(self, variant: Variant, entry: str) -> None:
        """Join a variant to its entry."""
        variant.entry = entry
        variant.store_timing = lambda timing: self._write(lambda: self.store.timed(entry, timing))

    def save(
        self,
        graph: CompiledGraph,
        variant: Variant,
        settings: Settings,
        ambient_state: Ambient,
        misses: Sequence[Miss],
        seconds: float,
    ) -> str:
        """Store a variant with all that was compiled of it so far, and why it was made.

        Returns:
            Why it was not stored; empty where it was.
        """
        if not self.usable or not self.writable:
            return "the store cannot be used"
        if why_not := why_not_stored(graph.tape, settings):
            return why_not
        if TRACED in dict(ambient_state):
            return "the tape has a hook marked as traceable, which may be another in another process"
        if variant.tensors is None:
            return "a saved tensor is of a kind that is not stored"
        backend = get_backend(settings.backend_in_mode)
        assert isinstance(backend, Storing)
        state = state_of(settings, ambient_state)
        served = msgspec.msgpack.encode((variant.tensors, variant.shapes.sizes, variant.scalars))
        identity = hashlib.sha256(msgspec.msgpack.encode((_id(graph), state)) + served).hexdigest()[:12]
        files: dict[str, bytes] = {}
        regions: list[Region] = []
        for step in variant.regions:
            for compiled in step.compiled_regions():
                try:
                    regions += self._region(step, compiled, backend, files)
                except _NotStoredError as error:
                    return str(error)
        regions += self._kept(_id(graph), identity, variant, {undropped(region.record) for region in regions}, files)
        entry = entry_of(graph.tape, variant, identity, _id(graph), state, regions, misses, seconds)
        try:
            self.store.add(structure_of(graph.tape, _id(graph)), entry, files)
        except StoreError as error:
            self._write_no_more(error)
            return str(error)
        self._tie(variant, entry.id)
        for made in made_in_memory(variant):
            if made.artifact is not None:
                made.digest = hashlib.sha256(made.artifact).hexdigest()
        return ""

    def _region(
        self, step: RegionStep, compiled: CompiledRegion, backend: Storing, files: dict[str, bytes]
    ) -> Sequence[Region]:
        """Return the stored form of a compiled region, and put its files into ``files``.

        Empty if the region was loaded and nothing new was found out about it: the entry then has it already.

        Raises:
            _NotStoredError: it cannot be stored.
        """
        if not is_repeatable(compiled.kind):
            raise _NotStoredError("a function or hook returned a value whose kind cannot be stored as text")
        stored = compiled.aten
        if isinstance(stored, StoredRegion):
            if compiled.proof.dropped == stored.record.dropped:
                return ()
            digests = [stored.artifact, stored.lowered]
            files.update({digest: self.store.read(digest) for digest in digests})
        else:
            assert isinstance(stored, InMemoryGraph)
            artifact = self._artifact(stored.made, compiled, backend)
            lowered = stored.text().encode()
            digests = [hashlib.sha256(data).hexdigest() for data in (artifact, lowered)]
            files.update(zip(digests, (artifact, lowered), strict=True))
        encoded = msgspec.msgpack.encode(region_record(step, compiled))
        return [Region(len(step.region.nodes), digests[0], digests[1], encoded)]

    def _artifact(self, made: Made, compiled: CompiledRegion, backend: Storing) -> bytes:
        """Return the bytes of a region that was compiled for this process.

        Raises:
            _NotStoredError: it cannot be stored.
        """
        if made.call is compiled.call and made.artifact is not None:
            return made.artifact
        try:
            if made.call is compiled.call and made.digest:
                return self.store.read(made.digest)
        except StoreError as error:
            raise _NotStoredError(f"code stored by another process has disappeared: {error}") from error
        artifact = backend.save(compiled.call)
        if artifact is None:
            raise _NotStoredError(backend.why_not_saved(compiled.call) or "its backend does not say why")
        return artifact

    def _kept(
        self, structure: str, identity: str, variant: Variant, records: set[RegionRecord], files: dict[str, bytes]
    ) -> Iterator[Region]:
        """Yield the regions of a variant that are in the store but were not compiled here, and put their files into
        ``files``.

        This process may have loaded them, or not needed them, or another process may have added them meanwhile.
        """
        room = {step.span: MAX_GUARDED for step in variant.regions}
        for entry in self._find(structure):
            for region in entry.regions if entry.id == identity else ():
                record = undropped(region.record)
                if record in records or not room.get(record.span):
                    continue
                try:
                    kept = {digest: self.store.read(digest) for digest in (region.artifact, region.lowered)}
                except StoreError:
                    continue  # compiled again when needed
                files.update(kept)
                room[record.span] -= 1
                yield region

    def _find(self, structure: str) -> Sequence[Entry]:
        """The entries of a structure; none where the store cannot be read."""
        try:
            return self.store.find(structure) if self.usable else ()
        except StoreError as error:
            self.usable = False
            warn_of_memory_alone(error)
            return ()

    def _write(self, work: Callable[[], object]) -> None:
        """Write data that no step depends on."""
        if self.usable and self.writable:
            try:
                work()
            except StoreError as error:
                self._write_no_more(error)

    def _write_no_more(self, error: StoreError) -> None:
        self.writable = False
        warn_once(f"the cache on disk cannot be written, and new graphs are kept only in memory: {error}")


class _NotStoredError(Exception):
    """The reason why a variant cannot be stored, in words."""


def made_in_memory(variant: Variant) -> list[Made]:
    """Return the code of a variant that was compiled for this process."""
    compiled = [each for step in variant.regions for each in step.compiled_regions()]
    return [each.aten.made for each in compiled if isinstance(each.aten, InMemoryGraph)]


def _id(graph: CompiledGraph) -> str:
    if graph.structure is None:
        graph.structure = structure_id(graph.tape, graph.keys or graph.tape.structure())
        graph.keys = None
    return graph.structure


def warn_of_memory_alone(error: Exception) -> None:
    """Warn once that a store cannot be used."""
    warn_once(f"the cache on disk cannot be used, and graphs are kept only in memory: {error}")
