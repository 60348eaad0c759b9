"""PyTorch training, faster, without touching how people write it.

>>> import compiled_autograd as ca
>>> with ca.enable() as session:
...     loss.backward()

captures the tape that eager autograd recorded, compiles it, and runs that instead of the autograd engine.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from .versions import VERSION

import torch  # isort: skip

try:
    from backends import Backend as _Backend  # noqa: F401
    from backends.torch_versions import TESTED_TORCH, is_tested
except ImportError as error:
    import backends as _other

    if hasattr(_other, "ENTRY_POINT_GROUP"):
        raise
    raise ImportError(
        f"compiled_autograd needs its own package 'backends', but {_other.__file__} is found before it: "
        "rename that one, or put it behind site-packages on sys.path"
    ) from error

from .errors import (
    BrokenCaptureError,
    CacheMissError,
    CompiledAutogradError,
    GradientMismatchError,
    InvalidSettingError,
    ReproductionError,
    UnknownSettingError,
    UnsupportedBackwardError,
)

try:
    from .api import compile_step, disable, enable, reset
    from .capture.forward_lines import trace_sources
    from .engine.session import Session
    from .inspection.view import TapeView, inspect
    from .outcomes import Outcome, Stats
    from .user_code.traceable import traceable
except (ImportError, AttributeError) as error:  # something private of PyTorch's has moved
    if is_tested(torch.__version__):
        raise
    from . import without_engine

    globals().update(without_engine.names(error))

if TYPE_CHECKING:
    from .replay import Reproduction

__version__ = VERSION

__all__ = [
    "TESTED_TORCH",
    "BrokenCaptureError",
    "CacheMissError",
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
    """Read a reproduction that :meth:`CompiledGraph.save` wrote. Nothing of the file is run.

    Raises:
        ReproductionError: it is no reproduction, it is damaged or of another version, or it names what is not here.
        OSError: it cannot be read.
        ImportError: PyTorch was not tested, and something of it that this package needs has moved.
    """
    from .replay import Reproduction

    return Reproduction(path)
