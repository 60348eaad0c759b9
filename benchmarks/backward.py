"""Compare ways to run a backward on the same models, each in a process of its own with nothing compiled before.

    python -m benchmarks.backward
    python -m benchmarks.backward --models mlp gpt --runners ours-inductor torch-ca-static --json results.json

See `benchmarks.models` for the models, `benchmarks.runners` for the runners, `benchmarks.measure` for what is measured
and how, and `benchmarks.tables` and `benchmarks.picture` for what is made of it.
"""

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console

import shadow_cache
from benchmarks import picture, targets
from benchmarks.tables import model_table, problems, summary_table, targets_table
from benchmarks.targets import MODELS, WITHOUT_HITS, Result

ONLY_BY_NAME = ("llama", "gpt-100m")
RUNNERS = ("eager", "ours-eager", "ours-inductor", "torch-ca-dynamic", "torch-ca-static", "aot")
OTHER_RUNNERS = ("ours-seam", "ours-cuda-graphs", "aot-ours")  # likewise
WITH_EXTENSION = {"ours-eager", "ours-inductor", "ours-cuda-graphs", "aot-ours"}
MEASUREMENTS = ("steady", "hit")
CACHE_FOLDERS = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=(*MODELS, *ONLY_BY_NAME), default=list(MODELS))
    parser.add_argument("--runners", nargs="+", choices=(*RUNNERS, *OTHER_RUNNERS), default=list(RUNNERS))
    parser.add_argument("--beside", choices=(*RUNNERS, *OTHER_RUNNERS), default="eager", help="what ratios are by")
    parser.add_argument("--pairs", type=int, default=30, help="pairs of steps that are timed")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds that one process may take")
    parser.add_argument("--json", type=Path, help="write all results to this file")
    parser.add_argument("--picture", type=Path, help="draw the results to this file, .svg or .png (needs matplotlib)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--child", choices=MEASUREMENTS, help="measure here, in this process, and print one JSON line")
    args = parser.parse_args()
    if args.pairs < 1:
        parser.error(f"--pairs {args.pairs}: at least one pair is needed")
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

    what = (args.models[0], args.runners[0], args.pairs, args.seed, args.device, args.beside)
    result = measure.run(args.child, *what)
    print(json.dumps(result))


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no output"


def run_apart(command: list[str], timeout: float, cold_store: bool = False) -> Result:
    """The JSON object that a command prints as its last line, run with empty caches; `failed` says what went wrong.

    With `cold_store`, the folder where this project keeps what it compiled is a new one too, with the extension that
    was built for `native` in it.
    """
    with tempfile.TemporaryDirectory(prefix="benchmark-", ignore_cleanup_errors=True) as folder:
        environment = os.environ | {variable: f"{folder}/{variable.lower()}" for variable in CACHE_FOLDERS}
        environment["TMPDIR"] = folder  # where Inductor keeps headers that it has compiled
        if cold_store:
            environment["COMPILED_AUTOGRAD_CACHE_DIR"] = f"{folder}/store"
            Path(folder, "store").mkdir(mode=0o700)  # of others' folders it makes no use
            if (built := shadow_cache.default_dir() / "native").is_dir():
                shutil.copytree(built, f"{folder}/store/native")
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
            output, errors = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            return {"failed": f"no answer in {timeout:g} s"}
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
    if process.returncode:
        return {"failed": last_line(errors)}
    return json.loads(last_line(output))


def measure_apart(measurement: str, model: str, runner: str, args: argparse.Namespace) -> Result:
    """One measurement in a new process with empty caches; `failed` says what went wrong where something did."""
    command = [sys.executable, "-m", "benchmarks.backward", "--child", measurement, "--models", model]
    command += ["--runners", runner, "--pairs", str(args.pairs), "--seed", str(args.seed), "--device", args.device]
    command += ["--beside", args.beside]
    return run_apart(command, args.timeout)


def measure_both(model: str, runner: str, args: argparse.Namespace) -> Result:
    """The steady state and the cost of a hit of one runner, each measured in its own process."""
    result = {"model": model, "runner": runner} | measure_apart("steady", model, runner, args)
    if runner in WITHOUT_HITS:
        return result | {"hit_not_applicable": f"{runner} has no cache of tapes"}
    hit = measure_apart("hit", model, runner, args)
    renamed = {"failed": "hit_failed", "not_applicable": "hit_not_applicable"}
    return result | {renamed.get(name, name): value for name, value in hit.items()}


def write_measured(args: argparse.Namespace, names: Iterable[str], results: list[Result], **more: Any) -> None:
    """To the file `args.json`: all that was measured, beside what it was measured on and the options of these names."""
    environment = {"python": platform.python_version(), "machine": platform.platform(), "cpus": os.cpu_count()}
    options = {name: getattr(args, name) for name in names}
    content = {"environment": environment, "options": options, "results": results, **more}
    args.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def write_json(results: list[Result], args: argparse.Namespace) -> None:
    """All that was measured, times in the units their names say, and what it says."""
    write_measured(args, ("beside", "pairs", "timeout", "device", "seed"), results, targets=targets.rows(results))


def build_extension(console: Console) -> None:
    """Else it would be built while something is measured, and set in at some step."""
    from benchmarks.native_walk import loaded

    try:
        with console.status("the extension of native=True is being built"):
            loaded()
    except SystemExit as error:
        console.print(f"without the extension of native=True: {error}", style="dim")


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
    if args.beside != "eager":
        console.print(f"ratios are by {args.beside}, not by eager")
    console.print(targets_table(results))
    console.print(summary_table(results, args.runners))
    if args.picture:
        picture.draw(results, args.picture)
    return 1 if any("failed" in result or "hit_failed" in result for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
