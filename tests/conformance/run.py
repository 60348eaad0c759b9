"""Runs a file of PyTorch's own tests under several engines, and prints how many pass and what was compiled.

    python -m tests.conformance.run FOLDER test_autograd.py --engines eager ours:eager --list

FOLDER holds PyTorch's ``test/`` folder; none of it is part of this project. Tests count that pass on ``eager``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
DIFFERENTIATED_AGAIN = ("create_graph", "batched_grads")
"""Backwards that ask for what only the eager engine does; they are left out of the share that was compiled."""
_MOST_CRASHES = 25


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


def run(folder: Path, file: str, engine: str, timeout: int, extra: list[str]) -> Result:
    """Run ``file`` under ``engine``, again after each crash, until every test has its record."""
    with tempfile.TemporaryDirectory() as scratch:
        records = Path(scratch) / "records.jsonl"
        records.touch()
        environment = {**os.environ, "CONFORMANCE_ENGINE": engine, "CONFORMANCE_RESULT": str(records)}
        environment["PYTHONPATH"] = os.pathsep.join([str(HERE.parents[1]), str(HERE), os.environ.get("PYTHONPATH", "")])
        command = [sys.executable, "-m", "pytest", "--noconftest", "-p", "no:logging", "-p", "no:cacheprovider"]
        command += ["-p", "plugin", "--timeout", str(timeout), "-q", file, *extra]
        for _ in range(_MOST_CRASHES):
            before = records.stat().st_size
            ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=False)
            if ended.returncode in (0, 1, 5) or records.stat().st_size == before:
                break
        lines = records.read_text().splitlines()
        if not lines:
            raise SystemExit(f"no test of {file} ran under {engine}:\n{ended.stdout.decode()[-2000:]}")
        return Result(engine, {record["test"]: record for record in map(json.loads, lines)})


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
    parser.add_argument("--list", action="store_true", help="name the tests that pass on eager and not elsewhere")
    arguments, extra = parser.parse_known_args()
    if arguments.engines[0] != "eager":
        arguments.engines.insert(0, "eager")
    results = [run(arguments.folder, arguments.file, engine, arguments.timeout, extra) for engine in arguments.engines]
    report(results, Console(soft_wrap=True), arguments.list)


if __name__ == "__main__":
    main()
