"""Jobs and imports of the compile queue."""

from __future__ import annotations

import contextvars
import math
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from .. import ir
from ..backends import Backend
from ..errors import UntraceableError
from ..guards.ambient import Ambient
from ..lowering.region_compiler import RegionCompiler
from ..shadow_cache import Failure
from ..steps.run_context import RunReport
from ..steps.steps import RegionStep, Slots

Autocast = Sequence[tuple[str, bool, torch.dtype]]
"""The device types, whether autocast is on for each, and its dtype."""


class Compiles(Protocol):
    """A program, as far as the queue knows it."""

    tape: ir.TapeGraph
    region_compiler: RegionCompiler

    def leave_opaque(self, step: RegionStep, error: UntraceableError, failures: list[Failure]) -> None:
        """Calls of a region cannot be traced."""


@dataclass(slots=True, eq=False, kw_only=True)
class Task:
    """Something that the thread does.

    Attributes:
        error: that calls cannot be traced; or what an import, or a backend, has raised.
    """

    error: BaseException | None = None
    is_over: bool = False
    _bells: list[queue.SimpleQueue[None]] = field(default_factory=list)

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for tasks that do the same."""
        raise NotImplementedError

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end, in one call of C: a signal's handler may run and raise meanwhile, and may itself wait.
        Return False if that took more than ``timeout`` seconds."""
        bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._bells.append(bell)
        try:
            if not self.is_over:
                bell.get(timeout=None if timeout is None else min(timeout, threading.TIMEOUT_MAX))
        except queue.Empty:
            return False
        return True

    def ring(self) -> None:
        """Wake all who wait."""
        self.is_over = True
        for bell in [*self._bells]:
            bell.put(None)


@dataclass(slots=True, eq=False)
class Import(Task):
    """The import of what a backend needs."""

    backend: Backend

    @property
    def key(self) -> tuple[object, ...]:
        return ("import", self.backend.name)


@dataclass(slots=True, eq=False)
class Job(Task):
    """A region to load or compile, and its values; stand-ins for them where no step waits.

    Attributes:
        may_compile: False where it is only to be loaded from the store.
        until: when tracing must have ended (``time.perf_counter``).
        ended: called at the end with the job and the seconds of lowering and compiling; 0 if it came to nothing.
        owner: the report of the step that waits, and takes ``report``, ``over_budget`` and ``error`` at the end.
        changed: names of the settings of the process that changed, so that the code was discarded.
        importing: the import of what the backend needs, while it goes on.
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
    ended: Callable[[Job, float], None] | None = None
    owner: RunReport | None = None
    report: RunReport = field(default_factory=RunReport)
    over_budget: bool = False
    changed: str = ""
    importing: Import | None = None

    @property
    def key(self) -> tuple[object, ...]:
        return id(self.step), self.kind, self.may_compile
