"""The one choke point: every ``backward`` that Python asks for comes through here, and goes to the eager engine or is
captured. How it comes there stands in ``docs/internals/engine.md``. Written against torch 2.13
(``torch/autograd/graph.py``).
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import torch
from torch._C import _ImperativeEngine
from torch.autograd import Variable
from torch.autograd.function import BackwardCFunction

from ..cache.graphs import USES
from ..diagnostics.bypass import CREATE_GRAPH, DEEP, MAX_NESTED
from ..diagnostics.structured_trace import is_on
from ..native.interface import FastPath, Module
from ..policies.decision import Record
from ..policies.own_loop import OWN_LOOPS
from ..runtime.running_backward import Running
from ..shadow_cache import Bypass, default_dir
from ..threads.gate import GATE, threads_running
from ..threads.leaf_writes import LEAF_WRITES
from ..threads.others import have_them_wait
from ..torch_api.dynamo import keep_from_dynamo
from ..torch_api.hook_handles import listen
from ..torch_api.input_buffers import BUFFERS, NAMES, no_buffers, unless_traced_elsewhere
from ..user_code.functions import number_of, with_dtypes
from ..user_code.reducers import REDUCERS
from . import backward
from .call import Call
from .cuda.streams import STREAMS
from .decide import by_arguments
from .execution import on_eager, running
from .fast_path.arming import FAST_PATH
from .own_loop.running import ANSWERS, answering, buffers, find, in_own_loop
from .seam import walking
from .session import BYPASS, Here, Outcome, Session, thread
from .traced import trace

_TOLD = 64
"""Sampling interval, in backwards with ``create_graph``: one in 64 checks whether the log is on."""


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
        """Run one backward, for the session of the calling thread."""
        arguments = (tensors, grad_tensors, keep_graph, create_graph, inputs, allow_unreachable, accumulate_grad)
        here = thread.here
        session = here.stack[-1] if here.stack else None
        if (
            here.unseen  # this comes first, and is short: it may be a small backward
            and session is not None
            and here.number == session.number
            and here.record.reason is here.verdict
            and not (create_graph or (accumulate_grad and here.looped))
        ):
            here.unseen -= 1
            verdict: Any = here.verdict
            try:
                return on_eager(here, *arguments)
            finally:
                left = session.left  # these lines stand twice: with a call between, Ctrl-C could lose the count
                if left is not None and left.verdict is verdict:
                    left.count += 1
                else:
                    session.left_to_eager(verdict)
        if create_graph and backward.STREAMS.in_use and (session is None or session.leaves_at_once):
            backward.STREAMS.differentiable(tensors)
        if session is None:
            return on_eager(here, *arguments)
        verdict, started = None, 0.0
        if (create_graph or inputs) and session.leaves_at_once and not GATE.line and here.depth <= MAX_NESTED:
            verdict = CREATE_GRAPH if create_graph else by_arguments(grad_tensors, keep_graph, inputs, accumulate_grad)
        if verdict is not None:
            started = perf_counter()
        elif here.unseen and here.record.reason is here.verdict and here.number == session.number and not create_graph:
            verdict = here.verdict  # it may run in the own loop
            here.unseen -= 1
        deep = here.depth > MAX_NESTED and not create_graph
        if verdict is None and deep and session.settings.on_unsupported != "raise":  # not much of the stack is left
            verdict, started = DEEP, perf_counter()
        if verdict is not None:
            return _left_at_once(here, session, verdict, started, arguments)
        return backward.run(session, Call(*arguments, number=session.number))

    def queue_callback(self, callback: Callable[[], None]) -> None:
        """Run ``callback`` when the backward that is running is done."""
        state = running()
        if state is None:
            super().queue_callback(callback)
        else:
            state.callbacks.append(callback)

    def is_checkpoint_valid(self) -> bool:
        """Return whether reentrant checkpointing may run its own backward now."""
        state = running()
        return super().is_checkpoint_valid() if state is None else state.checkpoint_valid


def _left_at_once(here: Here, session: Session, verdict: Bypass, started: float, arguments: tuple[Any, ...]) -> Any:
    """Run a backward on eager without a look at its tape.

    Args:
        started: the time of the decision; 0 if the backward is skipped, and the own loop may run it.
        arguments: those of ``run_backward``.
    """
    run = _runner(here, session) if arguments[-1] and not started else on_eager
    try:
        return run(here, *arguments)
    finally:
        left, skips = session.left, started and session.looks_away and not (verdict is CREATE_GRAPH or verdict is DEEP)
        if left is not None and left.verdict is verdict and not (skips or (started and left.count % _TOLD == 0)):
            left.count += 1
            if started:
                seconds = perf_counter() - started
                left.timed, left.last, left.seconds = left.count, seconds, left.seconds + seconds
        else:
            _left(session, verdict, perf_counter() - started if started else None)
        if skips:
            _skip_some(here, session, verdict, perf_counter() - started)


def _skip_some(here: Here, session: Session, verdict: Bypass, seconds: float) -> None:
    """Have no arguments asked for the next backwards, after many that were left to eager by the same."""
    record = here.record
    if record.key is not None or record.reason is not verdict:
        record = Record(None)  # in the ledger there is none for arguments
        record.reason, here.streak = verdict, 0
    backward.skip_some(session, record, verdict, False, seconds)


def _no_buffers(state: Running, ctx: Any) -> tuple[None, ...]:
    """Answer ``ctx.input_grad_buffers`` outside of the function's call: the hooks before a node may read it too."""
    return no_buffers(ctx, len(ctx.needs_input_grad) if state.current_node() is ctx else None)


_ANSWERS: dict[str, Callable[..., Any]] = {
    "_current_graph_task_id": lambda state: state.task_id,
    "_autograd._get_current_graph_task_keep_graph": lambda state: state.keep_graph,
    "_current_graph_task_execution_order": lambda state: state.execution_order(),
    "_current_autograd_node": lambda state: state.current_node(),
    "_will_engine_execute_node": lambda state, node: state.will_execute(node),
}
"""Questions about the backward that is under way, which Python asks of ``torch._C``: checkpointing, hooks over several
gradients, FSDP."""


def _left(session: Session, verdict: Bypass, seconds: float | None) -> None:
    """Count a backward that was left to eager, the first one in a row for that reason; with ``seconds``, one that was
    left for what its arguments say."""
    if seconds is not None and (FAST_PATH.is_armed or is_on()):
        outcome = Outcome(BYPASS, reasons=(verdict,), seconds={"run": seconds})
        session.record(outcome)  # C++ serves no hit of a session with some that are not counted
        trace(outcome)
    else:
        session.left_to_eager(verdict, seconds)


def _runner(here: Here, session: Session) -> Callable[..., Any]:
    """Return the function that runs a backward that accumulates: see :func:`running.runner`."""
    tries = here.record.loop
    if not session.may_loop or tries.left:
        tries.left = max(0, tries.left - 1)
        return on_eager
    here.tries = tries
    return in_own_loop


def install() -> None:
    """Come between Python and the engine; done once, at the first ``enable``."""
    if isinstance(Variable._execution_engine, Engine):
        return
    default_dir()  # imports what it needs: else a backward might, and one in its midst find half of it
    importlib.import_module("compiled_autograd.shadow_cache.store")
    code = torch.autograd.graph._engine_run_backward.__code__
    engine = Variable._execution_engine = Engine()
    FAST_PATH.make = functools.partial(_fast_path, engine.run_backward)
    FAST_PATH.put = functools.partial(_come_first, engine)
    for path, answer in _ANSWERS.items():
        *modules, name = path.split(".")
        module = functools.reduce(getattr, modules, torch._C)
        original = getattr(module, name)
        if name in ANSWERS:
            original = answering(original, ANSWERS[name])
        setattr(module, name, _answering(original, answer))
    if NAMES:
        original = unless_traced_elsewhere(answering(getattr(BackwardCFunction, BUFFERS).__get__, buffers))
        setattr(BackwardCFunction, BUFFERS, property(_answering(original, _no_buffers)))
    BackwardCFunction._compiled_autograd_key = _key_of_function(  # type: ignore[method-assign]
        BackwardCFunction._compiled_autograd_key
    )
    keep_from_dynamo(Engine.run_backward.__code__)
    listen()
    OWN_LOOPS.find = find
    GATE.expect_unseen(lambda: threads_running(code))
    STREAMS.install()
    have_them_wait()
    REDUCERS.backward = _reducer_hooks


def _fast_path(fallback: Callable[..., Any], module: Module) -> FastPath:
    """Make the callable that replaces :meth:`Engine.run_backward`, and calls it for backwards that C++ cannot serve."""
    run = _ImperativeEngine.run_backward.__get__(Variable._execution_engine)
    eager = (run, GATE.idents, LEAF_WRITES.writing, GATE.line)
    return module.fast_path(fallback, backward.resume, backward.interrupted, thread, USES, eager)


def _come_first(engine: Engine, path: FastPath) -> None:
    """Put the callable in place. If other code has replaced ``run_backward``, that stays, and all backwards go through
    Python."""
    if getattr(engine.run_backward, "__func__", None) is Engine.run_backward or hasattr(engine.run_backward, "served"):
        engine.run_backward = path  # type: ignore[method-assign]


def _reducer_hooks(number: torch.Tensor) -> None:
    """Run a function that calls hooks of DDP's reducer on the eager engine, since the hooks register callbacks for its
    end."""
    on_eager(thread.here, (number,), (torch.zeros(()),), False, False, (), True, True)


def _answering(original: Callable[..., Any], answer: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def function(*args: Any) -> Any:
        state = running()
        return original(*args) if state is None else answer(state, *args)

    return function


def _key_of_function(original: Callable[[Any], tuple[int, ...]]) -> Callable[[Any], tuple[int, ...]]:
    """Wrap the function that the engine calls for the key of each Python function, in PyTorch's own captures too."""
    of_classes = torch.autograd.Function._compiled_autograd_key

    @functools.wraps(original)
    def key(ctx: Any) -> tuple[int, ...]:
        if not walking():
            return original(ctx)
        if type(ctx)._forward_cls._compiled_autograd_key is of_classes:
            return (number_of(ctx),)
        number, *sizes = original(ctx)  # of a class with a key of its own, as that of a compiled forward
        return (with_dtypes((number,), ctx), *sizes)

    return key
