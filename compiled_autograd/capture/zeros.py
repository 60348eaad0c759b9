"""Zeros that the engine makes for undefined gradients of a Python function, before it reports the function."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from . import symbols
from .grad_dtypes import edges, metadata_of
from .recording import Recording

_LAYOUTS = {1: torch.sparse_coo, 2: torch.sparse_csr, 4: torch.sparse_csc, 5: torch.sparse_bsr, 6: torch.sparse_bsc}
"""``c10/core/Layout.h``."""


class RecordZeros(TorchDispatchMode):
    """Records the zeros that the engine makes while it prepares a Python function; everything else is refused."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self.recording = recording

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is torch.ops.aten.zeros.default:
            return self.recording.record_zeros(
                args[0], {name: kwargs.get(name) for name in ("dtype", "device", "layout")}
            )
        self.recording.refuse(f"{function} while the engine prepares {self.recording.calls[-1].name}")
        return function(*tree_map(_concrete, args), **tree_map(_concrete, kwargs))


def _concrete(value: Any) -> Any:
    symbol = symbols.symbol_of(value)
    return value if symbol is None else symbol.value


def layout_of(grad: Any) -> Any:
    """The layout that the engine expects of a gradient, by its number, where it is not strided; else True."""
    edge = next(edges(grad), None)
    return True if edge is None else _LAYOUTS.get(metadata_of(edge)[0][4], True)
