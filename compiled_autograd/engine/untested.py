"""An untested PyTorch: every backward runs on the eager engine, and is counted as a bypass."""

from __future__ import annotations

from time import perf_counter
from typing import Any

from torch._C import _ImperativeEngine
from torch.autograd import Variable

from ..diagnostics.bypass import UNTESTED_TORCH
from .outcomes import BYPASS, Outcome
from .session import current


class EagerEngine(_ImperativeEngine):
    """PyTorch's engine, with a count of its backwards. Nothing else of PyTorch is replaced."""

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        """Run one backward, whatever arguments this version passes."""
        session = current()
        started = perf_counter()
        try:
            return super().run_backward(*args, **kwargs)
        finally:
            if session is not None:
                session.record(Outcome(BYPASS, reasons=(UNTESTED_TORCH,), seconds={"run": perf_counter() - started}))


def install_eager() -> None:
    """Come between Python and the engine, unless the compiling engine or this one is there already."""
    if type(Variable._execution_engine) is _ImperativeEngine:
        Variable._execution_engine = EagerEngine()
