"""PyTorch training, faster, without touching how people write it.

>>> import compiled_autograd as ca
>>> with ca.enable() as session:
...     loss.backward()

captures the tape that eager autograd recorded, compiles it, and runs that instead of the autograd engine.
"""

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

from .errors import (  # noqa: E402
    BrokenCaptureError,
    CacheMissError,
    CompiledAutogradError,
    GradientMismatchError,
    InvalidSettingError,
    UnknownSettingError,
    UnsupportedBackwardError,
)
from .inspection import TapeView, inspect  # noqa: E402
from .session import Outcome, Session, Stats, compile_step, disable, enable  # noqa: E402

__version__ = VERSION

__all__ = [
    "TESTED_TORCH",
    "BrokenCaptureError",
    "CacheMissError",
    "CompiledAutogradError",
    "GradientMismatchError",
    "InvalidSettingError",
    "Outcome",
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
    "reset",
]


def reset() -> None:
    """Forget every graph in memory, compiled or captured. Sessions keep their counts, the store on disk its entries."""
    from .churn import CHURN
    from .disk import close_all
    from .graphs import GRAPHS
    from .traced_calls import TRACED
    from .tuning import TUNING
    from .walk import forget

    forget()
    GRAPHS.clear()
    TUNING.clear()
    CHURN.clear()
    TRACED.clear()
    close_all()
