"""Has the engine walk a tape and hand it over. What is private about the seam is used here, and here alone but for the
C++ hooks that :mod:`compiled_autograd.user_code.hooks` calls. Written against torch 2.13.

The engine's seam (``torch._C._dynamo.compiled_autograd``) is set for one call only. It is used for nothing but to hand
over: the function that the engine calls on a hit puts everything aside and returns. What was handed over runs after the
engine has returned, without its locks, so that a backward inside a backward is captured too. Only a graph with hooks
that C++ registered, ``retain_grad`` among them, runs before it returns, since those can be called no later.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch._C import _ImperativeEngine
from torch.autograd import Variable

from backends.garbage_collection import RARELY
from shadow_cache import Bypass

from .. import ir
from ..cache.graphs import GRAPHS, MAX_STRUCTURES, CompiledGraph
from ..cache.variants import Handover
from ..capture import tape
from ..capture.capture import Capture
from ..capture.grad_dtypes import refuse_others
from ..capture.view_writes import NAME, VIEW_WRITES
from ..diagnostics.bypass import (
    EVERY_TAPE_NEW,
    FORKED,
    ON_MISS,
    TORCH_COMPILED_AUTOGRAD,
    VIEW_WRITE,
    is_refusal,
    refused_by_engine,
)
from ..errors import BrokenCaptureError, CaptureRefusedError
from ..ir.order import in_engine_order
from ..policies.admission import ADMISSION
from ..threads.forks import can_compile
from ..threads.gate import GATE, take
from ..torch_api.op_registry import captures_of_others, find_op, others_are_on, share_op
from ..user_code.functions import forget_numbers
from .attempt import Attempt, Call
from .devices import cuda_device
from .execution import depth
from .handles import LEFT_TO_EAGER, Handle, may_be_kept, new_graph
from .session import BYPASS, Outcome

_seam = torch._C._dynamo.compiled_autograd

_FREED = "Trying to backward through the graph a second time"


class _Thread(threading.local):
    def __init__(self) -> None:
        self.attempt: Attempt | None = None


_thread = _Thread()


def walking() -> bool:
    """Whether the engine walks a tape for us, in this thread."""
    return _thread.attempt is not None


MAX_REPORTS = 8 * MAX_STRUCTURES
"""After this many reports the engine is made to forget, and captures anew what comes back. It keeps something of each
tape that it has reported, also where nothing was made of it, or where it is another to the engine alone."""
_reports = 0

_Answer = tuple[Callable[..., Any], Handle]
_handles: dict[CompiledGraph, _Answer] = {}
"""All that the engine was given since it last forgot: what it calls at a hit, and with what. It keeps the pair too."""


_asked_to_forget = False


def forget() -> None:
    """Drop the engine's own cache of structures, which is shared with PyTorch's compiled autograd.

    Walks of other threads, which hold what is in it, are waited for. Inside a call of the engine's there is no waiting:
    then it is dropped before the next walk.
    """
    global _asked_to_forget
    _asked_to_forget = True
    token = take()
    try:
        if GATE.enter_alone(token):
            _forget()
    finally:
        token.release()


def _forget() -> None:
    """The same, of who has the gate."""
    global _asked_to_forget, _reports
    _asked_to_forget, _reports = False, 0
    _seam.clear_cache()
    forget_numbers()
    VIEW_WRITES.forget()
    while _handles:
        _handles.popitem()[1][1].forget()
    LEFT_TO_EAGER.clear()


def run_backward(call: Call, allow_unreachable: bool) -> Any:
    """The engine's own."""
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


def ask_engine(attempt: Attempt) -> Bypass | None:
    """Let the engine walk the tape and hand it over, or give the reason why it stays with the eager engine.

    What is set here is put back after Ctrl-C too: :mod:`gate` says how.
    """
    global _asked_to_forget
    if others_are_on():  # before it is asked: the cache that PyTorch's fills at each step would be dropped at each
        return TORCH_COMPILED_AUTOGRAD
    outer = _thread.attempt
    if RARELY.entered and outer is None and not depth():
        RARELY.leave_all()
    try:
        reason = GATE.enter_capture(attempt.token)
        if reason is not None:
            return reason
        _thread.attempt = attempt
        _have_it_walk(attempt)
    except CaptureRefusedError as refused:
        attempt.mistake = refused.mistake
        return refused.reason
    except Exception as error:
        if attempt.ran:  # inside the engine's call, an error is the user's own
            raise
        if attempt.capture is not None and attempt.capture.reporting:
            if not str(error).startswith(_FREED):
                raise BrokenCaptureError(attempt.capture.calls[-1].name) from error
            # The words are eager's, but it could not say them: the engine has put symbols in place of some sizes.
            attempt.tell(Outcome(BYPASS, reasons=(refused_by_engine(error),)))
            raise
        attempt.mistake = not is_refusal(error)
        return refused_by_engine(error)
    finally:
        _thread.attempt = outer
        _asked_to_forget = _asked_to_forget or attempt.crowded  # it cannot be told to forget some
        try:
            if not attempt.gave_back:
                attempt.token.release()
        finally:
            if attempt.inside is not None:
                attempt.inside.release()
                GATE.forget(attempt.inside)
            attempt.end_capture()
            if attempt.capture is not None and attempt.capture.reporting:
                attempt.capture.spoil()
    return None if attempt.handover is not None else TORCH_COMPILED_AUTOGRAD


def _have_it_walk(attempt: Attempt) -> None:
    """Set the seam for one call of the engine."""
    _forget_what_others_captured()
    if _asked_to_forget:
        _forget()
    if VIEW_WRITES.differ(attempt.call.outputs, attempt.call.inputs):
        raise CaptureRefusedError(VIEW_WRITE)
    multithreading = torch._C._is_multithreading_enabled()
    prior: list[Any] = []
    try:
        try:
            # In one go: a call and an assignment would let Ctrl-C come between, and what was set before be lost.
            prior += map(_seam.set_autograd_compiler, (_begin,), (True,))  # type: ignore[arg-type]
            if prior[0][0] is not None:
                raise CaptureRefusedError(TORCH_COMPILED_AUTOGRAD)
            torch._C._set_multithreading_enabled(False)
            run_backward(attempt.call, True)
        finally:
            torch._C._set_multithreading_enabled(multithreading)
    finally:
        if prior and not attempt.gave_back:
            _seam.set_autograd_compiler(*prior[0])


def _run_inside(attempt: Attempt) -> list[Any]:
    """Run while the engine's own call is under way: for other threads this is then a backward of the eager engine."""
    attempt.end_capture()
    _seam.set_autograd_compiler(None, False)
    _thread.attempt = None
    attempt.inside = take()
    GATE.change_to_eager(attempt.inside)
    attempt.gave_back = True  # no call: nothing comes between this and the next line
    attempt.token.release()
    attempt.results = attempt.execute()
    return attempt.results


def _begin() -> Capture:
    """The engine has not met this structure."""
    global _asked_to_forget, _reports
    assert _thread.attempt is not None
    _reports += 1
    _asked_to_forget = _asked_to_forget or _reports >= MAX_REPORTS
    settings = _thread.attempt.session.settings
    if settings.tune and settings.compiles and ADMISSION.refuses():
        raise CaptureRefusedError(EVERY_TAPE_NEW)
    capture = Capture(share_op, find_op, _finish)
    _thread.attempt.begin_capture(capture)
    return capture


def _finish(captured: ir.TapeGraph, capture: Capture) -> _Answer:
    """The report is complete and the tape still whole."""
    attempt = _thread.attempt
    assert attempt is not None
    captured.cuda_device = cuda_device(captured)
    refuse_others(captured, attempt.call.inputs)
    short = len(captured.calls) <= tape.MAX_NODES_READ
    visited = tape.walk(attempt.call.outputs, attempt.call.inputs) if short else []
    agrees = short and tape.join_order(captured.calls, visited, attempt.call.outputs)
    ordered = in_engine_order(captured)
    keys = ordered.structure()
    graph = GRAPHS.find(keys)
    if graph is None:
        if agrees:
            tape.join_names(captured.calls, visited)
        attempt.miss = GRAPHS.explain(ordered, keys, capture.shapes)
        if not can_compile():
            raise CaptureRefusedError(FORKED)
        if not may_be_kept(attempt.session, ordered, keys):
            LEFT_TO_EAGER.add(attempt.call.description())
            raise CaptureRefusedError(ON_MISS)
        graph = new_graph(attempt, ordered, keys)
        ADMISSION.captured(graph)
    else:
        graph.met += 1
    written = any(call.name == NAME for call in captured.calls)
    if written and not VIEW_WRITES.keep(attempt.call.outputs, attempt.call.inputs):
        raise CaptureRefusedError(VIEW_WRITE)
    answer = _handles.get(graph)
    if answer is None:
        answer = _handles[graph] = (_hand_over, Handle(graph))
    return answer


def _hand_over(
    handle: Handle, tensors: list[torch.Tensor], sizes: Any, scalars: Any, objects: Any, packed: Any
) -> list[Any]:
    """What the engine calls once it has walked a tape whose structure it knows."""
    graph = handle.graph
    assert graph is not None, "the engine called what it had forgotten"
    handover = Handover(tensors, sizes, scalars, objects, packed)
    attempt = _thread.attempt
    if attempt is None:  # PyTorch's own compiled autograd met a structure that we captured before it
        return graph(handover)
    graph = attempt.graph = handle.graph_for(attempt, tensors)
    graph.met += attempt.capture is None and attempt.miss is None
    attempt.handover = handover
    if graph.tape.needs_engine and not attempt.probe:
        return _run_inside(attempt)
    return [None] * handle.outputs


_seen_of_others = 0


def _forget_what_others_captured() -> None:
    """The engine would give us graphs that PyTorch's own compiled autograd captured since we last looked."""
    global _seen_of_others
    count = captures_of_others()
    if count != _seen_of_others:
        forget()
        _seen_of_others = count
