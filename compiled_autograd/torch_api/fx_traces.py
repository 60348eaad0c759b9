"""Keeps traces of FX in one thread away from the modules of all others.

While ``fx.Tracer.trace`` runs, it replaces ``__call__`` and ``__getattr__`` of ``torch.nn.Module`` in the process
(``_Patcher.patch_method`` in ``torch/fx/_symbolic_trace.py``, 2.11 to 2.15), and sets a flag at which forwards of
``torch.compile`` raise. Inductor traces now and then as it compiles. If the training calls a model meanwhile, in
another thread, the trace would take the call for a part of its own.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from torch.fx import _symbolic_trace

from ..process_state import PROCESS

_FLAG = "_is_fx_tracing_flag"


class _Thread(threading.local):
    traces_alone = False


_thread = PROCESS.register(_Thread())


def trace_alone() -> None:
    """Have the traces of the calling thread change no module for other threads, from now on."""
    _thread.traces_alone = True
    if _symbolic_trace._Patcher.patch_method is _original:
        _symbolic_trace._Patcher.patch_method = _patch_method  # type: ignore[method-assign, assignment]


_original = _symbolic_trace._Patcher.patch_method


def _patch_method(patcher: Any, cls: type, name: str, new: Callable[..., Any], deduplicate: bool = True) -> Any:
    """Patch a method as FX does, but for the calling thread alone if it is to trace so."""
    if _thread.traces_alone:
        new = _only_here(getattr(cls, name), new)
        if getattr(_symbolic_trace, _FLAG, False):
            setattr(_symbolic_trace, _FLAG, False)
    return _original(patcher, cls, name, new, deduplicate)


def _only_here(before: Callable[..., Any], new: Callable[..., Any]) -> Callable[..., Any]:
    here = threading.get_ident()

    @functools.wraps(before)
    def method(*args: Any, **kwargs: Any) -> Any:
        return (new if threading.get_ident() == here else before)(*args, **kwargs)

    return method
