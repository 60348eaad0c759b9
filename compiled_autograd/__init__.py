"""PyTorch training, faster, without touching how people write it.

>>> import compiled_autograd as ca
>>> with ca.enable() as session:
...     loss.backward()

captures the tape that eager autograd recorded, compiles it, and runs that instead of the autograd engine.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from .versions import TESTED_TORCH, VERSION, UnsupportedTorchError, check_torch

import torch  # isort: skip

check_torch(torch.__version__)

try:
    from backends import Backend as _Backend  # noqa: F401
except ImportError as error:
    import backends as _other

    raise ImportError(
        f"compiled_autograd needs its own package 'backends', but {_other.__file__} is found before it: "
        "rename that one, or put it behind site-packages on sys.path"
    ) from error

from .api import compile_step, disable, enable, reset  # noqa: E402
from .capture.forward_lines import trace_sources  # noqa: E402
from .engine.session import Outcome, Session, Stats  # noqa: E402
from .errors import (  # noqa: E402
    BrokenCaptureError,
    CacheMissError,
    CompiledAutogradError,
    GradientMismatchError,
    InvalidSettingError,
    ReproductionError,
    UnknownSettingError,
    UnsupportedBackwardError,
)
from .inspection.view import TapeView, inspect  # noqa: E402
from .user_code.traceable import traceable  # noqa: E402

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
    "UnsupportedTorchError",
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
    """
    from .replay import Reproduction

    return Reproduction(path)
