"""Where the versions of PyTorch that are supported differ: the one file that asks which of them this is.

Everything else is written against the newest (2.13), and uses from here what an older one does in another way. Each
entry says what the rule is in which version, and where it stands in PyTorch.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch

from ..versions import release

_VERSION = release(torch.__version__)
_Method = TypeVar("_Method", bound=Callable[..., Any])

OWN_LOOP_CHECKED = ((2, 12), (2, 13))
"""Where all tests of the own loop were run, so that it is on by default."""


def why_own_loop_is_unchecked() -> str:
    """Why it is not on by default; empty where it is."""
    if _VERSION in OWN_LOOP_CHECKED:
        return ""
    checked = " and ".join(f"{major}.{minor}" for major, minor in OWN_LOOP_CHECKED)
    return f"it was not checked on torch {torch.__version__}, but on {checked}; own_loop=True has it all the same"


def reports_leaf(method: _Method) -> _Method:
    """Makes of ``accumulate_grad``, written as the engine of 2.13 calls it, what this version's engine calls.

    Since 2.13 the engine gives ``(variable, variable_grad, grad, has_post_hooks)`` and takes the result for the leaf's
    new ``.grad``. Before, it gives ``(variable, grad, has_post_hooks)``, has set ``.grad`` of what stands for the leaf
    to what stands for its ``.grad``, and insists on None (``torch/csrc/autograd/functions/accumulate_grad.cpp`` and
    ``torch/csrc/dynamo/python_compiled_autograd.cpp``).
    """
    if _VERSION >= (2, 13):
        return method

    @functools.wraps(method)
    def before(self: Any, variable: torch.Tensor, grad: torch.Tensor | None, has_post_hooks: bool) -> None:
        with torch._C.DisableTorchFunction():  # a mode of the user's is not to see a stand-in
            variable_grad = variable.grad
        method(self, variable, variable_grad, grad, has_post_hooks)

    return before  # type: ignore[return-value]


def has_aot_prologue(function: Any) -> bool:
    """Whether the ``autograd.Function`` that AOTAutograd made has what :func:`aot_prologue` uses."""
    return _VERSION < (2, 13) or hasattr(function, "_bw_prologue_fn")


def aot_prologue(function: Any, saved: Sequence[Any], tangents: Sequence[Any]) -> Sequence[Any]:
    """What the graph of a compiled forward's backward takes, from what was saved and the gradients that come in.

    Since 2.13 AOTAutograd generates a function for each graph, which takes the gradients in a list. Before, one
    function reads the metadata of all graphs (``torch/_functorch/_aot_autograd/runtime_wrappers.py``).
    """
    if _VERSION >= (2, 13):
        return function._bw_prologue_fn(tuple(saved), [], [], tangents)
    from torch._functorch._aot_autograd import runtime_wrappers

    prologue = runtime_wrappers._backward_prologue_functional  # type: ignore[attr-defined]
    return prologue(tuple(saved), [], [], function.metadata, function.maybe_subclass_metadata, *tangents)


def aot_epilogue(function: Any, results: Any) -> Sequence[Any]:
    """What the backward gives, from what its graph gives; versions as for :func:`aot_prologue`."""
    if _VERSION >= (2, 13):
        return function._bw_epilogue_fn(results)
    from torch._functorch._aot_autograd import runtime_wrappers

    epilogue = runtime_wrappers._backward_epilogue_functional  # type: ignore[attr-defined]
    return epilogue(function.metadata, function.maybe_subclass_metadata, results)


def decomposing(table: Mapping[Any, Callable[..., Any]]) -> AbstractContextManager[Any]:
    """To be entered while operators are recorded, for ``table`` to be heeded.

    Since 2.13 the mode that records them has the table of its tracer. Before, the table stands in a variable; in 2.11
    it is one for all threads, of which only one may trace at a time (``torch/fx/experimental/proxy_tensor.py``).
    """
    if _VERSION >= (2, 13):
        return contextlib.nullcontext()
    from torch.fx.experimental.proxy_tensor import decompose

    return decompose(table)


@functools.cache
def prepare_fake_tensors() -> None:
    """To be called before fake tensors are used, by whatever thread.

    In 2.11, built for CUDA but on a machine without a device, the first thread that uses them sets a guard for devices
    of the whole process, and takes it along when it ends: the next thread dies of it. So the first one is a thread
    that does not end (``c10/core/impl/DeviceGuardImplInterface.cpp``).
    """
    if _VERSION >= (2, 12) or not torch.backends.cuda.is_built() or torch.cuda.is_available():
        return
    done = threading.Event()

    def stay() -> None:
        torch._C._ensureCUDADeviceGuardSet()
        done.set()
        threading.Event().wait()

    threading.Thread(target=stay, name="compiled_autograd_device_guard", daemon=True).start()
    done.wait()


def multiplies_many_sizes() -> bool:
    """Whether a trace may multiply more than two sizes in one call, which nothing can run.

    Before 2.15 (``_build_proxy_for_sym_expr`` in ``torch/fx/experimental/proxy_tensor.py``).
    """
    return _VERSION < (2, 15)


NOT_TRACED = frozenset[str]() if _VERSION >= (2, 12) else frozenset({"CumprodBackward0"})
"""The engine's functions that are never traced. In 2.11, ``cumprod_backward`` runs some seven operators for each index
of the dimension where it sees a tensor subclass, as a fake tensor is one; otherwise, and since, a few for all of them
(``aten/src/ATen/native/ReduceOps.cpp``)."""


def words_for_unused(index: int) -> str:
    """What ``torch.autograd.grad`` says of a tensor without a gradient, from ``THPEngine_run_backward``
    (``torch/csrc/autograd/python_engine.cpp``); before 2.13 it does not say which tensor."""
    which = "One of the differentiated Tensors" if _VERSION < (2, 13) else f"The differentiated Tensor at index {index}"
    return f"{which} appears to not have been used in the graph. Set allow_unused=True if this is the desired behavior."
