"""One backward, from its arguments to what became of the attempt to run it compiled."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from backends.garbage_collection import RARELY
from shadow_cache import Miss

from ..cache.graphs import CompiledGraph
from ..cache.variants import Handover
from ..capture import tape
from ..capture.capture import Capture
from ..runtime.running_backward import Running
from ..steps.run_context import RunContext
from ..threads.gate import Token, take
from .devices import on_device
from .execution import execute
from .session import Outcome, Session


@dataclass(slots=True)
class Call:
    """The arguments of one ``run_backward``."""

    outputs: Sequence[Any]
    grads: Sequence[torch.Tensor | None]
    keep_graph: bool
    create_graph: bool
    inputs: Sequence[Any]
    allow_unreachable: bool
    accumulate_grad: bool

    def fingerprint(self) -> int:
        """See :func:`tape.fingerprint`."""
        return tape.fingerprint(self.outputs, self.inputs)

    def description(self) -> int:
        """Of what can be read of the tape from Python: tapes with one structure have one, but not only they."""
        return tape.description(self.outputs, self.inputs, self.accumulate_grad)


@dataclass(slots=True)
class Attempt:
    """One attempt to have a backward handed over.

    Attributes:
        token: for the gate, while the engine walks.
        inside: likewise, while what was handed over runs inside the engine's call.
        crowded: a structure was kept, and others had to go, which the engine still knows.
        gave_back: the seam and ``token`` were given back for that.
        ran: it was handed over, and has run or does.
        state: what it then is to those who ask.
        told: it is in the session's account.
    """

    session: Session
    call: Call
    started: float
    capture: Capture | None = None
    graph: CompiledGraph | None = None
    handover: Handover | None = None
    miss: Miss | None = None
    results: list[torch.Tensor | None] | None = None
    ran: bool = False
    state: Running | None = None
    told: bool = False
    mistake: bool = False
    token: Token = field(default_factory=take)
    inside: Token | None = None
    gave_back: bool = False
    crowded: bool = False
    _reports: bool = False
    probe: bool = False
    """Only look what there is: the tape is kept, and nothing runs."""

    def begin_capture(self, capture: Capture) -> None:
        """The engine is about to report."""
        self.capture, self._reports = capture, True
        RARELY.__enter__()

    def end_capture(self) -> None:
        """The engine has reported all, or given up; or it has nothing to report."""
        if self._reports:
            self._reports = False
            RARELY.__exit__()

    def tell(self, outcome: Outcome) -> None:
        """Enter what became of it into the session's account, if it is not there yet."""
        if not self.told and (self.state is None or not self.state.told):
            self.told = True
            self.session.record(outcome)

    def execute(self) -> list[torch.Tensor | None]:
        """Run what was handed over."""
        graph, handover = self.graph, self.handover
        assert graph is not None and handover is not None
        call, self.ran = self.call, True
        context = RunContext()
        context.report.add("capture", time.perf_counter() - self.started)
        checkpoint_valid = call.accumulate_grad and not call.inputs
        state = self.state = Running(
            call.outputs,
            call.inputs,
            call.accumulate_grad,
            call.keep_graph,
            checkpoint_valid,
            context,
            graph.tape.order,
        )
        with on_device(graph.tape.cuda_device):
            return execute(self.session, state, graph, handover, self.miss, self.capture is not None)
