"""How long `shadow-cache ls` takes from the shell, on a cache of 1,000 entries: `python -m benchmarks.command_line`.

Each entry is as one of a tape of 400 nodes with 300 saved tensors. Beside it stand Python alone and the import of
the command line, which nothing that is written in Python can be faster than. torch is not imported.
"""

import argparse
import hashlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from compiled_autograd import shadow_cache
from compiled_autograd.shadow_cache import Call, Entry, Input, Miss, Region, Structure

NODES, INPUTS, STRUCTURES = 400, 300, 50


def fill(path: Path, entries: int) -> None:
    """Make a cache of ``entries`` entries, of 50 structures."""
    structures = []
    for number in range(STRUCTURES):
        calls = tuple(
            Call(f"Op{index}Backward0", (f"Op{index}Backward0", f"constant {number if index == 390 else 0}"))
            for index in range(NODES)
        )
        structures.append(Structure(f"{number:012x}", calls, ("end", "return []"), "tape\n" * NODES))
    inputs = tuple(
        Input(f"node {index} AddmmBackward0, mat1", "float32", "cpu", ("64", "128")) for index in range(INPUTS)
    )
    with shadow_cache.open(path) as store:
        for number in range(entries):
            code, aten = f"code {number}".encode(), f"graph {number}".encode()
            names = [hashlib.sha256(data).hexdigest() for data in (code, aten)]
            structure = structures[number % STRUCTURES]
            entry = Entry(
                id=hashlib.sha256(str(number).encode()).hexdigest()[:12],
                structure=structure.id,
                loss="MseLossBackward0",
                module=f"Model{number % 7}",
                source=f"train.py:{number % 90} in step",
                nodes=NODES,
                settings={"backend": "inductor", "passes": "()"},
                ambient={"autocast": "None", "threads": "2"},
                environment={"torch": "2.13.0"},
                inputs=inputs,
                dynamic=False,
                guards=(),
                record=b"",
                regions=(Region(NODES, *names, b""),),
                miss=Miss("shape", "node 2 AddmmBackward0, mat1, dim 0", "64", str(number)),
                seconds=17.0,
                created=time.time(),
            )
            store.add(structure, entry, dict(zip(names, (code, aten), strict=True)))


def median(command: list[str], runs: int) -> tuple[float, float, float]:
    """Seconds of a command from its start to its end: median, least and most of several runs after one to warm up."""
    taken = []
    for _ in range(runs + 1):
        started = time.perf_counter()
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
        taken.append(time.perf_counter() - started)
    return statistics.median(taken[1:]), min(taken[1:]), max(taken[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--entries", type=int, default=1000)
    parser.add_argument("--runs", type=int, default=10)
    options = parser.parse_args()
    verb = [sys.executable, "-m", "compiled_autograd.shadow_cache"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cache"
        fill(path, options.entries)
        os.environ["COMPILED_AUTOGRAD_CACHE_DIR"] = str(path)
        print(f"{options.entries} entries, median (least, most) of {options.runs} runs, seconds")
        for name, command in (
            ("python -c pass", [sys.executable, "-c", "pass"]),
            (
                "import compiled_autograd.shadow_cache.cli",
                [sys.executable, "-c", "import compiled_autograd.shadow_cache.cli"],
            ),
            ("shadow-cache ls", [*verb, "ls"]),
            ("shadow-cache ls --format json", [*verb, "ls", "--format", "json"]),
            ("shadow-cache stats", [*verb, "stats"]),
            ("shadow-cache tree", [*verb, "tree"]),
        ):
            middle, least, most = median(command, options.runs)
            print(f"{name:<30}  {middle:.3f} ({least:.3f}, {most:.3f})")


if __name__ == "__main__":
    main()
