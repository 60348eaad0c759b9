"""Run the selftest, and leave the process as it was.

Tapes on ``backend="eager"`` run in this process, in a thread of their own: the user's modes, hooks and autocast do not
reach it. All other parts run in processes of their own (:mod:`apart`). So do these tapes where this process has
captured something already.
"""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path

import torch

from ..cache.graphs import GRAPHS
from ..diagnostics.bypass import OTHER_THREAD
from ..diagnostics.reporting import not_warning
from ..process_state import PROCESS
from ..settings import resolve
from ..shadow_cache import default_dir
from .apart import APART, TOGETHER, results, start
from .checks import PartResult, check_tape, measured
from .tapes import HERE

QUICK = tuple(HERE)
"""The names of the parts that take some seconds together: no compiler is called, and no process is started."""
NAMES = (*HERE, *APART)
"""The names of all parts."""
_SECONDS_FOR_A_PROCESS = 300.0
_SECONDS_TO_STOP = 5.0
_SECONDS_BETWEEN_LOOKS = 0.1
_TRIES = 3
"""The number of tries of a tape that met a backward of another thread."""


def run(only: Iterable[str] | None = None) -> list[PartResult]:
    """Run the selftest in this process, and leave the process as it was.

    Random numbers, default dtype and device, warnings, files, graphs and counts are afterwards what they were before.
    What stays is what the first ``enable`` leaves too: PyTorch's engine is called through this package's.

    Args:
        only: names of :data:`NAMES`, such as :data:`QUICK`; None for all.

    Returns:
        A result for each part.

    Raises:
        ValueError: a name that is unknown.
        UnknownSettingError, InvalidSettingError: an environment variable with this package's prefix.
    """
    return list(as_they_come(only))


def as_they_come(only: Iterable[str] | None = None) -> Generator[PartResult, None, None]:
    """Run the selftest as :func:`run` does, and give each result when it is there."""
    wanted = list(NAMES if only is None else only)
    unknown = [name for name in wanted if name not in NAMES]
    if unknown:
        raise ValueError(f"the part {unknown[0]!r} does not exist; the parts are {', '.join(NAMES)}")
    work = _Work(wanted)
    thread = threading.Thread(target=work.run, name="compiled_autograd selftest", daemon=True)
    try:
        thread.start()
        found: PartResult | BaseException
        for found in iter(work.next, None):  # type: ignore[assignment]
            if isinstance(found, BaseException):
                raise found
            yield found
    finally:  # Ctrl-C too
        work.stops.set()
        thread.join(_SECONDS_TO_STOP)


class _Work:
    """The work of the selftest's thread.

    Attributes:
        stops: set by the caller's thread; ends the work after the tape at hand.
    """

    def __init__(self, wanted: list[str]) -> None:
        self.stops = threading.Event()
        self._found: queue.SimpleQueue[PartResult | BaseException | None] = queue.SimpleQueue()
        self._here = [name for name in wanted if name in HERE]
        self._groups = [[name for name in group if name in wanted] for group in TOGETHER]
        if len(GRAPHS):
            self._groups.append(self._here)
            self._here = []
        where = resolve({})
        folder = Path(where.cache_dir).expanduser() if isinstance(where.cache_dir, str) else default_dir()
        self._native = None if where.native is False else folder / "native"

    def next(self) -> PartResult | BaseException | None:
        """The next result, or an error; None at the end. Waits in short turns, so that Ctrl-C comes through."""
        while True:
            with contextlib.suppress(queue.Empty):
                return self._found.get(timeout=_SECONDS_BETWEEN_LOOKS)

    def run(self) -> None:
        """Find all results."""
        try:
            with _processes(self._groups, self._native) as (folder, processes):
                if self._here:
                    self._run_here()
                for number, process in enumerate(processes):
                    status = self._wait_for(process)
                    if self.stops.is_set():
                        return
                    for result in results(folder, str(number), self._groups[number], status):
                        self._found.put(result)
        except BaseException as error:  # noqa: BLE001  raised in the caller's thread
            self._found.put(error)
        finally:
            self._found.put(None)

    def _run_here(self) -> None:
        with _as_it_was():
            for name in self._here:
                if self.stops.is_set():
                    return
                for _ in range(_TRIES):
                    result = measured(name, functools.partial(check_tape, HERE[name]))
                    if OTHER_THREAD.kind not in result.reason:
                        break
                    PROCESS.reset()
                self._found.put(result)

    def _wait_for(self, process: subprocess.Popen[bytes]) -> int | None:
        """The status with which a process ended; None where it took too long."""
        until = time.monotonic() + _SECONDS_FOR_A_PROCESS
        while not self.stops.is_set() and time.monotonic() < until:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(_SECONDS_BETWEEN_LOOKS)
        return None


@contextlib.contextmanager
def _as_it_was() -> Iterator[None]:
    """Afterwards nothing is captured, and random numbers and warnings are as they were."""
    on_cpu, on_cuda = torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    try:
        with not_warning():
            yield
    finally:
        PROCESS.reset()
        torch.set_rng_state(on_cpu)
        if on_cuda:
            torch.cuda.set_rng_state_all(on_cuda)


@contextlib.contextmanager
def _processes(groups: list[list[str]], native: Path | None) -> Iterator[tuple[Path, list[subprocess.Popen[bytes]]]]:
    """A process for each group of parts, started at once, and their folder. At the end there are neither."""
    groups[:] = [group for group in groups if group]
    if not groups:
        yield Path(), []
        return
    processes: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="compiled_autograd_", ignore_cleanup_errors=True) as folder:
        try:
            for number, group in enumerate(groups):
                processes.append(start(Path(folder), str(number), group, native))
            yield Path(folder), processes
        finally:
            for process in processes:
                _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process that runs still, with those that it has started."""
    if process.poll() is not None:
        return
    if hasattr(os, "killpg"):
        os.killpg(process.pid, signal.SIGKILL)  # the group is its own: it leads a session
    else:
        process.kill()
    process.wait()
