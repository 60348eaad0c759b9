"""Runs what the engine handed over, and answers for the engine while it does.

Users' code that runs inside a backward asks the engine about it: which task this is, which node runs, whether a node
will. During a compiled backward there is no task of the engine's, so the answers come from here.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from shadow_cache import Failure, Miss

from ..cache.disk import disk_for
from ..cache.graphs import REUSES_WORTH_COMPILING, CompiledGraph
from ..cache.variants import Handover, Variant
from ..diagnostics.bypass import FORKED, ON_MISS
from ..diagnostics.reporting import failure_of
from ..errors import CacheMissError, GradientMismatchError
from ..guards.ambient import Ambient, ambient
from ..ir import nan_checks
from ..policies.background import BACKGROUND
from ..runtime.program import Program
from ..runtime.running_backward import Running
from ..steps.run_context import RunContext, no_hooks
from ..steps.steps import RegionStep, Slots
from ..threads.forks import can_compile
from ..threads.gate import GATE, take
from .account import Account
from .session import Session


class _Thread(threading.local):
    def __init__(self) -> None:
        self.running: Running | None = None
        self.depth = 0


_thread = _Thread()


def running() -> Running | None:
    """The innermost compiled backward of the calling thread; None where an eager one was called inside it."""
    return _thread.running


def depth() -> int:
    """How many compiled backwards the calling thread is in, those around an eager one included."""
    return _thread.depth


def on_eager(run: Callable[..., Any], *arguments: Any) -> Any:
    """Have ``run`` run a backward of the eager engine: the gate knows of it, and nobody asks us about it."""
    outer, token = _thread.running, take()
    try:
        _thread.running = None
        GATE.enter_eager(token)
        return run(*arguments)
    finally:  # in this order: see the gate
        token.release()
        _thread.running = outer
        GATE.forget(token)


def execute(
    session: Session, state: Running, graph: CompiledGraph, handover: Handover, miss: Miss | None, captured: bool
) -> list[torch.Tensor | None]:
    """Run a backward that was handed over, and record what became of it.

    Args:
        session: whose settings hold, and who is told.
        state: what is answered to those who ask meanwhile; its context has the seconds of the capture.
        graph: the structure of what was handed over.
        handover: what the engine gave.
        miss: how the structure differs from those known before; None where it was known.
        captured: whether the engine had to report the tape.

    Returns:
        What ``autograd.grad`` asked for; empty for ``backward``.

    Raises:
        CacheMissError: ``on_miss="raise"``, and it was found too late that a region is not compiled: the step is done.
        GradientMismatchError: ``check`` is True or a number, and compiled code has given something else than the real
            calls: the step is done, with what these gave.
    """
    account = Account(session, state, graph, miss, captured)
    try:
        results = _with_state(state, account, handover)
    except BaseException as error:
        account.close_after(error)
        raise
    account.close()
    if state.context.report.mismatches and session.settings.check_every:
        raise GradientMismatchError(state.context.report.mismatches)
    if state.context.report.uncompiled and session.settings.on_miss == "raise":
        raise CacheMissError(account.reasons, ran=True)
    return results


def _with_state(state: Running, account: Account, handover: Handover) -> list[torch.Tensor | None]:
    """Run it, with the state of the thread that users' code finds under the engine; then put back what was there.

    Ctrl-C may come after any call (:mod:`gate` says where not). So what is put back by assigning it goes first, and
    each call that puts something back is the first one of a ``finally``.
    """
    outer, outer_depth = _thread.running, _thread.depth
    grad_mode, saved_hooks = torch.is_grad_enabled(), _saved_tensor_hooks()
    try:
        _thread.running, _thread.depth = state, outer_depth + 1
        state.context.late_hooks = state.late_hooks
        torch._C._set_grad_enabled(False)
        return _run(state, account, handover)
    finally:
        _thread.running, _thread.depth = outer, outer_depth
        state.context.late_hooks = no_hooks  # else the two hold each other, and the tape with them
        try:
            torch._C._set_grad_enabled(grad_mode)
        finally:
            _restore_saved_tensor_hooks(saved_hooks)


def _run(state: Running, account: Account, handover: Handover) -> list[torch.Tensor | None]:
    session, graph, context, miss = account.session, account.graph, state.context, account.miss
    forked = not can_compile()
    context.prove, context.check_every = session.settings.check is not False, session.settings.check_every
    context.may_compile = session.settings.on_miss == "compile" and not forked
    try:
        if torch.autograd._profiler_enabled():
            context.profile = state.profile(graph.tape)
        ambient_state = account.ambient_state = ambient()
        if session.settings.on_miss == "background" and not forked:
            context.submit = functools.partial(_submit, state, ambient_state)
        variant, other = find_variant(session, graph, ambient_state, handover)
        account.variant = variant
        if variant is not None and variant.entry is not None:
            graph.met = max(graph.met, REUSES_WORTH_COMPILING)  # another process has met this structure
            account.miss, account.reasons = None, []
        elif variant is None and miss is not None:
            account.miss = other or _nearest_stored(session, graph, handover, miss, context)
            account.reasons = [account.miss]
        elif variant is None and other is not None and (not graph.variants or other.kind == "corrupt"):
            account.reasons = [other]  # it says more than what this process can compare with
        if variant is None and session.settings.compiles and not forked:
            variant, variant_misses = _add(session, graph, ambient_state, handover, context)
            account.reasons.extend(variant_misses[1:] if account.reasons else variant_misses)
        elif variant is None:
            why = account.reasons or graph.explain(session.settings, ambient_state, handover)
            account.bypassed, account.reasons = True, [FORKED if forked else ON_MISS, *why]
        account.variant = variant
        results = graph(handover) if variant is None else variant.program.run(handover.slots(), context)
        context.call = 0
        for callback in state.callbacks:  # one may queue another
            callback()
        if context.report.mismatches and context.check_every:
            raise GradientMismatchError(context.report.mismatches)
        return results
    except Exception:
        if context.call and torch.is_anomaly_enabled():
            nan_checks.tell_of_forward(state.nodes[context.call - 1])
        raise


def _submit(state: Running, ambient_state: Ambient, program: Program, step: RegionStep, slots: Slots) -> None:
    """Have a region compiled in the background. The step goes on without that, and so it does if that fails."""
    try:
        BACKGROUND.submit(program, step, slots, state.fingerprint, ambient_state)
    except Exception as error:  # noqa: BLE001  a later step tries again
        state.context.report.failures.append(
            failure_of("submit", program.region_compiler.backend.name, step.region, error)
        )


def find_variant(
    session: Session, graph: CompiledGraph, ambient_state: Ambient, handover: Handover
) -> tuple[Variant | None, Miss | None]:
    """What serves a backward, in memory or in the store on disk; or None, and why what the store has does not."""
    variant = graph.find(session.settings.key, ambient_state, handover)
    disk = None if variant is not None else disk_for(session.settings)
    return (variant, None) if disk is None else disk.find(graph, session.settings, ambient_state, handover)


def _nearest_stored(
    session: Session, graph: CompiledGraph, handover: Handover, miss: Miss, context: RunContext
) -> Miss:
    """A structure miss, told by the store where it knows more."""
    disk = disk_for(session.settings)
    if disk is None:
        return miss
    with torch._C.DisableTorchFunctionSubclass():
        shapes = [tuple(tensor.shape) for tensor in handover.tensors]
    try:
        return disk.explain(graph, miss, shapes)
    except Exception as error:  # noqa: BLE001  the tape is released by now, and only the reason is not known
        what = f"{type(error).__name__}: {error}"
        context.report.failures.append(
            Failure("explain", repr(graph), what, "the reason is that of this process alone")
        )
        return miss


def _saved_tensor_hooks() -> list[Any]:
    """The thread's saved-tensor hooks, outermost first. What users' code does to them ends with the backward."""
    hooks: list[Any] = []
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
        return hooks
    put_back = itertools.starmap(torch._C._autograd._push_saved_tensors_default_hooks, hooks)
    try:
        while (top := torch._C._autograd._top_saved_tensors_default_hooks(True)) is not None:
            hooks[:0] = [top]  # no call: nothing comes between this and the next line
            torch._C._autograd._pop_saved_tensors_default_hooks()
    finally:
        _ = [*put_back]  # no call of Python's: all of them, before it looks for Ctrl-C
    return hooks


def _restore_saved_tensor_hooks(hooks: list[Any]) -> None:
    now = _saved_tensor_hooks()
    if now == hooks:
        return
    for _ in now:
        torch._C._autograd._pop_saved_tensors_default_hooks()
    for pair in hooks:
        torch._C._autograd._push_saved_tensors_default_hooks(*pair)


def _add(
    session: Session, graph: CompiledGraph, ambient_state: Ambient, handover: Handover, context: RunContext
) -> tuple[Variant | None, Sequence[Miss | Failure]]:
    """A new variant; or None where making one failed, and the tape graph's calls are to be run one by one."""
    try:
        return graph.add(session.settings, ambient_state, handover)
    except Exception as error:  # noqa: BLE001  the tape is released by now: the step must go on from the tape graph
        failure = Failure("plan", repr(graph), f"{type(error).__name__}: {error}", "its calls run one by one")
        context.report.failures.append(failure)
        return None, [failure]
