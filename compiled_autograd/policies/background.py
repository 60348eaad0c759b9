"""Compiles beside the training: ``on_miss="background"``. A thread lowers from tensors without memory, and a process of
lower priority compiles; a later step finds what was made.
"""

from __future__ import annotations

import atexit
import contextlib
import contextvars
import queue
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from .. import ir
from ..backends import Backend
from ..backends.inductor.randomness import compiles_beside
from ..diagnostics.reporting import failure_of, warn_of
from ..diagnostics.users_line import users_line, work_is_for
from ..errors import UntraceableError
from ..guards.ambient import Ambient, ambient, compile_state
from ..lowering.region_compiler import COMPILING
from ..lowering.stored_regions import Made
from ..process_state import PROCESS
from ..steps.memory import has_bit
from ..steps.run_context import RunContext
from ..steps.steps import RegionStep, Slots
from ..threads.forks import compiles_under
from ..torch_api.fx_traces import trace_alone
from ..torch_api.version_differences import prepare_fake_tensors
from .ledger import LEDGER
from .worker_process import WORKER, ProcessEndsError, compile_elsewhere

if TYPE_CHECKING:
    from ..runtime.program import Program


@dataclass(slots=True, eq=False)
class Job:
    """A region to compile, and stand-ins for its values. ``ended`` gets the seconds of the compile, 0 if it came to
    nothing."""

    program: Program
    step: RegionStep
    slots: Slots
    kind: tuple[Any, ...]
    context: contextvars.Context
    ambient_state: Ambient
    ended: Callable[[float], None]


_IMPORTING = compiles_under(threading.RLock())
"""A child that is forked meanwhile compiles nothing: it would wait forever for the rest of some module."""
_LAST_SECONDS = 2.0
"""Seconds that the process waits for the thread when it ends."""


class Background:
    """One thread of the process that compiles regions for others."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)  # itself it is locked by functions of Python's: see the gate
        self._jobs_left = 0
        self._submitted: set[tuple[int, tuple[Any, ...]]] = set()
        self._thread: threading.Thread | None = None
        self._imported: set[str] = set()

    @property
    def busy(self) -> bool:
        """Return whether any region is being compiled."""
        return bool(self._jobs_left)

    def submit(
        self,
        program: Program,
        step: RegionStep,
        slots: Slots,
        ambient_state: Ambient,
        ended: Callable[[float], None],
    ) -> bool:
        """Have a region compiled for the values in hand, unless that is under way. Milliseconds, but the first time:
        then the backend is imported.

        Args:
            ended: called when that has ended, with the seconds of lowering and compiling; 0 if it came to nothing.

        Returns:
            Whether ``ended`` will be called.
        """
        kind = program.region_compiler.kind(step, slots)
        if (id(step), kind) in self._submitted or WORKER.ended:
            return False
        backend = program.region_compiler.backend
        if backend.name not in self._imported:
            with _IMPORTING:
                _import_first(backend)
            self._imported.add(backend.name)
        needed = {*step.inputs, *(fresh.leaf for fresh in step.fresh)}
        stand_ins = [memoryless(value) if slot in needed else None for slot, value in enumerate(slots)]
        context = contextvars.copy_context()  # it has what the thread has set of Inductor's settings
        context.run(work_is_for, users_line())
        job = Job(program, step, stand_ins, kind, context, ambient_state, ended)
        with self._lock:
            if (id(step), kind) in self._submitted or WORKER.ended:
                return False
            if self._thread is None:
                thread = threading.Thread(target=self._work, name="compiled_autograd", daemon=True)
                thread.start()
                self._thread = thread
            self._submitted.add((id(step), kind))
            self._jobs_left += 1
            self._jobs.put(job)  # last: what was not handed on is not waited for
        return True

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until nothing is being compiled; False if that took more than ``timeout`` seconds."""
        with self._lock:
            return self._changed.wait_for(lambda: not self._jobs_left, timeout)

    def stop(self) -> None:
        """End the process that compiles; the thread too, if it is idle or nearly so: one that is in the midst of C++ at
        exit ends the process."""
        WORKER.end()
        with self._lock:  # earlier jobs are discarded, and no job follows
            self._jobs.put(None)
        if self._thread is not None:
            self._thread.join(_LAST_SECONDS)

    def reset_after_fork(self) -> None:
        """Forget all jobs in a forked child, which has no such thread. Their regions are submitted again when they
        occur."""
        self.__init__()  # type: ignore[misc]
        LEDGER.nothing_compiles()

    def _work(self) -> None:
        compiles_beside()
        trace_alone()
        while True:
            job = self._jobs.get()
            if job is None:
                return
            seconds = 0.0
            try:
                if not WORKER.ended:  # else the process ends
                    with _yielding():
                        seconds = job.context.run(_compile, job)
            finally:
                try:
                    job.ended(seconds)
                finally:
                    with self._lock:
                        self._submitted.discard((id(job.step), job.kind))
                        self._jobs_left -= 1
                        self._changed.notify_all()
            del job


_SWITCH_INTERVAL = 5e-4
"""Seconds for which the thread keeps the interpreter's lock while others want it; Python's default is ten times that.

An eager backward wants it for each tensor that it frees and that Python knows: some hundred times in a step."""


@contextlib.contextmanager
def _yielding() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, _SWITCH_INTERVAL))
    during = sys.getswitchinterval()
    try:
        yield
    finally:
        if sys.getswitchinterval() == during:  # else somebody has set another meanwhile
            sys.setswitchinterval(before)


def _import_first(backend: Backend) -> None:
    """Import the modules of a first trace, in the calling thread, which imports nothing else meanwhile.

    The modules of ``torch._dynamo`` and ``torch._inductor`` import one another. If two threads import some of them at
    the same time, one gets an unfinished module, instead of a deadlock (``_ModuleLock.has_deadlock`` in
    ``importlib/_bootstrap.py``). Users' code may import some at any time, as ``torch.use_deterministic_algorithms``
    does.
    """
    prepare_fake_tensors()
    FakeTensorMode()
    if backend.slow:
        backend.decompositions()


class _OtherStateError(BaseException):
    """The process is in another state than that of the job. This is no failure, and no handler of failures catches it:
    a later step in the job's state submits the region again."""


def _compile(job: Job) -> float:
    """Return the seconds of lowering and compiling."""
    region_compiler, context = job.program.region_compiler, RunContext()

    def compile(backend: Backend, graph_module: fx.GraphModule, examples: Sequence[Any]) -> Made:
        made = compile_elsewhere(job.ambient_state, backend, graph_module, examples)
        if not _in_same_state(job):  # as it was lowered, or compiled here
            raise _OtherStateError
        return made

    try:
        if not _in_same_state(job):
            return 0.0
        with COMPILING, torch.no_grad():
            if region_compiler.find(job.step, job.slots)[0]:  # a step of another session has compiled it meanwhile
                return 0.0
            if not region_compiler.load(job.step, job.slots, context):
                region_compiler.compile_region(job.step, job.slots, context, compile)
    except (_OtherStateError, ProcessEndsError):
        return 0.0
    except UntraceableError as error:
        job.program.leave_opaque(job.step, error, context.report.failures)
    except Exception as error:  # noqa: BLE001  the thread must live on; the region's calls go on one by one
        context.report.failures.append(failure_of("compile", region_compiler.backend.name, job.step.region, error))
        job.step.add(job.kind, [None])
    if WORKER.ended:  # half of the interpreter is gone: the failure is not the graph's, and no step follows
        return 0.0
    for failure in context.report.failures:
        warn_of(failure)
    region_compiler.finished.append(context.report)
    return sum(context.report.seconds.get(stage, 0.0) for stage in ("lower", "compile"))


def _in_same_state(job: Job) -> bool:
    """Return whether the process is still in the state of the job's variant.

    Autocast and anomaly mode belong to the calling thread and to the graph: the compile does not read them. Each thread
    keeps the number of threads that its first query returned, so a new thread reads the number.
    """
    asked: list[int] = []
    asking = threading.Thread(target=lambda: asked.append(torch.get_num_threads()))
    asking.start()
    asking.join()
    if torch.get_num_threads() != asked[0]:
        torch.set_num_threads(asked[0])
    return compile_state(ambient()) == compile_state(job.ambient_state)


def memoryless(value: Any) -> Any:
    """Return a tensor with all properties that a trace reads, but no memory. Other values, and parameters, are
    unchanged."""
    if type(value) is not torch.Tensor or not ir.is_plain(value) or has_bit(value):
        return value
    twin = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    twin.untyped_storage().resize_(0)
    return twin.requires_grad_(value.requires_grad)


BACKGROUND = Background()
PROCESS.register(BACKGROUND, after_fork=BACKGROUND.reset_after_fork)
atexit.register(BACKGROUND.stop)
