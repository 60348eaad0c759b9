"""The process that compiles regions for another: :mod:`worker_process` starts it.

It takes graphs as text, on standard input, and gives artifacts, on standard output. It runs at a lower priority, and
ends when its input does, whatever it is doing.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading

import msgspec
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from backends import Storing, get_backend

from ..guards.ambient import ambient
from ..lowering.stored_regions import graph_of
from .worker_process import Reply, Request, dtype_of, receive, send, told


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


def _take(requests: queue.SimpleQueue[bytes]) -> None:
    """Hand on what is asked, beside what is being compiled: whoever asks may be killed in the midst of that."""
    while True:
        try:
            requests.put(receive(sys.stdin.buffer))
        except EOFError:
            _end()


def _end() -> None:
    """Nobody reads what is made any more: end, with the compilers that were started."""
    if hasattr(os, "killpg") and os.getpgid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


def main() -> None:
    """Answer until nobody asks."""
    if hasattr(os, "nice"):
        os.nice(5)  # lower would starve beside a training that keeps all cores busy
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever a compiler prints is none of the replies
    requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_take, args=(requests,), daemon=True).start()
    while True:
        request = msgspec.msgpack.decode(requests.get(), type=Request)
        try:
            reply = answer(request)
        except Exception as error:  # noqa: BLE001  the one who asked compiles it himself, and sees the error
            reply = Reply(None, {}, f"{type(error).__name__}: {error}")
        try:
            send(replies, msgspec.msgpack.encode(reply))
        except BrokenPipeError:
            _end()


if __name__ == "__main__":
    main()
