"""``ca.compare``: a step of the user's, in turns with eager."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch

from ..api import disable, enable
from ..errors import UnknownSettingError
from ..policies.clock import wait_for_devices
from ..settings import PREFIX
from .answer import PROFILED_STEPS, Watch, answer, depends_on_products
from .backward_times import BackwardTimes
from .result import Comparison
from .turns import Turns


def compare(step: Callable[..., Any], *args: Any, seconds: float = 120.0, **settings: Any) -> Comparison:
    """Run a training step again and again, in turns with eager, and say whether compiled backwards pay.

    The step trains as it does anywhere: parameters, optimizer and random numbers move on with each call. Call it in no
    session.

    Args:
        step: a function that runs a whole training step: forward, backward and optimizer.
        args: passed to each call.
        seconds: limit of the comparison; it ends earlier once the answer is sure.
        settings: those of :func:`enable`. ``on_miss`` is ``"background"`` unless it is given: steps run on eager while
            a process beside them compiles.

    Returns:
        The answer, of which ``str`` is a sentence.

    Raises:
        TypeError: ``step`` cannot be called.
        ValueError: ``seconds`` is no number above 0.
        UnknownSettingError, InvalidSettingError, UnknownBackendError: as :func:`enable`.
    """
    if not callable(step):
        raise TypeError(f"compare() takes a function that runs one step, not {type(step).__name__}")
    if not isinstance(seconds, int | float) or not seconds > 0:
        raise ValueError(f"seconds={seconds!r} is not possible; seconds is the time limit, a number above 0")
    given = {} if os.environ.get(f"{PREFIX}ON_MISS") else {"on_miss": "background"}
    try:
        session = enable(**given | settings)
    except UnknownSettingError as error:
        if any(repr(name) in str(error) for name in settings):  # else a variable of the environment is meant
            error.args = (f"{error} An argument of the step is given so: compare(lambda: step(name=value)).",)
        raise
    watch = Watch(session)
    turns = Turns(watch.is_calm, seconds, watch.is_compiling)
    with BackwardTimes() as times:
        times.stepping = threading.get_ident()
        for _ in iter(lambda: turns.is_over, True):
            wait_for_devices()
            started = perf_counter()
            with session if turns.ours else disable():
                step(*args)
            wait_for_devices()
            times.is_timed = not torch.cuda.is_initialized()
            turns.add(perf_counter() - started, times.take())
        times.profiles = times.is_timed and depends_on_products(turns, watch)
        with disable():
            for _ in range(PROFILED_STEPS if times.profiles else 0):
                step(*args)
    return answer(session, turns, times, watch)
