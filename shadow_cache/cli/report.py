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
    help="The file to write; one that is there is replaced.",
)
@with_format
def report(view: View, output: Path) -> None:
    """Write the cache as one HTML file, to be opened in a browser.

    Has what ls, show, tree, why and graph tell: totals, misses in their order with what each cost, how the tapes
    differ, and of each tape a drawing, its tape graph and its ATen graphs. The file needs no network. Prints where it
    is.

    \b
    Examples:
      shadow-cache report -o cache.html
    """
    from ..report import page
    from ..report.from_store import store_report

    written = page.write(store_report(view.store), output)
    view.out({"file": str(written)}, [str(written)], lambda: [f"wrote {written}"])
