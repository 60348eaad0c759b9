"""``why``, ``diff``, ``graph``: why something was compiled, what tells two apart, and what a tape is."""

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
    """An entry, and all misses that were recorded for it, newest first; no entry where it has been removed."""

    entry: Entry | None
    misses: tuple[MissEntry, ...]


@click.command(cls=Verb)
@click.argument("id", required=False, shell_complete=ids)
@click.option("--last", is_flag=True, help="The newest miss; also what is meant without an ID.")
@click.option("--mismatches", is_flag=True, help="Instead: what was found wrong of compiled code.")
@with_format
def why(view: View, id: str | None, last: bool, mismatches: bool) -> None:
    """Say why something was compiled, or why it does not run compiled.

    Prints what was new and what that means, where (node, parameter, source line), what the nearest entry has and what
    came instead, what it cost, what one can do, and what was made for it; and whether that is left to eager, because it
    is slower. With an ID: the same of that entry, why it was made, and all misses recorded for it.

    \b
    Examples:
      shadow-cache why                  the newest miss
      shadow-cache why --last --format json
      shadow-cache why 3fa9             one entry
      shadow-cache why --mismatches     what compiled code computed wrongly
    """
    if (id is not None) + last + mismatches > 1:
        raise click.UsageError("give an ID, --last or --mismatches, not both.")
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
        words = "nothing that is kept on disk"
    gone = made is None and newest.miss.kind in ("evicted", "corrupt")  # then it says what was lost, not what was made
    structure = view.store.structure(newest.structure)
    rows = [*_explained(newest.miss, structure), ("lost" if gone else "made", words)]
    if made is not None and made.left_to_eager is not None:
        rows.append(("but", f"it is left to eager, timed {timed(made.left_to_eager, view.now)}"))
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
    """Name, parameter and source line of the node of a miss, as far as ``where`` does not say them itself."""
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
    """Show what tells entry B from entry A.

    Prints the named parts that differ, old and new: settings, state of the process, versions, saved tensors, guards;
    and, where the tapes are not the same, the first node at which they part. With --format quiet, the parts' names.

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
@click.option("--lowered", is_flag=True, help="The ATen graph of each region instead, as it was compiled.")
@with_view
def graph(view: View, id: str, form: str | None, lowered: bool) -> None:
    """Print the tape of an entry or a structure, or what it was lowered to.

    Prints the tape graph as text, or its nodes and edges for Graphviz, Mermaid or a program. With --lowered, the ATen
    graph of each region of an entry.

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
            raise click.UsageError(f"ATen graphs are stored as text: --lowered goes with text or json, not {form}.")
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
