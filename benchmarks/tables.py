"""The tables that `benchmarks.backward` prints of its results; torch is not imported."""

from rich.table import Table

from benchmarks.targets import REFERENCE, WITHOUT_HITS, Result, geometric_means, rows

# Heading, name in the results, form, and scale where it is not 1.
_MODEL = (
    ("first backward s", "first_backward_seconds", ".2f"),
    ("beside ms", "beside_ms", ".2f"),
    ("runner ms", "runner_ms", ".2f"),
    ("ratio", "ratio", ".3f"),
    ("here", "ratio_here", ".3f"),
    ("floor", "floor", ".3f"),
    ("hit ms", "hit_ms", ".3f"),
    ("hit us/node", "hit_us_per_node", ".2f"),
    ("peak MB eager", "eager_peak_bytes", ".1f", 1e-6),
    ("peak MB", "runner_peak_bytes", ".1f", 1e-6),
    ("alloc MB eager", "eager_allocated_bytes", ".1f", 1e-6),
    ("alloc MB", "runner_allocated_bytes", ".1f", 1e-6),
    ("grad diff", "gradient_difference", ".1e"),
)
_TARGETS = (
    ("ratio", "ratio", ".3f"),
    ("floor", "floor", ".3f"),
    ("first backward s", "first_backward_seconds", ".2f"),
    ("by static's", "first_to_reference", ".2f"),
    ("hit ms", "hit_ms", ".3f"),
    ("by static's", "hit_to_reference", ".2f"),
    ("by eager's", "hit_to_eager", ".2f"),
    ("alloc by eager's", "allocated_ratio", ".3f"),
)


def number(result: Result, name: str, form: str, scale: float = 1.0) -> str:
    value = result.get(name)
    return "-" if value is None else format(scale * value, form)


def first_step(result: Result) -> str:
    """Seconds from choosing the runner to the end of its first backward: to `aot`, most of it is the forward."""
    if "first_backward_seconds" not in result:
        return "-"
    return f"{sum(result[f'{part}_seconds'] for part in ('setup', 'first_forward', 'first_backward')):.1f}"


def notes(result: Result) -> str:
    said = ["failed"] if "failed" in result else []
    said += ["hit failed"] if "hit_failed" in result else []
    said += [f"{name} {value}" for name, value in result.get("counts", {}).items()]
    return ", ".join(said)


def problems(result: Result) -> list[str]:
    """Why some of the numbers are missing, one line each."""
    found = [f"{result['runner']}: {result[name]}" for name in ("failed", "not_applicable") if name in result]
    if "hit_failed" in result:
        found.append(f"{result['runner']}, hit: {result['hit_failed']}")
    if "hit_not_applicable" in result and result["runner"] not in WITHOUT_HITS:
        found.append(f"{result['runner']}, hit n/a: {result['hit_not_applicable']}")
    return found


def model_table(model: str, results: list[Result]) -> Table:
    """What was measured of one model, a row for each runner."""
    nodes = next((f", {result['nodes']} nodes" for result in results if "nodes" in result), "")
    gpu = next((f", on {result['gpu']}" for result in results if result.get("gpu")), "")
    table = _table(f"{model}{nodes}{gpu}", ["runner"], ["first step s", *_headings(_MODEL)])
    table.add_column("notes", overflow="fold")
    for result in results:
        table.add_row(result["runner"], first_step(result), *_cells(result, _MODEL), notes(result))
    return table


def targets_table(results: list[Result]) -> Table:
    """Each model and runner against the floor, eager and PyTorch's own; below them each runner's geometric means."""
    found = rows(results)
    title = f"Against the floor, eager and {REFERENCE} (below 1 is better)"
    table = _table(title, ["model", "runner"], _headings(_TARGETS))
    for index, row in enumerate(found):
        last = index + 1 == len(found) or found[index + 1]["model"] != row["model"]
        table.add_row(row["model"], row["runner"], *_cells(row, _TARGETS), end_section=last)
    for runner in dict.fromkeys(row["runner"] for row in found):
        table.add_row("geomean", runner, *_cells(geometric_means(found, runner), _TARGETS))
    return table


def summary_table(results: list[Result], runners: list[str]) -> Table:
    """Of each runner, over all models."""
    table = Table("runner", "answered", "geomean ratio", "worst ratio", "worst first step s", "worst grad diff")
    table.title = "Summary: backward against eager, below 1 is faster"
    for runner in runners:
        own = [result for result in results if result["runner"] == runner]
        answered = [result for result in own if "ratio" in result]
        row = [runner, f"{len(answered)} of {len(own)}"]
        if answered:
            row.append(number(geometric_means(rows(own), runner), "ratio", ".3f"))
            row.append(f"{max(result['ratio'] for result in answered):.3f}")
            row.append(max((each for each in map(first_step, answered) if each != "-"), key=float, default="-"))
            row.append(f"{max(result['gradient_difference'] for result in answered):.1e}")
        table.add_row(*row)
    return table


def _table(title: str, names: list[str], figures: list[str]) -> Table:
    table = Table(title=title)
    for heading in names:
        table.add_column(heading, no_wrap=True)
    for heading in figures:
        table.add_column(heading, justify="right")
    return table


def _headings(columns: tuple[tuple, ...]) -> list[str]:
    return [heading for heading, *_ in columns]


def _cells(result: Result, columns: tuple[tuple, ...]) -> list[str]:
    return [number(result, *column) for _, *column in columns]
