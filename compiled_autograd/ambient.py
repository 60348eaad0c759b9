"""State of the process and the thread that changes what a backward computes, without being part of the tape."""

from __future__ import annotations

from typing import Any

import torch

from backends.environment import chosen_settings

from . import nans

Ambient = tuple[tuple[str, Any], ...]
INDUCTOR_SETTINGS = "inductor_settings"
"""A part of this name is also in the environment of what Inductor compiled, for the store."""


def ambient() -> Ambient:
    """Named parts, compared by value: a variant made under one state never serves another."""
    parts: list[tuple[str, Any]] = [
        ("autocast", _autocast()),
        ("deterministic", torch._C._get_deterministic_algorithms()),
        ("deterministic_warn_only", torch._C._get_deterministic_algorithms_warn_only()),
        ("deterministic_fill", torch._C._get_deterministic_fill_uninitialized_memory()),
        ("check_nan", nans.looked_for()),
        ("default_dtype", torch.get_default_dtype()),
        ("matmul_precision", torch._C._get_float32_matmul_precision()),
        ("threads", torch.get_num_threads()),  # generated CPU kernels have it baked in
        (INDUCTOR_SETTINGS, chosen_settings()),
        ("mkldnn", torch._C._get_mkldnn_enabled()),
        (
            "cudnn",
            (torch._C._get_cudnn_enabled(), torch._C._get_cudnn_benchmark(), torch._C._get_cudnn_deterministic()),
        ),
    ]
    return tuple(parts)


def _autocast() -> Any:
    if not torch._C._is_any_autocast_enabled():
        return None
    return tuple(
        (device, str(torch.get_autocast_dtype(device)))
        for device in ("cpu", "cuda", "xpu", "mps", "mtia", "hpu")
        if torch.is_autocast_enabled(device)
    )
