"""Whole training steps of ordinary models under this project, beside eager and `torch.compile`.

    python -m benchmarks.ordinary
    python -m benchmarks.ordinary --models vit unet --runners ours compile --json results.json
    python -m benchmarks.ordinary --read results.json --markdown

See `benchmarks.ordinary.trainings` for the models and `benchmarks.ordinary.turns` for what is measured and how.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console

from benchmarks.backward import write_measured
from benchmarks.ordinary import figures
from benchmarks.ordinary.turns import RUNNERS, measure
from benchmarks.targets import Result

MODELS = ("vit", "bert", "gpt2", "unet", "gan", "actor-critic")
OPTIONS = ("steps", "seconds", "starts", "seed", "tiny")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ordinary", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--runners", nargs="+", choices=RUNNERS, default=list(RUNNERS))
    parser.add_argument("--steps", type=int, default=100, help="first steps, in which everything counts")
    parser.add_argument("--seconds", type=float, default=5.0, help="of turns for the steady step, at each start")
    parser.add_argument("--starts", type=int, default=3, help="new processes for the steady step: they differ")
    parser.add_argument("--tiny", action="store_true", help="models of a few parameters, to try the benchmark itself")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write all results to this file")
    parser.add_argument("--read", type=Path, help="measure nothing: show the results that --json wrote to this file")
    parser.add_argument("--markdown", action="store_true", help="print the tables as Markdown")
    args = parser.parse_args()
    if args.steps < 1:
        parser.error(f"--steps {args.steps}: at least one is needed")
    if args.starts < 1:
        parser.error(f"--starts {args.starts}: at least one is needed")
    args.runners = [each for each in RUNNERS if each in args.runners]
    if "ours-warm" in args.runners and "ours" not in args.runners:
        parser.error("--runners ours-warm: it reads what ours has left on disk, so name ours too")
    return args


def measure_all(args: argparse.Namespace, console: Console) -> list[Result]:
    """Each model under each runner, written after each."""
    results: list[Result] = []
    for model in args.models:
        with tempfile.TemporaryDirectory(prefix="ordinary-", ignore_cleanup_errors=True) as folder:
            for runner in args.runners:
                started = time.perf_counter()
                with console.status(f"{model} under {runner}"):
                    results.append(measure(model, runner, Path(folder), args))
                console.print(f"{model} under {runner}: {time.perf_counter() - started:.0f} s", style="dim")
                if args.json:
                    write_measured(args, OPTIONS, results)
    return results


def main() -> int:
    args = parse_arguments()
    # What is to be pasted is alone in the output.
    console = Console(stderr=args.markdown)
    if not console.is_terminal:
        console.width = 180
    if args.read:
        read = json.loads(args.read.read_text(encoding="utf-8"))
        results, args.steps = read["results"], read["options"]["steps"]
    else:
        results = measure_all(args, console)
    if args.markdown:
        print(figures.markdown(results, args.steps), end="")
    else:
        console.print(figures.table(results, args.steps))
    if single := [f"{each['model']} under {each['runner']}" for each in results if figures.has_one_round(each)]:
        what = "one round: ratios are chance without a second one, which --starts 2 or more --seconds give"
        console.print(f"{what} ({', '.join(single)})", markup=False, highlight=False)
    failed = [each for each in results if "failed" in each]
    for each in failed:
        console.print(f"{each['model']} under {each['runner']}: {each['failed']}", markup=False, highlight=False)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
