"""Has generated code read symbolic sizes from its tensors, if it asserts no sizes (torch 2.14 and later).

``PythonWrapperCodegen.codegen_inputs`` (``torch/_inductor/codegen/wrapper.py``) writes ``s0 = arg0_size[0]``. Since
2.14 it does so only with ``size_asserts``, which is off here: a symbol that is no argument of its own has no value
then, and the code fails with ``NameError``. Here the setting is on while these lines are written. It stays off for the
assertions, which take time at each call and which artifacts do not have (``assert_size_stride_grouped``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from ...versions import reads_sizes_where_it_asserts_them
from .instead import Instead


def _as_if_asserted(before: Callable[[Any], None], wrapper: Any) -> None:
    from torch._inductor import config

    with config.patch(size_asserts=True):
        before(wrapper)


_INSTEAD = Instead("torch._inductor.codegen.wrapper:PythonWrapperCodegen", "codegen_inputs", _as_if_asserted)


def sizes_read_from_tensors() -> contextlib.AbstractContextManager[None]:
    """Inside, in this thread, generated code reads sizes from its tensors."""
    return _INSTEAD.inside() if reads_sizes_where_it_asserts_them() else contextlib.nullcontext()
