"""Shared parts of all verbs: the store, the three output formats, abbreviated ids, plain help in pipes."""

from __future__ import annotations

import functools
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click
import msgspec
import rich_click
from click.shell_completion import CompletionItem

from ... import shadow_cache
from ..entries import Entry, Structure, Summary
from ..safe_text import harmless_json
from . import render

if TYPE_CHECKING:
    from ..store import Store

CACHE_DIR_VARIABLE = "COMPILED_AUTOGRAD_CACHE_DIR"
_NO_PATHS = ("", "none", "false", "0")  # values of the setting that are no path
_CANDIDATES = 8
_Function = Callable[..., Any]


class Fault(click.ClickException):
    """An entry was not found, or the store has a problem: exit code 1."""

    def show(self, file: Any = None) -> None:
        _say(f"{render.old('Error:')} {self.message}", file or sys.stderr)


class View:
    """The store and the output format of one call of the command line."""

    def __init__(self) -> None:
        self.format = "human"
        self.cache_dir: Path | None = None
        self.now = time.time()
        self._store: Store | None = None
        self._entries: dict[str, Summary] | None = None

    @property
    def store(self) -> Store:
        """The open store. Raises :class:`Fault` if there is none; never creates one."""
        if self._store is None:
            if not self.is_store:  # opening a folder creates the missing parts of a store
                raise Fault(self.nothing)
            try:
                self._store = shadow_cache.open(self.path, create=False)
            except shadow_cache.StoreMissingError:
                raise Fault(self.nothing) from None
        return self._store

    @property
    def entries(self) -> dict[str, Summary]:
        """All entries by id, last used first; empty without a store."""
        if self._entries is None:
            try:
                self._entries = {entry.id: entry for entry in self.store.summaries()}
            except Fault:
                self._entries = {}
        return self._entries

    @property
    def path(self) -> Path:
        """The folder of the store, also if there is no store yet."""
        text = os.environ.get(CACHE_DIR_VARIABLE, "")
        if self.cache_dir is None and text.lower() not in _NO_PATHS:
            return Path(text).expanduser()
        return (self.cache_dir or shadow_cache.default_dir()).expanduser()

    @property
    def is_store(self) -> bool:
        """True if the folder has a store."""
        return (self.path / "index").is_dir()

    @property
    def nothing(self) -> str:
        """The message for an empty or missing store."""
        return f"nothing is stored in {self.path}"

    @property
    def width(self) -> int | None:
        """The width of the terminal in characters; None if the output goes to no terminal."""
        return shutil.get_terminal_size().columns if sys.stdout.isatty() else None

    def entry(self, prefix: str) -> Entry:
        """Return the entry whose id begins with ``prefix``; :class:`Fault` if none or several do."""
        return self.whole(self.complete(prefix, {id: entry.name for id, entry in self.entries.items()}, "entry"))

    def whole(self, id: str) -> Entry:
        """Return one entry with its long fields."""
        for entry in self.store.find(self.entries[id].structure):
            if entry.id == id:
                return entry
        raise Fault(f"entry {id} was removed a moment ago.")

    def entry_or_structure(self, prefix: str) -> Entry | Structure:
        """Return the entry or structure whose id begins with ``prefix``; :class:`Fault` if none or several do."""
        names = {entry.structure: f"structure of {entry.name}" for entry in self.entries.values()}
        names |= {id: entry.name for id, entry in self.entries.items()}
        found = self.complete(prefix, names, "entry or structure")
        return self.whole(found) if found in self.entries else self.structure(found)

    def structure(self, id: str) -> Structure:
        """Return the structure with this full id."""
        found = self.store.structure(id)
        if found is None:
            raise Fault(f"structure {id} cannot be read; `shadow-cache verify` shows the damage.")
        return found

    def complete(self, prefix: str, names: dict[str, str], noun: str) -> str:
        """Return the full id; :class:`Fault` with the ids and names of candidates if none or several match."""
        if prefix in names:
            return prefix
        if not names:
            raise Fault(f"there is no {noun} {prefix!r}: {self.nothing}")
        found = [id for id in names if id.startswith(prefix.lower())]
        if len(found) == 1:
            return found[0]
        if found:
            what = f"{len(found)} ids begin with {prefix!r}; give more characters:"
        else:
            what = f"there is no {noun} whose id begins with {prefix!r}; the cache has:"
        candidates = found or list(names)
        lines = [f"  {id}  {names[id]}" for id in candidates[:_CANDIDATES]]
        if len(candidates) > _CANDIDATES:
            lines.append(f"  and {len(candidates) - _CANDIDATES} more; `shadow-cache ls` lists them")
        raise Fault("\n".join([what, *lines]))

    def out(self, record: Any, quiet: Iterable[str], human: Callable[[], Iterable[str]]) -> None:
        """Print ``record`` as JSON, the ids or values in ``quiet`` one a line, or the lines that ``human`` yields."""
        if self.format == "json":
            self.print_json(record)
        else:
            lines = quiet if self.format == "quiet" else human()
            self.print("\n".join(line.replace("\n", "\\n") for line in lines))  # names may contain newlines

    def print_json(self, record: Any) -> None:
        """Print a record to standard output as JSON of several lines."""
        self.print(harmless_json(msgspec.json.format(msgspec.json.encode(record), indent=2).decode()))

    def print(self, text: str) -> None:
        """Print to standard output, in colour only on a terminal. Empty text prints nothing, not even a newline."""
        if text:
            _say(text, sys.stdout)

    def say_damage(self) -> None:
        """Print the damage that this call found and skipped to stderr."""
        for each in () if self._store is None else self._store.damage:
            what, instead = f"{each.miss.where} {each.name and f'({each.name})'}".rstrip(), each.miss.hint
            _say(f"{render.old('damaged:')} {what}: {each.miss.new}; {instead or 'it was skipped'}", sys.stderr)

    def fail(self, note: str = "") -> NoReturn:
        """End with exit code 1, after a note for people; the other output has been printed already."""
        if note and self.format == "human":
            _say(note, sys.stderr)
        raise click.exceptions.Exit(1)


def _say(text: str, stream: Any) -> None:
    """Print in colour if ``stream`` is a terminal or ``FORCE_COLOR`` is set, unless ``NO_COLOR`` is set."""
    colours = not os.environ.get("NO_COLOR") and (bool(os.environ.get("FORCE_COLOR")) or stream.isatty())
    click.echo(render.for_encoding(render.shown(text), stream.encoding), file=stream, color=colours)


class _Context(rich_click.RichContext):
    def make_formatter(self, error_mode: bool = False) -> Any:
        """Return rich-click's formatter on a terminal, else a plain one, 100 characters wide."""
        return super().make_formatter(error_mode) if sys.stdout.isatty() else click.HelpFormatter(width=100)


class Verb(rich_click.RichCommand):
    """A command whose help is plain text if it does not go to a terminal."""

    context_class = _Context

    def format_help(self, ctx: Any, formatter: Any) -> None:
        if isinstance(formatter, rich_click.RichHelpFormatter):
            super().format_help(ctx, formatter)
            return
        for plain in (click.Command.format_usage, click.Command.format_help_text, click.Command.format_options):
            plain(self, ctx, formatter)
        if isinstance(self, Verbs):
            click.Group.format_commands(self, ctx, formatter)


class Verbs(Verb, rich_click.RichGroup):  # type: ignore[misc]  # as RichGroup itself
    """All verbs, in the order in which they were added."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


def _set(attribute: str) -> Callable[[click.Context, click.Parameter, Any], None]:
    def callback(ctx: click.Context, parameter: click.Parameter, value: Any) -> None:
        if value is not None:
            setattr(ctx.find_root().ensure_object(View), attribute, value)

    return callback


def with_view(function: _Function) -> _Function:
    """Decorate a verb, or the program: pass the :class:`View`, and add the option ``--cache-dir``."""

    @functools.wraps(function)
    def run(view: View, *arguments: Any, **named: Any) -> Any:
        try:
            return function(view, *arguments, **named)
        finally:
            view.say_damage()

    return rich_click.option(
        "--cache-dir",
        type=click.Path(file_okay=False, path_type=Path),
        expose_value=False,
        callback=_set("cache_dir"),
        help=f"The folder of the cache.  [default: ${CACHE_DIR_VARIABLE}, or this user's cache]",
    )(click.make_pass_decorator(View, ensure=True)(run))


def with_format(function: _Function) -> _Function:
    """Decorate like :func:`with_view`, and add the option ``--format``."""
    return rich_click.option(
        "--format",
        type=click.Choice(("human", "json", "quiet")),
        expose_value=False,
        callback=_set("format"),
        help="human: for reading. json: records. quiet: one id or value per line.  [default: human]",
    )(with_view(function))


def ids(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem[Any]]:
    """Complete an id in the shell: the ids that begin with ``incomplete``, with names."""
    view = ctx.find_root().ensure_object(View)
    return [CompletionItem(id, help=entry.name) for id, entry in view.entries.items() if id.startswith(incomplete)]
