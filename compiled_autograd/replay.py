"""A stored reproduction, run again: its operators one by one, and compiled; compared and timed."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from . import ir
from .api import enable
from .backends.signal_handlers import raise_what_a_handler_raised
from .cache.graphs import CompiledGraph
from .cache.variants import Handover
from .diagnostics.node_names import leaf_name
from .engine.session import Session
from .errors import ReproductionError
from .frontend import run_captured
from .proving.comparison import plain, root_mean_square, tolerance
from .reproduction.files import read_file
from .reproduction.reading import given_to, tape_of
from .reproduction.recording import STAND_IN
from .reproduction.records import About
from .runtime.interpret import interpret
from .shadow_cache import Miss

_RUNS = 4
"""Runs that are compared: code that Inductor generated may run as something else from the second one on."""
Gradients = dict[str, torch.Tensor | None]


@dataclass(frozen=True)
class Difference:
    """What compiled code gave for one leaf, or for one gradient that was asked for, beside the operators one by one.

    Attributes:
        name: of the parameter, or the number of the leaf's node.
        error: the largest difference, not a number where the two cannot be subtracted; ``where`` is its index.
        eager, compiled: the two values there.
        run: the run, counted from 0, in which it was the largest.
        is_rounding: every value is as near as rounding brings it (``docs/correctness.md``), float64 not asked.
        text: what else differs: dtype, shape, or that one is undefined.
    """

    name: str
    error: float = 0.0
    where: tuple[int, ...] = ()
    eager: float = 0.0
    compiled: float = 0.0
    run: int = 0
    is_rounding: bool = True
    text: str = ""


@dataclass(frozen=True)
class Comparison:
    """What became of the compiled runs of a reproduction.

    Attributes:
        differences: for each leaf, and each gradient that was asked for, the largest difference of several runs.
        reasons: what was said of the first of them beside that it was new: what a backend could not compile runs one by
            one there too, and shows no difference.
        compiles: how many regions were compiled.
    """

    differences: list[Difference]
    reasons: list[str]
    compiles: int

    @property
    def is_rounding(self) -> bool:
        """Whether nothing differs by more than rounding."""
        return all(each.is_rounding for each in self.differences)


@dataclass(frozen=True)
class Times:
    """Seconds of one backward, the median of several that took turns."""

    eager: float
    compiled: float
    rounds: int

    @property
    def ratio(self) -> float:
        """Of the time of the operators one by one, what compiled code takes."""
        return self.compiled / self.eager


class Reproduction:
    """One backward out of a file, to be run in a process that never saw its model.

    In place of hooks and functions of the user's stand steps that hand on made-up values.

    Attributes:
        about: where it comes from.
        tape: its tape graph. The calls run ATen operators.
        real: its tensors have the values that they had; else they are made up.
        stand_ins: what could not be carried, in words.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._record, self._stored = read_file(path)
        self.about: About = self._record.about
        try:
            self.tape: ir.TapeGraph = tape_of(self._record)
        except RecursionError as error:
            raise ReproductionError("it has lists in lists, deeper than can be read") from error
        self.real = self._record.real
        nodes, calls = self._record.nodes, self._record.calls
        self.stand_ins = [
            f"#{each.call} {nodes[each.call].name}: {each.name}" for each in calls if each.target == STAND_IN
        ]
        self._leaves = [node for node in self.tape.graph.nodes if node.target is ir.accumulate_grad]

    def eager(self) -> Gradients:
        """Run its operators one by one.

        Returns:
            The gradient of each leaf by its name, and ``result 0`` and so on for those that were asked for.

        Raises:
            ReproductionError: its tensors cannot be made here, or an operator cannot be run with them.
        """
        given = self._given()
        try:
            return self._run(given, self._one_by_one)
        except Exception as error:  # whatever an operator says of what it is called with
            raise_what_a_handler_raised(error)
            raise ReproductionError(f"its operators cannot be run ({type(error).__name__}: {error})") from error

    def compiled(self, session: Session) -> Gradients:
        """Run it as a backward of a session; ``session.last`` says what became of it."""
        return self._run(self._given(), lambda handover: run_captured(self.tape, handover, session))

    def session(self, backend: Any = None) -> Session:
        """A session with the settings of the file, and another backend where one is named. It keeps nothing on disk,
        and compares nothing: what differs is to show."""
        about = self.about
        chosen: dict[str, Any] = (
            {"backend": about.backend, "mode": about.mode} if backend is None else {"backend": backend}
        )
        return enable(**chosen, dynamic=about.dynamic, check=False, tune=False, cache_dir=False, native=False)

    def compare(self, backend: Any = None) -> Comparison:
        """What compiled code gives beside the operators one by one."""
        session, reasons, found = self.session(backend), list[str](), dict[str, Difference]()
        for number in range(_RUNS):
            want, got = self.eager(), self.compiled(session)
            if session.last is not None and not number:
                reasons = [str(each) for each in session.last.reasons if not isinstance(each, Miss)]
            for name in want:
                difference = _difference(name, want[name], got[name], number)
                before = found.get(name)
                if before is None or (before.is_rounding, -before.error) > (difference.is_rounding, -difference.error):
                    found[name] = difference
        return Comparison(list(found.values()), reasons, session.stats().compiles)

    def time(self, backend: Any = None, rounds: int = 20) -> Times:
        """Time both, turn by turn, after a few runs of each."""
        session, given = self.session(backend), self._given()
        ways: tuple[Callable[[Handover], Any], ...] = (
            self._one_by_one,
            lambda handover: run_captured(self.tape, handover, session),
        )
        seconds: tuple[list[float], list[float]] = ([], [])
        for number in range(_RUNS + rounds):
            for way, times in zip(ways, seconds, strict=True):
                started = time.perf_counter()
                self._run(given, way)
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                if number >= _RUNS:
                    times.append(time.perf_counter() - started)
        return Times(statistics.median(seconds[0]), statistics.median(seconds[1]), rounds)

    def graph(self, backend: Any = None) -> CompiledGraph:
        """What is compiled of it, in all its stages: see :meth:`CompiledGraph.readable`."""
        session = self.session(backend)
        self.compiled(session)
        if session.last is None or session.last.graph is None:
            raise ReproductionError("nothing was compiled of it")
        return session.last.graph

    # ---- a run -------------------------------------------------------------------------------------------------------

    def _given(self) -> Handover:
        tensors, scalars = given_to(self._record, self._stored)
        return Handover(tensors, list(self._record.sizes), list(scalars), (), ())

    def _one_by_one(self, handover: Handover) -> list[torch.Tensor | None]:
        with torch.no_grad():
            return interpret(self.tape, handover.by_kind())

    def _run(self, given: Handover, way: Callable[[Handover], Sequence[torch.Tensor | None]]) -> Gradients:
        leaves = [given.tensors[_lifted(node.args[0])] for node in self._leaves]
        for leaf, node in zip(leaves, self._leaves, strict=True):
            leaf.grad = None if node.args[1] is None else given.tensors[_lifted(node.args[1])]
        handover = Handover(list(given.tensors), list(given.sizes), list(given.scalars), (), ())
        results = way(handover)
        found: Gradients = {}
        for leaf, node in zip(leaves, self._leaves, strict=True):
            name = leaf_name(self.tape, node.meta["call"])
            found[f"{name} of #{node.meta['call']}" if name in found else name] = leaf.grad
        found.update({f"result {index}": result for index, result in enumerate(results)})
        return found


def _lifted(node: Any) -> int:
    assert isinstance(node, fx.Node)
    return node.meta["lifted"].index


def _difference(name: str, want: torch.Tensor | None, found: torch.Tensor | None, run: int) -> Difference:
    if want is None or found is None:
        text = "" if want is found else f"it is {'un' if found is None else ''}defined in compiled code alone"
        return Difference(name, run=run, is_rounding=want is found, text=text)
    if (want.dtype, want.shape) != (found.dtype, found.shape):
        text = f"{found.dtype} {list(found.shape)} in place of {want.dtype} {list(want.shape)}"
        return Difference(name, float("nan"), run=run, is_rounding=False, text=text)
    if want.layout is not found.layout:
        return Difference(name, float("nan"), run=run, is_rounding=False, text=f"{found.layout}, not {want.layout}")
    if want.layout is not torch.strided:
        want, found = want.to_dense(), found.to_dense()
    relative = tolerance([want.dtype])
    want, found = plain(want).double(), plain(found).double()
    if want.numel() == 0:
        return Difference(name, run=run)
    error = (found - want).abs()
    error[(want == found) | (want.isnan() & found.isnan())] = 0  # infinities too
    allowed = relative * (want.abs() + root_mean_square(want))
    is_rounding = bool(((error <= allowed) | (error == 0)).all())
    worst = error.nan_to_num(float("inf"))
    where = tuple(int(each) for each in torch.unravel_index(worst.argmax(), worst.shape)) if worst.dim() else ()
    return Difference(name, float(error[where]), where, float(want[where]), float(found[where]), run, is_rounding)
