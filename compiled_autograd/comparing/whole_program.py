"""The comparison of a whole program, whose steps are found by its optimizer."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable
from time import perf_counter
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..engine.session import Session
from ..policies.clock import wait_for_devices
from .answer import PROFILED_STEPS, Watch, answer, depends_on_products
from .backward_times import BackwardTimes
from .hints import OptimizerTimes, hints_of
from .result import Comparison
from .turns import Turns

_RECENT = 256
"""Calls of optimizers that tell which one steps least often: a step of the program ends where that one has stepped."""


class AnsweredExit(SystemExit):
    """Ends a program whose comparison is over. ``finally`` blocks of the program run."""


class ProgramComparison:
    """Alternates with eager in the steps of the program that runs.

    Args:
        session: the session that serves the whole process.
        seconds: limit of the comparison, from the first step.
        go_on: whether the program goes on once the answer is sure.
        say: called with the answer, once.

    Attributes:
        result: the answer; None until there is one.
    """

    def __init__(self, session: Session, seconds: float, go_on: bool, say: Callable[[Comparison], None]) -> None:
        self.result: Comparison | None = None
        self._session, self._go_on, self._say = session, go_on, say
        self._watch = Watch(session)
        self._turns = Turns(self._watch.is_calm, seconds, self._watch.is_compiling)
        self._times = BackwardTimes().__enter__()
        self._optimizing = OptimizerTimes()
        self._recent: deque[int] = deque(maxlen=_RECENT)
        self._last = 0
        self._thread = 0
        self._since = 0.0
        self._to_profile = 0
        self._hooks = [
            register_optimizer_step_pre_hook(self._optimizing.begin),
            register_optimizer_step_post_hook(self._stepped),
        ]

    def _stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        here = threading.get_ident()
        self._thread = self._thread or here
        if self.result is not None or here != self._thread:
            return
        self._optimizing.end(args, kwargs)
        self._recent.append(id(optimizer))
        if id(optimizer) != self._which():
            return
        wait_for_devices()
        now, first = perf_counter(), not self._since
        elapsed, self._since = now - self._since, now
        self._times.is_timed = not any(each.is_cuda for group in optimizer.param_groups for each in group["params"])
        backward = self._times.take()
        self._times.stepping = here
        if self._to_profile:
            self._profiled(optimizer)
            return
        if first:
            return
        self._turns.add(elapsed, backward)
        if not self._turns.is_over:
            self._session.serve_here(self._turns.ours)
            return
        if self._times.is_timed and depends_on_products(self._turns, self._watch):
            self._times.profiles, self._to_profile = True, PROFILED_STEPS
            self._session.serve_here(False)
        else:
            self._finish(optimizer)

    def _which(self) -> int:
        """The optimizer at which a step ends: of those that stepped lately, the one that does so least often."""
        counts = Counter(self._recent)
        rarest = min(counts, key=lambda each: (counts[each] < 2, counts[each]))
        if self._last not in counts or (self._turns.is_settling and 2 * counts[rarest] <= counts[self._last]):
            self._turns.drop_block()
            self._last = rarest
        return self._last

    def _profiled(self, optimizer: Optimizer) -> None:
        self._to_profile -= 1
        if not self._to_profile:
            self._times.profiles = False
            self._finish(optimizer)

    def _finish(self, optimizer: Optimizer | None) -> None:
        if self.result is not None:
            return
        hints = hints_of(optimizer, self._optimizing, self._turns) if optimizer is not None else ()
        self.result = answer(self._session, self._turns, self._times, self._watch, hints)
        for hook in self._hooks:
            hook.remove()
        self._times.__exit__()
        self._session.serve_here(True)
        self._say(self.result)
        if optimizer is None or self._go_on or threading.current_thread() is not threading.main_thread():
            return
        raise AnsweredExit

    def conclude(self) -> None:
        """Answer with what there is: the program has ended."""
        self._finish(None)
