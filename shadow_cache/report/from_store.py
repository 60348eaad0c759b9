"""The report of a store, made of the store's records alone."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ..amounts import date, plural, seconds, size
from ..entries import Call, Entry, MissEntry, StoreStats, Structure
from ..errors import StoreError
from ..miss_kinds import NO_MISSES, explain
from ..records import Miss
from ..trie import fold, guides
from . import data
from .modules import modules_of
from .texts import aten_texts, tape_lines

if TYPE_CHECKING:
    from ..store import Store

_VALUE = re.compile(r"%(\d+)\.\d+")
_NOT_IN_STORE = "The cache has this code only in compiled form. The report of a session shows it: session.report(path)."
_NO_LINKS = "The cache does not record the node of each line. The report of a session shows it: session.report(path)."


def store_report(store: Store) -> data.Report:
    """Return the report of all structures, entries and misses of a store."""
    entries = store.entries()
    by_structure: dict[str, list[Entry]] = {}
    for entry in entries:
        by_structure.setdefault(entry.structure, []).append(entry)
    found = {id: store.structure(id) for id in by_structure}
    structures = [structure for structure in found.values() if structure is not None]
    names = {id: members[0].name for id, members in by_structure.items()}
    return data.Report(
        of="store",
        title=str(store.path),
        made=date(time.time()),
        totals=_totals(store.stats()),
        timeline=_timeline(store.misses(), found),
        trie=trie_of(structures, names),
        graphs=tuple(_graph(store, each, by_structure[each.id]) for each in structures),
        verdict=_verdict(store.stats()),
    )


def _verdict(stats: StoreStats) -> data.Verdict:
    saved = f"{plural(stats.loads, 'load')} saved {seconds(stats.seconds_saved)} of compiling"
    if not stats.loads:
        saved = "none was loaded yet; a process with one of these tapes will load instead of compile"
    entries = plural(stats.entries, "entry", "entries")
    return data.Verdict(f"{entries} of {plural(stats.structures, 'structure')}, {size(stats.size)}; {saved}.")


def _totals(stats: StoreStats) -> tuple[data.Figure, ...]:
    figures = [
        data.Figure("entries", f"{stats.entries:,}", f"of {plural(stats.structures, 'structure')}"),
        data.Figure("size", size(stats.size), f"of {size(stats.max_size)}"),
        data.Figure("compiling", seconds(stats.compile_seconds), "for the stored entries"),
        data.Figure("loads", f"{stats.loads:,}", f"saved {seconds(stats.seconds_saved)} of compiling"),
        data.Figure("misses", f"{sum(stats.misses.values()):,}", "recorded here"),
    ]
    if stats.timed:
        figures.append(data.Figure("timed", f"{stats.timed:,}", f"{stats.left_to_eager:,} slower, run on eager"))
    return tuple(figures)


def _timeline(misses: Sequence[MissEntry], structures: Mapping[str, Structure | None]) -> data.Timeline:
    events = [
        data.Event(
            number=number,
            count=1,
            outcome="bypass" if each.miss.kind in NO_MISSES else "miss",
            title=each.name,
            graph=each.structure if structures.get(each.structure) is not None else None,
            cost=each.miss.seconds,
            seconds={},
            compiles=0,
            loads=0,
            when=each.when,
            reasons=(reason_of(each.miss),),
        )
        for number, each in enumerate(reversed(misses), 1)
    ]
    return data.Timeline(tuple(events), total=0, hits_between=False)


def reason_of(miss: Miss) -> data.Reason:
    """Return a miss with the explanation of its kind."""
    kind = explain(miss.kind)
    return data.Reason(miss.kind, str(miss), kind.means, kind.do)


def trie_of(structures: Sequence[Structure], names: Mapping[str, str]) -> tuple[data.Branch, ...]:
    """Fold the structures into the lines of a trie; shared nodes stand once."""
    lines: list[data.Branch] = []
    branches = fold(structures)
    depths: list[int] = []
    for branch, guide, _ in guides(branches):
        depths.append(0 if branch.parent is None else depths[branch.parent] + 1)
        count, first = len(branch.nodes), branch.nodes[:1]
        text = " to ".join(dict.fromkeys((*first, *branch.nodes[-1:]))) if branch.parent is None else "".join(first)
        if not count:
            text = "the tape ends"
        elif count > 1:
            text += f", {plural(count, 'node')}"
        id = branch.structure
        title = "" if id is None else names.get(id, "")
        lines.append(data.Branch(depths[-1], guide, text, branch.differs, branch.shared, id, title))
    return tuple(lines)


def nodes_of(calls: Sequence[Call], steps: Mapping[int, int] | None = None) -> tuple[data.Node, ...]:
    """Return the nodes of a tape, with the module of each.

    Args:
        steps: the step that runs each node, by the node's index.
    """
    names = [call.name for call in calls]
    edges = [call.edges for call in calls]
    if not any(edges):  # edges that could not be read from the tape follow from the keys
        edges = _edges_of_keys(calls)
    edges = [tuple(each for each in targets if 0 <= each < len(calls)) for targets in edges]
    modules = modules_of(names, [call.parameter for call in calls], edges)
    steps = steps or {}
    return tuple(
        data.Node(call.name, call.parameter, call.source, modules[index], edges[index], steps.get(index))
        for index, call in enumerate(calls)
    )


def _edges_of_keys(calls: Sequence[Call]) -> list[tuple[int, ...]]:
    edges: list[dict[int, None]] = [{} for _ in calls]
    for index, call in enumerate(calls):
        for part in call.key[1:]:
            for found in _VALUE.findall(part.partition(" = ")[2]):
                if int(found) != index and int(found) < len(calls):
                    edges[int(found)][index] = None
    return [tuple(targets) for targets in edges]


def _graph(store: Store, structure: Structure, entries: Sequence[Entry]) -> data.Graph:
    entry = entries[0]
    steps: list[data.Step] = []
    lines: list[data.Line] = []
    blocks: list[data.Block] = []
    note = _NO_LINKS
    for number, region in enumerate(entry.regions):
        detail = f"code {region.artifact[:12]}, ATen graph {region.lowered[:12]}"
        steps.append(data.Step("region", f"region {number}", detail, region.calls, 0))
        try:
            texts = aten_texts(store.read(region.lowered).decode())
        except (StoreError, UnicodeDecodeError) as error:
            texts, note = [f"(this file cannot be read: {error})"], f"{_NO_LINKS} Some files cannot be read."
        blocks.append(data.Block(number, len(lines), len(texts)))
        lines += [data.Line(text) for text in texts]
    stages = (
        data.Stage("tape", "Tape graph", "", tuple(tape_lines(structure.text))),
        data.Stage("aten", "ATen", note, tuple(lines), tuple(blocks)),
        data.Stage("code", "Backend's code", _NOT_IN_STORE, ()),
    )
    return data.Graph(
        id=structure.id,
        title=entry.name,
        facts=(
            ("structure", structure.id),
            ("nodes", f"{len(structure.calls):,}"),
            ("entries", f"{len(entries):,}; the stages below are of {entry.id}, the last one used"),
        ),
        nodes=nodes_of(structure.calls),
        steps=tuple(steps),
        stages=stages,
        variants=tuple(map(_variant, entries)),
    )


def _variant(entry: Entry) -> data.Variant:
    timing = entry.timing
    facts = [
        ("made", f"{date(entry.created)}, {seconds(entry.seconds)}"),
        ("why", str(entry.miss)),
        ("loads", f"{entry.loads:,}"),
        ("size", size(entry.size)),
        *((name, value) for values in entry.sections.values() for name, value in values.items()),
        ("inputs", ", ".join(f"{each.dtype}[{', '.join(each.shape)}]" for each in entry.inputs)),
    ]
    if entry.guards:
        facts.append(("guards", ", ".join(entry.guards)))
    times = {} if timing is None else {"eager": timing.eager, "compiled": timing.compiled, "samples": timing.samples}
    title = f"{entry.id}, {entry.settings.get('backend', '')}, {'dynamic' if entry.dynamic else 'static'}"
    return data.Variant(title, tuple(facts), **times)  # type: ignore[arg-type]
