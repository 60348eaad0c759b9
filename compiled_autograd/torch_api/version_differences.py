"""Functions that differ by PyTorch's version. The table of all differences is ``backends/torch_versions.py``."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch

from ..backends.torch_versions import DIFFERENCES, LAST, runs_own_loop
from ..backends.versions import has
from . import attributes

_Method = TypeVar("_Method", bound=Callable[..., Any])


def why_own_loop_is_unchecked() -> str:
    """Return why the own loop is off by default; empty where it is on."""
    if runs_own_loop(torch.__version__):
        return ""
    tested = f"torch {'.'.join(map(str, DIFFERENCES['own_loop'].since))} to {'.'.join(map(str, LAST))}"
    return f"its tests ran on {tested}, not on {torch.__version__}; extension='all' turns it on"


def reports_leaf(method: _Method) -> _Method:
    """Makes of ``accumulate_grad``, written as the engine of 2.13 calls it, what this version's engine calls.

    Since 2.13 the engine gives ``(variable, variable_grad, grad, has_post_hooks)`` and takes the result for the leaf's
    new ``.grad``. Before, it gives ``(variable, grad, has_post_hooks)``, has set ``.grad`` of what stands for the leaf
    to what stands for its ``.grad``, and insists on None (``torch/csrc/autograd/functions/accumulate_grad.cpp`` and
    ``torch/csrc/dynamo/python_compiled_autograd.cpp``).
    """
    if has("leaf_takes_result"):
        return method

    @functools.wraps(method)
    def before(self: Any, variable: torch.Tensor, grad: torch.Tensor | None, has_post_hooks: bool) -> None:
        with torch._C.DisableTorchFunction():  # a mode of the user's is not to see a stand-in
            variable_grad = attributes.grad(variable)
        method(self, variable, variable_grad, grad, has_post_hooks)

    return before  # type: ignore[return-value]


def has_aot_prologue(function: Any) -> bool:
    """Return whether AOTAutograd's ``autograd.Function`` has the attributes that :func:`aot_prologue` uses."""
    return not has("aot_generated_wrappers") or hasattr(function, "_bw_prologue_fn")


def aot_prologue(function: Any, saved: Sequence[Any], tangents: Sequence[Any]) -> Sequence[Any]:
    """Return the inputs of the graph of a compiled forward's backward, from the saved values and the incoming
    gradients.

    Since 2.13 AOTAutograd generates a function for each graph, which takes the gradients in a list. Before, one
    function reads the metadata of all graphs (``torch/_functorch/_aot_autograd/runtime_wrappers.py``).
    """
    if has("aot_generated_wrappers"):
        return function._bw_prologue_fn(tuple(saved), [], [], tangents)
    from torch._functorch._aot_autograd import runtime_wrappers

    prologue = runtime_wrappers._backward_prologue_functional  # type: ignore[attr-defined]
    return prologue(tuple(saved), [], [], function.metadata, function.maybe_subclass_metadata, *tangents)


def aot_epilogue(function: Any, results: Any) -> Sequence[Any]:
    """Return the results of the backward from those of its graph; versions as for :func:`aot_prologue`."""
    if has("aot_generated_wrappers"):
        return function._bw_epilogue_fn(results)
    from torch._functorch._aot_autograd import runtime_wrappers

    epilogue = runtime_wrappers._backward_epilogue_functional  # type: ignore[attr-defined]
    return epilogue(function.metadata, function.maybe_subclass_metadata, results)


def decomposing(table: Mapping[Any, Callable[..., Any]]) -> AbstractContextManager[Any]:
    """Return a context in which recorded operators use the decompositions of ``table``.

    Since 2.13 the mode that records them has the table of its tracer. Before, the table is in a variable. In 2.11 all
    threads share the variable, and only one may trace at a time (``torch/fx/experimental/proxy_tensor.py``).
    """
    if has("decompositions_of_mode"):
        return contextlib.nullcontext()
    from torch.fx.experimental.proxy_tensor import decompose

    return decompose(table)


@functools.cache
def prepare_fake_tensors() -> None:
    """Prepare fake tensors, before any thread uses them.

    In 2.11, built for CUDA but on a machine without a device, the first thread that uses them sets a device guard for
    the whole process, and destroys it when it ends: the next thread crashes. So the first one is a thread that does not
    end (``c10/core/impl/DeviceGuardImplInterface.cpp``).
    """
    if has("device_guard") or not torch.backends.cuda.is_built() or torch.cuda.is_available():
        return
    done = threading.Event()

    def stay() -> None:
        torch._C._ensureCUDADeviceGuardSet()
        done.set()
        threading.Event().wait()

    threading.Thread(target=stay, name="compiled_autograd_device_guard", daemon=True).start()
    done.wait()


def multiplies_many_sizes() -> bool:
    """Return whether a trace may multiply more than two sizes in one call, which nothing can run."""
    return not has("products_of_two_sizes")


NOT_TRACED = frozenset[str]() if has("cumprod_in_bulk") else frozenset({"CumprodBackward0"})
"""The engine's functions that are never traced. In 2.11, ``cumprod_backward`` runs some seven operators for each index
of the dimension where it sees a tensor subclass, as a fake tensor is one; otherwise, and since, a few for all of them
(``aten/src/ATen/native/ReduceOps.cpp``)."""


def words_for_unused(index: int) -> str:
    """Return the error of ``torch.autograd.grad`` for a tensor without a gradient, from ``THPEngine_run_backward``
    (``torch/csrc/autograd/python_engine.cpp``). Before 2.13 it does not name the tensor."""
    which = f"The differentiated Tensor at index {index}"
    if not has("unused_input_index"):
        which = "One of the differentiated Tensors"
    return f"{which} appears to not have been used in the graph. Set allow_unused=True if this is the desired behavior."
