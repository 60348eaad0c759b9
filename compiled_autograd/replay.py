"""Run a stored reproduction, with its operators one by one and compiled; compare and time the two."""

from __future__ import annotations

import math
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
"""Number of compared runs: from the second run on, Inductor's code may run in another form."""
Gradients = dict[str, torch.Tensor | None]


@dataclass(frozen=True)
class Difference:
    """The difference between compiled code and the operators one by one, for one leaf or one requested gradient.

    Attributes:
        name: the name of the parameter, or the number of the leaf's node.
        error: the largest difference; NaN if the two cannot be subtracted.
        where: the index of the largest difference.
        eager, compiled: the two values at this index.
        run: the run with the largest difference, counted from 0.
        is_rounding: True if all differences are within rounding (``docs/correctness.md``), without a check in float64.
        text: another difference in words: in dtype, shape or layout, or one of the two is undefined.
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
    """The result of the compiled runs of a reproduction.

    Attributes:
        differences: the largest difference of several runs, for each leaf and each requested gradient.
        reasons: the bypasses and failures of the first run. Calls that the backend could not compile also run one by
            one, and then show no difference.
        compiles: the number of compiled regions.
    """

    differences: list[Difference]
    reasons: list[str]
    compiles: int

    @property
    def is_rounding(self) -> bool:
        """True if no difference is larger than rounding."""
        return all(each.is_rounding for each in self.differences)


@dataclass(frozen=True)
class Times:
    """Median seconds of one backward of each kind; the two were run alternately, ``rounds`` times each."""

    eager: float
    compiled: float
    rounds: int

    @property
    def ratio(self) -> float:
        """The time of compiled code divided by the time of the operators one by one."""
        return self.compiled / self.eager


class Reproduction:
    """One backward from a file, to be run in a process without its model.

    Stand-ins that return made-up values replace hooks and functions of the user.

    Attributes:
        about: the origin of the reproduction.
        tape: the tape graph. The calls run ATen operators.
        real: True if the tensors have their original values; else the values are made up.
        stand_ins: the calls that stand-ins replace, in words.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._record, self._stored = read_file(path)
        self.about: About = self._record.about
        try:
            self.tape: ir.TapeGraph = tape_of(self._record)
        except RecursionError as error:
            raise ReproductionError("its lists are nested too deeply") from error
        self.real = self._record.real
        nodes, calls = self._record.nodes, self._record.calls
        self.stand_ins = [
            f"#{each.call} {nodes[each.call].name}: {each.name}" for each in calls if each.target == STAND_IN
        ]
        self._leaves = [node for node in self.tape.graph.nodes if node.target is ir.accumulate_grad]

    def eager(self) -> Gradients:
        """Run the operators one by one.

        Returns:
            The gradient of each leaf by name, and the requested gradients as ``result 0`` and so on.

        Raises:
            ReproductionError: the tensors cannot be made on this machine, or an operator fails on them.
        """
        given = self._given()
        try:
            return self._run(given, self._one_by_one)
        except Exception as error:  # any error of an operator
            raise ReproductionError(f"its operators cannot be run ({type(error).__name__}: {error})") from error

    def compiled(self, session: Session) -> Gradients:
        """Run the reproduction as a backward of a session; ``session.last`` is the outcome. Returns the gradients like
        :meth:`eager`."""
        return self._run(self._given(), lambda handover: run_captured(self.tape, handover, session))

    def session(self, backend: Any = None) -> Session:
        """Return a session with the settings of the file, or with another backend. The session stores nothing on disk,
        and does not check compiled code, so that differences show."""
        about = self.about
        chosen: dict[str, Any] = (
            {"backend": about.backend, "mode": about.mode} if backend is None else {"backend": backend}
        )
        always: dict[str, Any] = {"on_miss": "compile", "compile_budget": math.inf, "check": False, "tune": False}
        return enable(**chosen, **always, dynamic=about.dynamic, cache_dir=False, extension="off")

    def compare(self, backend: Any = None) -> Comparison:
        """Compare compiled code with the operators one by one, in several runs."""
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
        """Time compiled code and the operators one by one, alternately, ``rounds`` times each after a warm-up."""
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
        """Compile the reproduction, and return the graph with all its stages: see :meth:`CompiledGraph.readable`.

        Raises:
            ReproductionError: nothing was compiled.
        """
        session = self.session(backend)
        self.compiled(session)
        if session.last is None or session.last.graph is None:
            raise ReproductionError("nothing in it was compiled")
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
        text = "" if want is found else f"{'un' if found is None else ''}defined only in compiled code"
        return Difference(name, run=run, is_rounding=want is found, text=text)
    if (want.dtype, want.shape) != (found.dtype, found.shape):
        text = f"{found.dtype} {list(found.shape)} instead of {want.dtype} {list(want.shape)}"
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
