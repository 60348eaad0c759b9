"""Compiles a region in another process, so that this process's interpreter and cores remain for the training.

The graph is sent as text with the shapes of its inputs, and returns as an artifact. Other graphs are compiled here.
"""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import IO, Any

import msgspec
import torch
from torch import fx

from ..backends import ArtifactError, Backend, Storing
from ..diagnostics.reporting import warn_once
from ..guards.ambient import Ambient, compile_state
from ..lowering.graph_hash import InputKind, kinds_of_inputs
from ..lowering.stored_regions import Made
from ..process_state import PROCESS
from ..steps.memory import has_bit


class Request(msgspec.Struct):
    """A graph to be compiled, and the state of the process that it depends on."""

    backend: str
    code: str
    inputs: list[InputKind]
    threads: int
    deterministic: tuple[bool, bool, bool]
    matmul_precision: str
    default_dtype: str
    state: str


class Reply(msgspec.Struct):
    """The artifact and its environment; else the error."""

    artifact: bytes | None
    environment: dict[str, str]
    error: str = ""


class ProcessEndsError(BaseException):
    """This process ends, and its code will not run. This is no failure, and no handler of failures catches it."""


def compile_elsewhere(
    ambient_state: Ambient, backend: Backend, graph_module: fx.GraphModule, examples: Sequence[Any]
) -> Made:
    """Compile in the other process where that can be, else here.

    Raises:
        ProcessEndsError: this process ended before it was compiled.
    """
    request = _request(ambient_state, backend, graph_module, examples)
    if request is not None:
        assert isinstance(backend, Storing)
        try:
            reply = WORKER.ask(request)
            if reply.artifact is not None and reply.environment == _without_cuda(backend.environment()):
                return Made(backend.load(reply.artifact), reply.artifact)
        except (OSError, EOFError, msgspec.DecodeError, ArtifactError) as error:
            if WORKER.ended:
                raise ProcessEndsError from None
            warn_once(
                f"the process that compiles in the background failed, and this process compiles instead: {error}."
            )
    return Made(backend.compile(graph_module, examples))


def _request(
    ambient_state: Ambient, backend: Backend, graph_module: fx.GraphModule, examples: Sequence[Any]
) -> Request | None:
    if not backend.slow or not isinstance(backend, Storing):
        return None
    inputs = kinds_of_inputs(graph_module, examples)
    if inputs is None or any(map(has_bit, examples)):
        return None  # the request does not say so
    if any(value.device.type != "cpu" for value in examples):
        return None  # its code could not be brought back
    state = dict(ambient_state)
    return Request(
        backend.name,
        graph_module.graph.python_code("self").src,
        inputs,
        state["threads"],
        (state["deterministic"], state["deterministic_warn_only"], state["deterministic_fill"]),
        state["matmul_precision"],
        str(state["default_dtype"]),
        told(ambient_state),
    )


def told(state: Ambient) -> str:
    """Return the state that the two processes must share. The other process never uses CUDA, nor compiles for it."""
    return repr([part for part in compile_state(state) if not part[0].startswith("cuda")])


def _without_cuda(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without CUDA, since the artifact is code for the CPU."""
    return {name: value for name, value in environment.items() if not name.startswith("cuda")}


class Worker:
    """The other process; started when it is first needed."""

    def __init__(self) -> None:
        self.ended = False
        self._process: subprocess.Popen[bytes] | None = None
        self._lock, self._stopping = threading.Lock(), threading.Lock()

    def ask(self, request: Request) -> Reply:
        """Have a request compiled, and wait for the reply. After an error the process is ended: its late reply would be
        mistaken for that to the next request.

        Raises:
            OSError, EOFError: the process could not be started, or ended.
            msgspec.DecodeError: the reply is damaged.
        """
        process = None
        with self._lock:
            try:
                starts = self._process is None and not self.ended
                if starts:
                    self._process = _start()
                process = self._process  # whoever stops it takes it out of here
                if self.ended or process is None:  # looked at last: who ends it finds the process, or is seen here
                    raise EOFError("it was stopped, or this process ends")
                assert process.stdin is not None and process.stdout is not None
                if starts:  # a long request, and much that is printed before, would wait for each other
                    receive(process.stdout)
                send(process.stdin, msgspec.msgpack.encode(request))
                return msgspec.msgpack.decode(receive(process.stdout), type=Reply)
            except BaseException:
                if process is not None:
                    _close(process)
                self.stop()
                raise

    def forget(self) -> None:
        """Forget the process in a forked child: it belongs to the parent, which would read the child's replies."""
        process = self._process
        self.__init__()  # type: ignore[misc]
        if process is None:
            return
        process.returncode = 0  # else Python warns of a process that runs on
        _close(process)

    def end(self) -> None:
        """End the process permanently, since this process ends."""
        self.ended = True
        self.stop()

    def stop(self) -> None:
        """End the process. A compiler that it has started goes on to its end: Inductor has it write where every process
        looks for what was compiled, and none looks whether that is whole."""
        with self._stopping:
            process, self._process = self._process, None
            if process is not None:
                process.kill()
                process.wait()


def _close(process: subprocess.Popen[bytes]) -> None:
    """Close both streams, which a thread that is gone since a fork may hold. The rest of a message is not written."""
    for stream in (process.stdin, process.stdout):
        if isinstance(stream, io.BufferedWriter | io.BufferedReader):
            with contextlib.suppress(OSError):  # somebody has closed all that he found
                stream.raw.close()


_BEGIN = (
    "import os, sys; parent = os.getppid(); sys.path[:] = dict.fromkeys([*sys.argv[1:], *sys.path]); del sys.argv[1:]; "
)
"""Before this has run, nothing is imported but what Python itself imports: the parent may be killed meanwhile."""
_MAIN = "from compiled_autograd.compiling.worker_main import main; main(parent)"


def _start() -> subprocess.Popen[bytes]:
    environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}
    for each in ("TORCH_TRACE", "TORCH_DTRACE", "TORCH_LOGS"):  # what is compiled there is told of here
        environment.pop(each, None)
    return subprocess.Popen(
        command(_MAIN),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        start_new_session=True,  # a Ctrl-C is for this process, which may go on
    )


def command(code: str) -> list[str]:
    """Return a command that runs Python code with this process's import path, except the current folder.

    ``-m`` and ``-c`` alone search that folder first, and so does an empty part of ``PYTHONPATH``: code that any user
    wrote there would run. ``-I`` prevents that.
    """
    return [sys.executable, "-I", "-c", _BEGIN + code, *_paths()]


def _paths() -> list[str]:
    """Return the import path: the absolute entries of ``sys.path``, after folders of modules now found elsewhere."""
    paths = [path for path in sys.path if Path(path).is_absolute()]
    for name in ("msgspec", "torch", "compiled_autograd"):
        file = str(sys.modules[name].__file__)
        spec = PathFinder.find_spec(name, paths)
        if spec is None or spec.origin != file:
            paths.insert(0, str(Path(file).absolute().parents[1]))
    return paths


_WORD = b"\0compiled_autograd\n"
"""First bytes of a message. Imports of Python or PyTorch may print other text before output is redirected."""
READY = b"ready"
"""The first message of the other process."""


def send(stream: IO[bytes], data: bytes) -> None:
    """Write a message: a word, its length, then the bytes."""
    stream.write(_WORD + len(data).to_bytes(8, "little") + data)
    stream.flush()


def receive(stream: IO[bytes]) -> bytes:
    """Read a message, and skip all text before it.

    Raises:
        EOFError: the other end was closed.
    """
    while not (line := stream.readline()).endswith(_WORD):
        if not line:
            raise EOFError("it ended before it had answered")
    size = int.from_bytes(stream.read(8), "little")
    data = stream.read(size)
    if not data or len(data) < size:  # no message is empty
        raise EOFError("it ended before it had answered")
    return data


def dtype_of(name: str) -> torch.dtype:
    """The dtype with a name such as ``torch.float32``."""
    found = getattr(torch, name.removeprefix("torch."))
    assert isinstance(found, torch.dtype)
    return found


WORKER = Worker()
PROCESS.register(WORKER, after_fork=WORKER.forget)
