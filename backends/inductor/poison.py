"""Runs compiled code once with poison in all memory that it allocates, so that reads before a write show.

Fresh memory often holds zeros, or the last run's values, which are right as long as they are the same. Nothing that
other code runs is changed: the code runs in a namespace of its own, with other functions that allocate.
"""

from __future__ import annotations

import copy
import functools
import math
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

from ..artifacts import LINKED
from ..protocol import Compiled
from .cuda.direct import Direct
from .cuda.graphs import REPLAY, Replayed
from .cuda.kernels import Aligned, alignment_of
from .straight_line.straight_line import PROGRAM, StraightLine
from .wrappers import namespace_of

_ALLOCATING = "empty_strided"
"""Names of functions that allocate begin so in Inductor's generated code (``_inductor/codegen/wrapper.py``, 2.13)."""
_SHARED = "empty_strided_p2p"
"""Except this one: its memory belongs to other processes too, which may be reading it."""
_FRESH = frozenset(
    {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided", "empty_quantized"}
)
"""Operators of ATen that give memory as it is."""


def run_poisoned(compiled: Compiled, arguments: list[Any], form: str | None = None) -> Sequence[Any]:
    """Run it once, as :data:`Compiled` has it. What cannot be poisoned (CUDA graphs, foreign functions) just runs.

    Args:
        compiled: of any backend.
        arguments: are emptied.
        form: which of its forms runs, where it has some; without it, the one that would run now.
    """
    if isinstance(compiled, StraightLine):
        form = form or compiled.form_for(arguments)
        if form == PROGRAM:
            return compiled.run_form(form, arguments, poisoned)
        compiled.has_run = True
        compiled = compiled.compiled
    if isinstance(compiled, Replayed):
        form = form or compiled.form_for(arguments)
        if form == REPLAY:
            return compiled(arguments)  # it would record the poisoning
        return compiled.run_code(arguments, functools.partial(run_poisoned, form=form))
    if isinstance(compiled, Direct):
        return compiled.run_form(form or compiled.form_for(arguments), arguments, run_poisoned)
    code = _generated_code(compiled)
    if code is not None:
        return code(arguments)
    if _allocates_by_operators(compiled):
        with _FreshMemory():
            return compiled(arguments)
    return compiled(arguments)


def poisoned(namespace: Mapping[str, Any]) -> dict[str, Any]:
    """The namespace of generated code, with functions that poison what they allocate."""
    return {name: _poisoning(value) if _allocates(name, value) else value for name, value in namespace.items()}


def _allocates(name: str, value: Any) -> bool:
    return name.startswith(_ALLOCATING) and name != _SHARED and callable(value)


def _poisoning(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(allocate)
    def poisoning(*arguments: Any, **keywords: Any) -> torch.Tensor:
        return poison(allocate(*arguments, **keywords))

    return poisoning


def poison(tensor: torch.Tensor) -> torch.Tensor:
    """Fill all of a tensor's memory, gaps between its elements too."""
    whole = tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)
    try:
        whole.fill_(_poison_for(tensor.dtype))
    except (RuntimeError, TypeError):  # types that are stored and not computed with, as those of four bits
        whole.view(torch.uint8).fill_(255)
    return tensor


def _poison_for(dtype: torch.dtype) -> Any:
    if dtype.is_floating_point or dtype.is_complex:
        return math.nan
    return True if dtype is torch.bool else torch.iinfo(dtype).max


# ---- Inductor's code -----------------------------------------------------------------------------------------------


def _generated_code(compiled: Any) -> Callable[[list[Any]], Any] | None:
    """The function ``call`` of generated code, in a poisoned namespace; None where it is none, or not all of it."""
    call = getattr(compiled, "current_callable", None) or compiled
    call, checked, written = (call.compiled, call.checked, ()) if isinstance(call, Aligned) else alignment_of(call)
    namespace = namespace_of(call)
    if namespace is None or written:
        return None  # or there is something around it
    made = _poisoned_call(call, poisoned(namespace))
    return Aligned(made, checked) if checked else made


def _poisoned_call(call: Any, changed: dict[str, Any]) -> Any:
    if not isinstance(call, types.MethodType):
        return _in_namespace(call, changed)
    owner = copy.copy(call.__self__)  # a `Runner`, with the parts that a graph was partitioned into
    if hasattr(owner, "partitions"):
        owner.partitions = [_in_namespace(part, changed) for part in owner.partitions]
    return types.MethodType(_in_namespace(call.__func__, changed), owner)


def _in_namespace(function: Any, namespace: dict[str, Any]) -> Any:
    if not isinstance(function, types.FunctionType):
        return function
    return types.FunctionType(
        function.__code__, namespace, function.__name__, function.__defaults__, function.__closure__
    )


# ---- a graph's own code --------------------------------------------------------------------------------------------


class _FreshMemory(TorchDispatchMode):
    """Poisons what operators give that do not write."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function.namespace == "aten" and function.overloadpacket.__name__ in _FRESH:
            poison(result)
        return result


def _allocates_by_operators(compiled: Any) -> bool:
    """Return whether code is that of an FX graph, made here or loaded, and names such an operator."""
    function = getattr(compiled, "__func__", None)
    if not isinstance(function, types.FunctionType):
        return False
    ours = isinstance(compiled.__self__, fx.GraphModule) or function.__globals__.get("__name__") == LINKED
    return ours and not _FRESH.isdisjoint(function.__code__.co_names)
