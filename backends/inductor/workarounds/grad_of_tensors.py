"""Has PyTorch read ``.grad`` past Python while Inductor compiles, where a library has put a property in its place.

Each tensor that is described for tracing is asked for its ``grad`` (``safe_grad`` in
``torch/_subclasses/meta_utils.py``, 2.11 to 2.15), constants of Inductor's own patterns too. A property that raises, or
that registers a hook as nnsight's does, ended the compile.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch

from .inside import Inside

_GRAD: Any = torch._C.TensorBase.grad
_inside = Inside()


@contextlib.contextmanager
def grad_read_past_python() -> Iterator[None]:
    """Inside, in this thread, no property in the place of ``torch.Tensor.grad`` is asked."""
    if torch.Tensor.grad is _GRAD:
        yield
        return
    _install()
    with _inside.entered():
        yield


@functools.cache
def _install() -> None:
    """Put ours in front of PyTorch's; it changes something in threads that are inside alone."""
    from torch._subclasses import meta_utils

    before: Any = meta_utils.safe_grad

    @functools.wraps(before)
    def safe_grad(tensor: Any) -> Any:
        if not _inside:
            return before(tensor)
        with torch._logging.hide_warnings(torch._logging._internal.safe_grad_filter):
            return _GRAD.__get__(tensor)

    meta_utils.safe_grad = safe_grad  # type: ignore[assignment]
