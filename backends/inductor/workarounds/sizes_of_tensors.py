"""Has generated code read sizes that are symbols from its tensors, where it asserts no sizes (torch 2.14 and later).

``PythonWrapperCodegen.codegen_inputs`` (``torch/_inductor/codegen/wrapper.py``) writes ``s0 = arg0_size[0]``. Since
2.14 it does so only with ``size_asserts``, which is off here: a symbol that is no argument of its own has no value
then, and the code fails with ``NameError``. Here the setting is on while these lines are written. It stays off for the
assertions, which take time at each call and which artifacts do not have (``assert_size_stride_grouped``).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from ...versions import reads_sizes_where_it_asserts_them
from .inside import Inside

_inside = Inside()


@contextlib.contextmanager
def sizes_read_from_tensors() -> Iterator[None]:
    """Inside, in this thread, generated code reads sizes from its tensors."""
    if not reads_sizes_where_it_asserts_them():
        yield
        return
    _install()
    with _inside.entered():
        yield


@functools.cache
def _install() -> None:
    """Put ours in front of Inductor's; it changes something in threads that are inside alone."""
    from torch._inductor import config
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen

    before = PythonWrapperCodegen.codegen_inputs

    @functools.wraps(before)
    def codegen_inputs(self: Any) -> None:
        with config.patch(size_asserts=True) if _inside else contextlib.nullcontext():
            before(self)

    PythonWrapperCodegen.codegen_inputs = codegen_inputs  # type: ignore[method-assign]
