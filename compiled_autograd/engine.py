"""The one choke point: every ``backward`` that Python asks for comes through here, and goes to the eager engine or is
captured. The only file that touches the engine's private API. Written against torch 2.13.

``Tensor.backward``, ``torch.autograd.backward`` and ``torch.autograd.grad`` all end in
``Variable._execution_engine.run_backward`` (``torch/autograd/graph.py``). At the first ``enable`` that object is
replaced by one of a subclass, which passes on everything that no session asks for.

The engine's seam (``torch._C._dynamo.compiled_autograd``) is set for one call only. It is used for nothing but to hand
over: the function that the engine calls on a hit puts everything aside and returns. What was handed over runs after the
engine has returned, without its locks, so that a backward inside a backward is captured too.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._C import _ImperativeEngine
from torch.autograd import Variable

from shadow_cache import Bypass, Failure, Miss, unsupported

from . import ir, tape
from .ambient import ambient
from .bypass import TORCH_COMPILED_AUTOGRAD, before_capture
from .capture import Capture
from .errors import CaptureRefusedError, UnsupportedBackwardError
from .gate import GATE, threads_running
from .graphs import GRAPHS, CompiledGraph, Handover
from .order import in_engine_order
from .runtime import RunLog
from .session import BYPASS, HIT, SHAPE_MISS, STRUCTURE_MISS, Outcome, Session, current

_seam = torch._C._dynamo.compiled_autograd
_UNUSED = (
    "One of the differentiated Tensors appears to not have been used in the graph. "
    "Set allow_unused=True if this is the desired behavior."
)


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


@dataclass(slots=True)
class _Capturing:
    """What is known while a thread holds the seam."""

    call: Call
    capture: Capture | None = None
    handover: Handover | None = None
    miss: Miss | None = None


@dataclass(slots=True)
class _Running:
    """What a compiled backward answers to those that ask the engine about it while it runs."""

    checkpoint_valid: bool
    callbacks: list[Callable[[], None]] = field(default_factory=list)


class _Thread(threading.local):
    def __init__(self) -> None:
        self.capturing: _Capturing | None = None
        self.running: list[_Running] = []


_thread = _Thread()


class Engine(_ImperativeEngine):
    """Stands in for ``Variable._execution_engine``."""

    def run_backward(
        self,
        tensors: Sequence[Any],
        grad_tensors: Sequence[torch.Tensor | None],
        keep_graph: bool,
        create_graph: bool,
        inputs: Sequence[Any] = (),
        allow_unreachable: bool = False,
        accumulate_grad: bool = False,
    ) -> Any:
        """One backward, for the session that the calling thread is in."""
        call = Call(tensors, grad_tensors, keep_graph, create_graph, inputs, allow_unreachable, accumulate_grad)
        session = current()
        return _eager(call) if session is None else _run(session, call)

    def queue_callback(self, callback: Callable[[], None]) -> None:
        """Run ``callback`` when the backward that is running is done."""
        if _thread.running:
            _thread.running[-1].callbacks.append(callback)
        else:
            super().queue_callback(callback)

    def is_checkpoint_valid(self) -> bool:
        """Whether reentrant checkpointing may run its own backward now."""
        return _thread.running[-1].checkpoint_valid if _thread.running else super().is_checkpoint_valid()


def install() -> None:
    """Come between Python and the engine; done once, at the first ``enable``."""
    if isinstance(Variable._execution_engine, Engine):
        return
    code = torch.autograd.graph._engine_run_backward.__code__
    Variable._execution_engine = Engine()
    GATE.expect_unseen(lambda: threads_running(code))


def forget() -> None:
    """Drop the engine's own cache of structures, which is shared with PyTorch's compiled autograd."""
    _seam.clear_cache()


def _run(session: Session, call: Call) -> Any:
    reason = before_capture(call.create_graph)
    if reason is None:
        started = time.perf_counter()
        handed_over = _capture(call)
        if isinstance(handed_over, _Capturing):
            return _execute(session, call, handed_over, time.perf_counter() - started)
        reason = handed_over
    if session.settings.on_unsupported == "raise":
        session.record(Outcome(BYPASS, reasons=(reason,)))
        raise UnsupportedBackwardError(reason)
    return _bypass(session, call, reason)


def _bypass(session: Session, call: Call, reason: Bypass) -> Any:
    started = time.perf_counter()
    try:
        return _eager(call)
    finally:
        session.record(Outcome(BYPASS, reasons=(reason,), seconds={"run": time.perf_counter() - started}))


def _eager(call: Call) -> Any:
    """The eager engine, as if we were not there."""
    GATE.enter_eager()
    try:
        return _run_backward(call, call.allow_unreachable)
    finally:
        GATE.leave_eager()


def _run_backward(call: Call, allow_unreachable: bool) -> Any:
    return _ImperativeEngine.run_backward(
        Variable._execution_engine,
        call.outputs,
        call.grads,
        call.keep_graph,
        call.create_graph,
        call.inputs,
        allow_unreachable=allow_unreachable,
        accumulate_grad=call.accumulate_grad,
    )


# ---- the capture ---------------------------------------------------------------------------------------------------


def _capture(call: Call) -> _Capturing | Bypass:
    """Let the engine walk the tape and hand it over, or give the reason why it stays with the eager engine."""
    reason = GATE.enter_capture()
    if reason is not None:
        return reason
    capturing = _thread.capturing = _Capturing(call)
    multithreading = torch._C._is_multithreading_enabled()
    try:
        _forget_what_others_captured()
        prior = _seam.set_autograd_compiler(_begin, True)  # type: ignore[arg-type]
        try:
            if prior[0] is not None:
                return TORCH_COMPILED_AUTOGRAD
            torch._C._set_multithreading_enabled(False)
            _run_backward(call, True)
        finally:
            torch._C._set_multithreading_enabled(multithreading)
            _seam.set_autograd_compiler(*prior)
    except CaptureRefusedError as refused:
        return refused.reason
    except Exception as error:  # noqa: BLE001  the engine's own refusals; a mistake of the user's is raised by eager
        return _refused_by_engine(error)
    finally:
        _thread.capturing = None
        GATE.leave_capture()
    return capturing if capturing.handover is not None else TORCH_COMPILED_AUTOGRAD


def _refused_by_engine(error: Exception) -> Bypass:
    first_sentence = str(error).partition("\n")[0].partition(". ")[0]
    return unsupported(f"{type(error).__name__}: {first_sentence[:120]}")


def _begin() -> Capture:
    """The engine has not met this structure."""
    assert _thread.capturing is not None
    _thread.capturing.capture = Capture(_share_op, _find_op, _finish)
    return _thread.capturing.capture


def _finish(captured: ir.TapeGraph, capture: Capture) -> tuple[Callable[..., Any], CompiledGraph]:
    """The report is complete and the tape still whole."""
    capturing = _thread.capturing
    assert capturing is not None
    tape.annotate(captured.calls, tape.walk(capturing.call.outputs, capturing.call.inputs))
    graph, capturing.miss = GRAPHS.find_or_add(in_engine_order(captured))
    return _hand_over, graph


def _hand_over(
    graph: CompiledGraph, tensors: list[torch.Tensor], sizes: Any, scalars: Any, objects: Any, packed: Any
) -> list[Any]:
    """What the engine calls once it has walked a tape whose structure it knows."""
    handover = Handover(graph, tensors, list(sizes), list(scalars), objects)
    if _thread.capturing is None:
        # PyTorch's own compiled autograd met a structure that we captured before it.
        return graph(handover)
    handover.tensors = list(tensors)
    tensors.clear()
    _thread.capturing.handover = handover
    outputs = graph.tape.graph.find_nodes(op="output")[0].args[0]
    return [None] * len(outputs)


def _share_op(name: str, function: Callable[..., Any], is_custom: bool, traceable: bool) -> str:
    """The engine binds each function once in a process, so PyTorch's own compiled autograd must be told of it too."""
    from torch._dynamo.compiled_autograd import ops

    return ops.add(name, function, is_custom, traceable)


def _find_op(name: str) -> Callable[..., Any] | None:
    """A function that the engine bound for PyTorch's own compiled autograd before we were there."""
    from torch._dynamo.compiled_autograd import ops

    return ops.get(name) if hasattr(ops, name) else None


_captures_of_others = ""


def _forget_what_others_captured() -> None:
    """The engine would give us graphs that PyTorch's own compiled autograd captured since we last looked."""
    global _captures_of_others
    others = sys.modules.get("torch._dynamo.compiled_autograd")
    count = repr(others.COMPILE_COUNTER) if others is not None else _captures_of_others
    if count != _captures_of_others:
        if not count.endswith("(0)"):
            forget()
        _captures_of_others = count


# ---- the run -------------------------------------------------------------------------------------------------------


def _execute(session: Session, call: Call, capturing: _Capturing, seconds: float) -> tuple[torch.Tensor | None, ...]:
    handover = capturing.handover
    assert handover is not None
    graph, log = handover.graph, RunLog(seconds={"capture": seconds})
    reasons: list[Miss | Failure] = [] if capturing.miss is None else [capturing.miss]
    started = time.perf_counter()
    running = _Running(checkpoint_valid=call.accumulate_grad and not call.inputs)
    _thread.running.append(running)
    grad_mode = torch.is_grad_enabled()
    torch._C._set_grad_enabled(False)
    try:
        state = ambient()
        variant = graph.find(session.settings.key, state, handover)
        if variant is None:
            variant, miss = graph.add(session.settings, state, handover)
            reasons = reasons or [miss]
        results = variant.program.run(handover.slots(), log)
        for callback in running.callbacks:
            callback()
    finally:
        torch._C._set_grad_enabled(grad_mode)
        _thread.running.pop()
        log.seconds["run"] = time.perf_counter() - started
        reasons.extend(log.failures)
        variant_missed = SHAPE_MISS if reasons or log.compiles else HIT
        outcome = variant_missed if capturing.miss is None else STRUCTURE_MISS
        captured = capturing.capture is not None
        session.record(Outcome(outcome, graph, tuple(reasons), log.seconds), captured, log.compiles)
    if not call.allow_unreachable and any(result is None for result in results):
        raise RuntimeError(_UNUSED)
    return tuple(results)
