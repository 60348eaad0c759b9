"""Products and convolutions of float32 on CUDA whose operands a GPU may round to ten bits (TF32), as its settings say.

What cuBLAS and cuDNN do with an operand is up to each algorithm: one rounds it, one cuts it off, one takes it as it is.
Which algorithm runs may depend on strides and on how memory is aligned. So two runs that are both right may be as far
apart as that rounding takes them, downstream of such a call too. How far that is, is seen in float64, with operands
that are rounded so.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import _C
from torch.utils._python_dispatch import TorchDispatchMode

from .perturbing import ELSEWHERE, HARDLY, Move, perturbed

_DEVICE = "cuda"
_UNIT = 2.0**-11
"""By how much rounding to the nearest number of ten bits moves a number at most."""
TOLERANCE = 2.0**-9
"""Limit of rounding, relative to a value and to the root mean square of all values beside it, if float64 is not
available: one side truncates two operands, and the other does not."""
_BITS = 13
"""Number of bits that TF32 lacks, compared with float32."""

_PRODUCTS = {"mm": (0, 1), "bmm": (0, 1), **dict.fromkeys(("addmm", "baddbmm", "addbmm", "_addmm_activation"), (1, 2))}
_CONVOLUTIONS = {"convolution": (0, 1), "convolution_backward": (0, 1, 2), "cudnn_convolution": (0, 1)}
_RECURRENT = {"_cudnn_rnn": (0, 1), "_cudnn_rnn_backward": (0, 1, 4, 5, 6, 7, 8, 9)}
_OPERANDS: dict[str, Mapping[str, tuple[int, ...]]] = {
    "matmul": _PRODUCTS,
    "conv": _CONVOLUTIONS,
    "rnn": _RECURRENT,
}
"""By what the setting of PyTorch's is called, operators of ATen, and which of their arguments are rounded."""
_NAMED = re.compile(r"\baten\.(\w+)")

Operands = Mapping[str, tuple[int, ...]]


def rounding_operators(values: Iterable[Any]) -> Operands:
    """Operators that may round so as the settings are now, and their operands; none without float32 on CUDA.

    Args:
        values: tensors that a region is given.
    """
    found: dict[str, tuple[int, ...]] = {}
    if any(map(_may_be_rounded, values)):
        for kind, operators in _OPERANDS.items():
            if _C._get_fp32_precision_getter("cuda", kind) == "tf32":
                found.update(operators)
    return found


def _may_be_rounded(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.device.type == _DEVICE
        and value.dtype in (torch.float32, torch.complex64)
    )


def tolerance_of(text: str, operators: Operands) -> float:
    """:data:`TOLERANCE` where one of the operators is in the text of an ATen graph; else 0."""
    return TOLERANCE if operators and not operators.keys().isdisjoint(_NAMED.findall(text)) else 0.0


class RoundedOperands(TorchDispatchMode):
    """Rounds what these operators are given, in a way of its own for each number: 1 cuts off, 2 rounds to the nearest,
    and others move it at random by as much. One below 0 moves it at random, but hardly at all."""

    def __init__(self, operators: Operands, number: int) -> None:
        super().__init__()
        self._operators, self._number = operators, number
        self._calls = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        positions = self._operators.get(function.overloadpacket.__name__) if function.namespace == "aten" else None
        if positions is not None:
            self._calls += 1
            args = [self._rounded(each, index) if index in positions else each for index, each in enumerate(args)]
        return function(*args, **(kwargs or {}))

    def _rounded(self, value: Any, position: int) -> Any:
        if not isinstance(value, torch.Tensor) or value.dtype not in (torch.float64, torch.complex128):
            return value
        if self._number in (1, 2) and value.dtype is torch.float64:
            return _to_ten_bits(value, nearest=self._number == 2)
        place = ELSEWHERE + (self._calls << 4) + position
        return perturbed(value, Move(_UNIT if self._number > 0 else HARDLY, self._number), place)


def _to_ten_bits(value: torch.Tensor, nearest: bool) -> torch.Tensor:
    bits = value.to(torch.float32).view(torch.int32)
    if nearest:
        bits = bits + (1 << (_BITS - 1))
    short = (bits & -(1 << _BITS)).view(torch.float32).to(torch.float64)
    return torch.where(value.isfinite() & short.isfinite(), short, value)
