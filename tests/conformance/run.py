"""Runs a file of PyTorch's own tests under several engines, and prints how many pass and what was compiled.

    python -m tests.conformance.run FOLDER test_autograd.py --engines eager ours:eager --list

FOLDER holds PyTorch's ``test/`` folder; none of it is part of this project. Tests count that pass on ``eager``.

A file that takes hours is run with ``--records WHERE``: what became of each test is kept there, a run that was ended
goes on where it stopped, and runs with different ``-k`` (or any other option of pytest) add to the same account. With
``--eager-last`` the eager engine runs only the tests that do not pass elsewhere: only for these does it matter.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from .plugin import read

HERE = Path(__file__).resolve().parent
DIFFERENTIATED_AGAIN = ("create_graph", "batched_grads")
"""Backwards that ask for what only the eager engine does; they are left out of the share that was compiled."""
_MAX_CRASHES = 25


@dataclass(frozen=True)
class Result:
    """What one engine made of a file: for each test its last record."""

    engine: str
    tests: dict[str, dict[str, Any]]

    def passed(self, among: set[str]) -> set[str]:
        """Names of the tests that passed."""
        return {name for name in among if self.tests.get(name, {}).get("outcome") == "passed"}

    def backwards(self, among: set[str]) -> int:
        """How many backwards were asked for."""
        return sum(self.tests.get(name, {}).get("backwards", 0) for name in among)

    def bypasses(self, among: set[str]) -> Counter[str]:
        """How many of them the eager engine ran, by reason."""
        total: Counter[str] = Counter()
        for name in among:
            total.update(self.tests.get(name, {}).get("bypasses", {}))
        return total


@dataclass(frozen=True)
class Job:
    """A file of tests, how to run it, and where its records are kept."""

    folder: Path
    file: str
    timeout: int
    extra: list[str]
    records: Path

    def run(self, engine: str, only: set[str] | None = None) -> Result:
        """Run the tests that have no record yet (of ``only`` these), again after each crash, until each has one."""
        self.records.mkdir(parents=True, exist_ok=True)
        name = f"{self.file.removesuffix('.py').replace('/', '.')}.{engine.replace(':', '-')}"
        records = self.records.resolve() / f"{name}.jsonl"
        records.touch()
        environment = {**os.environ, "CONFORMANCE_ENGINE": engine, "CONFORMANCE_RESULT": str(records)}
        # Tests hardly ever come to a tape again: all of them would be left to eager as soon as the budget is used up.
        environment["COMPILED_AUTOGRAD_COMPILE_BUDGET"] = "inf"
        environment["PYTHONPATH"] = os.pathsep.join([str(HERE.parents[1]), str(HERE), os.environ.get("PYTHONPATH", "")])
        if only is not None:
            names = records.with_suffix(".only")
            names.write_text("\n".join(sorted(only)))
            environment["CONFORMANCE_ONLY"] = str(names)
        command = [sys.executable, "-m", "pytest", "--noconftest", "-p", "no:logging", "-p", "no:cacheprovider"]
        command += ["-p", "plugin", "--timeout", str(self.timeout), "-q", self.file, *self.extra]
        for _ in range(_MAX_CRASHES):
            before = records.stat().st_size
            ended = subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, check=False)
            if -ended.returncode in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
                raise SystemExit(f"{engine}: ended by a signal; the same command with --records goes on from here")
            if ended.returncode in (0, 1, 5) or records.stat().st_size == before:
                break
        tests = read(records)
        if not tests and only is None:
            raise SystemExit(f"no test of {self.file} ran under {engine}:\n{ended.stdout.decode()[-2000:]}")
        return Result(engine, tests)


def run_all(job: Job, engines: list[str], eager_last: bool) -> list[Result]:
    """The results of all engines, those of eager first."""
    if not eager_last:
        return [job.run(engine) for engine in engines]
    others = [job.run(engine) for engine in engines[1:]]
    names = set().union(*(result.tests for result in others))
    passed = set.intersection(*(result.passed(names) for result in others))
    skipped = {name for name in names if any(each.tests.get(name, {}).get("outcome") == "skipped" for each in others)}
    doubtful = names - passed - skipped
    eager = job.run(engines[0], only=doubtful) if doubtful else Result(engines[0], {})
    taken = {name: {"outcome": "passed", "backwards": others[0].tests[name].get("backwards", 0)} for name in passed}
    return [Result(eager.engine, {**taken, **eager.tests}), *others]


def report(results: list[Result], console: Console, details: bool) -> None:
    """Print one row for each engine, then what was bypassed, then what does not pass."""
    counted = {name for name, record in results[0].tests.items() if record["outcome"] == "passed"}
    table = Table("engine", "passed", "of", "backwards", "differentiated again", "others compiled")
    for result in results:
        bypasses = result.bypasses(counted)
        again = sum(count for reason, count in bypasses.items() if reason in DIFFERENTIATED_AGAIN)
        others = result.backwards(counted) - again
        compiled = others - (sum(bypasses.values()) - again)
        share = f"{compiled} ({compiled / others:.1%})" if others else "n/a"
        cells = (len(result.passed(counted)), len(counted), result.backwards(counted), again)
        table.add_row(result.engine, *map(str, cells), share)
    console.print(table)
    neither = {name for name, record in results[0].tests.items() if record["outcome"] == "failed"}
    if neither:
        console.print(
            f"{len(neither)} do not pass on the eager engine, with this version of PyTorch, and are not counted"
        )
    for result in results[1:]:
        for reason, count in result.bypasses(counted).most_common():
            console.print(f"{result.engine}: bypassed {count}: {reason}", highlight=False, markup=False)
        for name in sorted(counted - result.passed(counted)) if details else ():
            record = result.tests.get(name, {"outcome": "not run", "error": ""})
            error = " ".join(str(record.get("error", "")).split())[:160]
            console.print(f"{result.engine}: {record['outcome']} {name}: {error}", highlight=False, markup=False)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="PyTorch's test folder")
    parser.add_argument("file", help="a file in it, such as test_autograd.py")
    parser.add_argument("--engines", nargs="+", default=["eager", "torch", "ours:eager", "ours:inductor"])
    parser.add_argument("--timeout", type=int, default=60, help="seconds for one test (default 60)")
    parser.add_argument("--records", type=Path, help="a folder where records are kept; tests that have one are not run")
    parser.add_argument("--eager-last", action="store_true", help="run on eager only what does not pass elsewhere")
    parser.add_argument("--list", action="store_true", help="name the tests that pass on eager and not elsewhere")
    arguments, extra = parser.parse_known_args()
    if arguments.engines[0] != "eager":
        arguments.engines.insert(0, "eager")
    with tempfile.TemporaryDirectory() as scratch:
        records = arguments.records or Path(scratch)
        job = Job(arguments.folder, arguments.file, arguments.timeout, extra, records)
        results = run_all(job, arguments.engines, arguments.eager_last)
    report(results, Console(soft_wrap=True), arguments.list)


if __name__ == "__main__":
    main()
