"""``ls``, ``show``, ``tree``, ``stats``: the content of the cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import rich_click as click

from ..entries import Entry, StoreStats, Structure, Summary
from ..miss_kinds import explain
from ..trie import Branch, fold, guides
from . import render
from .base import Verb, View, ids, with_format
from .difference import describe, timed, variant, varying

_BAR = 20
_CLIP = 100
_KEYS: dict[str, Callable[[Summary], Any]] = {
    "used": lambda entry: -entry.last_used,
    "created": lambda entry: -entry.created,
    "size": lambda entry: -entry.size,
    "cost": lambda entry: -entry.seconds,
    "loads": lambda entry: -entry.loads,
    "name": lambda entry: entry.name.lower(),
}


@click.command(cls=Verb)
@click.option(
    "--sort",
    type=click.Choice(tuple(_KEYS)),
    default="used",
    show_default=True,
    help="Largest or newest first; names from A to Z.",
)
@click.option("--reverse", is_flag=True, help="Reverse the order.")
@click.option("--limit", type=click.IntRange(min=0), help="List at most this many entries.")
@click.option("--backend", help="Only entries of this backend, such as inductor or inductor:max-autotune.")
@click.option("--loss", help="Only entries with this text in the name of the loss.")
@click.option("--name", help="Only entries with this text in loss, module or source line.")
@click.option("--dynamic/--static", default=None, help="Only entries with symbolic sizes, or only those without.")
@click.option("--slower", is_flag=True, help="Only entries that run on eager, because eager is faster.")
@with_format
def ls(
    view: View,
    sort: str,
    reverse: bool,
    limit: int | None,
    backend: str | None,
    loss: str | None,
    name: str | None,
    dynamic: bool | None,
    slower: bool,
) -> None:
    """List the compiled entries.

    Prints a line for each entry: id, name (loss, module, source line), static or dynamic sizes, nodes of the tape,
    backend, compile time, size, number of loads, and time of the last use. If an entry was timed against eager, also
    prints whether entries run compiled or on eager.

    \b
    Examples:
      shadow-cache ls
      shadow-cache ls --sort cost --limit 10
      shadow-cache ls --name train.py --static
      shadow-cache ls --slower                    entries that run on eager, because eager is faster
      shadow-cache rm $(shadow-cache ls --backend eager --format quiet)
    """
    stored = view.entries
    found = [
        entry
        for entry in stored.values()
        if (backend is None or entry.settings.get("backend") == backend)
        and (loss is None or loss.lower() in entry.loss.lower())
        and (name is None or name.lower() in entry.name.lower())
        and (dynamic is None or entry.dynamic == dynamic)
        and (not slower or entry.left_to_eager)
    ]
    found = sorted(found, key=_KEYS[sort], reverse=reverse)[:limit]
    view.out(found, (entry.id for entry in found), lambda: _listed(view, found, len(stored)))
    if not stored:
        view.fail(view.nothing)
    if not found:
        view.fail(f"none of {render.plural(len(stored), 'entry', 'entries')} matches; remove a filter.")


def _listed(view: View, entries: list[Summary], stored: int) -> Iterator[str]:
    if not entries:
        return
    header = ["ID", "NAME", "SHAPES", "NODES", "BACKEND", "COST", "SIZE", "LOADS", "USED"]
    rows = [
        [
            *(entry.id, entry.name, variant(entry), f"{entry.nodes:,}", entry.settings.get("backend", "")),
            *(render.seconds(entry.seconds), render.size(entry.size), f"{entry.loads:,}"),
            render.ago(entry.last_used, view.now),
        ]
        for entry in entries
    ]
    if any(entry.timing for entry in entries):  # else the column would be empty: tune=False, or no trial yet
        header.append("RUNS")
        for row, entry in zip(rows, entries, strict=True):
            row.append("on eager" if entry.left_to_eager else "compiled" if entry.timing else "")
    yield from render.table(header, rows, right=(3, 5, 6, 7), flexible=1, spare=(3, 6, 4, 2, 7), width=view.width)
    of = f" of {stored:,}" if stored > len(entries) else ""
    cost = render.seconds(sum(entry.seconds for entry in entries))
    size = render.size(sum(entry.size for entry in entries))
    yield ""
    yield render.dim(f"{render.plural(len(entries), 'entry', 'entries')}{of}, {size}, {cost} of compiling")


@click.command(cls=Verb)
@click.argument("id", shell_complete=ids)
@with_format
def show(view: View, id: str) -> None:
    """Show all fields of one entry or structure.

    Prints the name, the miss for which the entry was compiled, the compile time and the time saved, and the last tuning
    trial against eager. Then prints the dependencies (settings, process state, versions, saved tensors, guards on
    sizes) and the regions.

    \b
    Examples:
      shadow-cache show 3fa9
      shadow-cache show 3fa9 --format json
    """
    found = view.entry_or_structure(id)
    if isinstance(found, Entry):
        view.out(found, [found.id], lambda: _entry(view, found))
    else:
        view.out(found, [found.id], lambda: _structure(view, found))


def _entry(view: View, entry: Entry) -> Iterator[str]:
    saved = f", saved {render.seconds(entry.loads * entry.seconds)}" if entry.loads else ""
    yield f"{render.identifier(entry.id)}  {render.bold(entry.name)}"
    yield ""
    yield from render.pairs(
        [
            ("made", f"{render.ago(entry.created, view.now)}, {render.date(entry.created)}"),
            ("why", f"{entry.miss}"),
            ("cost", render.seconds(entry.seconds)),
            ("used", f"{render.ago(entry.last_used, view.now)}, loaded {render.plural(entry.loads, 'time')}{saved}"),
            *([("timed", timed(entry.timing, view.now))] if entry.timing else []),
            ("size", f"{render.size(entry.size)} in {render.plural(len(entry.regions), 'region')}"),
            ("shapes", variant(entry)),
            ("structure", f"{render.identifier(entry.structure)}, {render.plural(entry.nodes, 'node')}"),
        ]
    )
    for title, values in entry.sections.items():
        if values:
            yield from ("", render.bold(title), *render.pairs(values.items()))
    if entry.inputs:
        yield from ("", render.bold("inputs"), *render.pairs((each.where, describe(each)) for each in entry.inputs))
    if entry.guards:
        yield from ("", render.bold("guards"), *(f"  {guard}" for guard in entry.guards))
    if entry.regions:
        rows = [
            (str(number), f"{region.calls:,}", region.artifact[:12], region.lowered[:12])
            for number, region in enumerate(entry.regions)
        ]
        yield from ("", render.bold("regions"))
        yield from render.table(("REGION", "CALLS", "CODE", "ATEN"), rows, right=(1,), indent="  ")


def _structure(view: View, structure: Structure) -> Iterator[str]:
    entries = view.store.find(structure.id)
    name = entries[0].name if entries else "no entry"
    yield f"{render.identifier(structure.id)}  structure of {render.bold(name)}"
    yield ""
    parameters = sum(call.parameter is not None for call in structure.calls)
    yield from render.pairs(
        [("nodes", f"{len(structure.calls):,}"), ("parameters", f"{parameters:,}"), ("entries", f"{len(entries):,}")]
    )
    yield from ("", render.bold("entries"), *_variants(entries, "  "))
    yield ""
    rows = [
        (f"#{index}", call.name, call.parameter or "", call.source or "") for index, call in enumerate(structure.calls)
    ]
    yield from render.table(("NODE", "OPERATION", "PARAMETER", "SOURCE"), rows)


@click.command(cls=Verb)
@with_format
def tree(view: View) -> None:
    """Show how the tapes differ.

    Prints all tapes as one tree. Nodes that several tapes begin with are printed once, as a count. Each branch begins
    with the first node that differs, and says how it differs. It ends with a structure and its entries. Each entry says
    in what it differs from the others of its structure.

    \b
    Examples:
      shadow-cache tree
      shadow-cache tree --format quiet    ids of the structures
    """
    by_structure = {id: view.store.find(id) for id in dict.fromkeys(entry.structure for entry in view.entries.values())}
    branches = fold(view.structure(id) for id in by_structure)
    view.out(branches, by_structure, lambda: _tree(branches, by_structure))
    if not by_structure:
        view.fail(view.nothing)


def _tree(branches: tuple[Branch, ...], by_structure: dict[str, tuple[Entry, ...]]) -> Iterator[str]:
    if not branches:
        return
    count = sum(len(entries) for entries in by_structure.values())
    structures = render.plural(len(by_structure), "structure")
    yield render.dim(f"{structures}, {render.plural(count, 'entry', 'entries')}")
    for branch, first, below in guides(branches):
        if branch.parent is None:
            yield ""
        if branch.structure is None:
            yield f"{first}{_run(branch)}{'' if branch.parent is None else f', {branch.shared} structures'}"
            continue
        entries = by_structure[branch.structure]
        nodes = render.plural(branch.start + len(branch.nodes), "node")
        leaf = f"{render.identifier(branch.structure)}  {render.bold(entries[0].name)}, {nodes}"
        if branch.parent is None:
            yield leaf
        else:
            yield f"{first}{_run(branch)}"
            yield f"{below}{leaf}"
        yield from _variants(entries, below)


def _run(branch: Branch) -> str:
    count = len(branch.nodes)
    if branch.parent is None:
        names = f"{branch.nodes[0]} to {branch.nodes[-1]}" if count > 1 else "".join(branch.nodes)
        shared = render.dim(f"… {render.plural(count, 'node')} shared")
        return f"{shared}, {names}" if names else shared
    what = f": {render.clip(branch.differs, _CLIP)}" if branch.differs else ""
    if not count:
        return f"the tape ends{what}"
    more = render.dim(f" … {render.plural(count - 1, 'more node')}") if count > 1 else ""
    return f"#{branch.start} {branch.nodes[0]}{what}{more}"


def _variants(entries: Sequence[Entry], before: str) -> Iterator[str]:
    apart = varying(entries)
    for index, entry in enumerate(entries):
        told = [f"{change.name} {change.new}" for change in apart[entry.id] if change.name != "backend"]
        more = f" and {len(told) - 3} more" if len(told) > 3 else ""
        guide = "└─ " if index == len(entries) - 1 else "├─ "
        words = [entry.settings.get("backend", ""), variant(entry), render.seconds(entry.seconds)]
        words += [render.size(entry.size), "runs on eager" if entry.left_to_eager else ""]
        words += [*(render.clip(text, _CLIP) for text in told[:3])]
        yield f"{before}{guide}{render.identifier(entry.id)}  {', '.join(word for word in words if word)}{more}"


@click.command(cls=Verb)
@with_format
def stats(view: View) -> None:
    """Show totals of the cache.

    Prints the size and its limit, the number of loads and the compile time that they saved, the number of entries that
    are slower than eager, and the number of misses and bypasses by reason. With --format quiet, prints the size in
    bytes.

    \b
    Examples:
      shadow-cache stats
      shadow-cache stats --format json
    """
    figures = view.store.stats()
    view.out(figures, [str(figures.size)], lambda: _stats(view, figures))


def _stats(view: View, figures: StoreStats) -> Iterable[str]:
    full = f" of {render.size(figures.max_size)} ({figures.size / figures.max_size:.1%})" if figures.max_size else ""
    structures = render.plural(figures.structures, "structure")
    slower = f"against eager; faster on eager: {figures.left_to_eager:,}"
    yield from render.pairs(
        [
            ("cache", str(view.path)),
            ("entries", f"{figures.entries:,} of {structures}"),
            ("size", f"{render.size(figures.size)}{full}"),
            ("compiling", f"{render.seconds(figures.compile_seconds)} for the stored entries"),
            ("loads", f"{figures.loads:,}, which saved {render.seconds(figures.seconds_saved)} of compiling"),
            *([("timed", f"{render.plural(figures.timed, 'entry', 'entries')} {slower}")] if figures.timed else []),
        ],
        indent="",
    )
    yield from _by_reason(figures.misses, "miss", "misses")
    yield from _by_reason(figures.bypasses, "bypass", "bypasses")


def _by_reason(counts: Mapping[str, int], noun: str, nouns: str) -> Iterable[str]:
    if not counts:
        return
    yield ""
    yield render.bold(f"{render.plural(sum(counts.values()), noun, nouns)}, by reason")
    most = max(counts.values())
    kinds = sorted(counts.items(), key=lambda kind: (-kind[1], kind[0]))
    width, digits = max(len(kind) for kind, _ in kinds), len(f"{most:,}")
    for kind, count in kinds:
        bar = "▇" * max(1, round(_BAR * count / most))
        yield f"  {kind:<{width}}  {count:>{digits},}  {bar:<{_BAR}}  {render.dim(explain(kind).means)}"
