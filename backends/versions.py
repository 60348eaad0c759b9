"""Where the versions of PyTorch that are supported differ, for what compiles: no other file of this folder asks which
of them this is. Everything else is written against the newest (2.13).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])


def user_override(entry: Any) -> Any:
    """What the user set an entry of a module of settings to, or ``_UNSET_SENTINEL``.

    Since 2.12 each thread has its own, in a ``ContextVar``. Before, there is one for all
    (``torch/utils/_config_module.py``).
    """
    return entry.user_override.get() if _VERSION >= (2, 12) else entry.user_override


def settings_belong_to_a_thread() -> bool:
    """Whether what one thread sets of Inductor's settings is nothing to the others; see :func:`user_override`."""
    return _VERSION >= (2, 12)


def plain_convolution_backward() -> Callable[..., Any] | None:
    """What Inductor is to make a plain call of the backward of a convolution with; None where it makes nothing else.

    Since 2.13 Inductor has a lowering of its own (``torch/_inductor/kernel/conv.py``), which can fall back on the plain
    call. Before, there was only that (``torch/_inductor/lowering.py``).
    """
    if _VERSION < (2, 13):
        return None
    from torch._inductor.kernel.conv import aten_convolution_backward_fallback

    return aten_convolution_backward_fallback


def leaves_out_casts() -> bool:
    """Whether a cast to 16 bits that is followed by one to more is left out, also with the setting to round as eager.

    Before 2.13 (``pointless_convert`` in ``torch/_inductor/fx_passes/joint_graph.py``).
    """
    return _VERSION < (2, 13)


def fuses_outer_loops_of_several_rows() -> bool:
    """Whether outer loops that take several rows in a step are fused where what they share holds one row.

    Before 2.14 (``OuterLoopFusedSchedulerNode`` in ``torch/_inductor/codegen/cpp.py``).
    """
    return _VERSION < (2, 14)


def reads_sizes_where_it_asserts_them() -> bool:
    """Whether code that asserts no sizes has no value for a symbol that is the size of a tensor alone.

    Since 2.14 (``PythonWrapperCodegen.codegen_inputs`` in ``torch/_inductor/codegen/wrapper.py``).
    """
    return _VERSION >= (2, 14)
