"""What the replays come to: sums, means and tables."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from rich.table import Table

from .simulator import Result


@dataclass
class Row:
    """A policy over all sequences.

    Attributes:
        results: by the name of the sequence.
    """

    name: str
    results: dict[str, Result] = field(default_factory=dict)

    @property
    def sum(self) -> float:
        """Seconds of all programs by eager's."""
        return sum(each.total for each in self.results.values()) / sum(each.eager for each in self.results.values())

    @property
    def mean(self) -> float:
        """Geometric mean of the programs' time by eager's."""
        return geometric([each.ratio for each in self.results.values()])

    @property
    def backwards(self) -> float:
        """Geometric mean of the time of backwards by eager's, waiting included."""
        return geometric([each.backward / each.eager_backward for each in self.results.values()])

    def by(self, other: Row) -> float:
        """Geometric mean of the programs' time by that of another row."""
        return geometric([self.results[name].total / other.results[name].total for name in self.results])

    def worst(self) -> tuple[str, float]:
        """The sequence with the largest time by eager's, and that ratio."""
        return max(((name, each.ratio) for name, each in self.results.items()), key=lambda pair: pair[1])

    def lost(self) -> float:
        """Seconds lost in all programs that were slower than eager."""
        return sum(max(0.0, each.total - each.eager) for each in self.results.values())

    def stall(self) -> float:
        """Seconds of the longest wait of a step."""
        return max(each.longest for each in self.results.values())

    def unpaid(self) -> str:
        """Compiles that never paid, of all."""
        made = sum(each.compiles for each in self.results.values())
        return f"{sum(each.unpaid for each in self.results.values())} of {made}"


def geometric(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


HEADINGS = (
    "sum / eager",
    "mean / eager",
    "backwards / eager",
    "mean / oracle",
    "worst / eager",
    "of",
    "lost s",
    "longest stall s",
    "unpaid compiles",
)


def cells(row: Row, oracle: Row) -> list[str]:
    """One line of the table of policies."""
    name, ratio = row.worst()
    figures = (f"{row.sum:.3f}", f"{row.mean:.3f}", f"{row.backwards:.3f}", f"{row.by(oracle):.3f}")
    return [row.name, *figures, f"{ratio:.2f}", name, f"{row.lost():.1f}", f"{row.stall():.2f}", row.unpaid()]


def policies(rows: list[Row], oracle: Row) -> Table:
    """A line for each policy."""
    table = Table("policy", title="Policies over all sequences (1 is eager; less is better)")
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading == "of" else "right")
    for row in rows:
        table.add_row(*cells(row, oracle))
    return table


def rules(before: Row, without: list[Row]) -> Table:
    """A line for each change of a policy, such as a rule that was taken out: what it is worth."""
    table = Table("change", title=f"{before.name}: figures after a change by those before (1: it is worth nothing)")
    for heading in ("sum", "mean", "backwards", "largest loss", "of", "largest gain", "of"):
        table.add_column(heading, justify="left" if heading == "of" else "right")
    for row in without:
        changes = {name: row.results[name].total / each.total for name, each in before.results.items()}
        most, least = max(changes, key=changes.__getitem__), min(changes, key=changes.__getitem__)
        figures = (f"{row.sum / before.sum:.4f}", f"{row.by(before):.4f}", f"{row.backwards / before.backwards:.4f}")
        table.add_row(row.name, *figures, f"{changes[most]:.3f}", most, f"{changes[least]:.3f}", least)
    return table


def sequences(rows: list[Row]) -> Table:
    """A line for each sequence: each policy's time by eager's."""
    table = Table("sequence", title="Time of the program by eager's")
    table.add_column("eager s", justify="right")
    for row in rows:
        table.add_column(row.name, justify="right")
    for name, first in rows[0].results.items():
        table.add_row(name, f"{first.eager:.1f}", *(f"{row.results[name].ratio:.3f}" for row in rows))
    return table


def markdown(table: Table) -> str:
    """A table of rich as one of Markdown."""
    columns = [[str(cell) for cell in column.cells] for column in table.columns]
    lines = [
        [str(column.header) for column in table.columns],
        ["---"] * len(columns),
        *map(list, zip(*columns, strict=True)),
    ]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"
