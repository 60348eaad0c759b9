"""``rm``, ``prune``, ``verify``, ``export``, ``import``: maintenance of the cache, and transfer to other machines."""

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

    Prints the removed entries. If one of the IDs is unknown, nothing is removed. A later backward that needs a removed
    entry compiles it again.

    \b
    Examples:
      shadow-cache rm 3fa9 81c0
      shadow-cache rm $(shadow-cache ls --backend eager --format quiet)
    """
    entries = list({entry.id: entry for entry in map(view.entry, id)}.values())
    view.store.remove([entry.id for entry in entries])
    view.out(entries, (entry.id for entry in entries), lambda: _told("removed", entries))


@click.command(cls=Verb)
@click.option("--older", callback=_parsed(render.parse_age), help="Remove entries unused for this long: 30d, 12h, 2w.")
@click.option("--max-size", callback=_parsed(render.parse_size), help="Shrink the cache to this size: 2GB.")
@click.option("--dry-run", is_flag=True, help="Remove nothing; print the entries that would be removed.")
@with_format
def prune(view: View, older: float | None, max_size: int | None, dry_run: bool) -> None:
    """Remove old entries, then the least recently used ones until the cache is within its size limit.

    Prints the removed entries, or with --dry-run the entries that would be removed. Without --older, no entry is too
    old. Without --max-size, the cache's own limit applies.

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
    """Compare every file with its checksum, and look for missing files.

    Prints a line for each problem, with the remedy. The exit code is 1 if there is a problem. Changes nothing: damaged
    entries are never used.

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
    """Write entries to FILE, for another machine of the same kind.

    Writes all entries, or those with the given IDs. Prints the written entries.

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
    """Add the entries of FILE, a file written by export.

    Prints the new entries. An entry is used only with the versions, processor and settings for which it was compiled.
    Import only files that you trust: they contain code, and this code will run.

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
        yield render.dim(f"replaced {render.plural(count - len(entries), 'entry', 'entries')} with the same ids")
