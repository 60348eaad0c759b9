"""One backward of a session, on one page: decide, hand over, run, account (``docs/internals/engine.md``)."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

from ..capture.unnamed import let_go_of_the_unnamed
from ..diagnostics.bypass import DDP_CPP_REDUCER, reason_of_end
from ..errors import UnsupportedBackwardError
from ..native.interface import Taken
from ..policies.clock import now
from ..policies.decision import ALIKE_BEFORE_A_SKIP, Record, State, next_action
from ..policies.ledger import LEDGER, TIMED
from ..settings import Settings
from ..shadow_cache import Bypass
from ..torch_api.version_differences import words_for_unused
from .account import Account
from .call import Call, HandedOver, RanInside, Refused, Results, Whole
from .cuda.streams import STREAMS
from .decide import decide, is_policy
from .execution import execute
from .fast_path.arming import FAST_PATH
from .native_hits import NATIVE_HITS
from .own_loop.running import runner
from .records import held, missed, record_of, watched
from .seam import hand_over
from .session import Session, thread
from .whole.beside import may_run_twice
from .whole.checks import CHECKS

_UNSUPPORTED = "unsupported"
_TRIES = 4
"""Maximum number of walks, if another thread changes the tape in each. Eager runs the backward then."""


def run(session: Session, call: Call) -> Any:
    """Run a backward compiled where that can be done, else on the eager engine; gives what the engine would give."""
    settings, here = session.settings, thread.here
    record = watched(call) if LEDGER.watched and not call.create_graph else None
    if record is not None:
        reason = next_action(record, None).reason
        if reason is not None and settings.on_miss == "raise":
            return _left_if_no_miss(session, call, record, reason)
        if reason is not None:
            return _left_to_eager(session, call, record, reason)
    here.skip_none()
    account = Account(session, settings)
    timed = record if record is not None and record.state is State.TIMING else None
    began = 0.0 if timed is None else now()
    try:
        reason = decide(call, settings)
        if reason is not None:
            return _refused(call, account, Refused(reason))
        if settings.check_every and CHECKS.may_be_next(settings):
            given = _whole(call, account)
        else:
            known = (record and FAST_PATH.serve(call, account)) or NATIVE_HITS.hand_over(call, settings)
            given = known or _engine_hands_over(call, settings, account)
        if isinstance(given, HandedOver):
            return _asked_for(call, execute(call, account, given))
        if isinstance(given, RanInside):
            return _asked_for(call, given.results)
        return _refused(call, account, given)
    except BaseException as error:
        interrupted(session, account.started, error, account)
        raise
    finally:
        let_go_of_the_unnamed()
        if timed is not None and account.served is not None:
            LEDGER.hit(timed, now() - began)


def resume(
    session: Session,
    arguments: tuple[Any, ...],
    named: dict[str, Any],
    started: float,
    hand_over: Callable[[Taken], HandedOver],
    taken: Taken,
) -> Any:
    """Go on with a backward of which the fast path has taken the tape, and which it does not run.

    Args:
        arguments, named: as ``run_backward`` got them.
        started: when that was.
        hand_over: says what was taken.
    """
    call, account = Call(*arguments, **named), Account(session, session.settings, started)
    call.number = session.number
    try:
        return _asked_for(call, execute(call, account, hand_over(taken)))
    except BaseException as error:
        interrupted(session, started, error, account)
        raise
    finally:
        let_go_of_the_unnamed()


def interrupted(session: Session, started: float, error: BaseException, account: Account | None = None) -> None:
    """Enter a backward that ended with an error into its session, unless that was done."""
    account = Account(session, session.settings, started) if account is None else account
    if not account.told:
        account.bypass(*reason_of_end(error))


def _left_to_eager(session: Session, call: Call, record: Record, reason: Bypass) -> Any:
    """Run a backward on eager, by an earlier decision about its tape. No more checks, since the tape may be small."""
    here = thread.here
    clock = now if reason is TIMED else time.perf_counter
    began = clock()
    try:
        return eager(call)
    finally:
        seconds = clock() - began
        session.left_to_eager(reason, seconds)
        LEDGER.ran_on_eager(record, reason, seconds, 1 + here.skipped - here.unseen)
        if session.looks_away and reason is not TIMED:
            skip_some(session, record, reason, session.may_loop, seconds)
        else:
            here.skip_none()


def skip_some(session: Session, record: Record, reason: Bypass, may_loop: bool, seconds: float) -> None:
    """Decide how many backwards are skipped after one that was left to eager: see :meth:`Here.leave`."""
    here = thread.here
    here.leave(record, reason, session.number, may_loop, seconds)
    if here.streak == ALIKE_BEFORE_A_SKIP:
        NATIVE_HITS.skip_looks(session.settings)


def _left_if_no_miss(session: Session, call: Call, record: Record, reason: Bypass) -> Any:
    """As :func:`_left_to_eager`, for ``on_miss="raise"``: that eager is faster is no reason to let a miss pass."""
    account = Account(session, session.settings)
    try:
        other = decide(call, session.settings)
        if other is not None:
            return _refused(call, account, Refused(other))
    except BaseException as error:
        interrupted(session, account.started, error, account)
        raise
    return _left_to_eager(session, call, record, reason)


def _handed_over(call: Call, account: Account, looked: HandedOver | None = None) -> HandedOver | RanInside | Refused:
    """Have the tape walked, in C++ or by the engine.

    Args:
        looked: the result of an earlier walk that did not release the tape.
    """
    settings = account.settings
    given = NATIVE_HITS.hand_over(call, settings) or _engine_hands_over(call, settings, account, looked)
    if isinstance(given, HandedOver):
        _as_first_met(given, looked)
    return given


def _whole(call: Call, account: Account) -> HandedOver | RanInside | Refused:
    """Have the tape walked, but keep it whole if its gradients can be compared with those of the eager engine."""
    settings = account.settings
    if call.keep_graph:
        given = _handed_over(call, account)
        if isinstance(given, HandedOver) and not given.is_reduced and may_run_twice(given.graph):
            given.whole = Whole(call)
        return given
    kept = dataclasses.replace(call, keep_graph=True)
    looked = NATIVE_HITS.hand_over(kept, settings) or _engine_hands_over(kept, settings, None)
    if not isinstance(looked, HandedOver):
        return looked
    if looked.is_reduced or not may_run_twice(looked.graph):
        return _handed_over(call, account, looked)
    looked.whole = Whole(call, functools.partial(_release, call, settings))
    return looked


def _release(call: Call, settings: Settings) -> None:
    """Walk a tape once more, so that it is released."""
    given = NATIVE_HITS.hand_over(call, settings) or hand_over(call, settings, None)
    if isinstance(given, HandedOver):
        given.graph.met -= 1


def _engine_hands_over(
    call: Call, settings: Settings, account: Account | None, looked: HandedOver | None = None
) -> HandedOver | RanInside | Refused:
    """Have the engine walk the tape. Without an account, the tape is not run."""
    reason = held(call, settings)
    if reason is not None:
        return Refused(reason)
    plan = NATIVE_HITS.learn(call, settings)
    run_inside = None if account is None else functools.partial(_execute_inside, call, account, looked)
    for _ in range(_TRIES):
        given = hand_over(call, settings, run_inside)
        if not isinstance(given, Refused) or not given.changed:
            break
    NATIVE_HITS.keep(plan, call, settings, given)
    return given


def _execute_inside(call: Call, account: Account, looked: HandedOver | None, given: HandedOver) -> Results:
    _as_first_met(given, looked)
    return execute(call, account, given)


def _as_first_met(given: HandedOver, looked: HandedOver | None) -> None:
    if looked is not None:
        given.miss, given.captured = looked.miss, looked.captured
        given.graph.met -= 1


def _asked_for(call: Call, results: Results) -> tuple[Any, ...]:
    if not call.allow_unreachable:
        for index, result in enumerate(results):
            if result is None:
                raise RuntimeError(words_for_unused(index))
    return tuple(results)


def _refused(call: Call, account: Account, refused: Refused) -> Any:
    """Let the eager engine run it, if nothing else was asked for."""
    reason, settings = refused.reason, account.settings
    if settings.on_unsupported == "raise" and not refused.mistake and not is_policy(reason):
        raise UnsupportedBackwardError(reason)
    if refused.miss is None and not (refused.mistake or refused.changed or call.create_graph):
        _tell_of_refusal(call, settings, reason)
    started = time.perf_counter()
    try:
        return eager(call)
    finally:
        missed(call, reason, time.perf_counter() - started)
        account.bypass(reason, () if refused.miss is None else (refused.miss,), since=started)


def _tell_of_refusal(call: Call, settings: Settings, reason: Bypass) -> None:
    """Have tapes that the engine or the capture refused left to eager, unless others like them were captured."""
    if settings.on_unsupported == "eager" and reason.kind in (_UNSUPPORTED, DDP_CPP_REDUCER.kind):
        record = record_of(call)
        if not record.living():
            LEDGER.refused(record, reason)


def eager(call: Call) -> Any:
    """Run a backward on the eager engine, without this package."""
    if STREAMS.in_use and call.create_graph:
        STREAMS.differentiable(call.outputs)
    here = thread.here
    return runner(here, call)(
        here,
        call.outputs,
        call.grads,
        call.keep_graph,
        call.create_graph,
        call.inputs,
        call.allow_unreachable,
        call.accumulate_grad,
    )
