"""Has the engine walk a tape and hand it over. Only this module uses the private API of the seam, except for the C++
hooks that :mod:`compiled_autograd.user_code.hooks` calls. Written against torch 2.13.

The engine's seam (``torch._C._dynamo.compiled_autograd``) is set for one call only, and only hands over
(``docs/internals/engine.md``). The backward runs after the engine has returned, without the engine's locks. So a
backward inside a backward is captured too.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any

import torch

from .. import ir
from ..backends.garbage_collection import RARELY
from ..backends.signal_handlers import raise_what_a_handler_raised
from ..cache.graphs import GRAPHS, MAX_STRUCTURES
from ..cache.variants import Handover
from ..capture import tape
from ..capture.capture import Capture
from ..capture.grad_dtypes import refuse_others
from ..capture.view_writes import NAME, VIEW_WRITES
from ..diagnostics.bypass import (
    DDP_CPP_REDUCER,
    NOT_YET,
    ON_MISS,
    OVER_BUDGET,
    TORCH_COMPILED_AUTOGRAD,
    VIEW_WRITE,
    is_refusal,
    refused_by_engine,
    says_that_it_was_freed,
)
from ..diagnostics.progress import Wait
from ..diagnostics.structure_misses import with_title
from ..errors import BrokenCaptureError, CaptureRefusedError
from ..ir.order import in_engine_order
from ..policies.decision import Action, Decision
from ..policies.ledger import LEDGER
from ..process_state import PROCESS
from ..settings import Settings
from ..shadow_cache import Miss
from ..threads.compile_thread import why_not_capture
from ..threads.gate import GATE
from ..threads.others import clear_cache, set_autograd_compiler
from ..torch_api.op_registry import captures_of_others, others_are_on
from ..user_code.functions import forget_numbers
from ..user_code.reducers import REDUCERS
from .call import Call, HandedOver, RanInside, Refused, Results, run_backward
from .cuda.devices import cuda_device
from .execution import depth
from .handles import KEPT, Handle, may_be_kept
from .native_hits import NATIVE_HITS, learns_of_reducers, may_move_aside
from .records import decided, record_of

MAX_REPORTS = 8 * MAX_STRUCTURES
"""Number of reports after which the engine's cache is cleared, so that tapes are captured again. The engine keeps data
of each tape that it reported, also if nothing was made of it, or if only the engine calls it different."""

RunInside = Callable[[HandedOver], Results]
_LEAF = "AccumulateGrad"
"""The one node that loses nothing where the engine fails while it reports it: it has a leaf, and looks at the leaf's
``.grad`` once more (``AccumulateGrad::apply_with_saved``, 2.13), to which another thread may have written meanwhile."""


@dataclass(slots=True)
class _Walk:
    """State of one walk of the engine over a tape, for the functions that the engine calls.

    Attributes:
        run_inside: runs a tape that must run before the engine returns; None only looks.
        held: not empty while this walk has the gate's lock. Not while a tape runs inside the engine's call.
        in_line: whether the thread is in the gate's line for this walk.
        inside: whether the tape runs, or has run, inside the engine's call.
        tape: the tape of ``miss``.
        aside: hooks of DDP's reducer, until they are put back.
        asks_store: the start of the report of a tape that is only captured to search the store.
    """

    call: Call
    settings: Settings
    run_inside: RunInside | None
    held: list[bool] = field(default_factory=list)
    in_line: bool = False
    inside: bool = False
    capture: Capture | None = None
    report: ExitStack = field(default_factory=ExitStack)
    miss: Miss | None = None
    tape: ir.TapeGraph | None = None
    given: HandedOver | RanInside | None = None
    asks_store: float | None = None
    aside: object | None = None

    def put_back(self) -> list[torch.Tensor]:
        """Give leaves the hooks of DDP's reducer back; which leaves."""
        aside, self.aside = self.aside, None
        if aside is None:
            return []
        assert REDUCERS.module is not None, "they were moved aside by it"
        return REDUCERS.module.put_back(aside)

    def told(self) -> Miss | None:
        """Return the difference of the structure from known ones, with its title, for the reason why eager runs it."""
        return self.miss if self.miss is None or self.tape is None else with_title(self.miss, self.tape)

    def begin_report(self, capture: Capture) -> None:
        """Prepare for the engine's report."""
        self.capture = capture
        self.report.enter_context(RARELY)
        self.report.enter_context(Wait(self.settings.progress).shown(capture.so_far))

    def end_report(self) -> None:
        """Undo the preparation, after a report or without one."""
        self.report.close()


class _Thread(threading.local):
    walk: _Walk | None = None


_thread = _Thread()


def walking() -> bool:
    """Return whether the engine walks a tape for this package, in this thread."""
    return _thread.walk is not None


def forget() -> None:
    """Drop the engine's own cache of structures, which is shared with PyTorch's compiled autograd.

    Walks of other threads, which hold parts of the cache, are waited for. Inside a call of the engine waiting is
    impossible: the cache is dropped before the next walk.
    """
    KEPT.must_forget = True
    inside = GATE.has_seam()
    with GATE.lock:
        if not inside and not GATE.in_call:
            _forget()


def _forget() -> None:
    """Drop the engine's cache, for the thread that has the gate."""
    KEPT.must_forget, KEPT.reports = False, 0
    clear_cache()
    forget_numbers()
    VIEW_WRITES.forget()
    KEPT.clear()
    NATIVE_HITS.forget()


PROCESS.register(_thread, reset=forget)


def hand_over(call: Call, settings: Settings, run_inside: RunInside | None) -> HandedOver | RanInside | Refused:
    """Let the engine walk the tape and hand it over, or give the reason why it stays with the eager engine.

    All state is restored after Ctrl-C too: :mod:`gate` says how.

    Args:
        run_inside: runs a tape with C++ hooks before the engine returns, since they cannot be called later. None hands
            such a tape over without running it.

    Raises:
        BrokenCaptureError: the engine failed while it reported a node.
        RuntimeError: the tape was freed before.
    """
    given = _asked(call, settings, run_inside)
    if isinstance(given, Refused) and given.reason is DDP_CPP_REDUCER and learns_of_reducers(call, settings):
        return _asked(call, settings, run_inside)
    return given


def _asked(call: Call, settings: Settings, run_inside: RunInside | None) -> HandedOver | RanInside | Refused:
    if others_are_on():  # before it is asked: the cache that PyTorch's fills at each step would be dropped at each
        return Refused(TORCH_COMPILED_AUTOGRAD)
    outer = _thread.walk
    if RARELY.entered and outer is None and not depth():
        RARELY.leave_all()
    walk, me = _Walk(call, settings, run_inside), get_ident()
    try:
        walk.in_line = True
        GATE.line.append(me)
        walk.held.extend(map(GATE.lock.acquire, (True,)))  # in one call of C: see the gate
        reason = GATE.why_not_walk()
        if reason is not None:
            return Refused(reason)
        _thread.walk = walk
        _have_it_walk(walk)
    except CaptureRefusedError as refused:
        if refused.reason is OVER_BUDGET and walk.capture is not None and walk.asks_store is None:
            LEDGER.spent(record_of(call), time.perf_counter() - walk.capture.began)
            call.decision = Decision(Action.EAGER, OVER_BUDGET)
        return Refused(refused.reason, walk.told(), refused.mistake)
    except Exception as error:
        raise_what_a_handler_raised(error)
        if walk.inside:  # inside the engine's call, an error is the user's own
            raise
        if walk.capture is None or not walk.capture.reporting:
            reason = refused_by_engine(error, of_inputs=bool(call.inputs))
            return Refused(reason, walk.told(), mistake=not is_refusal(error))
        if says_that_it_was_freed(error):  # the words are eager's, which could not say them: the engine has put symbols
            raise  # in place of some sizes
        node = walk.capture.calls[-1].name
        if node == _LEAF:  # its .grad is another than the one that was collected
            return Refused(refused_by_engine(error), walk.told(), mistake=True, changed=True)
        raise BrokenCaptureError(node) from error
    finally:
        _thread.walk = outer
        try:
            if walk.held:
                GATE.lock.release()
        finally:
            try:
                if walk.in_line:
                    GATE.line.remove(me)
            finally:
                if walk.inside:
                    GATE.in_call.remove(me)
                if walk.capture is not None and walk.capture.reporting:
                    walk.capture.spoil()
                walk.end_report()
    return Refused(TORCH_COMPILED_AUTOGRAD, walk.told()) if walk.given is None else walk.given


def _have_it_walk(walk: _Walk) -> None:
    """Set the seam for one call of the engine."""
    _forget_what_others_captured()
    if KEPT.must_forget:
        _forget()
    if VIEW_WRITES.differ(walk.call.outputs, walk.call.inputs):
        raise CaptureRefusedError(VIEW_WRITE)
    multithreading = torch._C._is_multithreading_enabled()
    prior: list[Any] = []
    try:
        try:
            # In one go: a call and an assignment would let Ctrl-C come between, and what was set before be lost.
            prior += map(set_autograd_compiler, (_begin,), (True,))  # type: ignore[arg-type]
            if prior[0][0] is not None:
                raise CaptureRefusedError(TORCH_COMPILED_AUTOGRAD)
            torch._C._set_multithreading_enabled(False)
            if REDUCERS.module is not None and may_move_aside(walk.call, walk.settings):
                walk.aside = REDUCERS.module.move_aside(walk.call.outputs)
            run_backward(walk.call, True)
        finally:
            try:
                walk.put_back()
            finally:
                torch._C._set_multithreading_enabled(multithreading)
    finally:
        if prior and walk.held:
            set_autograd_compiler(*prior[0])


def _run_inside(walk: _Walk, run: RunInside, handed: HandedOver) -> list[Any]:
    """Run while the engine's own call is under way: for other threads this is then a backward of the eager engine."""
    walk.end_report()
    set_autograd_compiler(None, False)
    _thread.walk = None
    me = get_ident()
    walk.inside = True  # nothing comes between this and the call below it, nor in the next two pairs
    GATE.in_call.append(me)
    walk.in_line = False
    GATE.line.remove(me)
    walk.held = []
    GATE.lock.release()
    walk.given = RanInside(run(handed))
    return list(walk.given.results)


# ---- what the engine calls -------------------------------------------------------------------------------------------


def _begin() -> Capture:
    """Begin a capture. The engine calls this for a new structure."""
    walk = _thread.walk
    assert walk is not None
    KEPT.reports += 1
    if KEPT.reports >= MAX_REPORTS:
        KEPT.must_forget = True
    decision = decided(walk.call, walk.settings) if walk.settings.compiles else Decision(Action.SERVE)
    if decision.action is Action.EAGER and decision.reason is not None:
        raise CaptureRefusedError(decision.reason)
    if decision.action is Action.ASK:
        walk.asks_store = time.perf_counter()
    capture = Capture(_finish, walk.call.inputs)
    capture.until = capture.began + decision.seconds
    walk.begin_report(capture)
    return capture


def _finish(captured: ir.TapeGraph, capture: Capture) -> tuple[Callable[..., Any], Handle]:
    """Finish a capture: the report is complete, and the tape still whole."""
    walk = _thread.walk
    assert walk is not None
    call = walk.call
    captured.cuda_device = cuda_device(captured)
    refuse_others(captured)
    short = len(captured.calls) <= tape.MAX_NODES_READ
    visited = tape.walk(call.outputs, call.inputs) if short else []
    agrees = short and tape.join_order(captured.calls, visited, call.outputs)
    ordered = in_engine_order(captured)
    keys = ordered.structure()
    graph = GRAPHS.find(keys)
    if graph is None:
        if agrees:
            tape.join_names(captured.calls, visited)
        walk.miss, walk.tape = GRAPHS.explain(ordered, keys, capture.shapes), ordered
        if (why := why_not_capture()) is not None:
            raise CaptureRefusedError(why)
        if not may_be_kept(walk.settings, ordered, keys, walk.asks_store is None):
            if walk.asks_store is not None:
                LEDGER.asked_store(record_of(call), time.perf_counter() - walk.asks_store)
                raise CaptureRefusedError(decided(call, walk.settings).reason or NOT_YET)
            KEPT.left_to_eager.add(call.description())
            raise CaptureRefusedError(ON_MISS)
        graph = KEPT.new_graph(ordered, keys)
    else:
        graph.met += 1
    written = any(each.name == NAME for each in captured.calls)
    if written and not VIEW_WRITES.keep(call.outputs, call.inputs):
        raise CaptureRefusedError(VIEW_WRITE)
    answer = KEPT.handles.get(graph)
    if answer is None:
        answer = KEPT.handles[graph] = (_hand_over, Handle(graph))
    return answer


def _hand_over(
    handle: Handle, tensors: list[torch.Tensor], sizes: Any, scalars: Any, objects: Any, packed: Any
) -> list[Any]:
    """Take the values of a tape. The engine calls this after the walk of a known structure."""
    handover = Handover(tensors, sizes, scalars, objects, packed)
    walk = _thread.walk
    if walk is None:  # PyTorch's own compiled autograd met a structure that we captured before it
        return handle(handover)
    graph, miss = handle.graph_for(walk.call, walk.settings, tensors)
    moved = walk.put_back()
    if moved:
        handover.reduced, handover.unwritten = graph.forms.reduced(tensors, moved)
    miss = walk.miss if miss is None else miss
    graph.met += walk.capture is None and miss is None
    walk.given = handed = HandedOver(graph, handover, miss, walk.capture is not None)
    if graph.tape.needs_engine and walk.run_inside is not None:
        return _run_inside(walk, walk.run_inside, handed)
    return [None] * handle.outputs


def _forget_what_others_captured() -> None:
    """The engine would give us graphs that PyTorch's own compiled autograd captured since we last looked."""
    count = captures_of_others()
    if count != KEPT.captures_of_others:
        forget()
        KEPT.captures_of_others = count
