"""Which backwards are the eager engine's because of CUDA streams and devices. CUDA is played by functions of ours."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo.device_interface  # looks for CUDA when it is imported, and is to find none

import compiled_autograd as ca
from compiled_autograd import errors, ir
from compiled_autograd.diagnostics.bypass import CUDA_DEVICES
from compiled_autograd.engine import backward, decide, seam
from compiled_autograd.engine.cuda import streams
from compiled_autograd.engine.cuda.devices import cuda_device, lie_apart
from compiled_autograd.engine.cuda.streams import DEFAULT, UNKNOWN, StreamWatch, _Thread
from compiled_autograd.threads.compile_thread import COMPILER

from .helpers import assert_same, expect, in_subprocess

SIDE, OTHER = 7, 9


class FakeCuda:
    """Two devices, whose current streams each thread sets for itself."""

    def __init__(self) -> None:
        self.local = threading.local()
        self.capturing = False

    def streams(self) -> dict[int, int]:
        """Of the calling thread: device -> stream."""
        if not hasattr(self.local, "streams"):
            self.local.streams = {0: 0, 1: 0}
        return self.local.streams

    def get(self, device: int) -> tuple[int, int, int]:
        return self.streams()[device], device, 1

    def set(self, stream_id: int, device_index: int, device_type: int) -> None:
        self.streams()[device_index] = stream_id

    def set_by_accelerator(self, stream: int) -> None:
        self.streams()[0] = stream

    def enter(self, stream: Any) -> Any:
        self.streams()[0] = OTHER
        return stream

    def leave(self, stream: Any, *exception: object) -> None:
        self.streams()[0] = 0


@contextlib.contextmanager
def on_stream(number: int, device: int = 0) -> Iterator[None]:
    """As ``torch.cuda.stream``."""
    before = torch._C._cuda_getCurrentStream(device)[0]
    torch._C._cuda_setStream(stream_id=number, device_index=device, device_type=1)
    try:
        yield
    finally:
        torch._C._cuda_setStream(stream_id=before, device_index=device, device_type=1)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    fake = FakeCuda()
    for name, function in {
        "_cuda_getCurrentStream": fake.get,
        "_cuda_getDeviceCount": lambda: 2,
        "_cuda_setStream": fake.set,
        "_accelerator_setStream": fake.set_by_accelerator,
        "_cuda_isCurrentStreamCapturing": lambda: fake.capturing,
    }.items():
        monkeypatch.setattr(torch._C, name, function, raising=False)
    methods = {name: getattr(torch.Stream, name) for name in ("__enter__", "__exit__")}
    streams._set(torch.Stream, "__enter__", lambda self: fake.enter(self))
    streams._set(torch.Stream, "__exit__", lambda self, *args: fake.leave(self, *args))
    yield fake
    for name, method in methods.items():
        streams._set(torch.Stream, name, method)
        assert getattr(torch.Stream, name) is method


def _use(watch: StreamWatch, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (decide, backward):
        monkeypatch.setattr(module, "STREAMS", watch)


@pytest.fixture
def watch(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Iterator[StreamWatch]:
    watch = StreamWatch()
    _use(watch, monkeypatch)
    watch.start()
    yield watch
    watch.stop()


@pytest.fixture
def no_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(outputs: Any) -> None:
        raise AssertionError("the tape was read")

    monkeypatch.setattr(streams, "first_nodes", refuse)


W = torch.linspace(-1, 1, 6)


def forward(first: Callable[[], Any] = contextlib.nullcontext, second: Any = contextlib.nullcontext) -> Any:
    """A tape of two parts, and its leaf."""
    w = W.clone().requires_grad_()
    with first():
        middle = (w * w).sin()
    with second():
        return (middle.exp() * 3).sum(), w


def side() -> Any:
    return on_stream(SIDE)


def steps(session: ca.Session, *parts: Any, around: Any = contextlib.nullcontext, count: int = 3) -> ca.Stats:
    """Backwards, each compared with eager."""
    with ca.disable():
        loss, wanted = forward()
        loss.backward()
    for _ in range(count):
        loss, w = forward(*parts)
        with session, around():
            loss.backward()
        assert_same([w.grad], [wanted.grad])
    return session.stats()


def test_what_begins_on_the_cpu_and_on_cuda_is_left_to_the_engines_threads(
    watch: StreamWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two parts that fail, the engine raises the error that came first."""
    asked: list[int] = []
    monkeypatch.setattr(decide, "lie_apart", lambda outputs: asked.append(len(outputs)) or True)
    x = torch.ones(3, requires_grad=True)
    session = ca.enable(backend="eager")
    with session:
        x.sum().backward()
        torch.autograd.backward([x.sum(), (2 * x).sum()])
    expect(session.stats(), structure_misses=1, bypasses={"cuda_devices": 1})
    assert asked == [2] and x.grad is not None and x.grad.tolist() == [4.0] * 3


def test_where_outputs_lie() -> None:
    class Somewhere:
        def __init__(self, device: str) -> None:
            self.device = torch.device(device)

    assert lie_apart([Somewhere("cuda:1"), object(), Somewhere("cpu")])
    assert not lie_apart([Somewhere("cuda:1"), Somewhere("cuda:0"), object()])
    assert not lie_apart([Somewhere("cpu"), Somewhere("cpu"), Somewhere("meta")])


def test_default_streams_cost_no_look_at_the_tape(watch: StreamWatch, no_walk: None) -> None:
    expect(steps(ca.enable(backend="eager")), structure_misses=1, hits=2)


def test_a_prefetcher_records_nothing(watch: StreamWatch, no_walk: None) -> None:
    with side(), torch.no_grad():
        (W.clone().requires_grad_() * 2).sum()
    with side():
        W.clone().mul_(2)
    expect(steps(ca.enable(backend="eager")), structure_misses=1, hits=2)


def test_part_of_the_forward_on_another_stream(watch: StreamWatch) -> None:
    session = ca.enable(backend="eager")
    expect(steps(session, side), bypasses={"cuda_streams": 3})
    assert session.last is not None and "SinBackward0 may have been recorded" in str(session.last.reasons[0])


def test_without_the_watch_it_would_be_compiled(watch: StreamWatch) -> None:
    watch.in_use = False
    expect(steps(ca.enable(backend="eager"), side), structure_misses=1, hits=2)


def test_later_tapes_compile_again(watch: StreamWatch) -> None:
    session = ca.enable(backend="eager")
    steps(session, side, count=2)
    expect(steps(session), bypasses={"cuda_streams": 2}, structure_misses=1, hits=2)


def test_a_whole_loop_on_one_stream(watch: StreamWatch) -> None:
    forward()
    with side():
        expect(steps(ca.enable(backend="eager")), structure_misses=1, hits=2)


def test_forward_and_backward_on_that_stream_and_work_between_on_another(watch: StreamWatch) -> None:
    def step_with_side_work() -> Any:
        with on_stream(OTHER):
            forward()
        return on_stream(SIDE)

    stats = steps(ca.enable(backend="eager"), side, side, around=step_with_side_work)
    expect(stats, structure_misses=1, hits=2)


@pytest.mark.parametrize(
    ("parts", "around"),
    [
        ((side, side), contextlib.nullcontext),
        ((), side),
        ((side, side), lambda: on_stream(OTHER)),
        ((), lambda: on_stream(SIDE, 1)),
    ],
    ids=["forward", "backward", "two", "another device's"],
)
def test_backward_on_another_stream_than_forward(watch: StreamWatch, parts: Any, around: Any) -> None:
    expect(steps(ca.enable(backend="eager"), *parts, around=around), bypasses={"cuda_streams": 3})


def test_streams_that_accelerator_sets(watch: StreamWatch) -> None:
    def both() -> Any:
        torch._C._accelerator_setStream(SIDE)
        stack = contextlib.ExitStack()
        stack.callback(torch._C._accelerator_setStream, 0)
        return stack

    expect(steps(ca.enable(backend="eager"), both), bypasses={"cuda_streams": 3})


def test_a_stream_as_context_manager(watch: StreamWatch) -> None:
    @contextlib.contextmanager
    def entered() -> Iterator[None]:  # a stream itself cannot be made without a device
        stream = torch.Stream.__enter__(None)  # type: ignore[arg-type]
        yield
        torch.Stream.__exit__(stream, None, None, None)

    expect(steps(ca.enable(backend="eager"), entered), bypasses={"cuda_streams": 3})


def test_a_stream_that_was_set_unseen(watch: StreamWatch, cuda: FakeCuda) -> None:
    session = ca.enable(backend="eager")
    expect(steps(session), structure_misses=1, hits=2)
    loss, _ = forward()
    cuda.streams()[0] = SIDE  # when, nobody knows
    loss, _ = forward()
    with session:
        loss.backward()
    expect(session.stats(), structure_misses=1, hits=2, bypasses={"cuda_streams": 1})
    expect(steps(session), structure_misses=1, hits=5, bypasses={"cuda_streams": 1})
    cuda.streams()[0] = 0


def test_a_part_that_another_thread_recorded(watch: StreamWatch) -> None:
    made: list[Any] = []

    def record() -> None:
        for _ in range(streams._recorded() + 100):
            forward()
        with side():
            made.append(forward())

    thread = threading.Thread(target=record)
    thread.start()
    thread.join()
    with ca.enable(backend="eager") as session:
        made[0][0].backward()
    expect(session.stats(), bypasses={"cuda_streams": 1})


def test_threads_on_default_streams_leave_no_trace(watch: StreamWatch, no_walk: None) -> None:
    thread = threading.Thread(target=lambda: steps(ca.enable(backend="eager")))
    thread.start()
    thread.join()
    assert watch._threads == []
    expect(steps(ca.enable(backend="eager")), hits=3)


def test_while_a_cuda_graph_is_captured(watch: StreamWatch, cuda: FakeCuda) -> None:
    session = ca.enable(backend="eager")
    cuda.capturing = True
    expect(steps(session), bypasses={"stream_capture": 3})
    cuda.capturing = False
    expect(steps(session), bypasses={"stream_capture": 3}, structure_misses=1, hits=2)


def test_raises_where_asked_to(watch: StreamWatch) -> None:
    with pytest.raises(ca.UnsupportedBackwardError, match="cuda_streams"):
        steps(ca.enable(backend="eager", on_unsupported="raise"), side)


@pytest.mark.parametrize("memory", [True, False])
def test_what_was_recorded_before(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, memory: bool) -> None:
    monkeypatch.setattr(torch.cuda, "_initialized", True)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: [{"stream": 0}, {"stream": 5 if memory else 0}])
    watch = StreamWatch()
    _use(watch, monkeypatch)
    loss, _ = forward()
    watch.start()
    with ca.enable(backend="eager") as session:
        loss.backward()
    bypasses = {"cuda_streams": 1} if memory else {}
    expect(session.stats(), bypasses=bypasses, structure_misses=not memory)
    stats = steps(session)
    assert stats.hits + stats.structure_misses == 4 - memory
    younger: list[ca.Stats] = []  # of a thread that began later, all is known
    thread = threading.Thread(target=lambda: younger.append(steps(ca.enable(backend="eager"))))
    thread.start()
    thread.join()
    watch.stop()
    assert len(watch._threads) == memory


def test_an_allocator_that_gives_no_account(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise RuntimeError("no snapshot")

    monkeypatch.setattr(torch.cuda, "memory_snapshot", refuse)
    assert streams._memory_on_other_streams()


def test_nodes_of_a_differentiable_backward_are_on_the_tapes_streams(watch: StreamWatch) -> None:
    with ca.enable(backend="eager") as session:
        loss, w = forward()
        torch.autograd.grad(loss, w, create_graph=True)[0].sum().backward()
        expect(session.stats(), bypasses={"create_graph": 1}, structure_misses=1)
        loss, w = forward(side)
        torch.autograd.grad(loss, w, create_graph=True)[0].sum().backward()
    expect(session.stats(), bypasses={"create_graph": 2, "cuda_streams": 1}, structure_misses=1)
    assert "create_graph" in str(session.last.reasons[0])  # type: ignore[union-attr]


def test_a_differentiable_backward_outside_of_any_session_counts_too(watch: StreamWatch) -> None:
    ca.enable(backend="eager").__enter__().__exit__()
    loss, w = forward(side)
    torch.autograd.grad(loss, w, create_graph=True)
    expect(steps(ca.enable(backend="eager")), bypasses={"cuda_streams": 3})


def test_a_tape_too_long_to_read(watch: StreamWatch, monkeypatch: pytest.MonkeyPatch) -> None:
    with side():
        forward()
    monkeypatch.setattr(streams, "MAX_NODES_READ", 1)
    session = ca.enable(backend="eager")
    monkeypatch.setattr(streams, "first_nodes", lambda outputs: [None, None])
    expect(steps(session), bypasses={"cuda_streams": 3})
    assert "more than 1 nodes" in str(session.last.reasons[0])  # type: ignore[union-attr]


def test_any_order_of_parts_and_streams(watch: StreamWatch) -> None:
    """A tape of some parts of what was recorded: compiled where they, and nothing else, say so."""
    draw = random.Random(0)
    outcomes = set()
    for _ in range(300):
        kept: list[tuple[int, torch.Tensor]] = []
        for _ in range(draw.randint(1, 6)):
            number = draw.choice((0, 0, SIDE, OTHER))
            with on_stream(number):
                part = W.clone().requires_grad_().sin().sum()
                if draw.random() < 0.5:
                    kept.append((number, part))
        where = draw.choice((0, SIDE))
        with on_stream(where):
            total = torch.stack([W.sum().requires_grad_() * 2, *(part for _, part in kept)]).sum()
            reason = watch.reason([total])
        assert (reason is not None) == any(number != where for number, _ in kept)
        outcomes.add((where, reason is None))
    assert len(outcomes) == 4


def test_changes_are_kept_of_the_last_ones_only() -> None:
    one, other = ((0, SIDE),), ((0, OTHER),)
    thread = _Thread(DEFAULT, 10, DEFAULT)
    assert thread.changes == [(0, DEFAULT)]
    for number in range(10, 5010):
        thread.change(number, one if number % 2 else other)
    assert len(thread.changes) <= streams._MAX_CHANGES
    assert thread.at(5) is UNKNOWN and thread.at(5009) == one and thread.at(5008) == other
    assert thread.at(9999) == one
    assert thread.during(5008, 5009) == {one, other} and thread.during(5009, 9999) == {one}
    assert thread.during(3, 4) == {UNKNOWN}


def test_changes_between_which_nothing_was_recorded_vanish() -> None:
    thread = _Thread(DEFAULT, 10, DEFAULT)
    thread.change(10, ((0, SIDE),))
    thread.change(10, DEFAULT)
    assert thread.only(DEFAULT)
    thread.change(10, ((0, SIDE),))
    thread.change(12, DEFAULT)
    assert [thread.at(number) for number in (9, 10, 11, 12)] == [DEFAULT, ((0, SIDE),), ((0, SIDE),), DEFAULT]
    assert _Thread(UNKNOWN, 0, DEFAULT).only(DEFAULT)
    assert _Thread(UNKNOWN, 3, DEFAULT).at(2) is UNKNOWN


def test_many_threads_become_one(watch: StreamWatch) -> None:
    def record() -> None:
        with side():
            forward()

    for _ in range(2 * streams._MAX_THREADS):
        thread = threading.Thread(target=record)
        thread.start()
        thread.join()
    assert len(watch._threads) <= streams._MAX_THREADS
    for account in watch._threads:  # whether merged or not
        assert account.at(0) != DEFAULT and account.at(1000) == DEFAULT


def test_begins_when_cuda_is_first_used(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Callable[[], None]] = []
    monkeypatch.setattr(torch.cuda, "_lazy_call", asked.append)
    watch = StreamWatch()
    setter = torch._C._cuda_setStream
    watch.install()
    watch.install()
    assert len(asked) == 1 and not watch.in_use and torch._C._cuda_setStream is setter
    asked[0]()
    assert watch.in_use and torch._C._cuda_setStream is not setter
    watch.reset_after_fork()
    assert not watch.in_use
    with side():
        forward()
    assert watch._threads == []
    watch.stop()
    assert torch._C._cuda_setStream is setter


def test_nothing_happens_without_cuda() -> None:
    code = """
import torch
enter, calls, accelerator = torch.Stream.__enter__, list(torch.cuda._queued_calls), torch._C._accelerator_setStream
import compiled_autograd as ca
x = torch.ones(3, requires_grad=True)
with ca.enable(backend="eager", on_unsupported="raise"):
    (x * x).sum().backward()
from compiled_autograd.engine.cuda.streams import STREAMS
assert not STREAMS.in_use and not STREAMS._undo
assert torch.Stream.__enter__ is enter and torch._C._accelerator_setStream is accelerator
assert len(torch.cuda._queued_calls) - len(calls) == torch.backends.cuda.is_built()
"""
    result = in_subprocess(code)
    assert result.returncode == 0, result.stderr


def captured(session: ca.Session) -> Any:
    steps(session)
    return session.graphs()[0].tape


def _lifted(*devices: str) -> list[ir.LiftedTensor]:
    return [ir.LiftedTensor(index, "float32", device) for index, device in enumerate(devices)]


def test_the_device_of_a_tape() -> None:
    tape = captured(ca.enable(backend="eager"))
    assert tape.cuda_device is None and cuda_device(tape) is None
    assert cuda_device(dataclasses.replace(tape, inputs=_lifted("cpu", "cuda:1"))) == 1
    with pytest.raises(errors.CaptureRefusedError, match="cuda_devices"):
        cuda_device(dataclasses.replace(tape, inputs=_lifted("cuda:0", "cuda:1")))


def test_a_device_that_only_metadata_name() -> None:
    tape = captured(ca.enable(backend="eager"))
    call = next(node for node in tape.graph.nodes if "validate_outputs" in str(node.target))
    tape = tape.copy(tape.calls)
    call = next(node for node in tape.graph.nodes if "validate_outputs" in str(node.target))
    assert "cpu" in str(call.args[1])
    call.args = (call.args[0], [[[None, None, torch.device("cuda", 1), 6, 0, None], [], False, 6]])
    assert cuda_device(tape) == 1
    with pytest.raises(errors.CaptureRefusedError, match="cuda_devices"):
        cuda_device(dataclasses.replace(tape, inputs=_lifted("cuda:0")))


def test_a_tape_on_several_devices_is_eagers(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(tape: Any) -> None:
        raise errors.CaptureRefusedError(CUDA_DEVICES)

    monkeypatch.setattr(seam, "cuda_device", refuse)
    expect(steps(ca.enable(backend="eager")), bypasses={"cuda_devices": 3})


def test_the_tapes_device_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each run, and of the thread that compiles."""
    entered: dict[int, list[int]] = {}

    @contextlib.contextmanager
    def device(index: int) -> Iterator[None]:
        here = entered.setdefault(threading.get_ident(), [])
        here.append(index)
        yield
        here.append(-1)

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(seam, "cuda_device", lambda tape: 1)
    expect(steps(ca.enable(backend="eager")), structure_misses=1, hits=2)
    assert entered.pop(threading.get_ident()) == [1, -1] * 3
    assert entered == {COMPILER.thread: [1, -1]}
