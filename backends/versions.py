"""Functions that differ by PyTorch's version, for code that compiles. The table is ``torch_versions.py``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import torch_versions


def has(name: str) -> bool:
    """Return whether a rule of :data:`torch_versions.DIFFERENCES` holds in the PyTorch that is installed."""
    return torch_versions.has(name, torch.__version__)


def user_override(entry: Any) -> Any:
    """Return the user's value of an entry in a module of settings, or ``_UNSET_SENTINEL``.

    Since 2.12 each thread has its own, in a ``ContextVar``. Before, there is one for all
    (``torch/utils/_config_module.py``).
    """
    return entry.user_override.get() if has("settings_of_a_thread") else entry.user_override


def settings_belong_to_a_thread() -> bool:
    """Return whether each thread has its own settings of Inductor; see :func:`user_override`."""
    return has("settings_of_a_thread")


def plain_convolution_backward() -> Callable[..., Any] | None:
    """Return the call that Inductor should make of the backward of a convolution; None if it always makes that call.

    Since 2.13 Inductor has a lowering of its own (``torch/_inductor/kernel/conv.py``), which can fall back on the plain
    call. Before, there was only that (``torch/_inductor/lowering.py``).
    """
    if not has("convolution_lowering"):
        return None
    from torch._inductor.kernel.conv import aten_convolution_backward_fallback

    return aten_convolution_backward_fallback


def leaves_out_casts() -> bool:
    """Return whether Inductor leaves out a cast to 16 bits and back, also with the setting to round as eager."""
    return not has("casts_kept")


def fuses_outer_loops_of_several_rows() -> bool:
    """Return whether Inductor fuses outer loops that take several rows, where the buffer between them holds one."""
    return not has("outer_loops_sound")


def reads_sizes_where_it_asserts_them() -> bool:
    """Return whether generated code reads the size of a tensor into a symbol only if it asserts sizes too."""
    return has("sizes_read_where_asserted")
