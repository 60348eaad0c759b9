"""What is known, before the engine is asked, to be the eager engine's: one question for each reason."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch.autograd import forward_ad

from ..errors import BrokenCaptureError, CacheMissError, UnsupportedBackwardError
from ..native.interface import Question
from ..shadow_cache import Bypass, Miss, unsupported

CREATE_GRAPH = Bypass("create_graph", hint="a backward that is differentiated again is left to the eager engine")
BATCHED_GRADS = Bypass("batched_grads", hint="is_grads_batched, vmap and grad transforms are left to the eager engine")
FORWARD_AD = Bypass(
    "forward_ad", hint="a dual level is on, and gradients may have tangents, which compiled code would drop"
)
INFERENCE_MODE = Bypass(
    "inference_mode", hint="the stand-ins of a capture would be inference tensors; call backward outside of it"
)
DISPATCH_MODE = Bypass("dispatch_mode", hint="a TorchDispatchMode is on; leave it, or call backward outside of it")
TRACING = Bypass("tracing", hint="torch.compile, export or jit.trace is tracing this backward itself")
TORCH_COMPILED_AUTOGRAD = Bypass(
    "torch_compiled_autograd", hint="PyTorch's own compiled autograd is on; turn it off to use this one"
)
OTHER_THREAD = Bypass(
    "other_thread_in_backward", hint="the engine's seam belongs to the process; the next backward is captured again"
)
INPUT_INSIDE = Bypass(
    "input_inside_tape",
    hint="the gradient of a tensor inside the tape is asked for, and of none below it: the engine would free what the "
    "node that made it saved, although that does not run. With retain_graph=True it compiles",
)
MAX_NESTED = 8
"""Compiled backwards inside one another. Each takes more of Python's stack than one of the engine's."""
DEEP = Bypass("deep_reentrant", hint=f"more than {MAX_NESTED} backwards inside one another; eager has threads for that")
INSIDE_ENGINE_CALL = Bypass(
    "inside_engine_call", hint="called inside a backward whose tape has a hook made by C++, as retain_grad makes one"
)
FORKED = Bypass(
    "forked",
    hint="this process was forked while another thread compiled, whose locks nobody lets go of here: what its "
    "parent had compiled runs, the rest is left to the eager engine. The start method spawn or forkserver does without",
)
INSIDE_COMPILE = Bypass(
    "inside_compile",
    hint="called in the midst of a walk or of compiling, by what Python ran there (gc, a signal's handler, a backend): "
    "what is compiled already runs, the rest is left to the eager engine",
)
INTERRUPTED = Bypass("interrupted", hint="an exception, such as that of Ctrl-C, ended it before anything ran")
BROKEN_CAPTURE = Bypass("broken_capture", hint="the engine failed while it reported a node, and nothing was run")
COMPILING = Bypass("compiling", hint="it is being compiled in the background; a later step switches over")
OVER_BUDGET = Bypass(
    "over_budget",
    hint="it is new, and compiling has cost more than hits have made up for; compile_budget=SECONDS sets how much may "
    "be lost",
)
ZERO_GRADIENTS = Bypass(
    "zero_gradients",
    hint="the last time all its gradients were zero, which shows nothing of compiled code; this is tried again from "
    "time to time, and tune=False does without",
)
CALL_BY_CALL = Bypass(
    "call_by_call",
    hint="the last times users' code changed what was still to run (late_hook, saved_grad), and the rest ran call by "
    "call, slower than eager; this is tried again from time to time, and tune=False does without",
)
UNTESTED_TORCH = Bypass(
    "untested_torch",
    hint="this PyTorch was not tested, and could give a wrong gradient if it was compiled for: "
    'untested_torch="try" has the selftest run at the first enable(), and compiles if it passes',
)
TURNED_OFF = Bypass("turned_off", hint="COMPILED_AUTOGRAD=0 in the environment turns every session off")
ON_MISS = Bypass("on_miss", hint='not in the cache, and on_miss="eager" or "raise" compiles nothing')
DDP_CPP_REDUCER = Bypass(
    "ddp_cpp_reducer",
    hint="DDP's reducer communicates from C++ hooks. They are called from compiled code where the parameters are on "
    "the CPU, the extension in C++ is built (the first one builds it), and .backward() was given no inputs; else by "
    "the eager engine alone, also inside no_sync(). What compiles everywhere: fully_shard (a mesh of shape (ranks, 1) "
    "replicates), Python hooks that communicate, and DDP made under torch._dynamo.config.optimize_ddp = "
    "'python_reducer' where every rank uses the same parameters and no buffers",
)
DDP_OF_INPUTS = Bypass(
    DDP_CPP_REDUCER.kind,
    hint="the gradients of some inputs were asked for, by .backward(inputs=...) or autograd.grad, and leaves have "
    "hooks of DDP's reducer: compiled code calls these only where every leaf gets its gradient. A .backward() without "
    "inputs compiles, on the CPU and with the extension in C++",
)
VIEW_WRITE = Bypass(
    "view_write",
    hint="another function has written in place into a part of a tensor than in a tape that was captured, and the "
    "engine does not tell the two apart; or it cannot be told which function it was",
)
STREAM_CAPTURE = Bypass(
    "stream_capture", hint="a CUDA graph is being captured on this stream, which compiling or copying would spoil"
)
CUDA_DEVICES = Bypass(
    "cuda_devices", hint="the tape lies on several CUDA devices; the eager engine has a thread for each of them"
)
ROOTS_APART = Bypass(
    "cuda_devices",
    hint="what backward is called on lies on the CPU and on CUDA; the eager engine computes these parts at the same "
    "time, and of errors the first one counts",
)


def on_other_streams(what: str) -> Bypass:
    """Part of the tape was recorded on another CUDA stream than the current one, or may have been: ``what`` was."""
    return Bypass(
        "cuda_streams",
        hint=f"{what} may not have been recorded on the CUDA stream that backward is called on, and only the eager "
        "engine makes streams wait for one another; forward and backward under one torch.cuda.stream compile",
    )


tracing_context = functools.partial(getattr, torch._guards._TLS, "tracing_context", None)
"""As ``TracingContext.try_get``, in one call (``torch/_guards.py``, 2.13)."""


is_batched = torch._C._functorch.is_legacy_batchedtensor
"""Return whether a gradient that a backward starts from is batched, as ``is_grads_batched`` has it."""


def before_capture(create_graph: bool, grads: Sequence[torch.Tensor | None], depth: int) -> Bypass | None:
    """The reason to leave a backward to the eager engine; None where there is none yet.

    Args:
        create_graph: the backward is to be differentiated again.
        grads: the gradients that it starts from.
        depth: in how many compiled backwards of this thread it is called.
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
    """What tells without Python that :func:`before_capture` has no reason, beside the keys of dispatch that are set for
    the thread: transforms of functions, ``jit.trace``, modes and inference mode each set some."""
    threads_own = torch._guards._TLS
    if not hasattr(threads_own, "tracing_context"):
        threads_own.tracing_context = None  # as `tracing` leaves it: to find that it is not there takes long
    return [
        (torch.compiler, "_is_compiling_flag", False),
        (tracing_context, None, None),
        (forward_ad, "_current_level", -1),
        (torch.is_inference_mode_enabled, None, False),
        (torch._C._len_torch_dispatch_stack, None, 0),
    ]


_DDP = "C++ DDP Reducer"
"""What the engine says of the hooks of DDP's reducer (``torch/csrc/distributed/c10d/reducer.cpp``). It refuses them
while it collects the tape, at every walk and whether or not it knows the structure, so no structure leaves them out."""


def is_refusal(error: Exception) -> bool:
    """Whether the engine cannot report this tape; else the error is for a mistake of the user's, which eager words."""
    return isinstance(error, NotImplementedError) or "compiled autograd" in str(error).lower()


def refused_by_engine(error: BaseException, of_inputs: bool = False) -> Bypass:
    """The reason where the engine has raised while it walked.

    Args:
        of_inputs: it was asked for the gradients of some inputs alone.
    """
    if _DDP in str(error):
        return DDP_OF_INPUTS if of_inputs else DDP_CPP_REDUCER
    first_sentence = str(error).partition("\n")[0].partition(". ")[0]
    return unsupported(f"{type(error).__name__}: {first_sentence[:120]}")


def says_that_it_was_freed(error: BaseException) -> bool:
    """Whether the engine was asked for a tape that has run before, and did not keep it."""
    return str(error).startswith("Trying to backward through the graph a second time")


def reason_of_end(error: BaseException) -> tuple[Bypass, Sequence[Miss]]:
    """Why a backward that has raised ``error`` ran nowhere, and how it was no hit if that is why."""
    if isinstance(error, BrokenCaptureError):
        return BROKEN_CAPTURE, ()
    if isinstance(error, CacheMissError):
        return ON_MISS, error.reasons
    if isinstance(error, UnsupportedBackwardError):
        return error.reason, ()
    return refused_by_engine(error) if says_that_it_was_freed(error) else INTERRUPTED, ()
