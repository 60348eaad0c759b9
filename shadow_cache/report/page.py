"""Write a report as one HTML file, without network access, other files, or code of the user.

Text from user code is data only. The template escapes its values. All other values are JSON in the page, and the page's
own script puts them into text nodes. A content security policy in the page allows only this script and its style.
"""

from __future__ import annotations

import base64
import collections
import functools
import hashlib
import json
import os
import uuid
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
import markupsafe
import msgspec

from ..safe_text import harmless
from .data import Graph, Report

MAX_BYTES = 4_500_000
"""Maximum bytes of all graphs together, so that the file stays below 5 MB. The longest texts are left out first."""
_SCRIPTS = (
    "base.js",
    "lists.js",
    "times.js",
    "timeline.js",
    "layout.js",
    "drawing.js",
    "stages.js",
    "figures.js",
    "main.js",
)
_ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}
_LEFT_OUT = "These lines were left out so that the file stays small."


def write(report: Report, path: str | os.PathLike[str]) -> Path:
    """Write the page, as :func:`write_file` does."""
    return write_file(page(report), path)


def write_file(text: str, path: str | os.PathLike[str]) -> Path:
    """Write a file and return its absolute path.

    An existing file, or the target of a link, is replaced atomically, and stays unchanged if writing fails. A path that
    is no regular file, such as a pipe or ``/dev/stdout``, is written directly.

    Raises:
        OSError: ``path`` cannot be written.
    """
    asked = Path(os.path.expanduser(path))  # noqa: PTH111  Path.expanduser raises for an unknown user
    if asked.is_dir():
        raise IsADirectoryError(21, "the report is one file, and this path is a folder; name a file in it", str(asked))
    if asked.exists() and not asked.is_file():
        asked.write_text(text, encoding="utf-8")
        return asked.absolute()
    target = Path(os.path.realpath(asked))
    temporary = target.with_name(f".{uuid.uuid4().hex}")
    try:
        with temporary.open("x", encoding="utf-8") as file:
            file.write(text)
        temporary.replace(target)
    except BaseException as error:
        if isinstance(error, OSError) and error.filename2 is None:
            error.filename = str(asked)  # not the name of the temporary file
        temporary.unlink(missing_ok=True)
        raise
    return asked.absolute()


def page(report: Report) -> str:
    """Return the whole page as HTML."""
    style, script = _text("page.css"), "\n".join(["'use strict';", *map(_text, _SCRIPTS)])
    graphs = _fitting(report.graphs)
    rest = msgspec.structs.replace(report, graphs=())
    return _template().render(
        report=report,
        graphs=report.graphs,
        numbers=collections.defaultdict(str, {each.id: f"{at}. " for at, each in enumerate(report.graphs, 1)}),
        harmless=harmless,
        # Both are files of this package, and hashed below.
        style=markupsafe.Markup(style),
        script=markupsafe.Markup(script),
        style_hash=_hash(style),
        script_hash=_hash(script),
        data=_json(rest),
        graph_data=[_safe(each) for each in graphs],
    )


@functools.cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(_text("page.html"))


@functools.cache
def _text(name: str) -> str:
    return resources.files(__package__).joinpath("page_files").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """Return the hash of an inline script or style in the form of a content security policy."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _encoded(record: Any) -> bytes:
    """Encode as JSON. Lone surrogates are escaped: names of files that are not UTF-8 contain them."""
    try:
        return msgspec.json.encode(record)
    except UnicodeEncodeError:
        return json.dumps(msgspec.to_builtins(record), separators=(",", ":")).encode()


def _json(record: Any) -> markupsafe.Markup:
    return _safe(_encoded(record))


def _safe(data: bytes) -> markupsafe.Markup:
    """Return equivalent JSON in which no tag, comment or entity can begin."""
    text = data.decode()
    for character, escape in _ESCAPES.items():
        text = text.replace(character, escape)
    return markupsafe.Markup(text)


def _fitting(graphs: Sequence[Graph]) -> list[bytes]:
    """Return the graphs as JSON, without the longest stages if the total exceeds :data:`MAX_BYTES`."""
    encoded = [_encoded(graph) for graph in graphs]
    total = sum(map(_escaped_size, encoded))
    while total > MAX_BYTES:
        sizes = [
            (_escaped_size(_encoded(stage.lines)), which, place)
            for which, graph in enumerate(graphs)
            for place, stage in enumerate(graph.stages)
            if stage.lines
        ]
        if not sizes:
            return _bare(graphs, encoded)
        sizes.sort(reverse=True)
        graphs = list(graphs)
        for size, which, place in sizes:
            stages = list(graphs[which].stages)
            note = " ".join(filter(None, (stages[place].note, _LEFT_OUT)))
            stages[place] = msgspec.structs.replace(stages[place], lines=(), blocks=(), note=note)
            graphs[which] = msgspec.structs.replace(graphs[which], stages=tuple(_linked(stages)))
            total -= size
            if total <= MAX_BYTES:
                break
        encoded = [_encoded(graph) for graph in graphs]
        total = sum(map(_escaped_size, encoded))
    return encoded


def _linked(stages: Sequence[Any]) -> list[Any]:
    """Return the stages without links into a stage that has no lines."""
    linked = []
    for place, stage in enumerate(stages):
        if place and not stages[place - 1].lines and stage.lines:
            lines = tuple(msgspec.structs.replace(line, links=()) for line in stage.lines)
            stage = msgspec.structs.replace(stage, lines=lines)
        linked.append(stage)
    return linked


def _bare(graphs: Sequence[Graph], encoded: Sequence[bytes]) -> list[bytes]:
    """Strip the last graphs to their names, if graphs without stages still exceed :data:`MAX_BYTES`."""
    kept, total = [], 0
    for graph, data in zip(graphs, encoded, strict=True):
        total += _escaped_size(data)
        if total > MAX_BYTES:
            graph = msgspec.structs.replace(graph, nodes=(), steps=(), stages=(), memory=None, note=_LEFT_OUT)
            data = _encoded(graph)
            total += _escaped_size(data)
        kept.append(data)
    return kept


def _escaped_size(data: bytes) -> int:
    return len(data) + 5 * sum(data.count(each) for each in (b"<", b">", b"&"))
