"""State of the process and the thread that changes what a backward computes, without being part of the tape.

It is asked for in each backward, when the tape is released: so nothing in here raises, whatever the user has set, and
all of it takes some microseconds. What each kernel asks for itself when it runs, compiled or not, such as whether
denormal numbers are flushed to zero or products of float16 on the CPU may be added in float16, need not be known here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import _C

from ..backends.inductor.environment import chosen_settings, questions_about_settings
from ..ir import nan_checks
from ..native.interface import Question

Ambient = tuple[tuple[str, Any], ...]
CHECKPOINTED = "checkpointed"
"""A part that a tape with several unpack hooks adds: which of these belong to one checkpointed call."""
REDUCED = "ddp_reducer"
"""A part of the state of a tape whose leaves have hooks of DDP's reducer: these leaves."""
TRACED = "traceable_functions"
"""A part that a tape with functions marked as traceable adds: what their backwards depend on beside tensors."""
INDUCTOR_SETTINGS = "inductor_settings"
"""Name of a part that is also in the environment of Inductor's code, for the store."""


def ambient() -> Ambient:
    """Named parts, compared by value: a variant made under one state never serves another."""
    parts = (
        ("autocast", _autocast()),
        ("deterministic", _C._get_deterministic_algorithms()),
        ("deterministic_warn_only", _C._get_deterministic_algorithms_warn_only()),
        ("deterministic_fill", _C._get_deterministic_fill_uninitialized_memory()),
        ("check_nan", nan_checks.looked_for()),
        ("default_dtype", torch.get_default_dtype()),
        ("matmul_precision", _matmul_precision()),
        ("mkldnn_precision", _precision("mkldnn")),
        ("threads", torch.get_num_threads()),  # generated CPU kernels have it baked in
        (INDUCTOR_SETTINGS, chosen_settings()),
        ("mkldnn", _C._get_mkldnn_enabled()),
        ("mkldnn_deterministic", _C._get_mkldnn_deterministic()),
        ("nnpack", _C._get_nnpack_enabled()),
    )
    return parts + _cuda() if torch.cuda._initialized else parts


def questions() -> list[Question] | None:
    """Return questions with which C++ checks whether :func:`ambient` would still return the same, except for the
    thread's dispatch keys, some of which autocast sets. None if autocast or checks for NaNs are on, or CUDA is in use:
    there the questions would not suffice."""
    if _C._is_any_autocast_enabled() or torch.is_anomaly_enabled() or torch.cuda._initialized:
        return None
    asked: list[Callable[[], Any]] = [
        torch.is_anomaly_enabled,
        _C._get_deterministic_algorithms,
        _C._get_deterministic_algorithms_warn_only,
        _C._get_deterministic_fill_uninitialized_memory,
        torch.get_default_dtype,
        _matmul_precision if _matmul_precision() == _MIXED else _C._get_float32_matmul_precision,
        *(functools.partial(_C._get_fp32_precision_getter, "mkldnn", each) for each in ("matmul", "conv", "rnn")),
        torch.get_num_threads,
        _C._get_mkldnn_enabled,
        _C._get_mkldnn_deterministic,
        _C._get_nnpack_enabled,
    ]
    return [
        (torch.cuda, "_initialized", False),
        *((each, None, each()) for each in asked),
        *questions_about_settings(),
    ]


def compile_state(state: Ambient) -> Ambient:
    """Return the part of a state on which the compiling of a lowered graph depends."""
    return tuple(part for part in state if part[0] not in ("autocast", "check_nan", CHECKPOINTED, REDUCED, TRACED))


def _precision(backend: str) -> tuple[str, ...]:
    """Return the rounding of products, convolutions and recurrent layers of float32. It includes settings for all
    backends, and for all operators of one backend (``fp32_precision`` in ``torch/backends/__init__.py``, 2.13). Unset
    means "ieee"."""
    get = _C._get_fp32_precision_getter
    found = (get(backend, "matmul"), get(backend, "conv"), get(backend, "rnn"))
    return _IEEE if found == _UNSET else tuple("ieee" if each == "none" else each for each in found)


_UNSET = ("none", "none", "none")
_IEEE = ("ieee", "ieee", "ieee")


def _matmul_precision() -> str:
    """Return the value that ``torch.set_float32_matmul_precision`` set. If backends differ from it, PyTorch raises, and
    :func:`_precision` has the values."""
    try:
        return _C._get_float32_matmul_precision()
    except RuntimeError:
        return _MIXED


_MIXED = "mixed"


def _cuda() -> Ambient:
    return (
        ("cudnn", (_C._get_cudnn_enabled(), _C._get_cudnn_benchmark(), _C._get_cudnn_deterministic())),
        ("cuda_precision", _precision("cuda")),
        ("cuda_bf16_reduction", _C._get_cublas_allow_bf16_reduced_precision_reduction()),
        ("cuda_fp16_reduction", _C._get_cublas_allow_fp16_reduced_precision_reduction()),
        ("cuda_fp16_accumulation", _C._get_cublas_allow_fp16_accumulation()),
        ("cuda_blas", _C._get_blas_preferred_backend()),
        ("cuda_linalg", _C._get_linalg_preferred_backend()),
    )


def _autocast() -> Any:
    if not _C._is_any_autocast_enabled():
        return None
    return tuple(
        (device, str(torch.get_autocast_dtype(device)))
        for device in ("cpu", "cuda", "xpu", "mps", "mtia", "hpu")
        if torch.is_autocast_enabled(device)
    )
