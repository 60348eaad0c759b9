"""Records programs: on eager for the times of eager, then in a session for the order and all other times.

    python -m benchmarks.policy.recorder [NAME ...] [--folder FOLDER]

Seconds are processor time of the thread, with one thread; those of a miss include the compiler's process. A compile
beside the training is taken to last as long as in the process.
"""

from __future__ import annotations

import argparse
import math
import os
import resource
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import torch

import compiled_autograd as ca
from benchmarks.policy import sequence
from benchmarks.policy.programs import PROGRAMS, Program
from benchmarks.policy.sequence import Recording, Tape
from compiled_autograd.backends import get_backend
from compiled_autograd.capture import tape as reader
from compiled_autograd.compiling.queue import _import_first
from compiled_autograd.shadow_cache import Bypass

NAME = "_engine_run_backward"
"""What ``torch.autograd`` calls by its name in that module (2.11 to 2.15)."""
DECIDED = "unsupported"
"""The reason of bypasses that policies have to do with. Others depend on the arguments, and cost nothing more."""
LONG_GAP = 8.0
"""A gap by the usual one of its tape from which it is kept, if it is longer than a millisecond."""
LEAST_HIT = 6e-5
"""Seconds that a hit is taken for at least, where it was not measured."""
UNKNOWN_SECONDS = {"capture": (0.15, 0.002), "lower": (0.02, 0.003), "compile": (1.5, 0.06)}
"""Seconds of each stage for a tape, and for each node, where a program had no tape that was compiled: as measured for
tapes of 4 to 192 nodes."""
START = 2.5
"""Seconds of importing the backend, if they are not measured."""
PROVED = 3
"""First hits that are compared with the real calls, and take longer."""


@dataclass
class Seen:
    """One backward as it was recorded."""

    key: tuple[int, int]
    nodes: int
    root: str
    look: float
    gap: float
    seconds: float
    all_seconds: float
    outcome: str = ""
    reason: str = ""
    graph: int | None = None
    stages: dict[str, float] = field(default_factory=dict)


class Recorder:
    """A context manager in which backwards are recorded. One inside another comes before it, and its time is not part
    of the other's.

    Args:
        choose: gives the session for a tape of some key; None for eager.
    """

    def __init__(self, choose: Callable[[tuple[int, int]], ca.Session | None]) -> None:
        self.seen: list[Seen] = []
        self._choose = choose
        self._original: Any = None
        self._inside = threading.local()
        self._last = time.process_time()
        self._pause = 0.0

    def __enter__(self) -> Recorder:
        self._original = getattr(torch.autograd, NAME)
        setattr(torch.autograd, NAME, self._run)
        self._last = time.process_time()
        return self

    def __exit__(self, *exception: object) -> None:
        setattr(torch.autograd, NAME, self._original)

    def pause(self, seconds: float) -> None:
        """See :class:`programs.Here`."""
        self._pause += seconds

    def _run(self, tensors: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        outer = getattr(self._inside, "spent", None)
        gap = 0.0 if outer is not None else time.process_time() - self._last + self._pause
        self._pause = 0.0
        create_graph, inputs = args[2], args[3]
        key, nodes, root, look = _read(tensors, inputs)
        self._inside.spent = 0.0
        session = None if create_graph else self._choose(key)
        everything, began = _all_seconds(), time.thread_time()
        try:
            with session or ca.disable():
                return self._original(tensors, *args, **kwargs)
        finally:
            seconds, all_seconds = time.thread_time() - began, _all_seconds() - everything
            inner, self._inside.spent = self._inside.spent, None if outer is None else outer + all_seconds
            seen = Seen(key, nodes, root, look, gap, max(0.0, seconds - inner), max(0.0, all_seconds - inner))
            _add_outcome(seen, session)
            if create_graph or any(each.grad_fn is not None for each in inputs if isinstance(each, torch.Tensor)):
                seen.outcome, seen.reason = "bypass", "arguments"
            self.seen.append(seen)
            self._last = time.process_time()


def _all_seconds() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.thread_time() + children.ru_utime + children.ru_stime


def _read(tensors: Sequence[Any], inputs: Sequence[Any]) -> tuple[tuple[int, int], int, str, float]:
    """Return the key of a tape (names and sizes), the number of its nodes, its root and the seconds of a look."""
    looks = []
    for _ in range(3):
        began = time.thread_time()
        fingerprint = reader.fingerprint(tensors, inputs)
        looks.append(time.thread_time() - began)
    nodes = reader.first_nodes(tensors)
    sizes = hash(tuple(tuple(tuple(each.shape) for each in node._input_metadata) for node in nodes))
    return (fingerprint, sizes), len(nodes), type(nodes[0]).__name__ if nodes else "", min(looks)


def _add_outcome(seen: Seen, session: ca.Session | None) -> None:
    last = None if session is None else session.last
    if last is None or (last.outcome == "bypass" and not last.reasons):
        return
    seen.outcome, seen.stages = last.outcome, dict(last.seconds)
    seen.graph = None if last.graph is None else last.graph.number
    if last.outcome == "bypass" and last.reasons and isinstance(last.reasons[0], Bypass):
        seen.reason = last.reasons[0].kind


def on_eager(program: Program, seed: int = 0) -> list[Seen]:
    """Run a program on eager."""
    torch.manual_seed(seed)
    with Recorder(lambda key: None) as recorder:
        program.run(recorder)
    return recorder.seen


def in_session(program: Program, seed: int = 0, **settings: Any) -> list[Seen]:
    """Run a program in a session that compiles the first tapes, up to the program's maximum. What would be compiled
    after these runs on eager."""
    chosen: dict[str, Any] = {"cache_dir": False, "tune": False, "compile_budget": math.inf, **settings}
    session = ca.enable(**chosen)
    misses: dict[int, list[tuple[int, int]]] = {}

    def choose(key: tuple[int, int]) -> ca.Session | None:
        stats, known = session.stats(), misses.setdefault(key[0], [])
        if stats.structure_misses + stats.shape_misses < program.compiles and key not in known:
            known.append(key)
        return session if key in known or len(known) == 2 else None  # two variants of a structure serve all sizes

    torch.manual_seed(seed)
    clock = patch.object(time, "perf_counter", _all_seconds)  # what the session's records go by
    with clock, Recorder(choose) as recorder:
        program.run(recorder)
    return recorder.seen


# ---- from what was seen to a sequence --------------------------------------------------------------------------------


def recording(name: str, program: Program, eager: list[Seen], seen: list[Seen], start: float) -> Recording:
    """Make a sequence of both runs."""
    return _Making(eager, seen).recording(name, program, start)


class _Making:
    def __init__(self, eager: list[Seen], seen: list[Seen]) -> None:
        self._eager: dict[tuple[int, int], list[float]] = {}
        for each in eager:
            self._eager.setdefault(each.key, []).append(each.seconds)
        self._seen = _without_others(seen)
        self._of: dict[tuple[Any, ...], list[Seen]] = {}
        for each in self._seen:
            self._of.setdefault(_tape_key(each), []).append(each)
        self._structures: dict[Any, int] = {}
        self._fingerprints: dict[int, int] = {}
        self._shapes: dict[int, list[Any]] = {}
        self._aliases: dict[tuple[int, Any], Any] = {}
        self.widens: set[int] = set()

    def recording(self, name: str, program: Program, start: float) -> Recording:
        self._number_all()
        known = [self._measured(key) for key in self._of]
        ratios = [tape.hit / tape.eager for tape in known if tape.hit]
        rates = {stage: _rate(known, stage) for stage in UNKNOWN_SECONDS}
        estimated = sum(not (tape.hit and tape.cost) and not tape.refused for tape in known)
        ratio = statistics.median(ratios) if ratios else program.hit
        tapes = [_estimated(tape, ratio, rates) for tape in known]
        numbers = {key: number for number, key in enumerate(self._of)}
        items: list[int | tuple[int, float]] = []
        for each in self._seen:
            number = numbers[_tape_key(each)]
            usual = tapes[number].gap
            long = each.gap > max(1e-3, LONG_GAP * usual)
            items.append((number, each.gap) if long else number)
        words = " ".join((program.run.__doc__ or f"{name.replace('_', ' ')}.").split())
        source = f"{words} {len(items)} backwards recorded with torch {torch.__version__}; {len(tapes)} tapes"
        source += f", the costs of {estimated} of them estimated from the others" if estimated else ""
        source += f"; repeated {program.times} times" if program.times > 1 else ""
        return Recording(name, source, tapes, sequence.encode(items), sorted(self.widens), start, program.times)

    def _number_all(self) -> None:
        """Number structures, and shapes within them. Sizes that a variant served without a miss are its own ones, until
        a second variant was made; from then on that one serves all."""
        missed: dict[int, int] = {}
        for each in self._seen:
            structure = self._structures.setdefault(_structure_key(each), len(self._structures))
            shapes = self._shapes.setdefault(structure, [])
            size = each.key[1]
            if size in shapes or (structure, size) in self._aliases:
                continue
            if each.outcome == "hit" and missed.get(structure, 0) == 1:
                self._aliases[structure, size] = shapes[0]
                continue
            shapes.append(size)
            if each.outcome in ("shape_miss", "structure_miss"):
                missed[structure] = missed.get(structure, 0) + 1
            if missed.get(structure, 0) == 2:
                self.widens.add(structure)
            elif missed.get(structure, 0) > 2:
                self.widens.discard(structure)
            elif missed.get(structure, 0) == 0 and len(shapes) > 1:  # nobody tried
                self.widens.add(structure)

    def _measured(self, key: tuple[Any, ...]) -> Tape:
        """A tape with 0 for what was not measured."""
        alike = self._of[key]
        first = alike[0]
        structure = self._structures[_structure_key(first)]
        size = self._aliases.get((structure, first.key[1]), first.key[1])
        hits = [each.seconds for each in alike if each.outcome == "hit"]
        hit = statistics.median(hits[PROVED:]) if len(hits) >= 2 * PROVED else 0.0
        eager = self._eager.get(first.key) or [each.seconds for each in alike if each.outcome == "bypass"]
        if not eager:
            eager = [hit or first.seconds]
        misses = [each for each in alike if each.outcome in ("shape_miss", "structure_miss")]
        refused = first.reason if first.reason == "unsupported" else ""
        capture, lower, compile = _split(misses[0], hit or eager[0]) if misses else (0.0, 0.0, 0.0)
        if misses:
            compile += sum(max(0.0, each - hit) for each in hits[:PROVED])
        if refused:
            capture = max(1e-6, statistics.median(each.seconds for each in alike) - statistics.median(eager))
        return Tape(
            structure,
            self._shapes[structure].index(size),
            self._fingerprints.setdefault(first.key[0], len(self._fingerprints)),
            first.nodes,
            first.root,
            max(1e-6, statistics.median(eager)),
            hit,
            capture,
            lower,
            compile,
            look=statistics.median(each.look for each in alike),
            gap=statistics.median(each.gap for each in alike),
            spread=_spread(eager),
            refused=refused,
        )


def _tape_key(each: Seen) -> tuple[Any, ...]:
    return (*each.key, each.graph if each.reason != "unsupported" else "unsupported")


def _structure_key(each: Seen) -> Any:
    return each.graph if each.graph is not None else ("not captured", each.key[0])


def _without_others(seen: list[Seen]) -> list[Seen]:
    """Leave out backwards that no policy decides about: their time belongs to the gap before the next one."""
    kept: list[Seen] = []
    gap = 0.0
    for each in seen:
        if each.outcome == "bypass" and each.reason != DECIDED:
            gap += each.gap + each.seconds
            continue
        each.gap += gap
        gap = 0.0
        kept.append(each)
    return kept


def _split(miss: Seen, usual: float) -> tuple[float, float, float]:
    """Divide the processor time of a miss, beyond a hit: tracing and compiling are in the session's record, and what
    is left is the report with all that is done in the training's own thread."""
    spent = max(1e-6, miss.all_seconds - usual)
    lower = min(spent, max(0.0, miss.stages.get("lower", 0.0)))
    compile = sum(max(0.0, miss.stages.get(stage, 0.0)) for stage in ("compile", "prove"))
    return max(0.0, spent - lower - compile), lower, min(compile, spent - lower)


def _rate(tapes: list[Tape], stage: str) -> tuple[float, float]:
    """Seconds of a stage for a tape and for each node, by the tapes of which it is known."""
    of_tapes = [getattr(tape, stage) / tape.nodes for tape in tapes if tape.lower + tape.compile]
    return (0.0, statistics.median(of_tapes)) if of_tapes else UNKNOWN_SECONDS[stage]


def _estimated(tape: Tape, ratio: float, rates: dict[str, tuple[float, float]]) -> Tape:
    """Fill in what was not measured, by the other tapes of the program."""
    if tape.refused:
        return tape
    stages = {stage: getattr(tape, stage) for stage in rates}
    if not tape.lower + tape.compile:
        stages = {stage: once + rate * tape.nodes for stage, (once, rate) in rates.items()}
    beside = stages["lower"] + stages["compile"]
    return msgspec.structs.replace(tape, hit=tape.hit or max(ratio * tape.eager, LEAST_HIT), beside=beside, **stages)


def _spread(times: list[float]) -> float:
    """The standard deviation of logarithms, from the quartiles."""
    if len(times) < 8:
        return 0.05
    low, _, high = statistics.quantiles(times, n=4)
    return min(1.0, math.log(high / low) / 1.35) if low > 0 else 0.05


# ---- command line ----------------------------------------------------------------------------------------------------


def start_seconds() -> float:
    """Import the backend, build the extension, and compile something small, twice. Returns the seconds of the first
    compile by those of the second."""
    began = time.thread_time()
    _import_first(get_backend("inductor"))
    x = torch.randn(3, 3, requires_grad=True)
    seconds = [time.thread_time() - began]
    with ca.enable(cache_dir=False, extension="all", tune=False):
        for function in (torch.sin, torch.cos):
            began = time.thread_time()
            function(x @ x).sum().backward()
            seconds.append(time.thread_time() - began)
            function(x @ x).sum().backward()
    return max(0.0, seconds[0] + seconds[1] - seconds[2])


def record_all(names: Sequence[str], folder: Path, only_eager: bool) -> None:
    """Record programs: all on eager, with estimated costs of compiling, and then each in a session."""
    eager: dict[str, list[Seen]] = {}
    for name in names:
        eager[name] = on_eager(PROGRAMS[name])
        print(sequence.save(recording(name, PROGRAMS[name], eager[name], eager[name], START), folder).name, flush=True)
    start = START if only_eager else start_seconds()
    for name in () if only_eager else names:
        ca.reset()
        began = time.process_time()
        seen = in_session(PROGRAMS[name], extension="all")
        path = sequence.save(recording(name, PROGRAMS[name], eager[name], seen, start), folder)
        print(f"{path.name}: {time.process_time() - began:.0f} s", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of a program; all by default")
    parser.add_argument("--folder", type=Path, default=sequence.FOLDER)
    parser.add_argument("--only-eager", action="store_true", help="estimate the costs of compiling")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as cache:
        os.environ.update(TORCHINDUCTOR_CACHE_DIR=cache, TORCHINDUCTOR_COMPILE_THREADS="1")
        record_all(options.names or [*PROGRAMS], options.folder, options.only_eager)
    return 0


if __name__ == "__main__":
    sys.exit(main())
