"""Runs what the engine handed over, and knows which compiled backward answers for the engine while it runs."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch._C import _ImperativeEngine
from torch.autograd import Variable

from ..backends.signal_handlers import raise_what_a_handler_raised
from ..cache.selection import Selection, select
from ..cache.variants import Handover, Variant
from ..compiling.queue import QUEUE, Job
from ..compiling.worker_process import WORKER
from ..diagnostics.node_log import NodeLog
from ..diagnostics.reporting import failure_of, logs_nodes
from ..errors import CacheMissError, GradientMismatchError
from ..guards.ambient import Ambient, ambient
from ..ir import nan_checks
from ..policies.decision import Action, waits
from ..policies.ledger import LEDGER
from ..runtime.program import Program
from ..runtime.running_backward import Ends, Running
from ..settings import Settings
from ..shadow_cache import Failure, VariantKey
from ..steps.run_context import RunContext
from ..steps.steps import RegionStep, Slots
from ..threads.compile_thread import why_not_compile
from ..threads.gate import GATE
from ..threads.leaf_writes import LEAF_WRITES
from ..threads.others import out_of_walk
from ..torch_api.hook_handles import HANDLES
from ..torch_api.saved_tensor_hooks import restore_saved_tensor_hooks, saved_tensor_hooks
from ..user_code.reducers import reducer_hooks
from .account import Account, RunAccount
from .call import Call, HandedOver, KnownShapes, Results
from .fast_path.arming import FAST_PATH
from .native_hits import NATIVE_HITS
from .records import record_of
from .session import HIT, Here, Outcome, thread
from .whole.beside import Beside, asked_for, may_run_beside
from .whole.checks import CHECKS

_run_backward: Any = _ImperativeEngine.run_backward


def running() -> Running | None:
    """The innermost compiled backward of the calling thread; None where an eager one was called inside it."""
    return thread.here.running


def depth() -> int:
    """Return how many compiled backwards the calling thread is in, including those around an eager one."""
    return thread.here.depth


def on_eager(
    here: Here,
    outputs: Sequence[Any],
    grads: Sequence[torch.Tensor | None],
    keep_graph: bool,
    create_graph: bool,
    inputs: Sequence[Any],
    allow_unreachable: bool,
    accumulate_grad: bool,
) -> Any:
    """Have the eager engine run a backward. The gate counts the backward, and no policy is asked.

    Backwards of some ten microseconds take this way too, so each call in here counts.

    Args:
        here: the calling thread.
    """
    me, outer, idents = here.ident, here.running, GATE.idents
    try:
        idents.append(me)
        here.running, run = None, _run_backward
        if LEAF_WRITES.writing or GATE.line:
            GATE.enter_eager(me)
            run = out_of_walk(run)
        return run(
            Variable._execution_engine,
            outputs,
            grads,
            keep_graph,
            create_graph,
            inputs,
            allow_unreachable,
            accumulate_grad,
        )
    finally:  # in this order: see the gate
        here.running = outer
        idents.remove(me)


def execute(call: Call, account: Account, handed: HandedOver) -> Results:
    """Run a backward that was handed over, and record what became of it.

    Returns:
        What ``autograd.grad`` asked for; empty for ``backward``.

    Raises:
        CacheMissError: ``on_miss="raise"``, and it was found too late that a region is not compiled: the step is done.
        GradientMismatchError: ``check`` is True or a number, and compiled code has given something else than the real
            calls: the step is done, with what these gave.
    """
    shapes = handed.shapes
    if shapes is not None and handed.graph.saving is None and _ran_alone(call, account, handed, shapes):
        return ()
    settings, outer = account.settings, thread.here.running
    context = RunContext(outer=None if outer is None else outer.context)
    report = context.report
    report.seconds["capture"] = time.perf_counter() - account.started
    context.ends = Ends(call.outputs, call.inputs)
    state = Running(context.ends, call.accumulate_grad, call.keep_graph, context, handed.graph.tape.order)
    run, device = RunAccount(account, call, handed, report), handed.graph.tape.cuda_device
    try:
        if device is None:
            results = _with_state(state, run)
        else:
            with torch.cuda.device(device):
                results = _with_state(state, run)
    except BaseException as error:
        run.close_after(error)
        raise
    run.close()
    if context.outer is not None:
        context.outer.nested += _to_raise(context, settings)  # raised here, they would cost the step around this
    if report.uncompiled and settings.on_miss == "raise":
        raise CacheMissError(run.selection.reasons, ran=True)
    return results


def _with_state(state: Running, run: RunAccount) -> Results:
    """Run it, with the state of the thread that users' code finds under the engine; then put back what was there.

    Ctrl-C may come after any call (:mod:`gate` says where not). So what is put back by assigning it goes first, and
    each call that puts something back is the first one of a ``finally``.
    """
    here = thread.here
    outer, outer_depth, told = here.running, here.depth, HANDLES.told
    grad_mode, saved_hooks = torch.is_grad_enabled(), saved_tensor_hooks()
    try:
        here.running, here.depth = state, outer_depth + 1
        HANDLES.told = (*told, state.context.changes)
        torch._C._set_grad_enabled(False)
        return _run(state, run)
    finally:
        here.running, here.depth = outer, outer_depth
        HANDLES.told = told
        try:
            torch._C._set_grad_enabled(grad_mode)
        finally:
            restore_saved_tensor_hooks(saved_hooks)


def _run(state: Running, run: RunAccount) -> Results:
    handed, graph = run.handed, run.handed.graph
    settings, context = run.account.settings, state.context
    context.prove = settings.check is not False
    context.module = None if handed.shapes is None else handed.shapes.module
    context.progress = settings.progress
    try:
        if torch.autograd._profiler_enabled():
            context.profile = state.profile(graph.tape)
        if logs_nodes():
            context.log = NodeLog()
        forms = graph.forms
        asks_tape = forms.unpacks or forms.marked or handed.is_reduced
        ambient_state = run.ambient_state = graph.state(handed.handover, settings) if asks_tape else ambient()
        if graph.saving is not None:
            graph.save_now(VariantKey(settings.key, ambient_state), handed.handover)
        run.selection = _select(run, ambient_state)
        _allow(run, context)
        if run.selection.failures:
            context.report.failures.extend(run.selection.failures)
        variant = run.selection.variant
        compared = settings.check_every > 0 and variant is not None and CHECKS.count(variant, settings)
        if variant is not None and compared:
            results: Results = _compared(run, variant, ambient_state, context)
        else:
            results = _served(handed, variant, context)
        if context.report.compiles and variant is not None and variant.program.region_compiler.backend.slow:
            NATIVE_HITS.get_ready(settings)
        context.call = 0
        if handed.is_reduced and handed.handover.unwritten:
            reducer_hooks(*handed.handover.unwritten)
        for callback in state.callbacks:  # one may queue another
            callback()
        if context.outer is None and (context.nested or context.report.mismatches):
            mismatches = _to_raise(context, settings)
            if mismatches:
                raise GradientMismatchError(mismatches)
        return results
    except Exception:
        if context.call and state.ends.outputs and torch.is_anomaly_enabled():
            nan_checks.tell_of_forward(state.nodes[context.call - 1])
        raise


def _to_raise(context: RunContext, settings: Settings) -> list[Failure]:
    return [*(context.report.mismatches if settings.check_every else ()), *context.nested]


def _served(handed: HandedOver, variant: Variant | None, context: RunContext) -> Results:
    if handed.whole is not None:
        handed.whole.free()
    if variant is None:
        return handed.graph(handed.handover, context)
    if handed.shapes is not None and _runs_native(handed, variant, handed.shapes, context):
        return ()
    return variant.program.run(handed.handover.slots(), context)


def _compared(run: RunAccount, variant: Variant, ambient_state: Ambient, context: RunContext) -> Results:
    """Run a backward that ``check`` compares: as a whole with the eager engine's, where the tape is whole and can run
    twice; else each region with its real calls."""
    whole, slots = run.handed.whole, run.handed.handover.slots()
    if whole is not None and may_run_beside(variant, ambient_state, context):
        asked = asked_for(whole.call, variant.program, slots)
        if asked is not None:
            ask = functools.partial(on_eager, thread.here)
            return Beside(whole.call, variant, asked, ask, slots, context).run()
    if whole is not None:
        whole.free()
    context.compare_all = context.report.compared = True
    return variant.program.run(slots, context)


def _runs_native(handed: HandedOver, variant: Variant, shapes: KnownShapes, context: RunContext) -> bool:
    """Run a backward without Python if possible, and return whether it ran."""
    taken = handed.given
    if isinstance(taken, Handover):
        return False
    native = variant.native.of(variant.program, shapes.module)
    looked_at = context.profile is not None or context.log is not None
    if native is None or looked_at or not native.is_usable(context.prove):
        return False
    native.run(taken)
    return True


def _ran_alone(call: Call, account: Account, handed: HandedOver, shapes: KnownShapes) -> bool:
    """Run a hit without Python if possible, and return whether it ran. Such a hit needs no thread state, context or
    report: these are only for users' code, reports and misses."""
    taken, settings, variant = handed.given, account.settings, shapes.last()
    native = None if variant is None else variant.native.current
    if native is None or not native.made.is_straight_line or not native.is_current() or isinstance(taken, Handover):
        return False
    if handed.whole is not None or torch.autograd._profiler_enabled() or logs_nodes():
        return False
    if not native.is_usable(settings.check is not False):
        return False
    assert variant is not None
    every = settings.check_every
    if (every and CHECKS.is_next(variant, settings)) or not handed.graph.uses(variant, settings.key, ambient()):
        return False
    if every:
        CHECKS.count(variant, settings)
    started, grad_mode = time.perf_counter(), torch.is_grad_enabled()
    outcome = Outcome(HIT, handed.graph, (), {"capture": started - account.started})
    try:
        try:
            torch._C._set_grad_enabled(False)
            native.run(taken)
        finally:
            torch._C._set_grad_enabled(grad_mode)
        ended = time.perf_counter()
        outcome.seconds["run"] = ended - started
        seconds = ended - account.started
        variant.hits += 1
        variant.ran += seconds
        account.served = variant
    finally:
        account.tell(outcome)
    FAST_PATH.hand(variant, native, handed.graph, shapes, settings)
    return True


def _allow(run: RunAccount, context: RunContext) -> None:
    """Decide whether, and where, missing regions are compiled. Those of a variant that was just made always are."""
    settings, context.left = run.account.settings, run.left
    decision = run.call.decision
    run.report.over_budget = decision is not None and decision.action is not Action.COMPILE
    refused = run.report.over_budget or why_not_compile() is not None
    if refused or not settings.compiles:
        context.may_compile = False
    elif not waits(settings):
        context.submit = functools.partial(_submit, run, run.ambient_state)


def _select(run: RunAccount, ambient_state: Ambient) -> Selection:
    """Select the code that serves the backward. Known shapes are not compared again."""
    settings, graph, shapes = run.account.settings, run.handed.graph, run.handed.shapes
    if shapes is not None:
        for known in shapes.variants():
            if graph.uses(known, settings.key, ambient_state):
                return Selection(known)
    selection = select(settings, graph, ambient_state, run.handed.handover, run.handed.miss, run.refuse)
    if shapes is not None and selection.variant is not None:
        shapes.served(selection.variant)
    return selection


def _submit(run: RunAccount, ambient_state: Ambient, program: Program, step: RegionStep, slots: Slots) -> None:
    """Have a region compiled in the background. The step goes on without that, and so it does if that fails."""
    variant, settings = run.selection.variant, run.account.settings
    session, graph = run.account.session, run.handed.graph
    assert variant is not None
    if run.left() <= 0.0:
        run.report.over_budget = True
        return

    backend = program.region_compiler.backend
    if QUEUE.busy and not QUEUE.has_imported(backend):  # it would wait for what is being compiled: a later step asks
        return
    record = record_of(run.call)

    def ended(job: Job | None, seconds: float) -> None:
        changed = "" if job is None else job.changed
        if seconds and not changed:
            session.compiled_beside(graph, seconds)
        LEDGER.ended(record, variant, ended, seconds, settings, changed)

    will_end = False
    try:
        LEDGER.begins(record, variant, ended)
        if not QUEUE.has_imported(backend):
            with run.report.timed("load"):
                error = QUEUE.import_for(backend)
            if error is not None and WORKER.ended:  # Python is about to end, and imports no more
                return
            if error is not None:  # the next step would find the same
                run.report.failures.append(failure_of("compile", backend.name, step.region, error))
                step.add(program.region_compiler.kind(step, slots), [None])
                return
        job = QUEUE.submit(program, step, slots, ambient_state, ended=ended)
        will_end = job is not None and job.ended is ended
    except Exception as error:  # noqa: BLE001  a later step tries again
        raise_what_a_handler_raised(error)
        if WORKER.ended:
            return
        run.report.failures.append(failure_of("submit", backend.name, step.region, error))
    finally:
        if not will_end:
            ended(None, 0.0)
