"""What one child process of `benchmarks.clients` measures: one library's program, run in one way."""

from __future__ import annotations

import contextlib
import gc
import itertools
import random
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

import compiled_autograd as ca
from benchmarks.client_programs import Program
from benchmarks.measure import WARM_PAIRS, alternate, compare

Values = dict[str, Any]
"""losses: of all steps, one f64 tensor. trained: what was trained, as it is after them."""
NUDGE = 2.0**-22
LEAST_SECONDS = 4.0
"""For so long turns are taken at least, however short a step is."""


def _draws() -> tuple[Any, ...]:
    return torch.get_rng_state(), numpy.random.get_state(), random.getstate()


class Side:
    """One training, with random draws of its own, whatever else draws between its steps."""

    def __init__(self, program: Program, around: AbstractContextManager[Any]) -> None:
        torch.manual_seed(0)
        numpy.random.seed(0)
        random.seed(0)
        self.training, self.around = program.build(), around
        self.losses: list[float] = []
        self.draws = _draws()

    def step(self) -> float:
        """Seconds of one step, in the thread's own CPU time. Searches for reference cycles, which come at any step of
        either side and may take as long as ten, come between steps."""
        torch.set_rng_state(self.draws[0])
        numpy.random.set_state(self.draws[1])
        random.setstate(self.draws[2])
        gc.disable()
        try:
            with self.around:
                started = time.thread_time()
                loss = self.training.step()
                taken = time.thread_time() - started
        finally:
            gc.enable()
        self.draws = _draws()
        self.losses.append(float(loss))
        return taken

    def values(self) -> Values:
        trained = [each.detach().clone() for each in self.training.trained()]
        return {"losses": torch.tensor(self.losses, dtype=torch.float64), "trained": trained}


@contextlib.contextmanager
def _warnings_noted() -> Iterator[set[str]]:
    """First lines of the warnings that were given inside."""
    noted: set[str] = set()
    with warnings.catch_warnings(record=True) as given:
        yield noted
    noted.update(str(each.message).partition("\n")[0] for each in given)


def _counts(session: ca.Session) -> dict[str, Any]:
    stats = session.stats()
    names = (
        "backwards",
        "hits",
        "captures",
        "compiles",
        "shape_misses",
        "structure_misses",
        "failures",
        "tuning",
        "bypasses",
    )
    return {name: getattr(stats, name) for name in names}


def _reasons(session: ca.Session) -> list[str]:
    last = session.last
    return [reason.kind for reason in last.reasons if reason.kind != "first_seen"] if last else []


def run_eager(program: Program, steps: int, rounds: int) -> tuple[dict[str, Any], dict[str, Values]]:
    """On eager; and once more with everything that is trained changed in its last bits."""
    plain = Side(program, contextlib.nullcontext())
    with _warnings_noted() as noted:
        for _ in range(steps):
            plain.step()
    nudged = Side(program, contextlib.nullcontext())
    with torch.no_grad():
        for each in nudged.training.trained():
            each.mul_(1 + NUDGE)
    for _ in range(steps):
        nudged.step()
    return {"warnings": sorted(noted)}, {"eager": plain.values(), "nudged": nudged.values()}


def run_one_by_one(program: Program, steps: int, rounds: int) -> tuple[dict[str, Any], dict[str, Values]]:
    """With backend="eager", which runs the captured calls one by one, each time."""
    session = ca.enable(backend="eager", on_miss="compile", tune=False)
    side, reasons = Side(program, session), Counter[str]()
    with _warnings_noted() as noted:
        for _ in range(steps):
            side.step()
            reasons.update(_reasons(session))
    result = {"counts": _counts(session), "reasons": reasons, "warnings": sorted(noted)}
    return result, {"one_by_one": side.values()}


def run_default(program: Program, steps: int, rounds: int) -> tuple[dict[str, Any], dict[str, Values]]:
    """With default settings but ``on_miss="compile"``, in turn with a copy on eager.

    The first steps take turns one by one. Those in which something was compiled are set apart, and taken by the clock,
    as the thread's own time leaves out what other processes compile for it. Then come `rounds` of turns.
    """
    warm = Side(program, ca.disable())
    for _ in range(3):
        warm.step()
    session, reasons = ca.enable(on_miss="compile"), Counter[str]()
    eager, ours = Side(program, ca.disable()), Side(program, session)
    eager_seconds, our_seconds, first_seconds, beside_compiling = 0.0, 0.0, None, 0.0
    with _warnings_noted() as noted:
        for _ in range(steps):
            by_eager = eager.step()
            compiled, started = session.stats().compile_seconds, time.perf_counter()
            taken = ours.step()
            by_clock = time.perf_counter() - started
            compiled = session.stats().compile_seconds - compiled
            if compiled:
                beside_compiling += max(by_clock - compiled, 0.0) - by_eager
            else:
                our_seconds, eager_seconds = our_seconds + taken, eager_seconds + by_eager
            first_seconds = first_seconds or by_clock
            reasons.update(_reasons(session))
    counts, compile_seconds = _counts(session), session.stats().compile_seconds
    values = {"default": ours.values(), "beside": eager.values()}
    started = time.perf_counter()
    alternate([eager, ours], WARM_PAIRS)
    rounds = max(rounds, int(LEAST_SECONDS * WARM_PAIRS / (time.perf_counter() - started)))
    eager_ms, our_ms, ratio = compare(*alternate([eager, ours], rounds))
    later = Counter(session.stats().bypasses)
    later["tuning"] = session.stats().tuning - counts["tuning"]
    later.subtract(counts["bypasses"])
    result = {
        "counts": counts,
        "reasons": reasons,
        "warnings": sorted(noted),
        "compile_seconds": compile_seconds,
        "first_step_seconds": first_seconds,
        "eager_ms": eager_ms,
        "our_ms": our_ms,
        "ratio": ratio,
        "ratio_of_first_steps": our_seconds / eager_seconds,
        "seconds_beside_compiling": beside_compiling,
        "later_bypasses": +later,
    }
    return result, values


RUNS = {"eager": run_eager, "one_by_one": run_one_by_one, "default": run_default}


def run(program: Program, way: str, steps: int, rounds: int, folder: Path) -> dict[str, Any]:
    """One way, as a JSON object; what was computed is written to files of the folder."""
    torch.set_num_threads(1)
    result, values = RUNS[way](program, steps, rounds)
    for name, each in values.items():
        torch.save(each, folder / f"{name}.pt")
    return result


def _bits(value: Tensor) -> Tensor:
    return value.contiguous().flatten().view(torch.uint8)


def same_bits(one: Values, other: Values) -> bool:
    """Whether losses and what was trained are the same, bit for bit."""
    pairs = itertools.zip_longest(_all(one), _all(other))
    return all(a is not None and b is not None and torch.equal(_bits(a), _bits(b)) for a, b in pairs)


def difference(one: Values, other: Values) -> float:
    """The largest difference of losses and of what was trained, each by the largest value of its tensor in `one`."""
    worst = 0.0
    for a, b in zip(_all(one), _all(other), strict=True):
        scale = a.abs().max().item() if a.numel() else 0.0
        apart = (a - b).abs().max().item() if a.numel() else 0.0
        if not torch.equal(a.isnan(), b.isnan()):
            return float("inf")
        worst = max(worst, apart / scale if scale else apart)
    return worst


def _all(values: Values) -> list[Tensor]:
    return [values["losses"], *values["trained"]]


def comparisons(folder: Path) -> dict[str, Any]:
    """What the files of the folder say: those of a way that failed are not there."""
    found = {path.stem: torch.load(path) for path in folder.glob("*.pt")}
    eager, result = found.get("eager"), dict[str, Any]()
    if eager is None:
        return result
    for name, key in (("one_by_one", "same_one_by_one"), ("beside", "same_eager"), ("default", "same_default")):
        if name in found:
            result[key] = same_bits(eager, found[name])
    for name, key in (("default", "difference"), ("nudged", "difference_nudged"), ("one_by_one", "one_by_one_apart")):
        if name in found:
            result[key] = difference(eager, found[name])
    return result
