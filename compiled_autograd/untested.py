"""Install the engine of a session: on an untested PyTorch the eager engine, unless ``untested_torch="try"`` works."""

from __future__ import annotations

import dataclasses
import functools
from time import perf_counter
from typing import Any

import torch
from torch._C import _ImperativeEngine
from torch.autograd import Variable

from .backends.torch_versions import TESTED_TORCH, is_tested
from .diagnostics.bypass import TURNED_OFF, UNTESTED_TORCH
from .diagnostics.progress import Wait
from .diagnostics.reporting import warn_once
from .engine.session import current
from .native.library import why_no_compiler, why_unsupported
from .outcomes import BYPASS, Outcome
from .process_state import PROCESS
from .settings import Settings
from .shadow_cache import Bypass


class EagerEngine(_ImperativeEngine):
    """PyTorch's engine, which also counts its backwards in the session. Nothing else of PyTorch is replaced."""

    def __init__(self, reason: Bypass) -> None:
        super().__init__()
        self._reason = reason

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        """Run one backward, with the arguments of this PyTorch version."""
        session = current()
        started = perf_counter()
        try:
            return super().run_backward(*args, **kwargs)
        finally:
            if session is not None:
                session.record(Outcome(BYPASS, reasons=(self._reason,), seconds={"run": perf_counter() - started}))


def ready_for(settings: Settings) -> Settings:
    """Install the engine for ``settings``, and return the settings in effect.

    On a tested PyTorch, all settings are in effect. On another one, ``untested_torch="try"`` is in effect only if the
    selftest passes. With ``COMPILED_AUTOGRAD=0``, the eager engine is installed on any PyTorch.
    """
    if settings.turned_off:
        _install_eager(TURNED_OFF)
        warn_once("COMPILED_AUTOGRAD=0 is set: in all sessions, all backwards run on PyTorch's own engine.")
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
    """Warn if the extension that was asked for cannot be built, and if a session will be slower than none since there
    is no C++ compiler."""
    if settings.extension == "all" and (wrong := why_unsupported()):
        warn_once(f"extension='all' has no effect: {wrong}.")
    if torch.backends.cuda.is_built() or not (missing := why_no_compiler()):
        return
    if settings.backend == "inductor":
        follows = 'backend "inductor" cannot compile for the CPU, and runs backwards call by call'
    elif settings.backend == "eager" and settings.native is not False:
        follows = 'hits of backend "eager" run without the extension'
    else:
        return
    runs = "runs" if settings.tune else "would run"
    warn_once(
        f"{missing}. Until then {follows}, which is slower than no session. tune=True {runs} frequent backwards on "
        "eager if that is faster."
    )


def _install_eager(reason: Bypass) -> None:
    if type(Variable._execution_engine) is _ImperativeEngine:  # else the compiling engine is installed already
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
        f"{text}, and the selftest failed on it. Every backward runs on PyTorch's own engine, despite "
        f"untested_torch='try'. {wrong}"
    )


def _tried(settings: Settings) -> str:
    """Return the result of :func:`_why_not`, and show the progress line during its first run."""
    progress = False if _why_not.cache_info().currsize else settings.progress
    with Wait(progress).shown(lambda: ("running the selftest", f"torch {torch.__version__} was not tested")):
        return _why_not()


@functools.cache
def _why_not() -> str:
    """Return in words why the selftest failed on this PyTorch; empty if it passed. Runs it once per process."""
    try:
        from .selftest import is_fine, run, sentence

        results = run()
        return "" if is_fine(results) else sentence(results)
    except Exception as error:  # noqa: BLE001  anything may have moved in an untested PyTorch
        return f"The selftest raised {type(error).__name__}: {error}"


PROCESS.register(_why_not, restart=_why_not.cache_clear)
