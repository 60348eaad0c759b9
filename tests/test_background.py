"""``on_miss="background"``: eager while something is compiled beside it, and a switch that changes no gradient."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from torch import fx, nn

import compiled_autograd as ca
from backends import get_backend
from backends.torch_versions import release
from compiled_autograd.cache.disk import made_in_memory
from compiled_autograd.compiling import queue, worker_process
from compiled_autograd.engine import execution
from compiled_autograd.engine.session import Session
from compiled_autograd.guards.ambient import ambient
from compiled_autograd.lowering import region_compiler
from compiled_autograd.policies import ledger
from shadow_cache import Bypass

from .helpers import Squares, assert_grads, assert_same, expect, in_subprocess, in_threads, mlp


def _step(session: Session, model: nn.Module, reference: nn.Module, x: torch.Tensor, bitwise: bool = True) -> None:
    for each in (model, reference):
        each.zero_grad()
        loss = each(x).square().mean()
        with session if each is model else ca.disable():
            loss.backward()
    assert_grads(model, reference, bitwise)


def _twins(make: Callable[[], nn.Module] = mlp) -> tuple[nn.Module, nn.Module]:
    model, reference = make(), make()
    reference.load_state_dict(model.state_dict())
    return model, reference


def test_the_missing_step_runs_at_once_and_a_later_one_switches_over() -> None:
    session = ca.enable(backend="eager", on_miss="background")
    model, reference = _twins()
    x = torch.randn(4, 8)
    _step(session, model, reference, x)
    assert session.last is not None and session.last.outcome == "structure_miss"
    assert session.stats().compiles == 0
    assert session.wait(60)
    for _ in range(3):
        _step(session, model, reference, x)
    assert session.last.outcome == "hit"
    expect(session.stats(), structure_misses=1, hits=3, captures=1, compiles=1)


def test_what_a_step_of_another_session_has_compiled_meanwhile_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was compiled again there, which failed, and the region's calls ran one by one from then on."""
    beside, session = ca.enable(backend="eager", on_miss="background"), ca.enable(backend="eager")
    model, reference = _twins()
    x = torch.randn(4, 8)
    may_begin, check_state = threading.Event(), queue._check_state
    monkeypatch.setattr(queue, "_check_state", lambda job: may_begin.wait(60) and check_state(job))
    _step(beside, model, reference, x)
    threading.Timer(0.2, may_begin.set).start()
    _step(session, model, reference, x)  # waits for that
    assert beside.wait(60)
    for _ in range(3):
        _step(session, model, reference, x)
    expect(session.stats(), shape_misses=1, hits=3, compiles=1)
    (step,) = beside.graphs()[0].variants[0].regions
    assert [len(each) for each in step.compiled.values()] == [1] and None not in step.compiled[()]


class _Slow:
    """A backend that compiles when it is let."""

    def __init__(self) -> None:
        import threading

        self.let = threading.Event()

    def __call__(self, graph_module: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        assert self.let.wait(60)
        return graph_module.forward


def test_meanwhile_backwards_stay_with_the_eager_engine() -> None:
    backend = _Slow()
    session = ca.enable(backend=backend, on_miss="background")
    model, reference = _twins()
    x = torch.randn(4, 8)
    for _ in range(4):
        _step(session, model, reference, x)
    expect(session.stats(), structure_misses=1, bypasses={"compiling": 3}, captures=1, compiles=0)
    assert not session.wait(0.01)
    # Another structure is captured all the same.
    loss = (model(x) * 2).sum()
    with session:
        loss.backward()
    assert session.stats().structure_misses == 2
    backend.let.set()
    assert session.wait(60)
    _step(session, model, reference, x)
    assert session.last is not None and session.last.outcome == "hit"


def test_a_session_that_compiles_itself_does_not_wait_for_the_background() -> None:
    """The sessions' settings compile the same, and their tapes have one root."""
    backend, model, x = _Slow(), mlp(), torch.randn(4, 8)
    beside, other = (
        ca.enable(backend=backend, on_miss=on_miss, cache_dir=False) for on_miss in ("background", "raise")
    )
    for _ in range(4):
        with beside:
            model(x).square().mean().backward()
    with other, pytest.raises(ca.CacheMissError):
        model(x).square().mean().backward()
    backend.let.set()
    assert beside.wait(60)
    expect(beside.stats(), structure_misses=1, captures=1, bypasses={"compiling": 3}, compiles=0)


def test_what_is_compiled_in_another_state_than_it_is_for_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, looks, looked = _Slow(), queue._check_state, threading.Event()

    def waits(job: queue.Job) -> None:
        assert looked.wait(60)
        looks(job)

    monkeypatch.setattr(queue, "_check_state", waits)
    session = ca.enable(backend=backend, on_miss="background")
    model, reference = _twins()
    x = torch.randn(4, 8)
    try:
        _step(session, model, reference, x)
        torch.set_float32_matmul_precision("high")
        looked.set()
        backend.let.set()
        assert session.wait(60) and session.stats().compiles == 0
        torch.set_float32_matmul_precision("highest")
        _step(session, model, reference, x)
        assert session.last is not None
        reason = session.last.reasons[0]
        assert isinstance(reason, Bypass)
        assert reason.kind == "settings_change" and "matmul_precision" in reason.what
        _step(session, model, reference, x)
        assert session.wait(60)
        _step(session, model, reference, x)
    finally:
        torch.set_float32_matmul_precision("highest")
    left = {reason.label: 1}
    expect(session.stats(), structure_misses=1, shape_misses=1, hits=1, captures=1, compiles=1, bypasses=left)


def test_another_thread_may_set_the_number_of_threads() -> None:
    """It holds for new threads and that one: ``DataLoader(pin_memory=True)`` does so in the process that trains."""
    before = torch.get_num_threads()
    for on_miss in ("compile", "background"):
        in_threads(lambda: torch.set_num_threads(before + 1))
        model, reference = _twins()
        session, x = ca.enable(backend="eager", on_miss=on_miss), torch.randn(4, 8)  # type: ignore[arg-type]
        for _ in range(3):
            _step(session, model, reference, x)
            assert session.wait(60)
        assert session.stats().hits >= 1 and torch.get_num_threads() == before
        assert in_threads(torch.get_num_threads) == [before + 1]
    in_threads(lambda: torch.set_num_threads(before))


@pytest.mark.slow
def test_what_others_import_meanwhile_is_whole() -> None:
    """Parts of Inductor that import one another, as its settings are where algorithms become deterministic."""
    code = """
import torch, compiled_autograd as ca
net, x = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1)), torch.randn(5, 4)
session = ca.enable(backend="inductor", on_miss="background", cache_dir=False, tune=False)
def step():
    net.zero_grad()
    loss = net(x).sum()
    with session:
        loss.backward()
step()
torch.use_deterministic_algorithms(True)
torch.use_deterministic_algorithms(False)
step()  # what was lowered for another state is compiled again
assert session.wait(300)
step()
step()
assert session.stats().failures == 0 and session.stats().compiles == 1, session.stats()
assert session.last.outcome == "hit"
"""
    result = in_subprocess(code, timeout=400)
    assert result.returncode == 0, result.stderr


def test_other_shapes_are_compiled_in_the_background_too() -> None:
    session = ca.enable(backend="eager", on_miss="background")
    model, reference = _twins()
    for size in (4, 4, 5, 5, 6, 7, 4):
        _step(session, model, reference, torch.randn(size, 8))
        assert session.wait(60)
    expect(session.stats(), structure_misses=1, shape_misses=1, hits=5, compiles=2)


class _WithFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(Squares.apply(self.before(x)).tanh())


def test_regions_between_opaque_calls_are_compiled_each_by_itself() -> None:
    session = ca.enable(backend="eager", on_miss="background")
    model, reference = _twins(_WithFunction)
    x = torch.randn(4, 8)
    for _ in range(3):
        _step(session, model, reference, x)
        assert session.wait(60)
    expect(session.stats(), structure_misses=1, hits=2, compiles=2)


def test_a_call_that_cannot_be_traced_stays_opaque() -> None:
    """``_cdist_backward`` with nonzero is data-dependent."""
    session = ca.enable(backend="eager", on_miss="background")
    weight = nn.Parameter(torch.randn(6))
    mask = torch.tensor([True, False, True, True, False, True])
    for _ in range(5):
        expected = torch.autograd.grad(weight.exp()[mask].sin().prod(), weight)
        loss = weight.exp()[mask].sin().prod()
        with session:
            (found,) = torch.autograd.grad(loss, weight)
        assert torch.equal(found, expected[0])
        assert session.wait(60)
    assert session.last is not None and session.last.outcome == "hit"
    assert session.stats().failures == 0


def test_a_backend_that_fails_leaves_the_calls_one_by_one(recwarn: pytest.WarningsRecorder) -> None:
    def fails(graph_module: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        raise ValueError("no such graph for me")

    session = ca.enable(backend=fails, on_miss="background")
    model, reference = _twins()
    x = torch.randn(4, 8)
    for _ in range(3):
        _step(session, model, reference, x)
        assert session.wait(60)
    stats = session.stats()
    assert stats.failures == 1 and stats.compiles == 0 and stats.bypasses == {}
    assert any("no such graph for me" in str(warning.message) for warning in recwarn)


def test_a_job_that_cannot_be_made_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    """The step goes on, and a later one has it compiled."""

    def fails(value: Any) -> Any:
        raise torch.OutOfMemoryError("no memory for what stands for it")

    x = torch.randn(4, requires_grad=True)
    wanted = torch.autograd.grad(x.sin().exp().sum(), x)
    with ca.enable(backend="eager", on_miss="background") as session:
        monkeypatch.setattr(queue, "memoryless", fails)
        assert_same(torch.autograd.grad(x.sin().exp().sum(), x), wanted)
        assert not queue.QUEUE.busy and session.wait(0)
        monkeypatch.undo()
        assert_same(torch.autograd.grad(x.sin().exp().sum(), x), wanted)
        assert session.wait(60)
        assert_same(torch.autograd.grad(x.sin().exp().sum(), x), wanted)
    expect(session.stats(), structure_misses=1, shape_misses=1, hits=1, failures=1)
    assert session.stats().compiles == 1


def test_nothing_of_a_step_is_kept_while_it_waits() -> None:
    tensor = torch.randn(1000, 1000)
    twin = queue.memoryless(tensor.t())
    assert (twin.shape, twin.stride(), twin.dtype) == (tensor.t().shape, tensor.t().stride(), tensor.dtype)
    assert twin.untyped_storage().nbytes() == 0
    parameter = nn.Parameter(torch.ones(2))
    assert queue.memoryless(parameter) is parameter
    assert queue.memoryless(3) == 3


_FORKS = """
import os
import torch
import compiled_autograd as ca

session = ca.enable(backend="eager", on_miss="background", cache_dir=False, tune=False)
weight = torch.randn(4, requires_grad=True)

def step():
    weight.grad = None
    with session:
        (weight.exp() * weight).sum().backward()
    assert torch.equal(weight.grad, (weight.exp() * weight + weight.exp()).detach())

step()
child = os.fork()
if child == 0:
    status = 1
    try:
        assert session.wait(1)
        step()
        assert session.wait(60)
        step()
        status = 0
    finally:
        os._exit(status)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert session.wait(60)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.skipif(
    release(torch.__version__) < (2, 12), reason="in 2.11 the child's thread may not end: see docs/limits.md"
)
def test_a_forked_child_goes_on() -> None:
    result = in_subprocess(_FORKS, OMP_NUM_THREADS="1")
    assert result.returncode == 0, result.stderr


_FORKS_BESIDE_A_WORKER = """
import os
import resource
import subprocess
import sys
from compiled_autograd.compiling import worker_process

worker = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
worker_process.WORKER._process = worker
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
written = worker.stdin.fileno()
resource.setrlimit(resource.RLIMIT_NOFILE, (written, most))  # no file more can be opened
child = os.fork()
if child == 0:
    mine = worker_process.WORKER._process
    worker_process.WORKER.stop()
    try:
        os.fstat(written)
    except OSError:
        os._exit(0 if mine is None else 1)
    os._exit(2)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert worker_process.WORKER._process is worker and worker.poll() is None
worker_process.WORKER.stop()
assert worker.poll() is not None
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_does_not_use_the_parents_process() -> None:
    result = in_subprocess(_FORKS_BESIDE_A_WORKER)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_what_was_compiled_in_the_background_is_stored(backend: str, tmp_path: Path) -> None:
    """By the other process too, which sends back what is loaded: that cannot be saved, but it can be sent on."""
    model, reference = _twins()
    x = torch.randn(4, 8)
    bitwise = backend == "eager"
    session = ca.enable(backend=backend, on_miss="background", cache_dir=tmp_path)
    _step(session, model, reference, x, bitwise)
    assert session.wait(300)
    _step(session, model, reference, x, bitwise)
    (variant,) = session.last.graph.variants
    assert variant.not_stored == ""
    assert (worker_process.WORKER._process is not None) == (backend == "inductor")
    (made,) = made_in_memory(variant)
    assert made.artifact is None and bool(made.digest) == (backend == "inductor")  # the store has it: once is enough
    worker_process.WORKER.stop()
    ca.reset()
    again = ca.enable(backend=backend, cache_dir=tmp_path)
    for _ in range(3):
        _step(again, model, reference, x, bitwise)
    expect(again.stats(), hits=3, compiles=0)
    assert again.stats().loads == 1


@pytest.mark.slow
def test_an_artifact_is_not_kept_where_there_is_no_store() -> None:
    model, reference = _twins()
    session = ca.enable(backend="inductor", on_miss="background", cache_dir=False)
    for _ in range(2):
        _step(session, model, reference, torch.randn(4, 8), bitwise=False)
        assert session.wait(300)
    worker_process.WORKER.stop()
    assert session.last.outcome == "hit"
    (made,) = made_in_memory(session.last.graph.variants[0])
    assert made.artifact is None and not made.digest


def test_what_was_compiled_in_another_state_is_given_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Else it would be stored for the state that the step was in, and serve there."""
    lower = region_compiler.lower
    changes = ["highest"]

    def lower_and_change(*arguments: Any) -> Any:
        lowered = lower(*arguments)
        torch.set_float32_matmul_precision(*changes)
        return lowered

    monkeypatch.setattr(region_compiler, "lower", lower_and_change)
    monkeypatch.setattr(ledger, "REST", 1)
    model, reference = _twins()
    x = torch.randn(4, 8)
    session = ca.enable(backend="eager", on_miss="background", cache_dir=tmp_path)
    try:
        torch.set_float32_matmul_precision("high")
        _step(session, model, reference, x)
        assert session.wait(60)
        assert torch.get_float32_matmul_precision() == "highest"  # it was lowered
        torch.set_float32_matmul_precision("high")
        changes[:] = ["high"]
        _step(session, model, reference, x)
        _step(session, model, reference, x)
        assert not session.stats().compiles and session.wait(60)
        for _ in range(2):
            _step(session, model, reference, x)
    finally:
        torch.set_float32_matmul_precision("highest")
    bypasses = session.stats().bypasses
    assert [(reason.partition("(")[0], count) for reason, count in bypasses.items()] == [("settings_change", 1)]
    expect(session.stats(), structure_misses=1, shape_misses=1, hits=2, compiles=1, bypasses=bypasses)


def test_messages_are_whole_or_refused() -> None:
    import io

    stream = io.BytesIO()
    worker_process.send(stream, b"a message")
    data = stream.getvalue()
    assert worker_process.receive(io.BytesIO(data)) == b"a message"
    assert worker_process.receive(io.BytesIO(b"printed\nand no line" + data)) == b"a message"
    for cut in (0, 3, len(data) - 10, len(data) - 1):
        with pytest.raises(EOFError):
            worker_process.receive(io.BytesIO(data[:cut]))


def test_the_process_that_compiles_runs_no_code_of_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = tmp_path / "ran"
    for name in ("msgspec", "sitecustomize", "torch", "compiled_autograd", "types", "ast"):
        (tmp_path / f"{name}.py").write_text(f"open({str(ran)!r}, 'w').write({name!r})\nraise ImportError\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["", "."]))
    monkeypatch.setattr(sys, "path", ["", ".", *sys.path])
    graph = fx.symbolic_trace(lambda x: [x * 2])
    inputs = [([3], [1], "torch.float32", "cpu")]
    told, threads = worker_process.told(ambient()), torch.get_num_threads()
    request = worker_process.Request(
        "eager", graph.code, inputs, threads, (False, False, True), "highest", "torch.float32", told
    )
    worker = worker_process.Worker()
    try:
        reply = worker.ask(request)
    finally:
        worker.stop()
    assert not ran.exists(), ran.read_text()
    assert reply.error == "" and reply.artifact is not None
    assert get_backend("eager").load(reply.artifact)([torch.ones(3)])[0].tolist() == [2, 2, 2]  # type: ignore[attr-defined]


_FOUND_THROUGH_SYS_PATH = """
import subprocess, sys
sys.path.insert(0, {root!r})
from compiled_autograd.compiling import worker_process
code = "import compiled_autograd, backends; print(compiled_autograd.__file__, backends.__file__, sys.argv)"
sys.path.remove({root!r})
print(subprocess.run(worker_process.command(code), check=True, capture_output=True, text=True).stdout)
"""


@pytest.mark.slow
def test_the_process_that_compiles_has_the_package_of_the_one_that_asks(tmp_path: Path) -> None:
    """However it was found: here in a copy of the sources, by a path that is no longer there."""
    root = Path(__file__).parents[1]
    (tmp_path / "compiled_autograd").symlink_to(root / "compiled_autograd")
    result = in_subprocess(_FOUND_THROUGH_SYS_PATH.format(root=str(tmp_path)), PYTHONPATH="")
    assert result.returncode == 0, result.stderr
    files = [str(tmp_path / name / "__init__.py") for name in ("compiled_autograd", "compiled_autograd/backends")]
    assert result.stdout.split() == [*files, "['-c']"]


@pytest.mark.slow
def test_inductor_compiles_in_another_process() -> None:
    session = ca.enable(backend="inductor", on_miss="background")
    model, reference = _twins()
    x = torch.randn(4, 8)
    _step(session, model, reference, x, bitwise=False)
    assert session.wait(300)
    assert worker_process.WORKER._process is not None and worker_process.WORKER._process.poll() is None
    _step(session, model, reference, x, bitwise=False)
    expect(session.stats(), structure_misses=1, hits=1, compiles=1)
    # The process is killed: the next graph is compiled here, with a warning.
    worker_process.WORKER._process.kill()
    worker_process.WORKER._process.wait()
    loss = (model(x) * 3).square().sum()
    with session, pytest.warns(UserWarning, match="goes on in this one"):
        loss.backward()
        assert session.wait(300)
    worker_process.WORKER.stop()


_ENDS_MEANWHILE = """
import time
import torch
import compiled_autograd as ca
from compiled_autograd.compiling import worker_process

worker_process._MAIN = "import time; time.sleep(600)"
start = worker_process._start

def started():
    process = start()
    print(process.pid)
    return process

worker_process._start = started
session = ca.enable(backend="inductor", cache_dir=False, on_miss="background")
weight = torch.randn(4, requires_grad=True)
for number in range(8):  # each waits for the one before
    value = weight
    for _ in range(number):
        value = value.exp()
    with session:
        (value * weight).sum().backward()
while worker_process.WORKER._process is None:
    time.sleep(0.01)
"""


def test_a_program_may_end_while_something_is_compiled_beside_it() -> None:
    """It was told of a process that failed, and of an Inductor that could not work in half an interpreter."""
    result = in_subprocess(_ENDS_MEANWHILE)
    assert result.returncode == 0 and result.stderr == "", result.stderr
    (pid,) = result.stdout.split()
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)


_ENDS_WHILE_IT_COMPILES = """
import threading, time
import torch
import compiled_autograd as ca
from compiled_autograd.compiling import worker_process

compiling = threading.Event()

def fails(graph_module, examples):
    compiling.set()
    while not worker_process.WORKER.ended:
        time.sleep(0.01)
    raise RuntimeError("cannot schedule new futures after shutdown")

with ca.enable(backend=fails, on_miss="background") as session:
    torch.randn(4, requires_grad=True).exp().sum().backward()
assert compiling.wait(60)
"""


def test_what_fails_because_the_program_ends_is_not_told() -> None:
    result = in_subprocess(_ENDS_WHILE_IT_COMPILES)
    assert result.returncode == 0 and result.stderr == "", result.stderr


_INTERRUPTED = """
import os, signal, time
from compiled_autograd.compiling import worker_process

signal.signal(signal.SIGINT, signal.default_int_handler)  # who started this in the background may have it ignored
os.setpgid(0, 0)
worker_process._MAIN = "import time; time.sleep(600)"
process = worker_process._start()
try:
    os.killpg(0, signal.SIGINT)  # as a terminal does for Ctrl-C
    time.sleep(60)
except KeyboardInterrupt:
    time.sleep(0.5)
    print(process.poll())
process.kill()
"""


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="this system has no groups of processes")
def test_an_interrupt_is_not_for_the_process_that_compiles() -> None:
    """The program may go on after it."""
    result = in_subprocess(_INTERRUPTED)
    assert (result.returncode, result.stdout, result.stderr) == (0, "None\n", "")


def test_no_process_is_left_or_started_when_this_one_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    start = worker_process._start
    monkeypatch.setattr(worker_process, "_start", lambda: started.append(start()) or started[-1])
    monkeypatch.setattr(worker_process, "_MAIN", "import time; time.sleep(600)")
    worker = worker_process.Worker()
    receive = worker_process.receive
    monkeypatch.setattr(worker_process, "receive", lambda stream: worker.end() or receive(stream))
    for _ in range(2):
        with pytest.raises(EOFError):
            worker.ask(_request())
    assert len(started) == 1 and started[0].poll() is not None
    worker.forget()  # a child by fork goes on
    assert not worker.ended


def test_no_answer_is_taken_for_that_to_another_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever kept the first from being read."""
    started: list[Any] = []
    start = worker_process._start
    monkeypatch.setattr(worker_process, "_start", lambda: started.append(start()) or started[-1])
    monkeypatch.setattr(worker_process, "_MAIN", "import time; time.sleep(600)")

    def receive(stream: Any) -> bytes:
        raise MemoryError

    monkeypatch.setattr(worker_process, "receive", receive)
    worker = worker_process.Worker()
    for number in (1, 2):
        with pytest.raises(MemoryError):
            worker.ask(_request())
        assert len(started) == number and started[-1].poll() is not None
        assert started[-1].stdin.closed and started[-1].stdout.closed


def test_what_is_submitted_while_the_program_ends_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    one = queue.CompileQueue()
    monkeypatch.setattr(queue, "WORKER", worker_process.Worker())
    one.stop()
    region_compiler = SimpleNamespace(kind=lambda step, slots: (), backend=get_backend("eager"))
    step: Any = SimpleNamespace(inputs=(), fresh=())
    program: Any = SimpleNamespace(region_compiler=region_compiler)
    assert one.submit(program, step, [], ambient()) is None
    assert one.wait(5) and not one.busy


def test_what_cannot_be_imported_since_the_program_ends_is_not_told(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    worker = worker_process.Worker()
    for module in (queue, execution):
        monkeypatch.setattr(module, "WORKER", worker)

    def import_first(backend: Any) -> None:
        worker.end()
        raise AttributeError("'prims' object has no attribute 'sum'")

    monkeypatch.setattr(queue, "_import_first", import_first)
    monkeypatch.setattr(queue.QUEUE, "_imported", set())
    model, reference = _twins()
    session = ca.enable(backend="eager", on_miss="background")
    _step(session, model, reference, torch.randn(4, 8))
    assert not session.stats().failures and not recwarn.list


def test_a_child_that_is_forked_during_the_first_import_knows_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waited for ever for the rest of a module, which a thread was importing that it does not have."""
    held: list[bool] = []
    monkeypatch.setattr(queue, "_import_first", lambda backend: held.append(queue.QUEUE.busy))
    monkeypatch.setattr(queue.QUEUE, "_imported", set())
    model, reference = _twins()
    session, x = ca.enable(backend="eager", on_miss="background"), torch.randn(4, 8)
    _step(session, model, reference, x)
    assert session.wait(60)
    _step(session, model, reference, x)
    assert held == [True] and not queue.QUEUE.busy
    expect(session.stats(), structure_misses=1, hits=1, captures=1, compiles=1)


@pytest.mark.slow
def test_the_process_that_compiles_says_nothing_where_nobody_reads_its_answer(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nor where an interrupt is sent to it alone: who asks decides when it ends. What is printed while it imports is no
    answer, and much of that and a long request do not wait for each other."""
    prints = "print('A plugin of PyTorch is here\\nLoading' * 3000, end='', flush=True); "
    monkeypatch.setattr(worker_process, "_MAIN", prints + worker_process._MAIN)
    worker = worker_process.Worker()
    limit = threading.Timer(120, worker.stop)
    limit.start()
    assert worker.ask(msgspec.structs.replace(_request(), code="no code" * 30_000)).error
    process = worker._process
    assert process is not None and process.stdin is not None and process.stdout is not None
    process.send_signal(signal.SIGINT)
    process.stdout.close()
    worker_process.send(process.stdin, msgspec.msgpack.encode(_request()))
    assert (process.wait(), capfd.readouterr()) == (0, ("", ""))
    process.stdin.close()
    limit.cancel()


_COMPILES_LONG = """
from compiled_autograd.compiling import worker_main
import subprocess, time

def answer(request):
    subprocess.Popen(["sh", "-c", f"echo half > {request.code}; sleep 5; echo whole > {request.code}"])  # a compiler
    time.sleep(600)

worker_main.answer = answer
worker_main.main(parent)
"""
_KILLED = f"""
import os, sys, time
import msgspec
from compiled_autograd.compiling import worker_process

worker_process._MAIN = {_COMPILES_LONG!r}
process = worker_process._start()
request = worker_process.Request("none", sys.argv[1], [], 1, (False, False, True), "highest", "torch.float32", "")
worker_process.WORKER._process = process
worker_process.send(process.stdin, msgspec.msgpack.encode(request))
forked = os.fork()
if forked:
    print(forked, flush=True)
else:
    os.closerange(1, 3)
time.sleep(120)  # the child lives on
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "killpg"), reason="this system has no groups of processes")
@pytest.mark.parametrize("when", ["it imports", "it compiles"])
def test_nothing_compiles_on_for_a_program_that_was_killed(when: str, tmp_path: Path) -> None:
    """As ``torchrun`` does to a rank when another has failed. A compiler goes on to its end."""
    file = tmp_path / "file"
    command = [sys.executable, "-c", _KILLED, str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        forked = int(process.stdout.readline())
        while when == "it compiles" and not file.exists():
            time.sleep(0.01)
        process.kill()
        assert process.communicate(timeout=60) == ("", None), "those that it has started have closed what they write to"
    assert file.read_text() == "whole\n" if when == "it compiles" else not file.exists()
    os.kill(forked, signal.SIGKILL)


def test_a_compiler_writes_all_of_its_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where the process that started it is ended. Inductor has the linker write to where it looks for
    what is compiled:
    half a library there was taken for the whole by each later process, until somebody emptied the folder."""
    file = tmp_path / "file"
    compiler = ["sh", "-c", f"echo half > {file}; sleep 1; echo whole > {file}"]
    monkeypatch.setattr(
        worker_process, "_MAIN", f"import subprocess, time; subprocess.Popen({compiler}); time.sleep(600)"
    )
    worker = worker_process.Worker()
    process = worker._process = worker_process._start()
    while not file.exists():
        time.sleep(0.01)
    worker.end()
    assert process.poll() is not None
    deadline = time.monotonic() + 60
    while file.read_text() != "whole\n" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert file.read_text() == "whole\n"


def _request() -> worker_process.Request:
    return worker_process.Request("none", "", [], 1, (False, False, True), "highest", "torch.float32", "")


def test_the_thread_lets_others_have_the_interpreter_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A training beside it asks for the lock some hundred times in a step; afterwards all is as it was."""
    before = sys.getswitchinterval()
    seen: list[float] = []
    compile_job = queue._compile

    def spy(job: queue.Job) -> None:
        seen.append(sys.getswitchinterval())
        compile_job(job)

    monkeypatch.setattr(queue, "_compile", spy)
    model = mlp()
    with ca.enable(backend="eager", on_miss="background") as session:
        model(torch.randn(2, 8)).sum().backward()
    session.wait()
    assert seen and max(seen) < before
    assert sys.getswitchinterval() == before


def test_only_code_for_the_cpu_is_compiled_in_another_process() -> None:
    """That for other devices is not stored, so it could not be brought back, and would be compiled twice."""
    graph_module = fx.symbolic_trace(lambda x: [x.sin()])
    backend = get_backend("inductor")
    for device, goes in (("cpu", True), ("meta", False)):
        x = torch.empty(3, device=device)
        graph_module.graph.find_nodes(op="placeholder")[0].meta["val"] = x
        assert (worker_process._request(ambient(), backend, graph_module, [x]) is not None) is goes
