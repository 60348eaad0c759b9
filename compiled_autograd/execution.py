"""Runs what the engine handed over, and answers for the engine while it does.

Users' code that runs inside a backward asks the engine about it: which task this is, which node runs, whether a node
will. During a compiled backward there is no task of the engine's, so the answers come from here.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import msgspec
import torch

from shadow_cache import Bypass, Failure, Miss

from . import ir, nans, tape
from .ambient import Ambient, ambient
from .background import BACKGROUND
from .bypass import ON_MISS
from .disk import disk_for
from .errors import CacheMissError, GradientMismatchError
from .graphs import OFTEN, CompiledGraph
from .log import RunLog, no_hooks
from .profiling import Profile
from .session import BYPASS, HIT, SHAPE_MISS, STRUCTURE_MISS, Outcome, Session
from .tuning import TUNING
from .variants import Handover, Variant

_task_ids = itertools.count(1 << 62)  # far above the engine's own


@dataclass
class Running:
    """A compiled backward that is under way in this thread."""

    outputs: Sequence[Any]
    inputs: Sequence[Any]
    accumulates: bool
    keep_graph: bool
    checkpoint_valid: bool
    log: RunLog
    order: Sequence[int]
    task_id: int = field(default_factory=_task_ids.__next__)
    callbacks: list[Callable[[], None]] = field(default_factory=list)

    @cached_property
    def nodes(self) -> list[Any]:
        """The tape's nodes in the order of the walk; read only when somebody asks."""
        return [each.node for each in tape.walk(self.outputs, self.inputs)]

    def profile(self, tape_graph: ir.TapeGraph) -> Profile:
        """What shows the events of this backward to a profiler."""
        short = len(tape_graph.calls) <= tape.LONGEST
        sequences = [type(node)._sequence_nr(node) for node in self.nodes] if short else []
        return Profile([call.name for call in tape_graph.calls], sequences)

    @cached_property
    def fingerprint(self) -> int:
        """See :func:`tape.fingerprint`."""
        return tape.fingerprint(self.outputs, self.inputs)

    @cached_property
    def node_set(self) -> set[Any]:
        """The same, to look things up in."""
        return set(self.nodes)

    def execution_order(self) -> list[Any]:
        """The same in the order in which they run; like the engine, only with multithreading off."""
        if torch._C._is_multithreading_enabled():
            raise RuntimeError(
                "_current_graph_task_execution_order expects the current backward to be executed with multithreading "
                "disabled, e.g. by running torch.autograd.set_multithreading_enabled(False)"
            )
        return [self.nodes[index - 1] for index in self.order if index]

    def will_execute(self, node: Any) -> bool:
        """Whether a node runs in this backward."""
        if not self.accumulates and type(node).name(node).endswith(tape.LEAF):
            raise RuntimeError(
                "A leaf node was passed to _will_engine_execute_node but we are currently running autograd.grad(). "
                "This is currently not supported."
            )
        return node in self.node_set

    def current_node(self) -> Any:
        """The node whose hooks or function are running."""
        self.log.asked.add(self.log.call)
        return self.nodes[self.log.call - 1] if self.log.call else None

    def late_hooks(self, captured: Sequence[Any]) -> list[Any]:
        """Post-hooks of the running node that are none of ``captured``: registered since the engine walked the tape."""
        handle = self.nodes[self.log.call - 1].register_hook(_nothing)
        hooks = handle.hooks_dict_ref()  # all of them lie in one dict, which is to be had no other way
        handle.remove()
        return [hook for hook in hooks.values() if not any(hook is known for known in captured)]


def _nothing(*args: object) -> None:
    """A hook that does nothing."""


class _Thread(threading.local):
    def __init__(self) -> None:
        self.stack: list[Running] = []
        self.hidden = 0  # compiled backwards in which an eager one was called that is now under way


_thread = _Thread()


def running() -> Running | None:
    """The innermost compiled backward of the calling thread."""
    return _thread.stack[-1] if _thread.stack else None


def depth() -> int:
    """How many compiled backwards the calling thread is in, those around an eager one included."""
    return len(_thread.stack) + _thread.hidden


def leave_to_engine() -> Any:
    """Inside, a backward of the eager engine runs, and nobody asks us."""
    return _Hidden()


class _Hidden:
    def __enter__(self) -> None:
        self.stack, _thread.stack = _thread.stack, []
        _thread.hidden += len(self.stack)

    def __exit__(self, *exception: object) -> None:
        _thread.stack = self.stack
        _thread.hidden -= len(self.stack)


def execute(
    session: Session, state: Running, handover: Handover, miss: Miss | None, captured: bool
) -> list[torch.Tensor | None]:
    """Run a backward that was handed over, and record what became of it.

    Args:
        session: whose settings hold, and who is told.
        state: what is answered to those who ask meanwhile; its log has the seconds of the capture.
        handover: what the engine gave.
        miss: how the structure differs from those known before; None where it was known.
        captured: whether the engine had to report the tape.

    Returns:
        What ``autograd.grad`` asked for; empty for ``backward``.
    """
    graph, log = handover.graph, state.log
    reasons: list[Bypass | Miss | Failure] = [] if miss is None else [miss]
    log.may_compile = session.settings.on_miss == "compile"
    log.prove, log.check_every = session.settings.check is not False, session.settings.check_every
    if session.settings.on_miss == "background":
        log.submit = lambda program, step, slots: BACKGROUND.submit(program, step, slots, state.fingerprint)
    if torch.autograd._profiler_enabled():
        log.profile = state.profile(graph.tape)
    bypassed = False
    started = time.perf_counter()
    _thread.stack.append(state)
    log.late_hooks = state.late_hooks
    saved_hooks = _saved_tensor_hooks()
    grad_mode = torch.is_grad_enabled()
    torch._C._set_grad_enabled(False)
    try:
        surroundings = ambient()
        variant, other = find_variant(session, graph, surroundings, handover)
        if variant is not None and variant.entry is not None:
            miss, reasons, graph.met = None, [], max(graph.met, OFTEN)  # another process has met this structure
        elif variant is None and miss is not None:
            miss = other or _nearest_stored(session, handover, miss, log)
            reasons = [miss]
        elif variant is None and other is not None and (not graph.variants or other.kind == "corrupt"):
            reasons = [other]  # it says more than what this process can compare with
        if variant is None and session.settings.compiles:
            variant, variant_misses = _add(session, graph, surroundings, handover, log)
            reasons.extend(variant_misses[1:] if reasons else variant_misses)
        elif variant is None:
            bypassed = True
            reasons = [ON_MISS, *(reasons or graph.explain(session.settings, surroundings, handover))]
        results = graph(handover) if variant is None else variant.program.run(handover.slots(), log)
        log.call = 0
        for callback in state.callbacks:  # one may queue another
            callback()
        if log.mismatches and log.check_every:
            raise GradientMismatchError(log.mismatches)
        return results
    except Exception:
        if log.call and torch.is_anomaly_enabled():
            nans.tell_of_forward(state.nodes[log.call - 1])
        raise
    finally:
        torch._C._set_grad_enabled(grad_mode)
        _restore_saved_tensor_hooks(saved_hooks)
        _thread.stack.pop()
        log.late_hooks = no_hooks  # else the two hold each other, and the tape with them
        log.seconds["run"] = time.perf_counter() - started
        reasons.extend(log.misses)
        if log.uncompiled:
            waits = "they are compiled in the background" if log.submit is not None else "on_miss does not compile"
            reasons.append(Miss("guard", f"{log.uncompiled} regions", hint=f"{waits}; their calls ran one by one"))
        reasons.extend(failure for failure in log.failures if failure not in reasons)
        variant_missed = SHAPE_MISS if reasons or log.compiles > log.background else HIT
        outcome = BYPASS if bypassed else variant_missed if miss is None else STRUCTURE_MISS
        cost = sum(log.seconds.get(stage, 0.0) for stage in ("lower", "compile"))
        if reasons and isinstance(reasons[0], Miss):
            walk = log.seconds.get("capture", 0.0) if captured else 0.0
            reasons[0] = msgspec.structs.replace(reasons[0], seconds=cost + walk)
        if variant is not None and (log.compiles or log.mismatches):
            _store(session, graph, variant, surroundings, reasons, cost, log.mismatches)
        if variant is not None and outcome == HIT and session.settings.tune:
            TUNING.hit(variant, log.seconds["capture"] + log.seconds["run"], lambda: state.fingerprint)
        session.record(Outcome(outcome, graph, tuple(reasons), log.seconds), captured, log.compiles, log.loads)
        if log.uncompiled and session.settings.on_miss == "raise" and sys.exc_info()[0] is None:
            raise CacheMissError(reasons, ran=True)


def find_variant(
    session: Session, graph: CompiledGraph, surroundings: Ambient, handover: Handover
) -> tuple[Variant | None, Miss | None]:
    """What serves a backward, in memory or in the store on disk; or None, and why what the store has does not."""
    variant = graph.find(session.settings.key, surroundings, handover)
    disk = None if variant is not None else disk_for(session.settings)
    return (variant, None) if disk is None else disk.find(graph, session.settings, surroundings, handover)


def _nearest_stored(session: Session, handover: Handover, miss: Miss, log: RunLog) -> Miss:
    """A structure miss, told by the store where it knows more."""
    disk = disk_for(session.settings)
    if disk is None:
        return miss
    with torch._C.DisableTorchFunctionSubclass():
        shapes = [tuple(tensor.shape) for tensor in handover.tensors]
    try:
        return disk.explain(handover.graph, miss, shapes)
    except Exception as error:  # noqa: BLE001  the tape is released by now, and only the reason is not known
        what = f"{type(error).__name__}: {error}"
        log.failures.append(Failure("explain", repr(handover.graph), what, "the reason is that of this process alone"))
        return miss


def _store(
    session: Session,
    graph: CompiledGraph,
    variant: Variant,
    surroundings: Ambient,
    reasons: list[Bypass | Miss | Failure],
    seconds: float,
    mismatches: Sequence[Failure],
) -> None:
    """Keep what was compiled for other processes, and what was found to be wrong of it."""
    disk = disk_for(session.settings)
    if disk is None:
        return
    misses = [reason for reason in reasons if isinstance(reason, Miss)]
    misses += [Miss("mismatch", each.where, new=each.error, hint=each.instead) for each in mismatches]
    try:
        variant.not_stored = disk.save(graph, variant, session.settings, surroundings, misses, seconds)
        disk.record(graph, None if variant.not_stored else variant.entry, misses)
    except Exception as error:  # noqa: BLE001  the step is done: what cannot be stored is compiled again elsewhere
        variant.not_stored = f"{type(error).__name__}: {error}"
        reasons.append(Failure("store", repr(graph), variant.not_stored, "it is kept in memory alone"))


def _saved_tensor_hooks() -> list[Any]:
    """The thread's saved-tensor hooks, outermost first. What users' code does to them ends with the backward."""
    hooks = []
    while (top := torch._C._autograd._top_saved_tensors_default_hooks(True)) is not None:
        hooks.append(top)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    hooks.reverse()
    for pair in hooks:
        torch._C._autograd._push_saved_tensors_default_hooks(*pair)
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
    session: Session, graph: CompiledGraph, surroundings: Ambient, handover: Handover, log: RunLog
) -> tuple[Variant | None, Sequence[Miss | Failure]]:
    """A new variant; or None where making one failed, and the tape graph's calls are to be run one by one."""
    try:
        return graph.add(session.settings, surroundings, handover)
    except Exception as error:  # noqa: BLE001  the tape is released by now: the step must go on from the tape graph
        failure = Failure("plan", repr(graph), f"{type(error).__name__}: {error}", "its calls run one by one")
        log.failures.append(failure)
        return None, [failure]
