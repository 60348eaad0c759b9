"""Eager and a runner, each in a process of its own, which take turns at blocks of steps; torch is not imported.

While one steps, the other is stopped, with all that it has started. So what is compiled beside a training, by threads
or by other processes, takes its own training's time and no other's.
"""

import contextlib
import json
import os
import signal
import statistics
import sys
import tempfile
import time
import uuid
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.apart import Answering
from benchmarks.children import caches_in, last_line, store_in
from benchmarks.targets import Result

# By the name of a row: the runner of `benchmarks.runners`, and the folder of its caches, which rows may share.
RUNNERS = {
    "eager": ("eager", "eager"),
    "ours": ("default", "ours"),
    "ours-warm": ("default", "ours"),
    "compile": ("aot", "compile"),
    "compile-ours": ("aot-default", "compile-ours"),
}
DRAWS_INSIDE = {"bert": ("compile", "compile-ours")}
"""Models that draw in their forward, and those runners whose forward draws other numbers than eager's."""
FIRST_BLOCK = 10
# In a later block: steps that are not counted, in which caches are warmed, and steps that are.
SETTLING_STEPS, COUNTED_STEPS = 3, 7
# Largest differences of the first step by eager's: of a gradient, of all parameters' movement; and of all gradients
# where other numbers are drawn: no gradient at all is 1 away.
LARGEST, MOVED, OF_OTHER_DRAWS = 0.05, 0.2, 0.9
_MARK = "BENCHMARK_TURN"

Times = list[tuple[float, float]]
"""Seconds of steps, and of the backwards in each."""


class Stepping(Answering):
    """A process of `benchmarks.ordinary.steps`, stopped but while it answers."""

    def __init__(self, runner: str, model: str, folder: Path, args: Namespace) -> None:
        folder.mkdir(exist_ok=True)
        self._mark = f"{_MARK}={uuid.uuid4().hex}"
        name, _, value = self._mark.partition("=")
        environment = dict(os.environ) | caches_in(folder) | store_in(folder) | {name: value}
        self._file = tempfile.TemporaryFile("w+")  # noqa: SIM115 - it is closed on exit
        size = "tiny" if args.tiny else "full"
        command = [sys.executable, "-m", "benchmarks.ordinary.steps", runner, model, str(args.seed), size]
        super().__init__(command, environment, self._file)

    def __enter__(self) -> "Stepping":
        super().__enter__()
        try:
            self.ready: Result = json.loads(self.answer())
        except RuntimeError:
            self.__exit__()
            raise
        self._signal(signal.SIGSTOP)
        return self

    def do(self, what: str, *given: object) -> Any:
        """The answer of the process, which runs as long as it takes. Raises RuntimeError if it has ended."""
        self._signal(signal.SIGCONT)
        answer = json.loads(self.ask(" ".join(map(str, (what, *given)))))
        self._signal(signal.SIGSTOP)
        return answer

    def answer(self) -> str:
        try:
            return super().answer()
        except RuntimeError as error:
            self._file.seek(0)
            raise RuntimeError(f"{error}: {last_line(self._file.read())}") from None

    def __exit__(self, *error: object) -> None:
        if any(error):
            self._signal(signal.SIGKILL)
        self._signal(signal.SIGCONT)
        super().__exit__()
        self._signal(signal.SIGKILL)  # what it has left behind
        self._file.close()

    def _signal(self, number: signal.Signals) -> None:
        """Send it to the process and to all that it has started, those included that others of them start meanwhile."""
        sent: set[int] = set()
        while new := set(self._processes()) - sent:
            for process in new:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, number)
            sent |= new

    def _processes(self) -> Iterator[int]:
        """A compiler may have a session of its own, and no parent any more: what it still has is the environment."""
        if self._process.returncode is None:
            yield self._process.pid
        for file in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if self._mark.encode() in file.read_bytes().split(b"\0"):
                    yield int(file.parent.name)


def in_turn(sides: Sequence[Stepping], number: int, steps: int) -> list[Times]:
    """A block of steps of each side; in each odd block the last goes first."""
    found = [(index, sides[index].do("steps", steps)) for index in range(len(sides))[:: -1 if number % 2 else 1]]
    return [times for _, times in sorted(found)]


def measure(model: str, runner: str, folder: Path, args: Namespace) -> Result:
    """One row; `failed` says what went wrong.

    first_seconds: of the first `args.steps` steps, and of what came before them. first_ratio: by eager's.
    step_ms, backward_ms: medians after these; with `eager_` those of eager. step_ratio, backward_ratio: the median over
        rounds of two neighbouring blocks. rounds: the ratios of each round.
    pays_after: the number of steps after which the time of all steps is less than eager's; None where it never is.
    differences: of the first step (`benchmarks.ordinary.steps`). other_draws: whether the runner draws other numbers.
    counts: of the first steps. later: what was counted besides while the others were measured, hits left out.
    """
    result: Result = {"model": model, "runner": runner}
    name, caches = RUNNERS[runner]
    rounds: list[list[Times]] = []
    try:
        for start in range(args.starts):
            with (
                Stepping("eager", model, folder / "beside", args) as eager,
                Stepping(name, model, folder / caches, args) as other,
            ):
                sides = [eager, other]
                if not start:
                    result |= {each: other.ready[each] for each in ("setup_seconds", "torch", "threads")}
                    result |= _first_steps(sides, model, runner, folder, args)
                    if "failed" in result:
                        return result
                result["later"], counted = _settled(sides, args)
                rounds += counted
    except RuntimeError as error:
        return result | {"failed": str(error)}
    result |= steady(rounds)
    return result | {"pays_after": pays_after(result, args.steps)}


def _first_steps(sides: list[Stepping], model: str, runner: str, folder: Path, args: Namespace) -> Result:
    first = [each.ready["setup_seconds"] for each in sides]
    for number, begin in enumerate(range(0, args.steps, FIRST_BLOCK)):
        blocks = in_turn(sides, number, min(FIRST_BLOCK, args.steps - begin))
        first = [before + sum(step for step, _ in block) for before, block in zip(first, blocks, strict=True)]
    # Both sides do all of it: what a process has allocated and freed decides how much memory its C library keeps.
    files = [folder / f"first{number}.pt" for number in range(2)]
    for side, file in zip(sides, files, strict=True):
        side.do("save", file)
    _, differences = (side.do("compare", file) for side, file in zip(sides, files[::-1], strict=True))
    compared = {"differences": differences, "other_draws": runner in DRAWS_INSIDE.get(model, ())}
    if wrong := wrong_work(differences, compared["other_draws"]):
        return compared | {"failed": wrong}
    counts = sides[1].do("counts")
    times = {"first_seconds": first[1], "eager_first_seconds": first[0], "first_ratio": first[1] / first[0]}
    return times | compared | {"counts": counts}


def _settled(sides: list[Stepping], args: Namespace) -> tuple[Result, list[list[Times]]]:
    """What was counted besides hits, and the rounds: once nothing is built any more, and half the first steps again."""
    other = sides[1]
    for _ in range(2):
        other.do("wait")
        in_turn(sides, 0, -(-args.steps // 4))
    before, rounds = other.do("counts"), list[list[Times]]()
    ends = time.monotonic() + args.seconds
    while not rounds or time.monotonic() < ends:
        blocks = in_turn(sides, len(rounds), SETTLING_STEPS + COUNTED_STEPS)
        rounds.append([block[SETTLING_STEPS:] for block in blocks])
    return _later(before, other.do("counts")), rounds


def wrong_work(differences: dict[str, float], other_draws: bool) -> str:
    """What is not as eager has it; empty where nothing is. A NaN is."""
    limits = {"gradients": OF_OTHER_DRAWS} if other_draws else {"largest": LARGEST, "moved": MOVED}
    found = [f"{name} {differences[name]:.1e}" for name, most in limits.items() if not differences[name] <= most]
    return f"the first step is another than eager's: {', '.join(found)}" if found else ""


def steady(rounds: list[list[Times]]) -> Result:
    """The figures of rounds of (eager's block, the runner's)."""
    result: Result = {"rounds": {}}
    for index, part in enumerate(("step", "backward")):
        times = [[[each[index] for each in block] for block in blocks] for blocks in rounds]
        for number, whose in enumerate(("eager_", "")):
            counted = [each for blocks in times for each in blocks[number]]
            result[f"{whose}{part}_ms"] = 1e3 * statistics.median(counted)
        ratios = [statistics.median(other) / statistics.median(eager) for eager, other in times]
        result["rounds"][part] = ratios
        result[f"{part}_ratio"] = statistics.median(ratios)
    return result


def _later(before: Result, after: Result) -> Result:
    """What was counted in between, hits left out."""
    found = {name: _flat(after).get(name, 0) - _flat(before).get(name, 0) for name in _flat(after)}
    return {name: count for name, count in found.items() if count and name != "hits"}


def _flat(counts: Result) -> dict[str, int]:
    flat = {name: value for name, value in counts.items() if name != "bypasses"}
    return flat | counts.get("bypasses", {})


def pays_after(result: Result, steps: int) -> float | None:
    """After how many steps all of them together took less than eager's; None where a step takes as long or longer."""
    gain = 1e-3 * result["eager_step_ms"] * (1 - result["step_ratio"])
    more = result["first_seconds"] - result["eager_first_seconds"]
    return max(0.0, steps + more / gain) if gain > 0 else None
