"""``python -m compiled_autograd.load FILE``: run a stored reproduction's operators one by one and compiled.

This module is a program and must not be imported: :func:`compiled_autograd.load` is a function.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import rich_click as click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from compiled_autograd.errors import CompiledAutogradError, import_failed
from compiled_autograd.shadow_cache.safe_text import harmless

try:
    from compiled_autograd.backends import UnknownBackendError
    from compiled_autograd.replay import Comparison, Reproduction, Times
except (ImportError, AttributeError) as error:
    click.echo(harmless(import_failed(error)), err=True)
    sys.exit(2)

if __name__ != "__main__":  # the module would hide the function in the package
    raise ImportError(
        "compiled_autograd.load is a function; as a program, run it with python -m compiled_autograd.load"
    )


@click.command()
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--backend", help="Use this backend instead of the file's: eager, inductor, ...")
@click.option(
    "--rounds", default=20, show_default=True, type=click.IntRange(0), help="Number of timed runs; 0 for none."
)
@click.option(
    "--stage",
    type=click.Choice(["tape", "aten", "regions", "code"]),
    help="Only print this stage of the reproduction.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(file: Path, backend: str | None, rounds: int, stage: str | None, as_json: bool) -> None:
    """Run a reproduction of a backward: its operators one by one, and compiled. Compare and time the two.

    Exit codes: 0 equal up to rounding, 1 a larger difference, 2 the file cannot be used.
    """
    try:
        reproduction = Reproduction(file)
        if stage is not None:
            is_tape = stage == "tape"
            text = reproduction.tape.readable() if is_tape else reproduction.graph(backend).readable(stage)
            click.echo(harmless(text, lines=True))
            return
        comparison = reproduction.compare(backend)
        times = reproduction.time(backend, rounds) if rounds else None
    except (CompiledAutogradError, UnknownBackendError, OSError) as error:
        click.echo(harmless(str(error)), err=True)
        sys.exit(2)
    if as_json:
        click.echo(_as_json(reproduction, comparison, times))
    else:
        _show(reproduction, comparison, times)
    sys.exit(0 if comparison.is_rounding else 1)


def _show(reproduction: Reproduction, comparison: Comparison, times: Times | None) -> None:
    console, about = Console(highlight=False, soft_wrap=True), reproduction.about
    written = f"written with torch {about.torch}, compiled_autograd {about.version}, backend {about.backend}"
    console.print(f"[bold]{_plain(about.where)}[/bold], {_plain(written)}")
    if about.difference:
        console.print(f"difference found: {_plain(about.difference)}")
    console.print(f"values: {'those of the backward' if reproduction.real else 'made up'}")
    for what in reproduction.stand_ins:
        console.print(f"made-up values stand in for {_plain(what)}")
    for reason in comparison.reasons:
        console.print(f"[yellow]{_plain(reason)}[/yellow]")
    table = Table("gradient", "largest difference", "at", "one by one", "compiled", "")
    for each in comparison.differences:
        numbers = (f"{each.error:.3g}", str(list(each.where)), f"{each.eager:.6g}", f"{each.compiled:.6g}")
        said = each.text or ("" if each.is_rounding else f"[red]more than rounding, in run {each.run}[/red]")
        table.add_row(_plain(each.name), *numbers, _plain(said) if each.text else said)
    console.print(table)
    worst = max((each.error for each in comparison.differences), default=0.0)
    wrong = [each for each in comparison.differences if not each.is_rounding]
    verdict = f"[red]{len(wrong)} gradients differ[/red]" if wrong else "all differences are within rounding"
    console.print(f"regions compiled: {comparison.compiles}; {verdict}; the largest is {worst:.3g}")
    if times is not None:
        console.print(
            f"one by one {times.eager * 1e3:.3g} ms, compiled {times.compiled * 1e3:.3g} ms, "
            f"ratio {times.ratio:.2f} (median of {times.rounds} each, run alternately)"
        )


def _plain(text: str) -> str:
    """Escape untrusted text of the file for the terminal and for rich's markup."""
    return escape(harmless(text))


def _as_json(reproduction: Reproduction, comparison: Comparison, times: Times | None) -> str:
    found: dict[str, object] = {
        "about": reproduction.about,
        "real": reproduction.real,
        "stand_ins": reproduction.stand_ins,
        "comparison": comparison,
        "times": times,
        "is_rounding": comparison.is_rounding,
    }
    return msgspec.json.encode(found).decode()


main()
