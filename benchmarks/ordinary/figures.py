"""The tables of `benchmarks.ordinary`, for a terminal and as Markdown."""

from collections.abc import Iterable, Sequence

from rich.table import Table

from benchmarks.tables import number
from benchmarks.targets import Result

# In the table that says when it helps: the heading, the runner, and the figure of its row.
_HELPS = (
    ("step", "ours", "step_ratio"),
    ("backward", "ours", "backward_ratio"),
    ("first {steps} steps", "ours", "first_ratio"),
    ("the same in the next process", "ours-warm", "first_ratio"),
    ("step with `torch.compile`", "compile", "step_ratio"),
    ("with both", "compile-ours", "step_ratio"),
)


def columns(steps: int) -> list[str]:
    """The headings of `cells`."""
    first = f"first {steps} steps"
    return [
        "model",
        "runner",
        f"{first}, s",
        "by eager's",
        "step, ms",
        "eager's, ms",
        "ratio",
        "backward, ms",
        "eager's, ms",
        "ratio",
        "pays after steps",
        "gradients",
    ]


def cells(result: Result) -> list[str]:
    """A row: dashes where nothing was measured."""
    found = [result["model"], result["runner"]]
    found += [number(result, "first_seconds", ".1f"), number(result, "first_ratio", ".2f")]
    for part in ("step", "backward"):
        found += [number(result, f"{part}_ms", ".1f"), number(result, f"eager_{part}_ms", ".1f")]
        found.append(number(result, f"{part}_ratio", ".2f"))
    after = "-" if result["runner"] == "eager" else "never" if "pays_after" in result else "-"
    found.append(after if result.get("pays_after") is None or after == "-" else f"{result['pays_after']:,.0f}")
    same = number(result.get("differences", {}), "largest", ".0e")
    return [*found, "other draws" if result.get("other_draws") else same]


def has_one_round(result: Result) -> bool:
    """Return whether the ratios are of a single pair of blocks."""
    return len(result.get("rounds", {}).get("step", ())) == 1


def notes(result: Result) -> str:
    """What the runner counted in the first steps, and what else while the others were measured."""
    if "failed" in result:
        return "failed"
    said = [f"{name} {value}" for name, value in result.get("counts", {}).items()]
    return ", ".join(said + [f"later {name} {value}" for name, value in result.get("later", {}).items()])


def table(results: Sequence[Result], steps: int) -> Table:
    """All that was measured."""
    shown = Table(title="Whole steps of ordinary models (ratios are by eager's: below 1 is faster)")
    for index, heading in enumerate([*columns(steps), "notes"]):
        shown.add_column(heading, justify="right" if 2 <= index < 12 else "left", overflow="fold")
    for index, result in enumerate(results):
        last = index + 1 == len(results) or results[index + 1]["model"] != result["model"]
        shown.add_row(*cells(result), notes(result), end_section=last)
    return shown


def markdown(results: Sequence[Result], steps: int) -> str:
    """Two tables: when it helps, a row for each model, and all that was measured."""
    return "\n".join([as_markdown(*helps(results, steps)), as_markdown(columns(steps), map(cells, results))])


def helps(results: Sequence[Result], steps: int) -> tuple[list[str], list[list[str]]]:
    """Headings and rows: times by eager's of each model."""
    found = {(result["model"], result["runner"]): result for result in results}
    rows = []
    for model in dict.fromkeys(result["model"] for result in results):
        eager = next((each for each in results if each["model"] == model and "eager_step_ms" in each), {})
        row = [model, number(eager, "eager_step_ms", ".0f"), number(eager, "eager_backward_ms", ".0f")]
        rows.append(row + [number(found.get((model, runner), {}), name, ".2f") for _, runner, name in _HELPS])
    headings = [heading.format(steps=steps) for heading, _, _ in _HELPS]
    return ["model", "eager's step, ms", "its backward, ms", *headings], rows


def as_markdown(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    return "".join(f"| {' | '.join(line)} |\n" for line in (headings, ["---"] * len(headings), *rows))
