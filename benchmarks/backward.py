"""Compare ways to run a backward on the same models, each in a process of its own with nothing compiled before.

    python -m benchmarks.backward
    python -m benchmarks.backward --models mlp gpt --runners ours-inductor torch-ca-static --json results.json
    python -m benchmarks.backward --device cuda --jobs 20 --quick --pairs 12    # minutes, where there are many cores

See `benchmarks.models` for the models, `benchmarks.runners` for the runners, `benchmarks.measure` for what is measured
and how, and `benchmarks.tables` and `benchmarks.picture` for what is made of it.
"""

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import picture, targets
from benchmarks.children import run_apart, run_together
from benchmarks.tables import model_table, problems, summary_table, targets_table
from benchmarks.targets import MODELS, WITHOUT_HITS, Result

ONLY_BY_NAME = ("llama", "gpt-100m", "force-matching")
RUNNERS = ("eager", "ours-eager", "ours-inductor", "torch-ca-dynamic", "torch-ca-static", "aot")
OTHER_RUNNERS = ("ours-seam", "ours-cuda-graphs", "aot-ours", "aot-cuda-graphs")  # likewise
WITH_EXTENSION = {"ours-eager", "ours-inductor", "ours-cuda-graphs", "aot-ours"}
MEASUREMENTS = ("steady", "hit")
FIRST_STEP = ("setup_seconds", "first_forward_seconds", "first_backward_seconds")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=(*MODELS, *ONLY_BY_NAME), default=list(MODELS))
    parser.add_argument("--runners", nargs="+", choices=(*RUNNERS, *OTHER_RUNNERS), default=list(RUNNERS))
    parser.add_argument("--beside", choices=(*RUNNERS, *OTHER_RUNNERS), default="eager", help="what ratios are by")
    parser.add_argument("--pairs", type=int, default=30, help="pairs of steps that are timed")
    parser.add_argument("--quick", action="store_true", help="measure with fewer steps, and no eager beside the runner")
    parser.add_argument(
        "--jobs", type=int, default=1, help="processes that compile at a time; they measure in turn, no first backwards"
    )
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds that one process may take")
    parser.add_argument("--json", type=Path, help="write all results to this file")
    parser.add_argument("--picture", type=Path, help="draw the results to this file, .svg or .png (needs matplotlib)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--floor", action=argparse.BooleanOptionalAction, default=True, help=argparse.SUPPRESS)
    parser.add_argument("--child", choices=MEASUREMENTS, help="measure here, in this process, and print one JSON line")
    args = parser.parse_args()
    if args.pairs < 1:
        parser.error(f"--pairs {args.pairs}: at least one pair is needed")
    if args.jobs < 1:
        parser.error(f"--jobs {args.jobs}: at least one process is needed")
    if args.child and (len(args.models), len(args.runners)) != (1, 1):
        parser.error("--child measures one model under one runner")
    if args.picture and args.beside != "eager":
        parser.error(
            "--picture draws ratios to eager, and --beside takes them by another runner: leave out one of them"
        )
    if args.picture:
        try:
            picture.check(args.picture)
        except picture.PictureError as error:
            parser.error(f"--picture {error}")
    return args


def child(args: argparse.Namespace) -> None:
    from benchmarks import measure

    given = {name: getattr(args, name) for name in ("pairs", "seed", "device", "beside", "quick", "floor")}
    print(json.dumps(measure.run(args.child, measure.What(args.models[0], args.runners[0], **given))))


def command(measurement: str, model: str, runner: str, args: argparse.Namespace) -> list[str]:
    """One measurement in a process of its own."""
    found = [sys.executable, "-m", "benchmarks.backward", "--child", measurement, "--models", model]
    found += ["--runners", runner, "--pairs", str(args.pairs), "--seed", str(args.seed), "--device", args.device]
    found += ["--beside", args.beside]
    if args.quick:
        found += ["--quick", "--floor" if runner == args.runners[0] else "--no-floor"]
    return found


def measurements(runner: str) -> tuple[str, ...]:
    """The steady state and the cost of a hit, where it has hits."""
    return MEASUREMENTS[:1] if runner in WITHOUT_HITS else MEASUREMENTS


def joined(model: str, runner: str, measured: dict[str, Result]) -> Result:
    """What the processes of one model and runner measured; hit_failed and hit_not_applicable are the second one's."""
    result = {"model": model, "runner": runner} | measured["steady"]
    if runner in WITHOUT_HITS:
        return result | {"hit_not_applicable": f"{runner} has no cache of tapes"}
    renamed = {"failed": "hit_failed", "not_applicable": "hit_not_applicable"}
    return result | {renamed.get(name, name): value for name, value in measured.get("hit", {}).items()}


def with_floor(result: Result, earlier: list[Result]) -> Result:
    """A quick run measures the floor of a model, which is eager's, beside one runner."""
    found = next((each for each in earlier if each["model"] == result["model"] and "floor" in each), {})
    return {name: found[name] for name in ("floor", "floor_ms") if name in found} | result


def measure_one_by_one(args: argparse.Namespace, console: Console) -> Iterator[Result]:
    """Each model under each runner."""
    cells = [(model, runner) for model in args.models for runner in args.runners]
    for number, (model, runner) in enumerate(cells, 1):
        started = time.perf_counter()
        with console.status(f"{model} under {runner}, {number} of {len(cells)}"):
            measured = {
                each: run_apart(command(each, model, runner, args), args.timeout) for each in measurements(runner)
            }
        console.print(f"{model} under {runner}: {time.perf_counter() - started:.0f} s", style="dim")
        yield joined(model, runner, measured)


def measure_together(args: argparse.Namespace, console: Console) -> Iterator[Result]:
    """The same in batches of `args.jobs` processes, whose first steps say nothing: they share the processor.

    Hits come last: nothing is compiled for them. Those of a runner come together, since they take about as long.
    """
    order = [(each, model, runner) for runner in args.runners for each in measurements(runner) for model in args.models]
    order.sort(key=lambda cell: MEASUREMENTS.index(cell[0]))
    measured: dict[tuple[str, str], dict[str, Result]] = {}
    for begin in range(0, len(order), args.jobs):
        batch, started = order[begin : begin + args.jobs], time.perf_counter()
        with console.status(f"{begin + 1} to {begin + len(batch)} of {len(order)}"):
            results = run_together([command(*cell, args) for cell in batch], args.timeout)
        for (each, model, runner), result in zip(batch, results, strict=True):
            together = {name: result.pop(name) for name in FIRST_STEP if name in result}
            measured.setdefault((model, runner), {})[each] = result | ({"together": together} if together else {})
        console.print(f"{begin + len(batch)} of {len(order)}: {time.perf_counter() - started:.0f} s", style="dim")
        if args.json:  # what there is, should this be ended
            write_json([joined(*cell, found) for cell, found in measured.items()], args)
    yield from (joined(m, runner, measured[m, runner]) for m in args.models for runner in args.runners)


def write_measured(args: argparse.Namespace, names: Iterable[str], results: list[Result], **more: Any) -> None:
    """To the file `args.json`: all that was measured, beside what it was measured on and the options of these names."""
    environment = {"python": platform.python_version(), "machine": platform.platform(), "cpus": os.cpu_count()}
    environment["gpu"] = next((result["gpu"] for result in results if result.get("gpu")), None)
    options = {name: getattr(args, name) for name in names}
    content = {"environment": environment, "options": options, "results": results, **more}
    args.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def write_json(results: list[Result], args: argparse.Namespace) -> None:
    """All that was measured, times in the units their names say, and what it says."""
    write_measured(
        args, ("beside", "pairs", "quick", "jobs", "timeout", "device", "seed"), results, targets=targets.rows(results)
    )


def build_extension(console: Console) -> None:
    """Else it would be built while something is measured, and set in at some step."""
    from benchmarks.native_walk import loaded

    try:
        with console.status("the C++ extension is being built"):
            loaded()
    except SystemExit as error:
        console.print(f"without the C++ extension: {error}", style="dim")


def main() -> int:
    args = parse_arguments()
    if args.child:
        child(args)
        return 0
    console = Console()
    if not console.is_terminal:
        # A file has no width to fit into, and the default of 80 columns would break every row.
        console.width = 220
    if WITH_EXTENSION & {*args.runners, args.beside}:
        build_extension(console)
    results: list[Result] = []
    for result in (measure_together if args.jobs > 1 else measure_one_by_one)(args, console):
        results.append(with_floor(result, results))
        if args.json:
            write_json(results, args)
        if result["runner"] == args.runners[-1]:
            own = [each for each in results if each["model"] == result["model"]]
            console.print(model_table(result["model"], own))
            for problem in (line for each in own for line in problems(each)):
                console.print(problem, markup=False, highlight=False)
    if args.beside != "eager":
        console.print(f"ratios are by {args.beside}, not by eager")
    console.print(targets_table(results))
    console.print(summary_table(results, args.runners))
    if args.picture:
        picture.draw(results, args.picture)
    return 1 if any("failed" in result or "hit_failed" in result for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
