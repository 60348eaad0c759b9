"""``why``, ``diff``, ``graph``: the reasons of misses, the difference of two entries, and the graph of a tape."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Sequence

import msgspec
import rich_click as click

from ..entries import Entry, MissEntry, Structure, Timing
from ..miss_kinds import MISMATCH, NO_MISSES, NOT_WORTH_IT, explain
from ..records import Miss
from ..safe_text import harmless
from . import graphs, render
from .base import Fault, Verb, View, ids, with_format, with_view
from .difference import Difference, difference, timed, variant


class Why(msgspec.Struct, frozen=True):
    """An entry (None: removed since), and all misses recorded for it, newest first."""

    entry: Entry | None
    misses: tuple[MissEntry, ...]


@click.command(cls=Verb)
@click.argument("id", required=False, shell_complete=ids)
@click.option("--last", is_flag=True, help="Explain the newest miss; the default without an ID.")
@click.option("--mismatches", is_flag=True, help="List the wrong results of compiled code instead.")
@with_format
def why(view: View, id: str | None, last: bool, mismatches: bool) -> None:
    """Explain why a backward was compiled, or why it does not run compiled.

    Without an ID, explains the newest miss. With an ID, explains the miss for which that entry was compiled, and lists
    all misses recorded for it. Prints the kind of the miss and its meaning, the place (node, parameter, source line),
    the old and the new value, the cost, and what to do. If the entry runs on eager because eager is faster, prints this
    too.

    \b
    Examples:
      shadow-cache why                  the newest miss
      shadow-cache why --last --format json
      shadow-cache why 3fa9             one entry
      shadow-cache why --mismatches     wrong results of compiled code
    """
    if (id is not None) + last + mismatches > 1:
        raise click.UsageError("give only one of ID, --last and --mismatches.")
    if mismatches:
        wrong = [miss for miss in view.store.misses() if miss.miss.kind == MISMATCH]
        view.out(wrong, [miss.miss.where for miss in wrong], lambda: _mismatches(view, wrong))
        return
    if id is None:
        newest = next(iter(view.store.misses(1)), None)
        if newest is None:
            raise Fault(f"no miss is recorded in {view.path}")
        view.out(newest, [newest.miss.kind], lambda: _last(view, newest))
        return
    misses = view.store.misses()
    names = {miss.entry: f"{miss.name}, not stored any more" for miss in reversed(misses) if miss.entry}
    names |= {id: entry.name for id, entry in view.entries.items()}
    whole = view.complete(id, names, "entry")
    entry = view.whole(whole) if whole in view.entries else None
    found = Why(entry, tuple(miss for miss in misses if miss.entry == whole))
    kinds = [found.entry.miss.kind] if found.entry else [miss.miss.kind for miss in found.misses]
    view.out(found, kinds, lambda: _why(view, whole, names[whole], found))


def _last(view: View, newest: MissEntry) -> Iterator[str]:
    yield f"{render.bold(newest.name)}, {render.ago(newest.when, view.now)}"
    yield ""
    made = view.entries.get(newest.entry or "")
    if made is not None:
        kind = ", ".join((made.settings.get("backend", ""), variant(made), render.size(made.size))).lstrip(", ")
        words = f"entry {render.identifier(made.id)} ({kind}) of structure {render.identifier(made.structure)}"
    elif newest.entry is not None:
        words = f"entry {render.identifier(newest.entry)}, not stored any more"
    elif newest.miss.kind in NO_MISSES:
        words = "nothing: such backwards run on the eager engine"
    else:
        words = "nothing that is stored on disk"
    gone = made is None and newest.miss.kind in ("evicted", "corrupt")  # the miss names the lost entry, not a new one
    structure = view.store.structure(newest.structure)
    rows = [*_explained(newest.miss, structure), ("lost" if gone else "made", words)]
    if made is not None and made.left_to_eager is not None:
        rows.append(("but", f"eager runs it, timed {timed(made.left_to_eager, view.now)}"))
    yield from render.pairs(rows)


def _mismatches(view: View, found: Sequence[MissEntry]) -> Iterator[str]:
    if not found:
        yield f"no mismatch is recorded in {view.path}"
        return
    for each in found:
        yield f"{render.bold(each.name)}, {render.ago(each.when, view.now)}"
        yield ""
        rows = [("where", each.miss.where), ("found", render.new(each.miss.new)), ("since", each.miss.hint)]
        if each.entry is not None:
            rows.append(("entry", render.identifier(each.entry)))
        yield from render.pairs(rows)
        yield ""
    yield f"{render.plural(len(found), 'mismatch', 'mismatches')}; {explain(MISMATCH).do}"


def _why(view: View, id: str, name: str, found: Why) -> Iterator[str]:
    yield f"{render.identifier(id)}  {render.bold(name)}"
    yield ""
    if found.entry is not None:
        if found.entry.left_to_eager is not None:
            yield from render.pairs(_left_to_eager(found.entry.left_to_eager, view.now))
            yield ""
        miss = msgspec.structs.replace(found.entry.miss, seconds=found.entry.miss.seconds or found.entry.seconds)
        structure = view.structure(found.entry.structure)
        yield from render.pairs([("made", render.ago(found.entry.created, view.now)), *_explained(miss, structure)])
        yield ""
    if not found.misses:
        yield render.dim("no other miss is recorded for it")
        return
    yield render.bold(f"{render.plural(len(found.misses), 'miss', 'misses')} recorded for it")
    rows = [
        (
            *(render.ago(each.when, view.now), each.miss.kind, each.miss.where),
            f"{each.miss.old} -> {each.miss.new}" if each.miss.old or each.miss.new else "",
            render.seconds(each.miss.seconds) if each.miss.seconds else "",
        )
        for each in found.misses
    ]
    yield from render.table(("WHEN", "KIND", "WHERE", "CHANGE", "COST"), rows, right=(4,), indent="  ")


def _left_to_eager(timing: Timing, now: float) -> list[tuple[str, str]]:
    why = [("runs", "on eager"), ("kind", render.bold("not_worth_it")), ("means", NOT_WORTH_IT.means)]
    return [*why, ("timed", timed(timing, now)), ("do", NOT_WORTH_IT.do)]


def _explained(miss: Miss, structure: Structure | None) -> list[tuple[str, str]]:
    kind = explain(miss.kind)
    rows = [("kind", render.bold(miss.kind)), ("means", kind.means)]
    if miss.where:
        rows.append(("where", "\n".join((miss.where, *_node(miss, structure)))))
    if miss.old or miss.new:
        rows += [("old", render.old(miss.old or "nothing")), ("new", render.new(miss.new or "nothing"))]
    if miss.seconds:
        rows.append(("cost", render.seconds(miss.seconds)))
    if miss.hint:
        rows.append(("hint", miss.hint))
    return [*rows, ("do", kind.do)]


def _node(miss: Miss, structure: Structure | None) -> list[str]:
    """Return name, parameter and source line of the node of a miss, except those that ``where`` contains."""
    if miss.node is None or structure is None or not 0 <= miss.node < len(structure.calls):
        return []
    call = structure.calls[miss.node]
    words = ((f"#{miss.node} ", call.name), ("parameter ", call.parameter), ("", call.source))
    return [harmless(f"{noun}{word}") for noun, word in words if word and word not in miss.where]


@click.command(cls=Verb)
@click.argument("a", shell_complete=ids)
@click.argument("b", shell_complete=ids)
@with_format
def diff(view: View, a: str, b: str) -> None:
    """Compare two entries, A and B.

    Prints each part that differs, as it is in A and in B: settings, process state, versions, saved tensors, guards. If
    the tapes differ, also prints the first node that differs. With --format quiet, prints only the names of the parts.

    \b
    Examples:
      shadow-cache diff 3fa9 81c0
      shadow-cache diff 3fa9 81c0 --format json
    """
    old, new = view.entry(a), view.entry(b)
    found = difference(old, new, view.structure(old.structure), view.structure(new.structure))
    names = [f"{change.section}.{change.name}" for change in found.changes]
    quiet = [*names, f"structure.{found.parting.index}"] if found.parting else names
    view.out(found, quiet, lambda: _difference(old, new, found))


def _difference(old: Entry, new: Entry, found: Difference) -> Iterator[str]:
    yield f"{render.old('-')} {render.identifier(old.id)}  {old.name}"
    yield f"{render.new('+')} {render.identifier(new.id)}  {new.name}"
    for section, changes in itertools.groupby(found.changes, operator.attrgetter("section")):
        yield ""
        yield render.bold(section)
        yield from render.pairs(
            (each.name, f"{render.old(each.old or 'nothing')} -> {render.new(each.new or 'nothing')}")
            for each in changes
        )
    yield ""
    yield render.bold("structure")
    if found.parting is None:
        yield f"  the same, {render.identifier(old.structure)}, {render.plural(old.nodes, 'node')}"
        return
    same = render.plural(found.parting.index, "node")
    yield f"  {render.identifier(old.structure)} and {render.identifier(new.structure)} part after {same}"
    for sign, style, call, part in (
        ("-", render.old, found.parting.old, found.parting.old_part),
        ("+", render.new, found.parting.new, found.parting.new_part),
    ):
        words = [call.name, call.parameter, call.source] if call else ["the tape ends"]
        yield style(f"  {sign} #{found.parting.index} {', '.join(word for word in words if word)}")
        if call is None or part != call.name:
            yield style(f"  {sign}   {part}")


@click.command(cls=Verb)
@click.argument("id", shell_complete=ids)
@click.option(
    "--format",
    "form",
    type=click.Choice(("text", "dot", "mermaid", "json")),
    help="text: the whole tape graph. dot, mermaid: a drawing. json: records.  [default: text]",
)
@click.option("--lowered", is_flag=True, help="Print the ATen graph of each region instead.")
@with_view
def graph(view: View, id: str, form: str | None, lowered: bool) -> None:
    """Print the tape of an entry or a structure, or its ATen graphs.

    Prints the tape graph as text, or its nodes and edges for Graphviz, Mermaid or a program. With --lowered, prints the
    ATen graph of each region of an entry instead.

    \b
    Examples:
      shadow-cache graph 3fa9
      shadow-cache graph 3fa9 --format dot | dot -Tsvg > tape.svg
      shadow-cache graph 3fa9 --lowered
    """
    form = form or ("json" if view.format == "json" else "text")
    found = view.entry_or_structure(id)
    if lowered:
        if isinstance(found, Structure):
            raise Fault(f"{found.id} is a structure; only entries are lowered. `shadow-cache tree` shows its entries.")
        if form in ("dot", "mermaid"):
            raise click.UsageError(f"ATen graphs are stored as text: use --lowered with text or json, not with {form}.")
        texts = [view.store.read(region.lowered).decode(errors="backslashreplace") for region in found.regions]
        if form == "json":
            view.print_json(texts)
            return
        for number, (region, text) in enumerate(zip(found.regions, texts, strict=True)):
            view.print(f"# region {number} of {found.id}: {render.plural(region.calls, 'call')}\n{text.rstrip()}\n")
        return
    structure = view.structure(found.structure) if isinstance(found, Entry) else found
    if form == "json":
        view.print_json(msgspec.structs.replace(structure, record=b""))
    else:
        view.print({"text": lambda it: it.text.rstrip(), "dot": graphs.dot, "mermaid": graphs.mermaid}[form](structure))
