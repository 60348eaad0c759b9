"""Format the listing of a tape as foldable HTML for a notebook, without external resources. All text is escaped."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from ..capture import tape
from ..shadow_cache.safe_text import harmless
from .folding import Layers, Module, parts_of, shown, tree_of
from .listing import Listing, edges_of, saved_as
from .nodes import counted

_MOST_ROWS = 1_000

# JupyterLab aligns cells to the right, by a selector that a class alone does not override.
_STYLE = """
<style>
.ca-tape { font: 13px/1.45 system-ui, sans-serif; overflow-x: auto; }
.ca-tape details { margin-left: 1em; border-left: 1px solid #8884; padding-left: .6em; }
.ca-tape summary { cursor: pointer; }
.ca-tape table { border-collapse: collapse; font: 12px/1.4 ui-monospace, monospace; margin: .2em 0 .4em 1em; }
.ca-tape td, .ca-tape th { border: 0; padding: .1em .8em .1em 0; text-align: left !important; vertical-align: top; }
.ca-tape td:nth-child(-n+3) { white-space: nowrap; }
.ca-tape td:nth-child(5) { min-width: 18em; }
.ca-tape .ca-less { opacity: .7; }
</style>
"""


def html_of(listing: Listing) -> str:
    """Return the listing as HTML with all modules folded except the model; at most 1,000 rows."""
    page = _Page(listing)
    body = "".join(page.module(tree_of(listing.nodes)))
    if page.left_out:
        body += f"<p>{page.left_out:,} more nodes are not shown: <code>readable()</code> lists all.</p>"
    return f'{_STYLE}<div class="ca-tape"><strong>{_text(listing.title)}</strong>{body}</div>'


def _text(text: str) -> str:
    return escape(harmless(text))


class _Page:
    def __init__(self, listing: Listing) -> None:
        self._listing = listing
        self._rows = 0
        self.left_out = 0

    def module(self, module: Module) -> Iterator[str]:
        for part in parts_of(module, self._listing.nodes):
            if isinstance(part, Layers):
                if self._rows >= _MOST_ROWS:
                    self.left_out += shown(part).count()
                    continue
                self._rows += 1
                yield f"<details><summary>{_text(self._listing.of_layers(part))}</summary>"
                yield from self.module(shown(part))
                yield "</details>"
                continue
            if part.times > 1:
                yield f"<div>{part.times:,} times {counted(len(part.indices))}:</div>"
            yield from self._table(part.indices)

    def _table(self, indices: tuple[int, ...]) -> Iterator[str]:
        there_is_room = max(0, _MOST_ROWS - self._rows)
        self._rows += len(indices)
        self.left_out += len(indices[there_is_room:])
        yield "<table>"
        for index in indices[:there_is_room]:
            node = self._listing.nodes[index]
            name = node.parameter if node.name == tape.LEAF and node.parameter else node.name
            cells = [
                f"#{index}",
                name,
                " ".join(map(str, node.gradients)),
                edges_of(node),
                "; ".join(map(saved_as, node.saved)),
                "; ".join((*node.hooks, *([f"at {node.source}"] if node.source else []))),
            ]
            yield "<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in cells) + "</tr>"
        yield "</table>"
