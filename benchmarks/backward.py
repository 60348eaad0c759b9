"""Compare ways to run a backward on the same models, each in a process of its own with nothing compiled before.

    python -m benchmarks.backward
    python -m benchmarks.backward --models mlp gpt --runners ours-inductor torch-ca-static --json results.json

See `benchmarks.models` for the models, `benchmarks.runners` for the runners and `benchmarks.measure` for what is
measured and how.
"""

import argparse
import json
import math
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

# Named here again because whoever only wants --help should not wait for torch to load.
MODELS = ("mlp", "gpt", "resnet", "lstm", "pinn")
RUNNERS = ("eager", "ours-eager", "ours-inductor", "torch-ca-dynamic", "torch-ca-static", "aot")
MEASUREMENTS = ("steady", "hit")
WITHOUT_HITS = ("eager", "aot")
CACHE_FOLDERS = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")

Result = dict[str, Any]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--runners", nargs="+", choices=RUNNERS, default=list(RUNNERS))
    parser.add_argument("--pairs", type=int, default=30, help="pairs of an eager and a runner's step that are timed")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds that one process may take")
    parser.add_argument("--json", type=Path, help="write all results to this file")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--child", choices=MEASUREMENTS, help="measure here, in this process, and print one JSON line")
    args = parser.parse_args()
    if args.pairs < 1:
        parser.error(f"--pairs {args.pairs}: at least one pair is needed")
    if args.child and (len(args.models), len(args.runners)) != (1, 1):
        parser.error("--child measures one model under one runner")
    return args


def child(args: argparse.Namespace) -> None:
    from benchmarks import measure

    result = measure.run(args.child, args.models[0], args.runners[0], args.pairs, args.seed, args.device)
    print(json.dumps(result))


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no output"


def measure_apart(measurement: str, model: str, runner: str, args: argparse.Namespace) -> Result:
    """One measurement in a new process with empty caches; `failed` says what went wrong where something did."""
    command = [sys.executable, "-m", "benchmarks.backward", "--child", measurement, "--models", model]
    command += ["--runners", runner, "--pairs", str(args.pairs), "--seed", str(args.seed), "--device", args.device]
    with tempfile.TemporaryDirectory(prefix="benchmark-", ignore_cleanup_errors=True) as folder:
        environment = os.environ | {variable: f"{folder}/{variable.lower()}" for variable in CACHE_FOLDERS}
        process = subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # A group of its own, so that the compilers it started can be stopped with it.
            start_new_session=True,
        )
        try:
            output, errors = process.communicate(timeout=args.timeout)
        except subprocess.TimeoutExpired:
            return {"failed": f"no answer in {args.timeout:g} s"}
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
    if process.returncode:
        return {"failed": last_line(errors)}
    return json.loads(last_line(output))


def measure_both(model: str, runner: str, args: argparse.Namespace) -> Result:
    """The steady state and the cost of a hit of one runner, each measured in its own process."""
    result = {"model": model, "runner": runner} | measure_apart("steady", model, runner, args)
    if runner in WITHOUT_HITS:
        return result | {"hit_not_applicable": f"{runner} has no cache of tapes"}
    hit = measure_apart("hit", model, runner, args)
    renamed = {"failed": "hit_failed", "not_applicable": "hit_not_applicable"}
    return result | {renamed.get(name, name): value for name, value in hit.items()}


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
    nodes = next((f", {result['nodes']} nodes" for result in results if "nodes" in result), "")
    table = Table(title=f"{model}{nodes}")
    for heading in ("runner", "first step s", "first backward s", "eager ms", "runner ms", "ratio"):
        table.add_column(heading, no_wrap=heading == "runner", justify="left" if heading == "runner" else "right")
    for heading in ("hit ms", "hit us/node", "peak MB eager", "peak MB", "grad diff"):
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
            number(result, "hit_ms", ".3f"),
            number(result, "hit_us_per_node", ".2f"),
            number(result, "eager_peak_bytes", ".1f", 1e-6),
            number(result, "runner_peak_bytes", ".1f", 1e-6),
            number(result, "gradient_difference", ".1e"),
            notes(result),
        )
    return table


def summary_table(results: list[Result], runners: list[str]) -> Table:
    table = Table("runner", "answered", "geomean ratio", "worst ratio", "worst first step s", "worst grad diff")
    table.title = "Summary: backward against eager, below 1 is faster"
    for runner in runners:
        own = [result for result in results if result["runner"] == runner]
        answered = [result for result in own if "ratio" in result]
        row = [runner, f"{len(answered)} of {len(own)}"]
        if answered:
            ratios = [result["ratio"] for result in answered]
            row.append(f"{math.exp(sum(map(math.log, ratios)) / len(ratios)):.3f}")
            row.append(f"{max(ratios):.3f}")
            row.append(max((first_step(result) for result in answered), key=float))
            row.append(f"{max(result['gradient_difference'] for result in answered):.1e}")
        table.add_row(*row)
    return table


def write_json(results: list[Result], args: argparse.Namespace) -> None:
    """All that was measured, times in the units their names say, beside what it was measured on."""
    environment = {"python": platform.python_version(), "machine": platform.platform(), "cpus": os.cpu_count()}
    options = {name: getattr(args, name) for name in ("pairs", "timeout", "device", "seed")}
    content = {"environment": environment, "options": options, "results": results}
    args.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main() -> int:
    args = parse_arguments()
    if args.child:
        child(args)
        return 0
    console = Console()
    if not console.is_terminal:
        # A file has no width to fit into, and the default of 80 columns would break every row.
        console.width = 180
    results: list[Result] = []
    total = len(args.models) * len(args.runners)
    for model in args.models:
        for runner in args.runners:
            started = time.perf_counter()
            with console.status(f"{model} under {runner}, {len(results) + 1} of {total}"):
                results.append(measure_both(model, runner, args))
            console.print(f"{model} under {runner}: {time.perf_counter() - started:.0f} s", style="dim")
            if args.json:
                write_json(results, args)
        own = [result for result in results if result["model"] == model]
        console.print(model_table(model, own))
        for problem in (line for result in own for line in problems(result)):
            console.print(problem, markup=False, highlight=False)
    console.print(summary_table(results, args.runners))
    return 1 if any("failed" in result or "hit_failed" in result for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
