"""Has PyTorch read ``.grad`` past Python while Inductor compiles, where a library has put a property in its place.

Each tensor that is described for tracing is asked for its ``grad`` (``safe_grad`` in
``torch/_subclasses/meta_utils.py``, 2.11 to 2.15), constants of Inductor's own patterns too. A property that raises, or
that registers a hook as nnsight's does, ended the compile.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from .instead import Instead

_GRAD: Any = torch._C.TensorBase.grad


def _past_python(before: Callable[[Any], Any], tensor: Any) -> Any:
    with torch._logging.hide_warnings(torch._logging._internal.safe_grad_filter):
        return _GRAD.__get__(tensor)


_INSTEAD = Instead("torch._subclasses.meta_utils", "safe_grad", _past_python)


def grad_read_past_python() -> contextlib.AbstractContextManager[None]:
    """Inside, in this thread, no property in the place of ``torch.Tensor.grad`` is asked."""
    return contextlib.nullcontext() if torch.Tensor.grad is _GRAD else _INSTEAD.inside()
