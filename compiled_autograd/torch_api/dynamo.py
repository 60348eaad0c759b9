"""Functions that ``torch.compile`` must not trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])


def keep_from_dynamo(code: Any) -> None:
    """Have ``torch.compile`` run code, and what that calls, as it is.

    A step that it compiles breaks at its ``backward``, which Dynamo runs as Python: and would look at each frame of
    ours in there, where ``torch.compiler.is_compiling()`` is then true. ``torch._dynamo.disable`` says the same, but
    takes seconds to import (``torch/csrc/dynamo/eval_frame.c``, 2.13).
    """
    eval_frame = torch._C._dynamo.eval_frame
    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(code, eval_frame._FrameExecStrategy(skip, skip))


def questions_about_dynamo() -> list[tuple[Any, str | None, Any]]:
    """Return questions with which C++ checks that Dynamo does not look at frames of the calling thread, as it does for
    Python code called by a compiled function. It would look at each function that C++ calls, since no frame of this
    package is around them that :func:`keep_from_dynamo` has it skip. For the form see ``native.interface.Question``."""
    return [(torch._C._dynamo.eval_frame.get_eval_frame_callback, None, None)]


def not_compiled(function: _Function) -> _Function:
    """Have ``torch.compile`` run a function as it is, and break its graphs there rather than look into it
    (``InliningInstructionTranslator.check_inlineable`` in ``torch/_dynamo/symbolic_convert.py``, 2.13)."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    keep_from_dynamo(function.__code__)
    return function
