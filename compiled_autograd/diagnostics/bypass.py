"""Bypasses: the reasons to run a backward on the eager engine, and the checks before the engine is asked."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch.autograd import forward_ad

from ..errors import BrokenCaptureError, CacheMissError, UnsupportedBackwardError
from ..native.interface import Question
from ..shadow_cache import Bypass, Miss, unsupported

CREATE_GRAPH = Bypass("create_graph", hint="only the eager engine runs a backward that is differentiated again")
BATCHED_GRADS = Bypass("batched_grads", hint="only the eager engine runs is_grads_batched, vmap and grad transforms")
FORWARD_AD = Bypass(
    "forward_ad", hint="a forward AD level is on; compiled code would drop the tangents of the gradients"
)
INFERENCE_MODE = Bypass(
    "inference_mode", hint="a capture cannot run in inference mode; call backward outside of the mode"
)
DISPATCH_MODE = Bypass("dispatch_mode", hint="a TorchDispatchMode is on; call backward outside of the mode")
TRACING = Bypass("tracing", hint="torch.compile, export or jit.trace is tracing this backward itself")
TORCH_COMPILED_AUTOGRAD = Bypass(
    "torch_compiled_autograd", hint="PyTorch's own compiled autograd is on; turn it off to use this one"
)
OTHER_THREAD = Bypass(
    "other_thread_in_backward",
    hint="another thread holds the engine's capture hook, which exists once in a process; the next backward is "
    "captured again",
)
INTERMEDIATE_INPUT = Bypass(
    "intermediate_input",
    hint="only gradients of tensors inside the tape are asked for, and the engine would free tensors saved by nodes "
    "that do not run. With retain_graph=True it compiles",
)
MAX_NESTED = 8
"""Maximum depth of nested compiled backwards. Each takes more of Python's stack than a backward of the engine."""
DEEP = Bypass("deep_reentrant", hint=f"more than {MAX_NESTED} nested backwards; the eager engine has threads for these")
INSIDE_ENGINE_CALL = Bypass(
    "inside_engine_call", hint="called inside a backward whose tape has a C++ hook, such as the one of retain_grad"
)
FORKED = Bypass(
    "forked",
    hint="this process was forked while another thread was compiling, and locks of that thread stay held: code that "
    "the parent had compiled runs, and eager runs the rest. To avoid this, use the start method spawn or forkserver",
)
INSIDE_COMPILE = Bypass(
    "inside_compile",
    hint="called during a walk or a compile, by code that Python ran there (gc, a signal handler, a backend): code "
    "that is compiled already runs, and eager runs the rest",
)
INTERRUPTED = Bypass("interrupted", hint="an exception, such as that of Ctrl-C, ended the backward before it ran")
BROKEN_CAPTURE = Bypass("broken_capture", hint="the engine failed while it reported a node; the backward did not run")
COMPILING = Bypass("compiling", hint="it is being compiled in the background; a later step will run the compiled code")
NOT_YET = Bypass(
    "not_yet",
    hint="it is new: it is compiled in the background once it has run on eager for as long as a compile is likely to "
    'hold up the training (2 s for the first one). on_miss="compile" compiles it at once',
)


def settings_change(names: str) -> Bypass:
    """A reason: settings of the process were others when the code was compiled."""
    return Bypass(
        "settings_change",
        names,
        "it was being compiled in the background when these settings of the process were changed, and the code was "
        'discarded; another try follows after more backwards. on_miss="compile" compiles under the settings of the '
        "step. Settings that hold for the whole training need no other try",
    )


OVER_BUDGET = Bypass(
    "over_budget",
    hint="it is new, and compiling has cost more time than hits have saved; compile_budget=SECONDS sets the limit of "
    "this loss",
)
ALL_ZERO_GRADIENTS = Bypass(
    "all_zero_gradients",
    hint="all its gradients were zero the last time, so that compiled code could not be checked; it is tried again "
    "from time to time, and tune=False always compiles",
)
CALL_BY_CALL = Bypass(
    "call_by_call",
    hint="the last times, users' code changed the rest of the backward (late_hook, saved_grad), and this rest ran call "
    "by call, slower than eager; it is tried again from time to time, and tune=False always compiles",
)
UNTESTED_TORCH = Bypass(
    "untested_torch",
    hint="this package was not tested on this PyTorch, and compiled code could give wrong gradients: "
    'untested_torch="try" runs the selftest at the first enable(), and compiles if it passes',
)
TURNED_OFF = Bypass("turned_off", hint="COMPILED_AUTOGRAD=0 in the environment turns all sessions off")
ON_MISS = Bypass("on_miss", hint='it is not in the cache, and on_miss="eager" or "raise" compiles nothing')
DDP_CPP_REDUCER = Bypass(
    "ddp_cpp_reducer",
    hint="DDP's reducer communicates from C++ hooks. Compiled code can call these hooks if the parameters are on the "
    "CPU, the C++ extension is built (the first such backward builds it), and .backward() got no inputs; otherwise "
    "only the eager engine can, also inside no_sync(). These always compile: fully_shard (a mesh of shape (ranks, 1) "
    "replicates), Python hooks that communicate, and DDP made under torch._dynamo.config.optimize_ddp = "
    "'python_reducer' if every rank uses the same parameters and no buffers",
)
DDP_OF_INPUTS = Bypass(
    DDP_CPP_REDUCER.kind,
    hint="the gradients of only some inputs were asked for, by .backward(inputs=...) or autograd.grad, and leaves have "
    "hooks of DDP's reducer: compiled code calls these hooks only if every leaf gets its gradient. A .backward() "
    "without inputs compiles, on the CPU and with the C++ extension",
)
VIEW_WRITE = Bypass(
    "view_write",
    hint="a function wrote in place into a part of a tensor, and the engine cannot tell this tape from a captured one "
    "with another function there; or the function is unknown",
)
STREAM_CAPTURE = Bypass(
    "stream_capture", hint="a CUDA graph is being captured on this stream; compiling or copying would break the capture"
)
CUDA_DEVICES = Bypass(
    "cuda_devices", hint="the tape uses several CUDA devices; the eager engine has a thread for each of them"
)
ROOTS_APART = Bypass(
    "cuda_devices",
    hint="backward is called on tensors on the CPU and on CUDA; the eager engine computes both parts at the same time, "
    "and raises the first error of the two",
)


def on_other_streams(what: str) -> Bypass:
    """Return the bypass of a tape of which a part, ``what``, was or may have been recorded on another CUDA stream than
    the current one."""
    return Bypass(
        "cuda_streams",
        hint=f"{what} may have been recorded on another CUDA stream than the one on which backward is called, and only "
        "the eager engine synchronizes streams. To compile, run forward and backward under one torch.cuda.stream",
    )


tracing_context = functools.partial(getattr, torch._guards._TLS, "tracing_context", None)
"""``TracingContext.try_get`` in one call (``torch/_guards.py``, 2.13)."""


is_batched = torch._C._functorch.is_legacy_batchedtensor
"""Return whether an initial gradient is batched, as with ``is_grads_batched``."""


def before_capture(create_graph: bool, grads: Sequence[torch.Tensor | None], depth: int) -> Bypass | None:
    """Return the reason to run a backward on the eager engine; None if no reason is known before the capture.

    Args:
        create_graph: the backward will be differentiated again.
        grads: the initial gradients.
        depth: the number of this thread's compiled backwards that enclose this one.
    """
    if create_graph:
        return CREATE_GRAPH
    if depth > MAX_NESTED:
        return DEEP
    if any(grad is not None and is_batched(grad) for grad in grads):
        return BATCHED_GRADS
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return TRACING
    if tracing_context() is not None:  # AOTAutograd differentiates a forward that it compiles
        return TRACING
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return BATCHED_GRADS
    if forward_ad._current_level >= 0:
        return FORWARD_AD
    if torch.is_inference_mode_enabled():
        return INFERENCE_MODE
    return DISPATCH_MODE if torch._C._len_torch_dispatch_stack() else None


def questions() -> list[Question]:
    """Return the questions by which C++ checks that :func:`before_capture` has no reason. C++ also checks the thread's
    dispatch keys: function transforms, ``jit.trace``, modes and inference mode set some."""
    threads_own = torch._guards._TLS
    if not hasattr(threads_own, "tracing_context"):
        threads_own.tracing_context = None  # as `tracing` leaves it: a missing attribute takes longer to look up
    return [
        (torch.compiler, "_is_compiling_flag", False),
        (tracing_context, None, None),
        (forward_ad, "_current_level", -1),
        (torch.is_inference_mode_enabled, None, False),
        (torch._C._len_torch_dispatch_stack, None, 0),
    ]


_DDP = "C++ DDP Reducer"
"""The name of the hooks of DDP's reducer in the engine's error (``torch/csrc/distributed/c10d/reducer.cpp``). The
engine refuses them in every walk, also for known structures, so that no captured structure lacks them."""


def is_refusal(error: Exception) -> bool:
    """Return whether the engine cannot report this tape. Any other error is a mistake of the user; eager raises it."""
    return isinstance(error, NotImplementedError) or "compiled autograd" in str(error).lower()


def refused_by_engine(error: BaseException, of_inputs: bool = False) -> Bypass:
    """Return the bypass for an error that the engine raised during its walk.

    Args:
        of_inputs: only the gradients of some inputs were asked for.
    """
    if _DDP in str(error):
        return DDP_OF_INPUTS if of_inputs else DDP_CPP_REDUCER
    first_sentence = str(error).partition("\n")[0].partition(". ")[0]
    return unsupported(f"{type(error).__name__}: {first_sentence[:120]}")


def says_that_it_was_freed(error: BaseException) -> bool:
    """Return whether the error says that the tape was freed by an earlier backward."""
    return str(error).startswith("Trying to backward through the graph a second time")


def reason_of_end(error: BaseException) -> tuple[Bypass, Sequence[Miss]]:
    """Return the bypass of a backward that raised ``error`` and did not run, and the misses of a CacheMissError."""
    if isinstance(error, BrokenCaptureError):
        return BROKEN_CAPTURE, ()
    if isinstance(error, CacheMissError):
        return ON_MISS, error.reasons
    if isinstance(error, UnsupportedBackwardError):
        return error.reason, ()
    return refused_by_engine(error) if says_that_it_was_freed(error) else INTERRUPTED, ()
