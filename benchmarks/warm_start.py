"""The first backward of a new process, with nothing compiled before and with the cache on disk filled by another.

    python -m benchmarks.warm_start
    python -m benchmarks.warm_start --models mlp --repeats 5 --json warm.json

Each backward is the first of a process of its own, in which Inductor's folder is empty: cold, where the cache on disk
is empty too, and warm, where it holds what the cold process left. Seconds are those of `loss.backward()` alone; what
it imports is part of them. With `--check` the exit code is 1 unless the warm one compiled nothing, was a hit, and took
at most a quarter of the cold one's time.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.targets import MODELS, Result

STAGES = ("capture", "lower", "compile", "load", "run")
LARGEST_RATIO = 0.25


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["mlp", "gpt"])
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--repeats", type=int, default=3, help="pairs of a cold and a warm process")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write all results to this file")
    parser.add_argument("--check", action="store_true", help="fail unless the warm backward is what it should be")
    parser.add_argument("--child", action="store_true", help="measure here, in this process, and print one JSON line")
    args = parser.parse_args()
    if args.repeats < 1:
        parser.error(f"--repeats {args.repeats}: at least one is needed")
    return args


def child(model: str, backend: str, seed: int, device: str) -> Result:
    """The first backward of this process, and a hit after it."""
    import torch

    import compiled_autograd as ca
    from benchmarks.models import build
    from benchmarks.sides import now

    module, make_loss = build(model, seed, device)
    eager, _ = build(model, seed, device)
    make_loss(eager).backward()
    session = ca.enable(backend=backend, on_miss="compile")
    seconds = []
    for _ in range(2):
        module.zero_grad()
        loss = make_loss(module)
        started = now(device)
        with session:
            loss.backward()
        seconds.append(now(device) - started)
        if len(seconds) == 1:
            first = session.last
    assert first is not None
    pairs = list(zip(module.parameters(), eager.parameters(), strict=True))
    largest = max(float(other.grad.abs().max()) for _, other in pairs if other.grad is not None)
    return {
        "seconds": seconds[0],
        "second_backward_seconds": seconds[1],
        "stages": first.seconds,
        "outcome": first.outcome,
        "reasons": [str(reason) for reason in first.reasons],
        "compiles": session.stats().compiles,
        "difference": max(float((one.grad - other.grad).abs().max()) for one, other in pairs) / largest,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


def in_process(model: str, args: argparse.Namespace, cache: Path, scratch: Path) -> Result:
    """What one new process measures, with nothing in Inductor's folder."""
    command = [sys.executable, "-m", "benchmarks.warm_start", "--child", "--models", model]
    command += ["--backend", args.backend, "--seed", str(args.seed), "--device", args.device]
    with tempfile.TemporaryDirectory(dir=scratch, ignore_cleanup_errors=True) as folder:
        environment = os.environ | {"COMPILED_AUTOGRAD_CACHE_DIR": str(cache), "TORCHINDUCTOR_CACHE_DIR": folder}
        started = time.perf_counter()
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        whole = time.perf_counter() - started
    if done.returncode:
        raise SystemExit(f"{model}: {done.stderr.strip() or 'no output'}")
    return json.loads(done.stdout.strip().splitlines()[-1]) | {"process_seconds": whole}


def measure(model: str, args: argparse.Namespace) -> Result:
    """Medians over pairs of a cold and a warm process; each pair has a cache of its own."""
    pairs = []
    for _ in range(args.repeats):
        with tempfile.TemporaryDirectory(prefix="warm-start-", ignore_cleanup_errors=True) as folder:
            cache = Path(folder) / "cache"
            pairs.append([in_process(model, args, cache, Path(folder)) for _ in range(2)])
    cold, warm = zip(*pairs, strict=True)
    return {
        "model": model,
        "backend": args.backend,
        "cold_seconds": statistics.median(each["seconds"] for each in cold),
        "warm_seconds": statistics.median(each["seconds"] for each in warm),
        "ratio": statistics.median(two["seconds"] / one["seconds"] for one, two in pairs),
        "cold_stages": medians(cold),
        "warm_stages": medians(warm),
        "outcomes": sorted({each["outcome"] for each in warm}),
        "compiles": max(each["compiles"] for each in warm),
        "difference": max(each["difference"] for each in (*cold, *warm)),
        "pairs": pairs,
    }


def medians(results: tuple[Result, ...]) -> dict[str, float]:
    """Of each stage that there was; ``run`` is everything after the capture, the stages before it included."""
    return {
        stage: statistics.median(each["stages"].get(stage, 0.0) for each in results)
        for stage in STAGES
        if any(stage in each["stages"] for each in results)
    }


def wrong(result: Result) -> list[str]:
    """What is not as it should be."""
    found = []
    if result["outcomes"] != ["hit"]:
        found.append(f"{result['model']}: outcomes {', '.join(result['outcomes'])}, not hit")
    if result["compiles"]:
        found.append(f"{result['model']}: {result['compiles']} regions were compiled")
    if result["ratio"] > LARGEST_RATIO:
        found.append(f"{result['model']}: warm over cold is {result['ratio']:.3f}, more than {LARGEST_RATIO}")
    return found


def table(results: list[Result]) -> Table:
    shown = Table(title="first backward of a process, seconds")
    for heading in ("model", "cold", "warm", "ratio", "compiles", "outcome", "grad diff"):
        shown.add_column(heading, justify="left" if heading in ("model", "outcome") else "right")
    shown.add_column("stages, warm")
    for result in results:
        stages = ", ".join(f"{stage} {seconds:.3f}" for stage, seconds in result["warm_stages"].items())
        shown.add_row(
            result["model"],
            f"{result['cold_seconds']:.2f}",
            f"{result['warm_seconds']:.2f}",
            f"{result['ratio']:.3f}",
            str(result["compiles"]),
            ", ".join(result["outcomes"]),
            f"{result['difference']:.1e}",
            stages,
        )
    return shown


def main() -> int:
    args = parse_arguments()
    if args.child:
        print(json.dumps(child(args.models[0], args.backend, args.seed, args.device)))
        return 0
    console = Console()
    if not console.is_terminal:
        # A file has no width to fit into, and the default of 80 columns would break every row.
        console.width = 180
    results = []
    for model in args.models:
        results.append(measure(model, args))
        if args.json:
            environment = {"python": platform.python_version(), "machine": platform.platform(), "cpus": os.cpu_count()}
            content = {"environment": environment, "repeats": args.repeats, "results": results}
            args.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    console.print(table(results))
    problems = [problem for result in results for problem in wrong(result)]
    for problem in problems:
        console.print(problem, markup=False, highlight=False)
    return 1 if args.check and problems else 0


if __name__ == "__main__":
    sys.exit(main())
