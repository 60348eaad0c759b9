"""Install the engine that a session needs; on a PyTorch that was never tested, the eager one unless asked to try."""

from __future__ import annotations

import dataclasses
import functools
from time import perf_counter
from typing import Any

import torch
from torch._C import _ImperativeEngine
from torch.autograd import Variable

from .backends.signal_handlers import raise_what_a_handler_raised
from .backends.torch_versions import TESTED_TORCH, is_tested
from .diagnostics.bypass import TURNED_OFF, UNTESTED_TORCH
from .diagnostics.progress import Wait
from .diagnostics.reporting import warn_once
from .engine.session import current
from .native.library import why_no_compiler
from .outcomes import BYPASS, Outcome
from .process_state import PROCESS
from .settings import Settings
from .shadow_cache import Bypass


class EagerEngine(_ImperativeEngine):
    """PyTorch's engine, with a count of its backwards. Nothing else of PyTorch is replaced."""

    def __init__(self, reason: Bypass) -> None:
        super().__init__()
        self._reason = reason

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        """Run one backward, whatever arguments this version passes."""
        session = current()
        started = perf_counter()
        try:
            return super().run_backward(*args, **kwargs)
        finally:
            if session is not None:
                session.record(Outcome(BYPASS, reasons=(self._reason,), seconds={"run": perf_counter() - started}))


def ready_for(settings: Settings) -> Settings:
    """Install what ``settings`` need, and return the settings that hold.

    On a tested PyTorch these are the ones given. Elsewhere, ``untested_torch="try"`` holds if the selftest passes.
    With ``COMPILED_AUTOGRAD=0`` the eager engine is installed on any.
    """
    if settings.turned_off:
        _install_eager(TURNED_OFF)
        warn_once("COMPILED_AUTOGRAD=0 is set: every session leaves all backwards to PyTorch's own engine.")
        return settings
    tested = is_tested(torch.__version__)
    wrong = _tried(settings) if settings.untested_torch == "try" and not tested else None
    if tested or wrong == "":
        from .engine.engine import install

        install()
        _tell_of_no_compiler(settings)
        return settings
    _install_eager(UNTESTED_TORCH)
    warn_once(_warning(wrong), key=f"untested torch: {wrong}")
    return dataclasses.replace(settings, untested_torch="eager")


def _tell_of_no_compiler(settings: Settings) -> None:
    """Warn where no backward of a session can be faster than without it, since there is no C++ compiler."""
    if torch.backends.cuda.is_built() or not (missing := why_no_compiler()):
        return
    if settings.backend == "inductor":
        follows = 'backend "inductor" cannot compile for the CPU, and runs the calls of a backward one by one'
    elif settings.backend == "eager" and settings.native is not False:
        follows = 'hits of backend "eager" run without the extension'
    else:
        return
    leaves = "leaves" if settings.tune else "would leave"
    warn_once(
        f"{missing}. Until then {follows}, which takes longer than no session. tune=True {leaves} backwards that come "
        "often to eager where that is faster."
    )


def _install_eager(reason: Bypass) -> None:
    if type(Variable._execution_engine) is _ImperativeEngine:  # else the compiling engine is there already
        Variable._execution_engine = EagerEngine(reason)


def _warning(wrong: str | None) -> str:
    text = f"compiled_autograd was not tested on torch {torch.__version__} (tested: {TESTED_TORCH})"
    if wrong is None:
        return (
            f"{text}. Every backward runs on PyTorch's own engine. To compile, install a tested torch or a newer "
            "compiled_autograd, or set untested_torch='try' (COMPILED_AUTOGRAD_UNTESTED_TORCH=try), which compiles if "
            "the selftest passes."
        )
    return (
        f"{text}, and the selftest did not pass on it. Every backward runs on PyTorch's own engine, in spite of "
        f"untested_torch='try'. {wrong}"
    )


def _tried(settings: Settings) -> str:
    """Return what :func:`_why_not` does, with a line for whoever waits for the first answer."""
    progress = False if _why_not.cache_info().currsize else settings.progress
    with Wait(progress).shown(lambda: ("running the selftest", f"torch {torch.__version__} was not tested")):
        return _why_not()


@functools.cache
def _why_not() -> str:
    """Return why nothing is to be compiled on this PyTorch; empty if the selftest passes. Runs it once in a process."""
    try:
        from .selftest import is_fine, run, sentence

        results = run()
        return "" if is_fine(results) else sentence(results)
    except Exception as error:  # noqa: BLE001  anything may have moved in a PyTorch that was never tested
        raise_what_a_handler_raised(error)
        return f"It failed: {type(error).__name__}: {error}"


PROCESS.register(_why_not, restart=_why_not.cache_clear)
