"""The process that compiles regions for another: :mod:`worker_process` starts it.

It takes graphs as text, on standard input, and gives artifacts, on standard output. It runs at a lower priority, and
ends when its input does, or when the one that asks has ended, whatever it is doing.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading

import msgspec
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from ..backends import Storing, get_backend
from ..guards.ambient import ambient
from ..lowering.stored_regions import graph_of
from .worker_process import READY, Reply, Request, dtype_of, receive, send, told


def answer(request: Request) -> Reply:
    """Compile one graph."""
    backend = get_backend(request.backend)
    assert isinstance(backend, Storing)
    torch.set_num_threads(request.threads)
    enabled, warn_only, fill = request.deterministic
    torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
    torch._C._set_deterministic_fill_uninitialized_memory(fill)
    torch.set_float32_matmul_precision(request.matmul_precision)
    torch.set_default_dtype(dtype_of(request.default_dtype))
    if told(ambient()) != request.state:
        raise ValueError("the other process is in a state that this one was not told of")
    graph_module = graph_of(request.code)
    mode = FakeTensorMode()
    with mode:
        examples = [
            torch.empty_strided(shape, strides, dtype=dtype_of(dtype), device=device)
            for shape, strides, dtype, device in request.inputs
        ]
    FakeTensorProp(graph_module, mode).propagate_dont_convert_inputs(*examples)
    return Reply(backend.save(backend.compile(graph_module, examples)), backend.environment())


_MILLISECONDS_BETWEEN_LOOKS = 1000


def _end_with(parent: int) -> None:
    """End this process when its parent is gone. The parent may be killed during a compile, or run another program, and
    its children may keep the pipe open. On Windows this process ends after its compile, whose result is not read."""
    if sys.platform == "win32":
        return
    pipe = select.poll()
    pipe.register(sys.stdin, 0)  # that it was closed is told in any case
    while os.getppid() == parent and not pipe.poll(_MILLISECONDS_BETWEEN_LOOKS):
        pass
    os._exit(0)


def main(parent: int) -> None:
    """Answer requests until the pipe is closed, or ``parent``, a process id, is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # that of a terminal does not reach it, and may be sent to it
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    if hasattr(os, "nice"):
        os.nice(5)  # lower would starve beside a training that keeps all cores busy
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a compiler prints is none of the replies
    with contextlib.suppress(EOFError, BrokenPipeError):
        send(replies, READY)
        while True:
            request = msgspec.msgpack.decode(receive(sys.stdin.buffer), type=Request)
            try:
                reply = answer(request)
            except Exception as error:  # noqa: BLE001  the one who asked compiles it himself, and sees the error
                reply = Reply(None, {}, f"{type(error).__name__}: {error}")
            send(replies, msgspec.msgpack.encode(reply))
    os._exit(0)  # a compiler may have threads that do not end by themselves


if __name__ == "__main__":
    main(os.getppid())
