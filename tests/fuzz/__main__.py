"""Runs random tapes, and prints each that is not as under eager: its seed, the smallest form of it, and what it shows.

python -m tests.fuzz --tapes 3000 --seed 0
python -m tests.fuzz --backend inductor --minutes 20
python -m tests.fuzz --backend inductor --replay 17
python -m tests.fuzz --walk both --device cuda
"""

from __future__ import annotations

import argparse
import atexit
import inspect
import sys
import time
import warnings
from collections import Counter
from pathlib import Path

import torch
from rich.console import Console

from compiled_autograd.engine.native_hits import NATIVE_HITS
from shadow_cache import default_dir

from ..both_walks import compare_everywhere, library_in, tell
from .compare import Finding
from .generate import generate
from .known import IGNORED, WITHOUT
from .operators import TABLE
from .program import SKIP, Program, describe, from_json
from .runner import Settings, Verdict, check, check_in_folder, told
from .shrink import shrink
from .values import LEFT_OUT, PLACE

_CHECK = {"default": None, "false": False, "true": True}
_MAX_SHRUNK = 4
"""Programs of one kind of finding that are made smaller: the others are only named."""


def main() -> int:
    """The command line; 1 where something was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tapes", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0, help="of the first tape; the others count on")
    parser.add_argument("--minutes", type=float, default=0.0, help="stop then, however many have run")
    parser.add_argument("--backend", default="eager")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--walk", choices=["off", "on", "both"], default="off", help="in C++: see tests/both_walks.py")
    parser.add_argument("--check", choices=_CHECK, default="default", help="false shows compiled code itself")
    parser.add_argument("--replay", type=int, help="run this seed alone")
    parser.add_argument("--program", help="run the program in this file (- is the standard input)")
    parser.add_argument("--folder", help="with --program: a store that another process may have filled")
    parser.add_argument("--shrink", type=float, default=60.0, help="seconds for making one smaller")
    parser.add_argument("--without", nargs="*", default=[], help="operators and layouts to do without")
    parser.add_argument("--ignore", nargs="*", default=[], help="texts of findings that are not told")
    parser.add_argument("--known", action="store_true", help="do not tell what is in known.py")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    LEFT_OUT.update(arguments.without)
    if arguments.known:
        LEFT_OUT.update(WITHOUT)
        arguments.ignore += IGNORED
    console = Console(soft_wrap=True, highlight=False, markup=False)
    PLACE.device = arguments.device
    settings = Settings(arguments.backend, _CHECK[arguments.check])
    walk_in_cpp(arguments.walk)
    if arguments.program is not None:
        text = sys.stdin.read() if arguments.program == "-" else Path(arguments.program).read_text()
        program = from_json(text)
        verdict = check_in_folder(program, settings, arguments.folder) if arguments.folder else check(program, settings)
        for finding in verdict.findings:
            console.print(f"finding: {finding}")
        return bool(verdict.findings)
    seeds = (
        [arguments.replay] if arguments.replay is not None else range(arguments.seed, arguments.seed + arguments.tapes)
    )
    return run_many(seeds, settings, console, arguments.minutes, arguments.shrink, arguments.ignore)


def walk_in_cpp(how: str) -> None:
    """Have the extension built, and serve, or compare."""
    if how == "off":
        return
    library = library_in(default_dir() / "native")
    if how == "both":
        compare_everywhere(library)
        atexit.register(tell)
    else:
        NATIVE_HITS.library = library


def run_many(
    seeds: range, settings: Settings, console: Console, minutes: float, seconds: float, ignore: list[str]
) -> int:
    """Run the programs of these seeds, and tell what was found."""
    started = time.monotonic()
    kinds: Counter[str] = Counter()
    total = Verdict()
    ran = 0
    for seed in seeds:
        if minutes and time.monotonic() - started > 60 * minutes:
            break
        program = generate(seed, settings.backend)
        verdict = check(program, settings)
        ran += 1
        total.backwards.update(verdict.backwards)
        total.loads += verdict.loads
        findings = told(verdict, ignore)
        if findings:
            finding = findings[0]
            kinds[finding.kind] += 1
            console.print(f"\nseed {seed}: {finding}")
            if kinds[finding.kind] <= _MAX_SHRUNK and seconds:
                tell_smallest(program, finding, settings, console, seconds, ignore)
    took = time.monotonic() - started
    console.print(
        f"\n{ran} tapes in {took:.0f} s, backwards {dict(total.backwards)}, {total.loads} regions from the store"
    )
    console.print(f"findings: {dict(kinds) or 'none'}")
    return bool(kinds)


def tell_smallest(
    program: Program, finding: Finding, settings: Settings, console: Console, seconds: float, ignore: list[str]
) -> None:
    """Print the smallest program that shows the same kind of thing, and the source of its operators."""

    def fails(less: Program) -> bool:
        return any(each.kind == finding.kind for each in told(check(less, settings), ignore))

    least = shrink(program, fails, seconds)
    console.print(describe(least))
    shown = [each for each in check(least, settings).findings if each.kind == finding.kind]
    for each in shown[:3]:
        console.print(f"  -> {each}")
    names = {operator.name for operator in least.operators} - {SKIP, "pointwise"}
    for name in sorted(names) if len(names) <= 2 else ():
        console.print(inspect.getsource(TABLE[name][0]).rstrip())
    console.print(f"  --program: {least.to_json()}")


if __name__ == "__main__":
    sys.exit(main())
