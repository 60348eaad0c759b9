"""Re-raise exceptions raised by the user's signal handlers, such as for a time limit or a machine that shuts down. They
may arrive inside any code, and are no failure of that code."""

from __future__ import annotations

import functools
import signal
import sys
from collections.abc import Iterator
from inspect import getargvalues
from threading import current_thread, main_thread
from types import CodeType, FrameType, TracebackType
from typing import Any


def raise_what_a_handler_raised(error: BaseException) -> None:
    """For the beginning of each ``except Exception`` after which the step goes on: raise what the handler of a signal
    has raised, if that is ``error``, or what ``error`` was made of.

    Python calls a handler from the frame that it interrupts, with that frame (``signal.signal``). A handler may have
    deleted what it was given: such a one is known while it is the handler.

    Raises:
        BaseException: what the handler has raised.
    """
    if current_thread() is not main_thread():  # no handler runs there
        return
    catching = sys._getframe(1)
    around = {id(frame) for frame in _frames(catching.f_back)}
    codes = set(_codes_of_handlers())
    found: BaseException | None = None
    each: BaseException | None = error
    seen: set[int] = set()
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        trace = each.__traceback__
        if each is not error and trace is not None and id(trace.tb_frame) in around:
            break  # this backward was called where that one is handled
        # To look at the locals of the frame that has caught it would keep a copy of them there, the error among them,
        # and with it all that its frames have: until Python searches for cycles.
        if trace is not None and _is_through_a_handler(trace.tb_next if trace.tb_frame is catching else trace, codes):
            found = each
        each = each.__cause__ or each.__context__
    try:
        if found is not None:
            raise found
    finally:
        del error, each, found, trace, catching  # for the same reason


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _codes_of_handlers() -> Iterator[CodeType]:
    """Yield the code of the current signal handlers that are written in Python."""
    for number in signal.valid_signals():
        handler: Any = signal.getsignal(number)
        while isinstance(handler, functools.partial):
            handler = handler.func
        for each in (handler, type(handler).__call__ if callable(handler) else None):
            code = getattr(each, "__code__", None)
            if isinstance(code, CodeType):
                yield code


def _is_through_a_handler(trace: TracebackType | None, codes: set[CodeType]) -> bool:
    while trace is not None:
        if trace.tb_frame.f_code in codes:
            return True
        arguments = getargvalues(trace.tb_frame)
        given = [arguments.locals.get(name) for name in arguments.args]
        rest = arguments.locals.get(arguments.varargs or "")
        if isinstance(rest, tuple):  # else the name stands for something else by now, which is not to be looked at
            given += rest
        interrupted = trace.tb_frame.f_back
        if interrupted is not None and any(each is interrupted for each in given):
            return True
        trace = trace.tb_next
    return False
