"""``report``: the cache as one HTML file."""

from __future__ import annotations

from pathlib import Path

import rich_click as click

from .base import Verb, View, with_format


@click.command(cls=Verb)
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    required=True,
    help="The file to write; an existing file is replaced.",
)
@with_format
def report(view: View, output: Path) -> None:
    """Write the cache as one HTML file, for a browser.

    The page has the content of ls, show, tree, why and graph: totals, misses with their costs, and the differences of
    the tapes. For each tape it has a drawing, the tape graph and the ATen graphs. The file needs no network. Prints the
    path of the file.

    \b
    Examples:
      shadow-cache report -o cache.html
    """
    from ..report import page
    from ..report.from_store import store_report

    written = page.write(store_report(view.store), output)
    view.out({"file": str(written)}, [str(written)], lambda: [f"wrote {written}"])
