"""The tables that `benchmarks.backward` prints of its results; torch is not imported."""

from rich.table import Table

from benchmarks.targets import REFERENCE, WITHOUT_HITS, Result, geometric_means, rows


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
    table = _table(f"{model}{nodes}", "runner")
    for heading in ("first step s", "first backward s", "eager ms", "runner ms", "ratio", "here", "floor", "hit ms"):
        table.add_column(heading, justify="right")
    for heading in ("hit us/node", "peak MB eager", "peak MB", "alloc MB eager", "alloc MB", "grad diff"):
        table.add_column(heading, justify="right")
    table.add_column("notes", overflow="fold")
    for result in results:
        table.add_row(
            result["runner"],
            first_step(result),
            number(result, "first_backward_seconds", ".2f"),
            number(result, "eager_ms", ".2f"),
            number(result, "runner_ms", ".2f"),
            number(result, "ratio", ".3f"),
            number(result, "ratio_here", ".3f"),
            number(result, "floor", ".3f"),
            number(result, "hit_ms", ".3f"),
            number(result, "hit_us_per_node", ".2f"),
            number(result, "eager_peak_bytes", ".1f", 1e-6),
            number(result, "runner_peak_bytes", ".1f", 1e-6),
            number(result, "eager_allocated_bytes", ".1f", 1e-6),
            number(result, "runner_allocated_bytes", ".1f", 1e-6),
            number(result, "gradient_difference", ".1e"),
            notes(result),
        )
    return table


def targets_table(results: list[Result]) -> Table:
    """Each model and runner against the floor, eager and PyTorch's own; below them each runner's geometric means."""
    found = rows(results)
    table = _table(f"Against the floor, eager and {REFERENCE} (below 1 is better)", "model", "runner")
    for heading in ("ratio", "floor", "first backward s", "by static's", "hit ms", "by static's", "by eager's"):
        table.add_column(heading, justify="right")
    table.add_column("alloc by eager's", justify="right")
    for index, row in enumerate(found):
        last = index + 1 == len(found) or found[index + 1]["model"] != row["model"]
        table.add_row(row["model"], row["runner"], *_cells(row), end_section=last)
    for runner in dict.fromkeys(row["runner"] for row in found):
        table.add_row("geomean", runner, *_cells(geometric_means(found, runner)))
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
            row.append(max((first_step(result) for result in answered), key=float))
            row.append(f"{max(result['gradient_difference'] for result in answered):.1e}")
        table.add_row(*row)
    return table


def _table(title: str, *names: str) -> Table:
    table = Table(title=title)
    for name in names:
        table.add_column(name, no_wrap=True)
    return table


def _cells(row: Result) -> list[str]:
    return [
        number(row, "ratio", ".3f"),
        number(row, "floor", ".3f"),
        number(row, "first_backward_seconds", ".2f"),
        number(row, "first_to_reference", ".2f"),
        number(row, "hit_ms", ".3f"),
        number(row, "hit_to_reference", ".2f"),
        number(row, "hit_to_eager", ".2f"),
        number(row, "allocated_ratio", ".3f"),
    ]
