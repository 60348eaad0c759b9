"""``ctx.input_grad_buffers`` (since 2.15): sums of gradients that a ``backward`` may add to in place, and return None.

PyTorch's documentation allows None for each entry at any time. A compiled backward has no such sums: the additions are
part of compiled code, or come in another order. Backwards of the engine and of the own loop show the real sums.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

_PUBLIC = "input_grad_buffers"
BUFFERS = f"_{_PUBLIC}"
"""The attribute of ``ctx`` that the public property reads."""
NAMES = frozenset({_PUBLIC, BUFFERS} if hasattr(BackwardCFunction, BUFFERS) else ())
"""The names of both; empty before 2.15."""
_engines: Any = getattr(BackwardCFunction, BUFFERS, None)
_C: Any = torch._C  # the stubs of older versions lack a function


def no_buffers(ctx: Any, arguments: int | None) -> tuple[None, ...]:
    """Return the ``input_grad_buffers`` of a compiled backward: None for each argument of ``forward``.

    Args:
        arguments: the number of arguments of ``forward``; None if another node than that of ``ctx`` is running.

    Raises:
        RuntimeError: eager raises too, with the same text (``get_current_input_grad_buffers`` in
            ``torch/csrc/autograd/engine.cpp``, 2.15).
    """
    try:
        _engines.__get__(ctx)  # always raises: about hooks first, then because the engine is not running this node
    except RuntimeError as error:
        if "post-hooks" in str(error):
            raise
    if arguments is None:
        raise RuntimeError(f"{_PUBLIC} can only be accessed from the currently executing autograd.Function backward()")
    if _anomaly_mode():
        raise RuntimeError(f"{_PUBLIC} does not support anomaly detection")
    if _C._override_stale_capture_stream():
        raise RuntimeError(f"{_PUBLIC} does not support set_override_stale_capture_stream(True)")
    return (None,) * arguments


def unless_traced_elsewhere(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a getter of the engine's buffers that gives None for each argument while another thread is tracing."""

    @functools.wraps(original)
    def buffers(ctx: Any) -> Any:
        try:
            return original(ctx)
        except RuntimeError as error:
            if "anomaly" not in str(error) or _anomaly_mode():
                raise
        return (None,) * len(ctx.needs_input_grad)

    return buffers


def _anomaly_mode() -> bool:
    """Return whether anomaly mode with NaN checks is on.

    AOTAutograd turns on anomaly mode without NaN checks while it traces (``detect_anomaly`` in
    ``torch/_functorch/_aot_autograd/graph_capture_wrappers.py``, 2.15). The mode belongs to the process. So a compile
    in the background would make the backwards of all threads raise.
    """
    return torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()
