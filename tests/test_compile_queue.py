"""The compile queue: who waits for a job, who takes what came of it, and how it ends."""

from __future__ import annotations

import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import compiled_autograd as ca
from compiled_autograd.compiling import queue
from compiled_autograd.compiling.jobs import Job
from compiled_autograd.compiling.queue import QUEUE
from compiled_autograd.lowering.region_compiler import RegionCompiler
from compiled_autograd.threads.compile_thread import COMPILER

from .helpers import in_subprocess, in_threads, same_bits


class _TimeIsUpError(Exception):
    pass


@pytest.fixture
def alarm() -> Iterator[None]:
    def handler(number: int, frame: object) -> None:
        raise _TimeIsUpError

    before = signal.signal(signal.SIGALRM, handler)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def _grad(x: torch.Tensor) -> torch.Tensor:
    (grad,) = torch.autograd.grad((x.sin() * x.exp()).sum(), x)
    return grad


class _Slow:
    """A backend that counts its compiles, and waits in each."""

    def __init__(self) -> None:
        self.let, self.began = threading.Event(), threading.Event()
        self.threads: list[int] = []

    def __call__(self, graph_module: torch.fx.GraphModule, examples: Any) -> Callable[..., Any]:
        self.threads.append(threading.get_ident())
        self.began.set()
        assert self.let.wait(60)
        return graph_module.forward


def test_an_interrupted_step_leaves_its_compile_to_the_next(alarm: None) -> None:
    backend, x = _Slow(), torch.randn(8, requires_grad=True)
    right = _grad(x)
    with ca.enable(backend=backend, cache_dir=False, on_miss="compile") as session:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(_TimeIsUpError):
            _grad(x)
        assert QUEUE.busy
        threading.Timer(0.2, backend.let.set).start()
        assert same_bits(_grad(x), right) and same_bits(_grad(x), right)
    assert backend.threads == [COMPILER.thread] and session.last is not None and session.last.outcome == "hit"
    assert session.stats().compiles == 1 and session.stats().failures == 0


def test_a_handler_may_run_a_backward_while_its_step_waits(alarm: None) -> None:
    """Also the same one: it waits for the same job."""
    backend, x = _Slow(), torch.randn(8, requires_grad=True)
    right, found = _grad(x), list[torch.Tensor]()

    def handler(number: int, frame: object) -> None:
        threading.Timer(0.2, backend.let.set).start()
        with torch.enable_grad():
            found.append(_grad(x))

    signal.signal(signal.SIGALRM, handler)
    with ca.enable(backend=backend, cache_dir=False, on_miss="compile") as session:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        assert same_bits(_grad(x), right)
    assert same_bits(found[0], right) and len(backend.threads) == 1
    assert session.stats().backwards == 2 and session.stats().compiles == 1


def test_steps_of_several_threads_wait_for_one_thread() -> None:
    backend, x = _Slow(), torch.randn(8, requires_grad=True)
    right, sessions = _grad(x), list[ca.Session]()

    def work() -> None:
        with ca.enable(backend=backend, cache_dir=False, on_miss="compile") as session:
            assert same_bits(_grad(x), right)
        sessions.append(session)

    threading.Timer(0.5, backend.let.set).start()
    in_threads(work, work, work, timeout=30)
    assert {*backend.threads} == {COMPILER.thread}
    assert len(backend.threads) == sum(each.stats().compiles for each in sessions) <= 3


def test_what_a_backend_raises_that_is_no_exception_comes_out() -> None:
    def stops(graph_module: torch.fx.GraphModule, examples: Any) -> Callable[..., Any]:
        raise KeyboardInterrupt("by the user of a debugger")

    x = torch.randn(8, requires_grad=True)
    right = _grad(x)
    with ca.enable(backend=stops, cache_dir=False, on_miss="compile"), pytest.raises(KeyboardInterrupt):
        _grad(x)
    with ca.enable(backend="eager", cache_dir=False, on_miss="compile") as session:
        assert same_bits(_grad(x), right) and same_bits(_grad(x), right)
    assert session.stats().hits == 1  # the thread is still there


@pytest.mark.parametrize("on_miss", ["compile", "background"])
def test_a_trace_has_the_autocast_of_the_step(on_miss: str) -> None:
    @ca.traceable
    def hook(grad: torch.Tensor) -> torch.Tensor:
        return grad * (2.0 if torch.is_autocast_enabled("cpu") else 3.0)

    with ca.enable(backend="aot_eager", cache_dir=False, on_miss=on_miss) as session:
        for inside in (True, False, True, False, True, False):
            for _ in range(3):
                x = torch.ones(4, requires_grad=True)
                y = x * 1.0
                y.register_hook(hook)
                loss = y.sum()
                with torch.autocast("cpu", torch.bfloat16, enabled=inside):
                    (grad,) = torch.autograd.grad(loss, x)
                assert grad.tolist() == [2.0 if inside else 3.0] * 4
                assert session.wait(60)
    assert session.stats().hits


_ENDS = """
import signal, time
import torch
import compiled_autograd as ca

def slow(graph_module, examples):
    end = time.time() + 60
    while time.time() < end:
        torch.ones(3) + 1
    return graph_module.forward

def handler(number, frame):
    raise KeyboardInterrupt

signal.signal(signal.SIGALRM, handler)
signal.setitimer(signal.ITIMER_REAL, 1)
with ca.enable(backend=slow, cache_dir=False, on_miss="compile"):
    try:
        torch.ones(3, requires_grad=True).exp().sum().backward()
    except KeyboardInterrupt:
        print("interrupted")
"""


def test_a_program_ends_soon_after_its_wait_was_interrupted() -> None:
    began = time.monotonic()
    result = in_subprocess(_ENDS)
    assert result.returncode == 0 and "interrupted" in result.stdout, result.stderr
    assert "terminate" not in result.stderr
    assert time.monotonic() - began < 50


def test_a_thread_that_an_error_would_end_goes_on(monkeypatch: pytest.MonkeyPatch, alarm: None) -> None:
    """Users' functions may be called at the end of a job, such as ``warnings.showwarning``."""

    def shows(*given: Any) -> None:
        raise RuntimeError("no warning is shown here")

    def fails(graph_module: torch.fx.GraphModule, examples: Any) -> Any:
        raise ValueError("no code for this")

    x = torch.randn(8, requires_grad=True)
    right = _grad(x)
    with ca.enable(backend=fails, cache_dir=False, on_miss="background") as session, monkeypatch.context() as patched:
        patched.setattr(warnings, "showwarning", shows)
        assert same_bits(_grad(x), right) and session.wait(60)
    with ca.enable(backend="eager", cache_dir=False, on_miss="compile") as session:
        signal.setitimer(signal.ITIMER_REAL, 30)
        assert same_bits(_grad(x), right) and session.stats().compiles == 1


def test_a_step_goes_on_where_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(8, requires_grad=True)
    right = _grad(x)

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    if QUEUE._thread is not None:
        QUEUE._queue.put(None)
        QUEUE._thread.join()
    with ca.enable(backend="eager", cache_dir=False, on_miss="compile") as session:
        with monkeypatch.context() as patched, pytest.warns(UserWarning, match="can't start new thread"):
            patched.setattr(threading.Thread, "start", start)
            assert same_bits(_grad(x), right)
        assert same_bits(_grad(x), right)
        assert session.stats().failures == session.stats().compiles == 1


_INTERRUPTED_IMPORT = """
import signal, torch, compiled_autograd as ca

x = torch.randn(8, requires_grad=True)
loss = lambda: (x.sin() * x.exp()).sum()
(right,) = torch.autograd.grad(loss(), x)
session = ca.enable(backend="inductor", cache_dir=False, on_miss="background", compile_budget=float("inf"))

def stop(number, frame):
    raise KeyboardInterrupt

signal.signal(signal.SIGALRM, stop)
signal.setitimer(signal.ITIMER_REAL, 0.3)
try:
    with session:
        torch.autograd.grad(loss(), x)
except KeyboardInterrupt:
    pass
for _ in range(3):
    with session:
        (grad,) = torch.autograd.grad(loss(), x)
    assert torch.allclose(grad, right)
    assert session.wait(100)
print(session.stats().compiles, session.stats().failures)
"""


def test_an_interrupt_during_the_first_import_leaves_it_to_the_thread() -> None:
    """Modules of PyTorch were half imported for the rest of the process."""
    result = in_subprocess(_INTERRUPTED_IMPORT)
    assert result.returncode == 0 and result.stdout.split() == ["1", "0"], result.stderr


def test_a_backend_that_raises_what_is_no_error_fails_beside_the_training() -> None:
    asked: list[int] = []

    def ends(graph_module: torch.fx.GraphModule, examples: Any) -> Any:
        asked.append(1)
        raise SystemExit

    x = torch.randn(8, requires_grad=True)
    right = _grad(x)
    with ca.enable(backend=ends, cache_dir=False, on_miss="background", tune=False) as session:
        for _ in range(5):
            assert same_bits(_grad(x), right) and session.wait(60)
    assert len(asked) == session.stats().failures == 1


def test_a_step_whose_wait_was_interrupted_is_no_hit(alarm: None) -> None:
    backend, x = _Slow(), torch.randn(8, requires_grad=True)
    with ca.enable(backend=backend, cache_dir=False, on_miss="compile") as session:
        for _ in range(2):
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            with pytest.raises(_TimeIsUpError):
                _grad(x)
        assert session.stats().hits == 0
        backend.let.set()
        assert session.wait(60)
        _grad(x)
    stats = session.stats()
    assert (stats.backwards, stats.hits, stats.compiles) == (3, 1, 1)


def test_code_inside_a_compile_does_not_wait_for_it() -> None:
    found: list[bool] = []

    def waits(graph_module: torch.fx.GraphModule, examples: Any) -> Any:
        found.append(session.wait())
        return graph_module.forward

    session = ca.enable(backend=waits, cache_dir=False, on_miss="compile")
    with session:
        _grad(torch.randn(8, requires_grad=True))
    assert found == [False] and session.wait(0)


def test_steps_that_wait_for_a_load_are_hits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(8, requires_grad=True)
    right = _grad(x)
    with ca.enable(backend="eager", cache_dir=tmp_path, on_miss="compile"):
        _grad(x)
    ca.reset()
    load, begun = RegionCompiler.load, threading.Event()

    def slowly(self: RegionCompiler, *given: Any) -> bool:
        begun.set()
        time.sleep(0.5)  # until the others wait for it
        return load(self, *given)

    monkeypatch.setattr(RegionCompiler, "load", slowly)
    session = ca.enable(backend="eager", cache_dir=tmp_path, on_miss="compile")

    def first() -> None:
        with session:
            assert same_bits(_grad(x), right)

    def later() -> None:
        assert begun.wait(60)
        first()

    in_threads(first, later, later)
    stats = session.stats()
    left = stats.bypasses.get("other_thread_in_backward", 0)
    assert stats.hits + left == 3 and stats.hits and not stats.compiles, stats


def test_what_an_interrupted_step_left_in_another_state_is_given_up(alarm: None) -> None:
    backend, x = _Slow(), torch.randn(8, requires_grad=True)
    right = _grad(x)
    with ca.enable(backend=backend, cache_dir=False, on_miss="compile", tune=False) as session:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(_TimeIsUpError):
            _grad(x)
        torch.set_float32_matmul_precision("medium")
        try:
            backend.let.set()
            assert session.wait(60)
        finally:
            torch.set_float32_matmul_precision("highest")
        assert same_bits(_grad(x), right) and session.last is not None and session.last.outcome != "hit"
        assert same_bits(_grad(x), right) and session.last.outcome == "hit"
    assert len(backend.threads) == 2


def test_an_interrupted_step_waits_for_an_import(monkeypatch: pytest.MonkeyPatch, alarm: None) -> None:
    """The program's next line may import the same modules."""
    ended = threading.Event()

    def slowly(backend: Any) -> None:
        time.sleep(1.0)
        ended.set()

    monkeypatch.setattr(queue, "_import_first", slowly)
    x = torch.randn(8, requires_grad=True)
    for on_miss in ("compile", "background"):
        ca.reset()
        monkeypatch.setattr(QUEUE, "_imported", set())
        ended.clear()
        with ca.enable(backend="eager", cache_dir=False, on_miss=on_miss, compile_budget=float("inf")):
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            with pytest.raises(_TimeIsUpError):
                _grad(x)
            assert ended.is_set()
            assert QUEUE.wait(60)


def test_a_job_lets_go_of_its_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """A traceback may hold the job, until ``gc`` runs."""
    put, tasks = QUEUE._put, list[Any]()
    monkeypatch.setattr(QUEUE, "_put", lambda task: tasks.append(task) or put(task))
    with ca.enable(backend="eager", cache_dir=False, on_miss="compile"):
        _grad(torch.randn(8, requires_grad=True))
    assert tasks and all(not task.slots for task in tasks if isinstance(task, Job))


def test_a_wait_without_end_is_no_error() -> None:
    backend, x = _Slow(), torch.randn(8, requires_grad=True)
    with ca.enable(backend=backend, cache_dir=False, on_miss="background", compile_budget=float("inf")) as session:
        _grad(x)
        threading.Timer(0.2, backend.let.set).start()
        assert QUEUE.busy and session.wait(float("inf")) and not QUEUE.busy


def test_a_first_step_does_not_wait_for_what_another_session_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend's import would come after that, in the thread."""
    backend, x = _Slow(), torch.randn(8, requires_grad=True)
    right = _grad(x)
    settings: dict[str, Any] = {"cache_dir": False, "on_miss": "background", "compile_budget": float("inf")}
    other = ca.enable(backend="eager", tune=False, **settings)
    with ca.enable(backend=backend, **settings) as session:
        _grad(x)
        assert backend.began.wait(60)
    monkeypatch.setattr(QUEUE, "_imported", QUEUE._imported - {"eager"})
    with other:
        assert same_bits(_grad(x), right) and QUEUE.busy
        backend.let.set()
        assert session.wait(60)
        for _ in range(2):
            assert same_bits(_grad(x), right) and other.wait(60)
        assert same_bits(_grad(x), right) and other.stats().hits == 2


def test_a_backend_that_cannot_be_imported_is_asked_once_a_region(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def fails(backend: Any) -> None:
        tried.append(1)
        raise ImportError("libfoo.so.3: cannot open shared object file")

    monkeypatch.setattr(queue, "_import_first", fails)
    monkeypatch.setattr(QUEUE, "_imported", set())
    x = torch.randn(8, requires_grad=True)
    right = _grad(x)
    with ca.enable(backend="eager", cache_dir=False, on_miss="background", compile_budget=float("inf")) as session:
        with pytest.warns(UserWarning, match="libfoo"):
            assert same_bits(_grad(x), right)
        for _ in range(20):
            assert same_bits(_grad(x), right)
    assert len(tried) == session.stats().failures == 1
