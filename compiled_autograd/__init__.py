"""Faster PyTorch training without changes to the model or the training loop.

>>> import compiled_autograd as ca
>>> with ca.enable() as session:
...     loss.backward()

This captures the tape that eager autograd recorded, compiles the tape, and runs the compiled code instead of the
autograd engine.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from . import old_names
from .backends.torch_versions import TESTED_TORCH, is_tested
from .errors import (
    BrokenCaptureError,
    CacheMissError,
    CompiledAutogradError,
    GradientMismatchError,
    InvalidSettingError,
    ReproductionError,
    UnknownSettingError,
    UnsupportedBackwardError,
    WrongUseError,
)
from .versions import VERSION

if TYPE_CHECKING:
    from .api import compile_step, disable, enable, reset
    from .capture.forward_lines import trace_sources
    from .comparing.result import Comparison
    from .comparing.step import compare
    from .engine.session import Session
    from .inspection.view import TapeView, inspect
    from .outcomes import Outcome, Stats
    from .replay import Reproduction
    from .user_code.traceable import traceable

__version__ = VERSION

__all__ = [
    "TESTED_TORCH",
    "BrokenCaptureError",
    "CacheMissError",
    "Comparison",
    "CompiledAutogradError",
    "GradientMismatchError",
    "InvalidSettingError",
    "Outcome",
    "ReproductionError",
    "Session",
    "Stats",
    "TapeView",
    "UnknownSettingError",
    "UnsupportedBackwardError",
    "WrongUseError",
    "compare",
    "compile_step",
    "disable",
    "enable",
    "inspect",
    "load",
    "reset",
    "trace_sources",
    "traceable",
]


def load(path: str | os.PathLike[str]) -> Reproduction:
    """Read a reproduction that :meth:`CompiledGraph.save` wrote. Reading runs no code of the file.

    Raises:
        ReproductionError: the file is no reproduction, damaged, of another version, or names operators, dtypes or
            devices that do not exist here.
        OSError: the file cannot be read.
        ImportError: this package was not tested on this PyTorch, and needs a private name that has moved.
    """
    from .replay import Reproduction

    return Reproduction(path)


def _load() -> bool:
    """Import the public names, and return whether that succeeded. Imported lazily: the command line ``shadow-cache``
    also imports this package, and works without torch."""
    import torch

    names = globals()
    try:
        from . import api, outcomes
        from .capture.forward_lines import trace_sources
        from .comparing.result import Comparison
        from .comparing.step import compare
        from .engine.session import Session
        from .inspection import view
        from .user_code.traceable import traceable
    except (ImportError, AttributeError) as error:  # a private name of PyTorch has moved
        if is_tested(torch.__version__):
            raise
        from . import without_engine

        names.update(without_engine.names(error))
        return False
    for module in (api, outcomes, view):
        names.update({name: value for name, value in vars(module).items() if name in __all__})
    names.update(
        Comparison=Comparison, compare=compare, Session=Session, trace_sources=trace_sources, traceable=traceable
    )
    return True


def _start_if_asked() -> None:
    """Run all backwards of the process in one session if ``COMPILED_AUTOGRAD=1`` is set."""
    if _load():
        from .runner.start import start_if_asked

        start_if_asked()


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        _load()
        return globals()[name]


def __dir__() -> list[str]:
    return sorted(__all__)


old_names.install()

if os.environ.get("COMPILED_AUTOGRAD"):
    _start_if_asked()
