"""The one choke point: every ``backward`` that Python asks for comes through here, and goes to the eager engine or is
captured. Written against torch 2.13.

``Tensor.backward``, ``torch.autograd.backward`` and ``torch.autograd.grad`` all end in
``Variable._execution_engine.run_backward`` (``torch/autograd/graph.py``). At the first ``enable`` that object is
replaced by one of a subclass, which passes on everything that no session asks for.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C import _ImperativeEngine
from torch.autograd import Variable

from shadow_cache import Bypass, Miss

from ..diagnostics.bypass import (
    BROKEN_CAPTURE,
    COMPILING,
    DEEP,
    EVERY_TAPE_NEW,
    FORKED,
    INTERRUPTED,
    MAX_NESTED,
    ON_MISS,
    TRACING,
    before_capture,
)
from ..errors import BrokenCaptureError, CacheMissError, UnsupportedBackwardError
from ..guards.ambient import ambient
from ..policies.autotune import AUTOTUNE
from ..policies.background import BACKGROUND
from ..threads.gate import GATE, threads_running
from ..torch_api.version_differences import words_for_unused
from ..user_code.functions import number_of
from .attempt import Attempt, Call
from .execution import depth, find_variant, on_eager, running
from .handles import LEFT_TO_EAGER
from .seam import ask_engine, run_backward, walking
from .session import BYPASS, Outcome, Session, current
from .streams import STREAMS


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
        if session is None:
            return _eager(call)
        if depth() <= MAX_NESTED or create_graph or session.settings.on_unsupported == "raise":
            return _run(session, call)
        started = time.perf_counter()
        try:  # here, and not in functions of its own: there is not much left of Python's stack
            return on_eager(run_backward, call, allow_unreachable)
        finally:
            session.record(Outcome(BYPASS, reasons=(DEEP,), seconds={"run": time.perf_counter() - started}))

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
    _keep_from_dynamo(Engine.run_backward.__code__)
    GATE.expect_unseen(lambda: threads_running(code))
    STREAMS.install()


def _keep_from_dynamo(code: Any) -> None:
    """Have ``torch.compile`` run code, and what that calls, as it is.

    A step that it compiles breaks at its ``backward``, which Dynamo runs as Python: and would look at each frame of
    ours in there, where ``torch.compiler.is_compiling()`` is then true. ``torch._dynamo.disable`` says the same, but
    takes seconds to import (``torch/csrc/dynamo/eval_frame.c``, 2.13).
    """
    eval_frame = torch._C._dynamo.eval_frame
    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(code, eval_frame._FrameExecStrategy(skip, skip))


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
        return (number_of(ctx),) if walking() else original(ctx)

    return key


def _run(session: Session, call: Call) -> Any:
    attempt = Attempt(session, call, time.perf_counter())
    try:
        return _run_attempt(session, call, attempt)
    except BaseException as error:
        broken = isinstance(error, BrokenCaptureError)
        attempt.tell(Outcome(BYPASS, reasons=(BROKEN_CAPTURE if broken else INTERRUPTED,)))
        raise


def _run_attempt(session: Session, call: Call, attempt: Attempt) -> Any:
    reason = before_capture(call.create_graph, call.grads, depth())
    if reason is None and STREAMS.in_use:
        reason = STREAMS.reason(call.outputs)
    if reason is None and session.settings.on_miss == "raise":
        _raise_if_missing(attempt)
    if reason is None and session.settings.on_miss == "background" and BACKGROUND.busy:
        reason = COMPILING if BACKGROUND.busy_with(call.fingerprint()) else None
    if reason is None and AUTOTUNE.active and session.settings.tune:
        tape_name = call.fingerprint()  # the tape is gone once eager has run
        trial = AUTOTUNE.find(tape_name, session.settings.key)
        eagers_turn = None if trial is None else trial.reason()
        if eagers_turn is not None:
            return _on_trial(attempt, eagers_turn, tape_name)
    if reason is None and session.settings.on_miss == "eager" and call.description() in LEFT_TO_EAGER:
        reason = ON_MISS
    if reason is None:
        reason = ask_engine(attempt)
        if reason is None:
            results = attempt.execute() if attempt.results is None else attempt.results
            if not call.allow_unreachable:
                _check_used(results)
            return tuple(results)
    policy = reason in (TRACING, ON_MISS, COMPILING, EVERY_TAPE_NEW, FORKED)
    if session.settings.on_unsupported == "raise" and not attempt.mistake and not policy:
        attempt.tell(Outcome(BYPASS, reasons=(reason,)))
        raise UnsupportedBackwardError(reason)
    return _bypass(attempt, reason, () if attempt.miss is None else (attempt.miss,))


def _on_trial(attempt: Attempt, reason: Bypass, tape_name: int) -> Any:
    """The eager engine's turn, timed."""
    started = time.perf_counter()
    results = _bypass(attempt, reason)
    AUTOTUNE.eager(tape_name, attempt.session.settings.key, time.perf_counter() - started)
    return results


def _raise_if_missing(attempt: Attempt) -> None:
    """With ``on_miss="raise"``: let the engine walk the tape, and keep it, to see whether it would be a hit.

    Raises:
        CacheMissError: it would not.
    """
    session = attempt.session
    probing = Attempt(session, dataclasses.replace(attempt.call, keep_graph=True), time.perf_counter(), probe=True)
    try:
        reason = ask_engine(probing)
    finally:
        attempt.told = probing.told
    misses = [] if probing.miss is None else [probing.miss]
    if reason is None:
        graph, ambient_state = probing.graph, ambient()
        assert graph is not None and probing.handover is not None
        variant, other = find_variant(session, graph, ambient_state, probing.handover)
        if variant is not None:
            misses = []
        else:
            new = bool(misses) or not graph.variants  # to this process: then the store knows more
            explained = graph.explain(session.settings, ambient_state, probing.handover)
            misses = [other] if other is not None and new else misses or explained
    if misses:
        attempt.tell(Outcome(BYPASS, reasons=(ON_MISS, *misses)))
        raise CacheMissError(misses)


def _check_used(results: Sequence[torch.Tensor | None]) -> None:
    for index, result in enumerate(results):
        if result is None:
            raise RuntimeError(words_for_unused(index))


def _bypass(attempt: Attempt, reason: Bypass, misses: Sequence[Miss] = ()) -> Any:
    started = time.perf_counter()
    try:
        return _eager(attempt.call)
    finally:
        attempt.tell(Outcome(BYPASS, reasons=(reason, *misses), seconds={"run": time.perf_counter() - started}))


def _eager(call: Call) -> Any:
    """The eager engine, as if we were not there."""
    if STREAMS.in_use and call.create_graph:
        STREAMS.differentiable(call.outputs)
    return on_eager(run_backward, call, call.allow_unreachable)
