"""The one choke point: every ``backward`` that Python asks for comes through here, and goes to the eager engine or is
captured. What is private about the engine is used here, and here alone but for the C++ hooks that
:mod:`compiled_autograd.hooks` calls. Written against torch 2.13.

``Tensor.backward``, ``torch.autograd.backward`` and ``torch.autograd.grad`` all end in
``Variable._execution_engine.run_backward`` (``torch/autograd/graph.py``). At the first ``enable`` that object is
replaced by one of a subclass, which passes on everything that no session asks for.

The engine's seam (``torch._C._dynamo.compiled_autograd``) is set for one call only. It is used for nothing but to hand
over: the function that the engine calls on a hit puts everything aside and returns. What was handed over runs after the
engine has returned, without its locks, so that a backward inside a backward is captured too. Only a graph with hooks
that C++ registered, ``retain_grad`` among them, runs before it returns, since those can be called no later.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._C import _ImperativeEngine
from torch.autograd import Variable

from backends import get_backend
from shadow_cache import Bypass, Key, Miss, unsupported

from . import ir, tape
from .ambient import ambient
from .background import BACKGROUND
from .bypass import (
    COMPILING,
    DDP_CPP_REDUCER,
    EVERY_TAPE_NEW,
    ON_MISS,
    TORCH_COMPILED_AUTOGRAD,
    TRACING,
    before_capture,
)
from .capture import Capture
from .churn import CHURN
from .disk import disk_for
from .errors import BrokenCaptureError, CacheMissError, CaptureRefusedError, UnsupportedBackwardError
from .execution import Running, depth, execute, find_variant, leave_to_engine, running
from .functions import number_of
from .gate import GATE, threads_running
from .graphs import GRAPHS, MOST_NODES, MOST_STRUCTURES, CompiledGraph
from .log import RunLog
from .order import in_engine_order, order_shows, reordered
from .reporting import warn_once
from .seam import words_for_unused
from .session import BYPASS, Outcome, Session, current
from .sharing import captures_of_others, find_op, share_op
from .tuning import TUNING
from .variants import Handover

_seam = torch._C._dynamo.compiled_autograd


_FREED = "Trying to backward through the graph a second time"
_DDP = "C++ DDP Reducer"
"""What the engine says of the hooks of DDP's reducer (``torch/csrc/distributed/c10d/reducer.cpp``). It refuses them
while it collects the tape, at every walk and whether or not it knows the structure, so no structure leaves them out."""


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
class _Capturing:
    """One attempt to have a backward handed over."""

    session: Session
    call: Call
    started: float
    capture: Capture | None = None
    handover: Handover | None = None
    miss: Miss | None = None
    results: list[torch.Tensor | None] | None = None
    ran: bool = False
    mistake: bool = False
    probe: bool = False
    """Only look what there is: the tape is kept, and nothing runs."""

    def execute(self) -> list[torch.Tensor | None]:
        """Run what was handed over."""
        assert self.handover is not None
        call, self.ran = self.call, True
        log = RunLog(seconds={"capture": time.perf_counter() - self.started})
        checkpoint_valid = call.accumulate_grad and not call.inputs
        state = Running(
            call.outputs,
            call.inputs,
            call.accumulate_grad,
            call.keep_graph,
            checkpoint_valid,
            log,
            self.handover.graph.tape.order,
        )
        return execute(self.session, state, self.handover, self.miss, self.capture is not None)


class _Thread(threading.local):
    def __init__(self) -> None:
        self.capturing: _Capturing | None = None
        self.crowded = False


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
        state = running()
        if state is None:
            super().queue_callback(callback)
        else:
            state.callbacks.append(callback)

    def is_checkpoint_valid(self) -> bool:
        """Whether reentrant checkpointing may run its own backward now."""
        state = running()
        return super().is_checkpoint_valid() if state is None else state.checkpoint_valid


_ANSWERS: dict[str, Callable[..., Any]] = {
    "_current_graph_task_id": lambda state: state.task_id,
    "_autograd._get_current_graph_task_keep_graph": lambda state: state.keep_graph,
    "_current_graph_task_execution_order": lambda state: state.execution_order(),
    "_current_autograd_node": lambda state: state.current_node(),
    "_will_engine_execute_node": lambda state, node: state.will_execute(node),
}
"""Questions about the backward that is under way, which Python asks of ``torch._C``: checkpointing, hooks over several
gradients, FSDP."""


def install() -> None:
    """Come between Python and the engine; done once, at the first ``enable``."""
    if isinstance(Variable._execution_engine, Engine):
        return
    code = torch.autograd.graph._engine_run_backward.__code__
    Variable._execution_engine = Engine()
    for path, answer in _ANSWERS.items():
        *modules, name = path.split(".")
        module = functools.reduce(getattr, modules, torch._C)
        setattr(module, name, _answering(getattr(module, name), answer))
    torch.autograd.Function._compiled_autograd_key = staticmethod(  # type: ignore[method-assign]
        _key_of_function(torch.autograd.Function._compiled_autograd_key)
    )
    GATE.expect_unseen(lambda: threads_running(code))


def _answering(original: Callable[..., Any], answer: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def function(*args: Any) -> Any:
        state = running()
        return original(*args) if state is None else answer(state, *args)

    return function


def _key_of_function(original: Callable[[Any], tuple[int, ...]]) -> Callable[[Any], tuple[int, ...]]:
    """What the engine asks of each Python function that it walks over, PyTorch's own captures included."""

    @functools.wraps(original)
    def key(ctx: Any) -> tuple[int, ...]:
        return original(ctx) if _thread.capturing is None else (number_of(ctx),)

    return key


_MOST_ORDERS = 64
"""So many ways in which a tape's nodes were made are kept, before they are forgotten and looked at anew."""


class _Handle:
    """What the engine keeps for a structure. It never lets go of it, even when it forgets (2.13): so this lets go.

    The engine does not ask in which order the nodes of a tape were made, on which the order depends in which they run:
    ``orders`` has the graph for each way in which they were.
    """

    __slots__ = ("graph", "orders", "shows", "shows_bitwise")

    def __init__(self, graph: CompiledGraph) -> None:
        self.graph: CompiledGraph | None = graph
        self.orders: dict[tuple[int, ...], CompiledGraph] = {}
        self.shows = order_shows(graph.tape, bitwise=False)
        self.shows_bitwise = order_shows(graph.tape, bitwise=True)

    def forget(self) -> None:
        """Let go."""
        self.graph = None
        self.orders.clear()

    def in_order(self, capturing: _Capturing) -> CompiledGraph:
        """The graph for the order of the tape that was handed over."""
        assert self.graph is not None
        settings = capturing.session.settings
        if not self.shows and not (self.shows_bitwise and get_backend(settings.backend).bitwise):
            return self.graph
        made_when = tape.made_when(capturing.call.outputs)
        graph = self.orders.get(made_when)
        if graph is None:
            graph, is_kept = _in_other_order(capturing, self.graph)
            if not is_kept:
                return graph
            if len(self.orders) >= _MOST_ORDERS:
                self.orders.clear()
            self.orders[made_when] = graph
        return graph

    def __call__(self, handover: Handover) -> list[torch.Tensor | None]:
        """Run it. The engine insists on something that can be called."""
        assert self.graph is not None, "the engine called what it had forgotten"
        return self.graph(handover)


_handles: list[_Handle] = []
"""All that the engine was given since it last forgot."""


def forget() -> None:
    """Drop the engine's own cache of structures, which is shared with PyTorch's compiled autograd."""
    _seam.clear_cache()
    while _handles:
        _handles.pop().forget()
    _LEFT_TO_EAGER.clear()


def _run(session: Session, call: Call) -> Any:
    capturing = _Capturing(session, call, time.perf_counter())
    reason = before_capture(call.create_graph, call.grads, depth())
    if reason is None and session.settings.on_miss == "raise":
        _raise_if_missing(session, call)
    if reason is None and session.settings.on_miss == "background" and BACKGROUND.busy:
        reason = COMPILING if BACKGROUND.busy_with(call.fingerprint()) else None
    if reason is None and TUNING.active and session.settings.tune:
        tape_name = call.fingerprint()  # the tape is gone once eager has run
        trial = TUNING.find(tape_name, session.settings.key)
        eagers_turn = None if trial is None else trial.reason()
        if eagers_turn is not None:
            return _on_trial(session, call, eagers_turn, tape_name)
    if reason is None and session.settings.on_miss == "eager" and call.description() in _LEFT_TO_EAGER:
        reason = ON_MISS
    if reason is None:
        reason = _capture(capturing)
        if reason is None:
            results = capturing.execute() if capturing.results is None else capturing.results
            if not call.allow_unreachable:
                _check_used(results)
            return tuple(results)
    policy = reason in (TRACING, ON_MISS, COMPILING, EVERY_TAPE_NEW)
    if session.settings.on_unsupported == "raise" and not capturing.mistake and not policy:
        session.record(Outcome(BYPASS, reasons=(reason,)))
        raise UnsupportedBackwardError(reason)
    return _bypass(session, call, reason, () if capturing.miss is None else (capturing.miss,))


def _on_trial(session: Session, call: Call, reason: Bypass, tape_name: int) -> Any:
    """The eager engine's turn, timed."""
    started = time.perf_counter()
    results = _bypass(session, call, reason)
    TUNING.eager(tape_name, session.settings.key, time.perf_counter() - started)
    return results


_LEFT_TO_EAGER: set[int] = set()
"""Descriptions of tapes that ``on_miss="eager"`` found not to be in the cache: the engine need not be asked again."""


def _raise_if_missing(session: Session, call: Call) -> None:
    """With ``on_miss="raise"``: let the engine walk the tape, and keep it, to see whether it would be a hit.

    Raises:
        CacheMissError: it would not.
    """
    probing = _Capturing(session, dataclasses.replace(call, keep_graph=True), time.perf_counter(), probe=True)
    reason = _capture(probing)
    misses = [] if probing.miss is None else [probing.miss]
    if reason is None:
        assert probing.handover is not None
        graph, surroundings = probing.handover.graph, ambient()
        variant, other = find_variant(session, graph, surroundings, probing.handover)
        if variant is not None:
            misses = []
        else:
            new = bool(misses) or not graph.variants  # to this process: then the store knows more
            explained = graph.explain(session.settings, surroundings, probing.handover)
            misses = [other] if other is not None and new else misses or explained
    if misses:
        session.record(Outcome(BYPASS, reasons=(ON_MISS, *misses)))
        raise CacheMissError(misses)


def _check_used(results: Sequence[torch.Tensor | None]) -> None:
    for index, result in enumerate(results):
        if result is None:
            raise RuntimeError(words_for_unused(index))


def _bypass(session: Session, call: Call, reason: Bypass, misses: Sequence[Miss] = ()) -> Any:
    started = time.perf_counter()
    try:
        return _eager(call)
    finally:
        session.record(Outcome(BYPASS, reasons=(reason, *misses), seconds={"run": time.perf_counter() - started}))


def _eager(call: Call) -> Any:
    """The eager engine, as if we were not there."""
    GATE.enter_eager()
    try:
        with leave_to_engine():
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


def _capture(capturing: _Capturing) -> Bypass | None:
    """Let the engine walk the tape and hand it over, or give the reason why it stays with the eager engine."""
    reason = GATE.enter_capture()
    if reason is not None:
        return reason
    outer, _thread.capturing = _thread.capturing, capturing
    multithreading = torch._C._is_multithreading_enabled()
    try:
        _forget_what_others_captured()
        if _thread.crowded:
            _thread.crowded = False
            forget()
        prior = _seam.set_autograd_compiler(_begin, True)  # type: ignore[arg-type]
        try:
            if prior[0] is not None:
                return TORCH_COMPILED_AUTOGRAD
            torch._C._set_multithreading_enabled(False)
            _run_backward(capturing.call, True)
        finally:
            torch._C._set_multithreading_enabled(multithreading)
            if not capturing.ran:  # else the seam was given back before
                _seam.set_autograd_compiler(*prior)
    except CaptureRefusedError as refused:
        return refused.reason
    except Exception as error:
        if capturing.ran:  # inside the engine's call, an error is the user's own
            raise
        freed = str(error).startswith(_FREED)  # then there is nothing left to lose, and eager says the same
        if capturing.capture is not None and capturing.capture.reporting and not freed:
            raise BrokenCaptureError(capturing.capture.calls[-1].name) from error
        capturing.mistake = not _is_refusal(error)
        return _refused_by_engine(error)
    finally:
        _thread.capturing = outer
        if capturing.ran:
            GATE.leave_call()
        else:
            GATE.leave_capture()
    return None if capturing.handover is not None else TORCH_COMPILED_AUTOGRAD


def _run_inside(capturing: _Capturing) -> list[Any]:
    """Run while the engine's own call is under way: for other threads this is then a backward of the eager engine."""
    _seam.set_autograd_compiler(None, False)
    _thread.capturing = None
    GATE.change_to_eager()
    capturing.results = capturing.execute()
    return capturing.results


def _is_refusal(error: Exception) -> bool:
    """Whether the engine cannot report this tape; else the error is for a mistake of the user's, which eager words."""
    return isinstance(error, NotImplementedError) or "compiled autograd" in str(error).lower()


def _refused_by_engine(error: Exception) -> Bypass:
    if _DDP in str(error):
        return DDP_CPP_REDUCER
    first_sentence = str(error).partition("\n")[0].partition(". ")[0]
    return unsupported(f"{type(error).__name__}: {first_sentence[:120]}")


def _begin() -> Capture:
    """The engine has not met this structure."""
    assert _thread.capturing is not None
    settings = _thread.capturing.session.settings
    if settings.tune and settings.compiles and CHURN.refuses():
        raise CaptureRefusedError(EVERY_TAPE_NEW)
    _thread.capturing.capture = Capture(share_op, find_op, _finish)
    return _thread.capturing.capture


def _finish(captured: ir.TapeGraph, capture: Capture) -> tuple[Callable[..., Any], _Handle]:
    """The report is complete and the tape still whole."""
    capturing = _thread.capturing
    assert capturing is not None
    short = len(captured.calls) <= tape.LONGEST
    visited = tape.walk(capturing.call.outputs, capturing.call.inputs) if short else []
    agrees = short and tape.join_order(captured.calls, visited, capturing.call.outputs)
    ordered = in_engine_order(captured)
    keys = ordered.structure()
    graph = GRAPHS.find(keys)
    if graph is None:
        if agrees:
            tape.join_names(captured.calls, visited)
        capturing.miss = GRAPHS.explain(ordered, keys, capture.shapes)
        if not _may_be_kept(capturing.session, ordered, keys):
            _LEFT_TO_EAGER.add(capturing.call.description())
            raise CaptureRefusedError(ON_MISS)
        graph = _new_graph(ordered, keys)
        CHURN.captured(graph)
    else:
        graph.came_back = True
    handle = _Handle(graph)
    _handles.append(handle)
    return _hand_over, handle


def _new_graph(ordered: ir.TapeGraph, keys: Sequence[Key]) -> CompiledGraph:
    graph, crowded = GRAPHS.add(ordered, keys)
    _LEFT_TO_EAGER.clear()
    if crowded:  # the engine still knows those that went; it cannot be told to forget some
        _thread.crowded = True
        warn_once(
            f"more than {MOST_STRUCTURES} structures were captured, or more than {MOST_NODES} nodes in all, and "
            "the half used least recently was let go. Where a tape is another at every step, ca.disable() around "
            "its backward saves capturing it"
        )
    return graph


def _in_other_order(capturing: _Capturing, graph: CompiledGraph) -> tuple[CompiledGraph, bool]:
    """The graph for a tape of a known structure whose nodes were made when those of no earlier one were.

    Also whether it is kept: not if the policy is to compile nothing.
    """
    call = capturing.call
    ordered = reordered(graph.tape, [each.sequence for each in tape.walk(call.outputs, call.inputs)])
    if ordered is graph.tape:
        return graph, True
    keys = ordered.structure()
    known = GRAPHS.find(keys)
    if known is not None:
        return known, True
    capturing.miss = GRAPHS.explain(ordered, keys, other_order=True)
    if not _may_be_kept(capturing.session, ordered, keys):
        return CompiledGraph(ordered), False
    return _new_graph(ordered, keys), True


def _may_be_kept(session: Session, ordered: ir.TapeGraph, keys: Sequence[Key]) -> bool:
    """Whether something will be made of a new structure: compiled, or taken from the store on disk."""
    disk = None if session.settings.compiles else disk_for(session.settings)
    return session.settings.compiles or (disk is not None and disk.knows(ordered, keys))


def _hand_over(
    handle: _Handle, tensors: list[torch.Tensor], sizes: Any, scalars: Any, objects: Any, packed: Any
) -> list[Any]:
    """What the engine calls once it has walked a tape whose structure it knows."""
    graph = handle.graph
    assert graph is not None, "the engine called what it had forgotten"
    handover = Handover(graph, list(tensors), list(sizes), list(scalars), objects, packed)
    tensors.clear()
    capturing = _thread.capturing
    if capturing is None:  # PyTorch's own compiled autograd met a structure that we captured before it
        return graph(handover)
    graph = handover.graph = handle.in_order(capturing)
    graph.came_back = graph.came_back or (capturing.capture is None and capturing.miss is None)
    capturing.handover = handover
    if graph.tape.needs_engine and not capturing.probe:
        return _run_inside(capturing)
    outputs = graph.tape.graph.find_nodes(op="output")[0].args[0]
    return [None] * len(outputs)


_seen_of_others = 0


def _forget_what_others_captured() -> None:
    """The engine would give us graphs that PyTorch's own compiled autograd captured since we last looked."""
    global _seen_of_others
    count = captures_of_others()
    if count != _seen_of_others:
        forget()
        _seen_of_others = count
