"""Other people's libraries under `compiled_autograd.enable()`, with nothing else changed: a line for each.

    python -m benchmarks.clients
    python -m benchmarks.clients --only transformers gpytorch --json results.json --markdown results.md

The programs are those of `benchmarks.client_programs`. Each runs in processes of its own, with nothing compiled before:
on eager, with `backend="eager"`, and with default settings, where steps of a copy on eager come between
(`benchmarks.client_runs`). Steps are whole ones: forward, backward, optimizer. `docs/clients.md` has the
columns.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.backward import build_extension, write_measured
from benchmarks.children import run_apart
from benchmarks.client_programs import PROGRAMS, Program
from benchmarks.targets import Result

WAYS = ("eager", "one_by_one", "default")
COLUMNS = (
    "library",
    "same bits one by one",
    "difference",
    "of eager nudged",
    "hits",
    "captures",
    "compiles",
    "bypasses",
    "first step s",
    "eager ms",
    "steady",
    "first steps",
    "remarks",
)
_LONGEST_WARNING = 100


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PROGRAMS, default=list(PROGRAMS), metavar="NAME")
    parser.add_argument("--steps", type=int, default=100, help="steps that are compared, and counted")
    parser.add_argument(
        "--rounds",
        type=int,
        default=20,
        help="turns of five steps that are timed after these, or as many as take some seconds",
    )
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds that one process may take")
    parser.add_argument("--json", type=Path, help="write all results to this file")
    parser.add_argument("--markdown", type=Path, help="write the table to this file")
    parser.add_argument("--child", choices=WAYS, help="run here, in this process, and print one JSON line")
    parser.add_argument("--folder", type=Path, help="of a child: where it writes what it computed")
    args = parser.parse_args()
    for name in ("steps", "rounds"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} {getattr(args, name)}: at least one is needed")
    if args.child and (len(args.only) != 1 or args.folder is None):
        parser.error("--child runs one program, and needs --folder")
    return args


def version_of(program: Program) -> str | None:
    """Of the library, without what stands behind a plus sign; None where it is not installed."""
    try:
        return importlib.metadata.version(program.distribution).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return None


def measure(program: Program, args: argparse.Namespace) -> Result:
    """All three ways of one program; `missing` where the library is not installed, `failed` by the way that failed."""
    result: Result = {"library": program.distribution, "version": version_of(program), "failed": {}}
    if result["version"] is None:
        return result | {"missing": f"pip install {program.distribution}"}
    from benchmarks import client_runs

    with tempfile.TemporaryDirectory(prefix="clients-") as folder:
        for way in WAYS:
            command = [sys.executable, "-m", "benchmarks.clients", "--child", way, "--only", program.distribution]
            command += ["--steps", str(args.steps), "--rounds", str(args.rounds), "--folder", folder]
            result[way] = run_apart(command, args.timeout, cold_store=True)
            if "failed" in result[way]:
                result["failed"][way] = result[way].pop("failed")
        return result | client_runs.comparisons(Path(folder))


def remarks(result: Result) -> Iterator[str]:
    """What else there is to say of it, a phrase each."""
    if "missing" in result:
        yield "not installed"
    for way, why in result["failed"].items():
        yield f"failed ({way}): {why}"
    if result.get("same_eager") is False:
        yield "eager differs between two processes"
    default, eager = result.get("default", {}), result.get("eager", {})
    bypasses = default.get("counts", {}).get("bypasses", {})
    for kind, count in default.get("reasons", {}).items():
        if not any(label.startswith(kind) for label in bypasses):
            yield f"{kind} {count}"
    for label, count in default.get("later_bypasses", {}).items():
        yield f"later {label} {count}"
    for way in ("one_by_one", "default"):
        if failures := result.get(way, {}).get("counts", {}).get("failures"):
            yield f"failures ({way}) {failures}"
    own = {*result.get("one_by_one", {}).get("warnings", ()), *default.get("warnings", ())}
    for text in sorted(own - {*eager.get("warnings", ())}):
        yield f"warns: {text if len(text) <= _LONGEST_WARNING else text[:_LONGEST_WARNING] + '...'}"


def row(result: Result) -> list[str]:
    """The cells of COLUMNS; a dash where nothing was measured."""
    default = result.get("default", {})
    counts = default.get("counts", {})
    same = {True: "yes", False: f"no: {result.get('one_by_one_apart', 0.0):.0e}", None: "-"}
    left = {name: counts[name] for name in ("tuning",) if counts.get(name)} | counts.get("bypasses", {})
    bypasses = ", ".join(f"{label} {count}" for label, count in left.items())
    return [
        " ".join(filter(None, (result["library"], result["version"]))),
        same[result.get("same_one_by_one")],
        "none" if result.get("same_default") else _number(result.get("difference"), ".0e"),
        _number(result.get("difference_nudged"), ".0e"),
        *(str(counts.get(name, "-")) for name in ("hits", "captures", "compiles")),
        bypasses or ("none" if counts else "-"),
        _number(default.get("first_step_seconds"), ".1f"),
        _number(default.get("eager_ms"), ".1f"),
        _number(default.get("ratio"), ".2f"),
        _first_steps(default),
        "; ".join(remarks(result)),
    ]


def _first_steps(default: Result) -> str:
    if "ratio_of_first_steps" not in default:
        return "-"
    return f"{default['ratio_of_first_steps']:.2f} ({default['seconds_beside_compiling']:+.2f} s)"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def markdown(results: list[Result]) -> str:
    """The table as Markdown."""
    rows = [[cell.replace("|", "\\|") for cell in row(result)] for result in results]
    lines = [COLUMNS, ["---"] * len(COLUMNS), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def table(results: list[Result]) -> Table:
    """The same for a terminal."""
    shown = Table(title="Libraries under compiled_autograd.enable()")
    for heading in COLUMNS:
        shown.add_column(heading, overflow="fold")
    for result in results:
        shown.add_row(*row(result))
    return shown


def write(results: list[Result], args: argparse.Namespace) -> None:
    """What was measured so far, to the files that were asked for."""
    if args.markdown:
        args.markdown.write_text(markdown(results), encoding="utf-8")
    if args.json:
        write_measured(args, ("steps", "rounds", "timeout"), results)


def child(args: argparse.Namespace) -> None:
    from benchmarks import client_runs

    print(json.dumps(client_runs.run(PROGRAMS[args.only[0]], args.child, args.steps, args.rounds, args.folder)))


def main() -> int:
    args = parse_arguments()
    if args.child:
        child(args)
        return 0
    console = Console()
    if not console.is_terminal:
        console.width = 260
    build_extension(console)
    results: list[Result] = []
    for name in args.only:
        started = time.perf_counter()
        with console.status(f"{name}, {len(results) + 1} of {len(args.only)}"):
            results.append(measure(PROGRAMS[name], args))
        taken = f"{time.perf_counter() - started:.0f} s"
        console.print(" | ".join(row(results[-1])), taken, markup=False, highlight=False)
        write(results, args)
    console.print(table(results))
    return 1 if any(result["failed"] for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
