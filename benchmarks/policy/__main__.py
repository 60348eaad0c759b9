"""Policies replayed over recorded sequences of backwards: what each would cost, and what the best plan would.

    python -m benchmarks.policy
    python -m benchmarks.policy --vary --sequences
    python -m benchmarks.policy --only packed_gru notebook --cores 1 --markdown

Each sequence is one program's backwards (`sequences/*.json`, made by `python -m benchmarks.policy.recorder`). It is
replayed as it was recorded, and with times that are scattered by 30 %. Nothing is compiled, and torch computes nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import sys
import warnings
from collections.abc import Callable, Iterator
from unittest.mock import patch

from rich.console import Console

from compiled_autograd.policies import ledger

from . import figures, sequence
from .figures import Row
from .ledger import Replayed
from .oracle import bound
from .plain import Always, EagerOnly
from .sequence import Event, Recording
from .simulator import Machine, Policy, Way, replay

SCATTER = 0.3
CONSTANTS = ("FIRST_SECONDS", "BESIDE", "SECONDS", "SHARE", "SAMPLES", "WORTH", "REST")
Make = Callable[[], contextlib.AbstractContextManager[Policy]]


def _plain(make: Callable[[], Policy]) -> Make:
    return lambda: contextlib.nullcontext(make())


POLICIES: dict[str, Make] = {
    "eager only": _plain(EagerOnly),
    "always compile": _plain(Always),
    "always beside": _plain(lambda: Always(Way.BESIDE)),
    "compile": _plain(lambda: Replayed("compile")),
    "background": _plain(Replayed),
}


@contextlib.contextmanager
def _other(name: str, value: float) -> Iterator[Policy]:
    with patch.object(ledger, name, value):
        yield Replayed()


def varied() -> dict[str, Make]:
    """The ledger's constants, each at half and twice its value."""
    found: dict[str, Make] = {}
    for name in CONSTANTS:
        value = getattr(ledger, name)
        for factor in (0.5, 2):
            changed = 1 + (value - 1) * factor if name == "WORTH" else type(value)(value * factor)
            found[f"{name} {changed:g}, not {value:g}"] = functools.partial(_other, name, changed)
    return found


class Played:
    """The sequences, and the machine on which they are replayed."""

    def __init__(self, recordings: list[Recording], scatters: list[float], machine: Machine, most: int) -> None:
        self._machine = machine
        self._of: dict[str, tuple[Recording, list[Event]]] = {}
        for each in recordings:
            for scatter in scatters:
                name = f"{each.name} +{scatter:.0%}" if scatter else each.name
                self._of[name] = each, sequence.events(each, scatter)[:most]

    def oracle(self) -> Row:
        """The lower bound."""
        row = Row("oracle")
        for name, (recording, events) in self._of.items():
            row.results[name] = bound(events, recording.widens, recording.start, self._machine)
        return row

    def row(self, name: str, make: Make) -> Row:
        """A policy, made anew for each sequence."""
        row = Row(name)
        for of, (recording, events) in self._of.items():
            with make() as policy:
                row.results[of] = replay(policy, events, recording.widens, recording.start, self._machine)
        return row


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.policy", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", help="sequences to replay")
    parser.add_argument("--vary", action="store_true", help="halve and double each constant of the ledger")
    parser.add_argument("--sequences", action="store_true", help="show each sequence too")
    parser.add_argument("--cores", type=int, default=2)

    parser.add_argument("--at-most", type=int, default=10**9, metavar="N", help="replay the first N backwards of each")
    parser.add_argument("--no-scatter", action="store_true", help="leave out the scattered times")
    parser.add_argument("--markdown", action="store_true", help="print the tables as Markdown")
    return parser.parse_args()


def main() -> int:
    args = parse_arguments()
    warnings.simplefilter("ignore")
    console = Console()
    if not console.is_terminal:
        console.width = 200
    recordings = [each for each in sequence.load_all() if not args.only or each.name in args.only]
    if not recordings:
        print(f"no sequence is named {args.only}", file=sys.stderr)
        return 1
    machine = Machine(cores=args.cores)
    played = Played(recordings, [0.0] if args.no_scatter else [0.0, SCATTER], machine, args.at_most)
    oracle = played.oracle()
    rows = [played.row(name, make) for name, make in POLICIES.items()]
    tables = [figures.policies([oracle, *rows], oracle)]
    if args.vary:
        others = [played.row(name, make) for name, make in varied().items()]
        tables.append(figures.rules(rows[-1], others))
    if args.sequences:
        tables.append(figures.sequences([oracle, *rows]))
    for table in tables:
        if args.markdown:
            print(f"**{table.title}**\n\n{figures.markdown(table)}")
        else:
            console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
