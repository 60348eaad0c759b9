"""``rm``, ``prune``, ``verify``, ``export``, ``import``: keeping the cache in order, and handing parts of it on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import rich_click as click

from ... import shadow_cache
from ..entries import Problem, Summary
from . import render
from .base import Fault, Verb, View, ids, with_format

_T = TypeVar("_T")


def _parsed(parse: Callable[[str], _T]) -> Callable[[click.Context, click.Parameter, str | None], _T | None]:
    def callback(ctx: click.Context, parameter: click.Parameter, value: str | None) -> _T | None:
        try:
            return None if value is None else parse(value)
        except ValueError as error:
            raise click.BadParameter(str(error), ctx, parameter) from None

    return callback


def _told(verb: str, entries: Sequence[Summary]) -> Iterator[str]:
    yield from (f"{render.identifier(entry.id)}  {entry.name}, {render.size(entry.size)}" for entry in entries)
    size = render.size(sum(entry.size for entry in entries))
    yield render.dim(f"{verb} {render.plural(len(entries), 'entry', 'entries')}, {size}")


@click.command(cls=Verb)
@click.argument("id", nargs=-1, required=True, shell_complete=ids)
@with_format
def rm(view: View, id: tuple[str, ...]) -> None:
    """Remove entries.

    Prints what was removed. If one of the IDs is unknown, nothing is. What is needed again is compiled again.

    \b
    Examples:
      shadow-cache rm 3fa9 81c0
      shadow-cache rm $(shadow-cache ls --backend eager --format quiet)
    """
    entries = list({entry.id: entry for entry in map(view.entry, id)}.values())
    view.store.remove([entry.id for entry in entries])
    view.out(entries, (entry.id for entry in entries), lambda: _told("removed", entries))


@click.command(cls=Verb)
@click.option("--older", callback=_parsed(render.parse_age), help="Those not used for this long: 30d, 12h, 2w.")
@click.option("--max-size", callback=_parsed(render.parse_size), help="Those used least lately, until it fits: 2GB.")
@click.option("--dry-run", is_flag=True, help="Remove nothing, only say what would be.")
@with_format
def prune(view: View, older: float | None, max_size: int | None, dry_run: bool) -> None:
    """Remove what has not been used for long, or what is too much.

    Prints what was removed, or with --dry-run what would be. Without --max-size, the cache's own limit holds.

    \b
    Examples:
      shadow-cache prune --older 30d --dry-run
      shadow-cache prune --older 30d --max-size 2GB
    """
    entries = view.store.prune(older_than=older, max_size=max_size, dry_run=dry_run)
    verb = "would remove" if dry_run else "removed"
    view.out(entries, (entry.id for entry in entries), lambda: _told(verb, entries))


@click.command(cls=Verb)
@with_format
def verify(view: View) -> None:
    """Check every file against its checksum, and that nothing is missing.

    Prints a line for each problem, and what can be done about it; exit code 1 if there is one. Nothing is changed: what
    is damaged is never used.

    \b
    Examples:
      shadow-cache verify
      shadow-cache verify --format quiet || echo damaged
    """
    problems = view.store.verify()
    count = view.store.stats().entries
    view.out(problems, (problem.where for problem in problems), lambda: _verified(problems, count))
    if problems:
        view.fail()


def _verified(problems: Sequence[Problem], count: int) -> Iterator[str]:
    for problem in problems:
        yield f"{render.bold(problem.where)}: {render.old(problem.what)}. {problem.do}."
    if problems:
        yield render.dim(render.plural(len(problems), "problem"))
    else:
        yield f"{render.plural(count, 'entry', 'entries')}, no problem"


@click.command(cls=Verb)
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.argument("id", nargs=-1, shell_complete=ids)
@with_format
def export(view: View, file: Path, id: tuple[str, ...]) -> None:
    """Write entries to FILE, for another machine of the same kind; all of them, or those of the IDs.

    Prints what was written.

    \b
    Examples:
      shadow-cache export warm.tar
      shadow-cache export one.tar 3fa9
    """
    entries = [view.entry(prefix) for prefix in id] if id else list(view.entries.values())
    if not entries:
        raise Fault(view.nothing)
    view.store.export(file, [entry.id for entry in entries])
    view.out(entries, (entry.id for entry in entries), lambda: _told("exported", entries))


@click.command(cls=Verb, name="import")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@with_format
def import_(view: View, file: Path) -> None:
    """Add the entries of FILE, which export has written.

    Prints what is new. Each is used only where versions, processor and settings agree with those it was made for.
    Import only what you trust: compiled code is run.

    \b
    Examples:
      shadow-cache import warm.tar
    """
    before = view.entries
    with shadow_cache.open(view.path) as store:
        count = store.import_(file)
        after = store.summaries()
    entries = [entry for entry in after if entry.id not in before]
    view.out(entries, (entry.id for entry in entries), lambda: _imported(count, entries))


def _imported(count: int, entries: Sequence[Summary]) -> Iterator[str]:
    yield from _told("added", entries)
    if count > len(entries):
        yield render.dim(f"replaced {render.plural(count - len(entries), 'entry', 'entries')} of the same ids")
