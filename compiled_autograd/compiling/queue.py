"""The compile queue: one thread loads, lowers and compiles regions.

Steps wait for it (``on_miss="compile"``) or do not (``"background"``). What no step waits for, a process of lower
priority compiles; a later step finds what was made.
"""

from __future__ import annotations

import atexit
import contextlib
import contextvars
import ctypes
import math
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from .. import ir
from ..backends import Backend
from ..backends.inductor.randomness import compiles_beside
from ..diagnostics.reporting import failure_of, warn_of
from ..diagnostics.users_line import users_line, work_is_for
from ..errors import OverBudgetError, UntraceableError
from ..guards.ambient import Ambient, ambient, compile_state
from ..lowering.region_compiler import RegionCompiler, compile_here
from ..lowering.stored_regions import Made
from ..process_state import PROCESS
from ..shadow_cache import Failure
from ..steps.memory import has_bit
from ..steps.run_context import RunContext, RunReport
from ..steps.steps import RegionStep, Slots
from ..threads.compile_thread import COMPILER
from ..torch_api.fx_traces import trace_alone
from ..torch_api.version_differences import prepare_fake_tensors
from .worker_process import WORKER, ProcessEndsError, compile_elsewhere


class Compiles(Protocol):
    """A program, as far as the queue knows it."""

    tape: ir.TapeGraph
    region_compiler: RegionCompiler

    def leave_opaque(self, step: RegionStep, error: UntraceableError, failures: list[Failure]) -> None:
        """Calls of a region cannot be traced."""


@dataclass(slots=True, eq=False)
class Job:
    """A region to load or compile, and its values; stand-ins for them where no step waits.

    Attributes:
        may_compile: False where it is only to be loaded from the store.
        until: when tracing must have ended (``time.perf_counter``).
        ended: called at the end with the seconds of lowering and compiling; 0 if it came to nothing.
        owner: the report of the step that waits, and takes ``report``, ``over_budget`` and ``error`` at the end.
        error: that calls cannot be traced; or what a backend has raised that is no ``Exception``.
    """

    program: Compiles
    step: RegionStep
    slots: Slots
    kind: tuple[Any, ...]
    context: contextvars.Context
    ambient_state: Ambient
    autocast: Autocast = ()
    may_compile: bool = True
    until: float = math.inf
    ended: Callable[[float], None] | None = None
    owner: RunReport | None = None
    report: RunReport = field(default_factory=RunReport)
    over_budget: bool = False
    error: BaseException | None = None
    _is_over: bool = False
    _bells: list[queue.SimpleQueue[None]] = field(default_factory=list)

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for jobs that do the same."""
        return id(self.step), self.kind, self.may_compile

    def wait(self) -> None:
        """Wait for the end, in one call of C: a signal's handler may run and raise meanwhile, and may itself wait."""
        bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._bells.append(bell)
        if not self._is_over:
            bell.get()

    def ring(self) -> None:
        """Wake all who wait."""
        self._is_over = True
        for bell in [*self._bells]:
            bell.put(None)


_LAST_SECONDS = 2.0
"""Seconds that the process waits for the thread when it ends."""
_TRIES = 20
"""Times that a busy thread is told to end in these seconds."""


class CompileQueue:
    """One thread of the process that loads and compiles regions for others."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)  # itself it is locked by functions of Python's: see the gate
        self._jobs: dict[tuple[object, ...], Job] = {}
        self._thread: threading.Thread | None = None
        self._imported: set[str] = set()
        self._importing: set[int] = set()

    @property
    def busy(self) -> bool:
        """Return whether any region is being compiled."""
        return bool(self._jobs)

    def submit(
        self,
        program: Compiles,
        step: RegionStep,
        slots: Slots,
        ambient_state: Ambient,
        *,
        ended: Callable[[float], None] | None = None,
        waits_with: RunReport | None = None,
        may_compile: bool = True,
        seconds: float = math.inf,
    ) -> Job | None:
        """Have a region compiled for the values in hand. Milliseconds, but the first time: then the backend is
        imported.

        Args:
            ended: called at the end of the job; never if another step has submitted the same.
            waits_with: the report of a step that is about to wait.
            seconds: those that tracing may take.

        Returns:
            The job, of whoever came first; None where the process ends.
        """
        compiler = program.region_compiler
        kind = compiler.kind(step, slots)
        found = self._jobs.get((id(step), kind, may_compile))
        if found is not None or WORKER.ended:
            return found
        if may_compile and waits_with is None:  # else the thread does, where no handler of a signal can break it off
            self.import_for(compiler.backend)
        needed = {*step.inputs, *(fresh.leaf for fresh in step.fresh)}
        stand_ins = [value if slot in needed else None for slot, value in enumerate(slots)]
        if waits_with is None:
            stand_ins = [*map(memoryless, stand_ins)]
        context = contextvars.copy_context()  # it has what the thread has set of Inductor's settings
        context.run(work_is_for, users_line())
        job = Job(program, step, stand_ins, kind, context, ambient_state, _autocast(), may_compile, ended=ended)
        job.until = time.perf_counter() + seconds
        if waits_with is not None:
            job.owner = waits_with
            job.report = RunReport(misses=[*waits_with.misses], compile_id=waits_with.compile_id)
        with self._lock:
            found = self._jobs.get(job.key)
            if found is not None or WORKER.ended:
                return found
            if self._thread is None:
                thread = threading.Thread(target=self._work, name="compiled_autograd", daemon=True)
                thread.start()
                self._thread = thread
            self._jobs[job.key] = job
            self._queue.put(job)  # last: what was not handed on is not waited for
        return job

    def is_next(self, job: Job) -> bool:
        """Return whether no other job comes before this one."""
        return next(iter([*self._jobs.values()]), job) is job

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until nothing is being compiled; False if that took more than ``timeout`` seconds."""
        with self._lock:
            return self._changed.wait_for(lambda: not self._jobs, timeout)

    def stop(self) -> None:
        """End the process that compiles, and the thread: one that is in the midst of C++ at exit ends the process."""
        WORKER.end()
        with self._lock:  # earlier jobs are discarded, and no job follows
            self._queue.put(None)
        thread = self._thread
        if thread is not None and thread.ident is not None:
            thread.join(0.0 if self._jobs else _LAST_SECONDS)
            for _ in range(_TRIES):  # a finalizer that it comes in swallows it
                if thread.is_alive():
                    _raise_in(thread.ident, SystemExit)
                    thread.join(_LAST_SECONDS / _TRIES)

    def reset_after_fork(self) -> None:
        """Forget all jobs in a forked child: it has no such thread. If the fork interrupted one, Inductor or an import
        may hold locks forever, and the child compiles nothing."""
        jobs, importing = [*self._jobs.values()], self._importing - {threading.get_ident()}
        self.__init__()  # type: ignore[misc]
        COMPILER.thread = 0
        COMPILER.is_broken |= bool(jobs or importing)
        for job in jobs:
            job.ring()

    def import_for(self, backend: Backend) -> None:
        """Import what the backend needs, once; a child that is forked meanwhile knows of it."""
        if backend.name in self._imported:
            return
        me = threading.get_ident()
        try:
            self._importing.add(me)
            _import_first(backend)
            self._imported.add(backend.name)
        finally:
            self._importing.discard(me)

    def _work(self) -> None:
        COMPILER.thread = threading.get_ident()
        trace_alone()
        while True:
            job = self._queue.get()
            if job is None:
                return
            seconds = 0.0
            try:
                if not WORKER.ended:  # else the process ends
                    with _yielding():
                        seconds = job.context.run(_compile, job)
            finally:
                try:
                    if job.ended is not None:
                        job.ended(seconds)
                finally:
                    with self._lock:
                        self._jobs.pop(job.key, None)
                        self._changed.notify_all()
                    job.ring()
            del job


Autocast = Sequence[tuple[str, bool, torch.dtype]]


def _autocast() -> Autocast:
    """Return what autocast is for the calling thread."""
    devices = ("cpu", "cuda")
    return [(device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in devices]


def _set_autocast(autocast: Autocast) -> None:
    for device, enabled, dtype in autocast:
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)


def _raise_in(thread: int, error: type[BaseException]) -> None:
    """Raise an error in a thread of Python's, at its next bytecode."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error))


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
    compiler, device, report = job.program.region_compiler, job.program.tape.cuda_device, job.report
    context = RunContext(report, left=lambda: job.until - time.perf_counter())

    def compile_beside(backend: Backend, graph_module: fx.GraphModule, examples: Sequence[Any]) -> Made:
        made = compile_elsewhere(job.ambient_state, backend, graph_module, examples)
        if not _in_same_state(job):  # as it was lowered, or compiled here
            raise _OtherStateError
        return made

    try:
        if not _in_same_state(job):
            return 0.0
        _set_autocast(job.autocast)  # a marked hook may ask for it
        compiles_beside(job.owner is None)
        with torch.no_grad(), contextlib.nullcontext() if device is None else torch.cuda.device(device):
            if compiler.find(job.step, job.slots)[0]:  # a step of another session has compiled it meanwhile
                return 0.0
            if not compiler.load(job.step, job.slots, context) and job.may_compile:
                QUEUE.import_for(compiler.backend)
                if context.left() <= 0.0:
                    raise OverBudgetError
                how = compile_beside if job.owner is None else compile_here
                compiler.compile_region(job.step, job.slots, context, how)
    except (_OtherStateError, ProcessEndsError):
        return 0.0
    except OverBudgetError:
        job.over_budget = True
    except UntraceableError as error:
        job.error = error
    except Exception as error:  # noqa: BLE001  the thread must live on; the region's calls go on one by one
        report.failures.append(failure_of("compile", compiler.backend.name, job.step.region, error))
        job.step.add(job.kind, [None])
    except BaseException as error:  # noqa: BLE001  so it must here
        job.error = error
    if WORKER.ended:  # half of the interpreter is gone: the failure is not the graph's, and no step follows
        return 0.0
    if job.owner is None:
        if isinstance(job.error, UntraceableError):
            job.program.leave_opaque(job.step, job.error, report.failures)
        for failure in report.failures:
            warn_of(failure)
        compiler.finished.append(report)
    return sum(report.seconds.get(stage, 0.0) for stage in ("lower", "compile"))


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


QUEUE = CompileQueue()
PROCESS.register(QUEUE, after_fork=QUEUE.reset_after_fork)
atexit.register(QUEUE.stop)
