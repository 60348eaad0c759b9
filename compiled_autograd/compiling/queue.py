"""The compile queue: one thread loads, lowers and compiles regions.

Steps wait for it (``on_miss="compile"``) or do not (``"background"``). What no step waits for, a process of lower
priority compiles; a later step finds what was made.
"""

from __future__ import annotations

import atexit
import contextlib
import contextvars
import ctypes
import logging
import math
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

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
from ..lowering.region_compiler import compile_here
from ..lowering.stored_regions import Made
from ..process_state import PROCESS
from ..steps.memory import has_bit
from ..steps.run_context import RunContext, RunReport
from ..steps.steps import RegionStep, Slots
from ..threads.compile_thread import COMPILER
from ..torch_api.fx_traces import trace_alone
from ..torch_api.version_differences import prepare_fake_tensors
from .jobs import Autocast, Compiles, Import, Job, Task
from .worker_process import WORKER, ProcessEndsError, compile_elsewhere

_log = logging.getLogger(__name__)

_LAST_SECONDS, _BETWEEN = 60.0, 0.1
"""Seconds that the process waits for the thread at its end, and seconds between two demands that the thread end."""


class CompileQueue:
    """One thread of the process that loads and compiles regions for others."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._lock = threading.RLock()
        self._jobs: dict[tuple[object, ...], Task] = {}
        self._thread: threading.Thread | None = None
        self._imported: set[str] = set()

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
        ended: Callable[[Job, float], None] | None = None,
        waits_with: RunReport | None = None,
        may_compile: bool = True,
        seconds: float = math.inf,
    ) -> Job | None:
        """Have a region compiled for the values in hand, in milliseconds.

        Args:
            ended: see :class:`Job`; never called if another step has submitted the same.
            waits_with: the report of a step that is about to wait.
            seconds: those that tracing may take.

        Returns:
            The job, of whoever came first; None where the process ends.

        Raises:
            RuntimeError: no thread can be started.
        """
        kind = program.region_compiler.kind(step, slots)
        found: Any = self._jobs.get((id(step), kind, may_compile))
        if found is not None or WORKER.ended:
            return found
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
        return self._put(job)

    def _put(self, task: Any) -> Any:
        """Give the thread something to do. Return the task, or one that was put before and does the same; None where
        the process ends."""
        with self._lock:
            found = self._jobs.get(task.key)
            if found is not None or WORKER.ended:
                return found
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._work, name="compiled_autograd", daemon=True)
                self._thread.start()
            self._jobs[task.key] = task
            self._queue.put(task)  # last: what was not handed on is not waited for
        return task

    def import_for(self, backend: Backend) -> BaseException | None:
        """Have the thread import what a backend needs, once, and wait for that: a signal's handler that raises does so
        after it. Return the error of the import.

        Raises:
            RuntimeError: no thread can be started.
        """
        if backend.name in self._imported:
            return None
        task: Task | None = self._put(Import(backend))
        if task is None:
            return None
        try:
            task.wait()
        finally:
            task.wait()
        return task.error

    def import_here(self, backend: Backend) -> None:
        """Import what a backend needs, in the thread."""
        _import_first(backend)
        self._imported.add(backend.name)

    def has_imported(self, backend: Backend) -> bool:
        """Return whether nothing is to be imported for a backend."""
        return backend.name in self._imported

    def is_next(self, job: Job) -> bool:
        """Return whether no other job comes before this one."""
        return next(iter([*self._jobs.values()]), job) is job

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until nothing is being compiled. Return False if that took more than ``timeout`` seconds, or in the
        thread that compiles."""
        ends = None if timeout is None else time.monotonic() + timeout
        while True:
            task = next(iter([*self._jobs.values()]), None)
            if task is None:
                return True
            left = None if ends is None else ends - time.monotonic()
            if COMPILER.thread == threading.get_ident() or (left is not None and left <= 0.0):
                return False
            task.wait(left)

    def stop(self) -> None:
        """End the process that compiles, and the thread: one that is in the midst of C++ at exit ends the process."""
        WORKER.end()
        with self._lock:  # earlier jobs are discarded, and no job follows
            self._queue.put(None)
        thread, until = self._thread, time.monotonic() + _LAST_SECONDS
        while thread is not None and thread.is_alive() and time.monotonic() < until:
            if self._jobs and thread.ident is not None:  # repeatedly: a finalizer that it comes in swallows it
                _raise_in(thread.ident, SystemExit)
            thread.join(_BETWEEN)

    def reset_after_fork(self) -> None:
        """Forget all jobs in a forked child: it has no such thread. If the fork interrupted one, Inductor or an import
        may hold locks forever, and the child compiles nothing."""
        jobs = [*self._jobs.values()]
        self.__init__()  # type: ignore[misc]
        COMPILER.thread = 0
        COMPILER.is_broken |= bool(jobs)
        for job in jobs:
            importing = job.importing if isinstance(job, Job) else None
            if importing is not None:
                importing.ring()
            job.ring()

    def _work(self) -> None:
        COMPILER.thread = threading.get_ident()
        trace_alone()
        while True:
            task = self._queue.get()
            if task is None:
                return
            try:
                self._do(task)
            except BaseException:  # noqa: BLE001  others wait for this thread
                if WORKER.ended:
                    return
                _log.exception("error after a compile")
            del task

    def _do(self, task: Task) -> None:
        seconds = 0.0
        try:
            if WORKER.ended:
                return
            if isinstance(task, Job):
                with _yielding():
                    seconds = task.context.run(_compile, task)
            elif isinstance(task, Import):
                try:
                    self.import_here(task.backend)
                except Exception as error:  # noqa: BLE001  whoever waits raises it
                    task.error = error
        finally:
            try:
                if isinstance(task, Job) and task.ended is not None:
                    task.ended(task, seconds)
            finally:
                self._jobs.pop(task.key, None)
                if isinstance(task, Job):
                    task.slots.clear()  # an error's traceback may hold the job until gc runs
                task.ring()


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
    context, beside = RunContext(report, left=lambda: job.until - time.perf_counter()), job.owner is None

    def compile(backend: Backend, graph_module: fx.GraphModule, examples: Sequence[Any]) -> Made:
        if beside:
            made = compile_elsewhere(job.ambient_state, backend, graph_module, examples)
        else:
            made = compile_here(backend, graph_module, examples)
        _check_state(job)  # whoever waited may wait no more, and other threads never did
        return made

    try:
        _use_threads(dict(job.ambient_state)["threads"])
        _check_state(job)
        _set_autocast(job.autocast)  # a marked hook may ask for it
        compiles_beside(beside)
        with torch.no_grad(), contextlib.nullcontext() if device is None else torch.cuda.device(device):
            if compiler.find(job.step, job.slots)[0]:  # a step of another session has compiled it meanwhile
                return 0.0
            if not compiler.load(job.step, job.slots, context) and job.may_compile:
                if not QUEUE.has_imported(compiler.backend):
                    with report.timed("load"):
                        _import_in(job)
                if context.left() <= 0.0:
                    raise OverBudgetError
                if not beside:
                    compiler.backend.prepare()
                compiler.compile_region(job.step, job.slots, context, compile)
    except _OtherStateError:
        pass
    except ProcessEndsError:
        return 0.0
    except OverBudgetError:
        job.over_budget = True
    except UntraceableError as error:
        job.error = error
    except Exception as error:  # noqa: BLE001  the thread must live on; the region's calls go on one by one
        _fail(job, error)
    except BaseException as error:  # noqa: BLE001  so it must here
        if job.owner is None and not WORKER.ended:
            _fail(job, error)
        else:
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


def _import_in(job: Job) -> None:
    """Import what the backend of a job needs. A step that waits for the job waits for that, even if interrupted."""
    backend = job.program.region_compiler.backend
    job.importing = importing = Import(backend)
    try:
        QUEUE.import_here(backend)
    finally:
        job.importing = None
        importing.ring()


def _fail(job: Job, error: BaseException) -> None:
    backend = job.program.region_compiler.backend
    job.report.failures.append(failure_of("compile", backend.name, job.step.region, error))
    job.step.add(job.kind, [None])


def _check_state(job: Job) -> None:
    """Check that the process is in the state of the job's variant.

    Autocast and anomaly mode belong to the calling thread and to the graph: the compile does not read them.

    Raises:
        _OtherStateError: it is in another one.
    """
    wanted, found = dict(compile_state(job.ambient_state)), dict(compile_state(ambient()))
    job.changed = ", ".join(name for name in {**wanted, **found} if wanted.get(name) != found.get(name))
    if job.changed:
        raise _OtherStateError


def _use_threads(number: int) -> None:
    """Use as many threads for operators as the thread that waits. PyTorch has a number for each thread, and
    another one for new threads. The latter does not change here."""
    if torch.get_num_threads() == number:
        return
    asked: list[int] = []
    _in_a_thread(lambda: asked.append(torch.get_num_threads()))
    torch.set_num_threads(number)
    if asked[0] != number:
        _in_a_thread(lambda: torch.set_num_threads(asked[0]))


def _in_a_thread(run: Callable[[], None]) -> None:
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


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
