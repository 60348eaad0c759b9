"""Ctrl-C at any moment: nothing of ours is taken for ever, and every backward is told of once."""

from __future__ import annotations

import contextlib
import dis
import functools
import gc
import inspect
import itertools
import random
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import compiled_autograd as ca
from backends.garbage_collection import RARELY
from backends.signal_handlers import raise_what_a_handler_raised
from compiled_autograd.capture import capture
from compiled_autograd.compiling.queue import QUEUE, CompileQueue
from compiled_autograd.engine import execution, seam
from compiled_autograd.threads.gate import GATE
from compiled_autograd.threads.leaf_writes import LEAF_WRITES
from compiled_autograd.torch_api.hook_handles import HANDLES
from shadow_cache.store.folder import Folder

from .helpers import ROOT, SineAndCosine, in_threads, same_bits, total

OURS = (str(Path(ca.__file__).parent), str(ROOT / "backends"), str(ROOT / "shadow_cache"))


def _files(*names: str) -> tuple[str, ...]:
    """Files of the package, by the ends of their paths."""
    found = tuple(str(path) for name in names for path in Path(ca.__file__).parent.rglob(name))
    assert len(found) == len(names)
    return found


WEIGHT = torch.randn(4, 4)


class _Sine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * ctx.saved_tensors[0].cos()


def _loss(x: torch.Tensor, retained: bool) -> torch.Tensor:
    between = (x @ WEIGHT).tanh()
    if retained:
        between.retain_grad()
    between.register_hook(lambda grad: grad * 2)
    return _Sine.apply(between).sum()


class _InterruptAt:
    """Raises where Python looks for signals: after the n-th call of C or at the n-th beginning of a function, in code
    of ours, or of other files, or of some functions there. ``came`` says whether it was so many."""

    def __init__(self, count: int, files: tuple[str, ...] = OURS, functions: tuple[str, ...] = ()) -> None:
        self.left = count
        self.files = files
        self.functions = functions
        self.came = False

    def __call__(self, frame: Any, event: str, argument: Any) -> None:
        if event not in ("call", "c_return") or not frame.f_code.co_filename.startswith(self.files):
            return
        if self.functions and frame.f_code.co_name not in self.functions:
            return
        self.left -= 1
        if self.left < 0:
            sys.setprofile(None)
            self.came = True
            raise KeyboardInterrupt


def _nothing_is_stuck() -> None:
    assert GATE.idle()
    assert not LEAF_WRITES.writing and in_threads(lambda: LEAF_WRITES.in_turn(lambda: None), timeout=20) == [True]
    assert HANDLES.told == ()
    assert execution.running() is None and execution.depth() == 0 and not seam.walking()
    prior = seam.set_autograd_compiler(None, False)
    assert prior[0] is None
    assert torch.is_grad_enabled() and torch._C._is_multithreading_enabled()
    assert torch._C._len_torch_dispatch_stack() == 0
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert QUEUE.wait(20)


@pytest.fixture
def wanted() -> Callable[[bool], torch.Tensor]:
    def grad(retained: bool) -> torch.Tensor:
        x = torch.ones(4, 4, requires_grad=True)
        _loss(x, retained).backward()
        assert x.grad is not None
        return x.grad

    return grad


@pytest.fixture(autouse=True)
def no_interrupt_is_left() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    sys.setprofile(None)
    assert gc.get_threshold() == before and not RARELY.entered


def _step(retained: bool) -> torch.Tensor | None:
    x = torch.ones(4, 4, requires_grad=True)
    _loss(x, retained).backward()
    return x.grad


def _told(session: Any) -> int:
    """What became of how many backwards is known."""
    return total(session.stats())


@pytest.mark.parametrize(
    ("known", "retained", "every"),
    [
        (True, False, 1),
        (True, True, 1),
        (False, False, 211),
        *(pytest.param(False, *each, marks=pytest.mark.slow) for each in ((False, 97), (True, 101))),
    ],
)
def test_an_interrupt_after_every_call(
    known: bool, retained: bool, every: int, wanted: Callable[[bool], torch.Tensor]
) -> None:
    """In a hit, after each call there is; in a capture, after some of them. The next backward is as ever."""
    with ca.disable():
        right = wanted(retained)
    with ca.enable(backend="eager", cache_dir=False) as session:
        _step(retained)
        for count in itertools.count(0, every):
            if not known:
                ca.reset()
            before = session.stats().backwards
            interrupt = _InterruptAt(count)
            x = torch.ones(4, 4, requires_grad=True)
            loss = _loss(x, retained)
            sys.setprofile(interrupt)
            try:
                loss.backward()
            except KeyboardInterrupt:
                assert interrupt.came
            finally:
                sys.setprofile(None)
            _nothing_is_stuck()
            assert session.stats().backwards - before <= 1
            assert same_bits(_step(retained), right)
            if not interrupt.came:
                break
        assert count > 50
        assert session.stats().backwards == _told(session)


def test_interrupts_at_random(wanted: Callable[[bool], torch.Tensor]) -> None:
    """Real signals, at whatever moment."""
    with ca.disable():
        right = wanted(False)
    armed = False

    def interrupt(*_: object) -> None:
        if armed:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    interrupts = 0
    try:
        with ca.enable(backend="eager", cache_dir=False):
            _step(False)
            end = time.monotonic() + 3
            while time.monotonic() < end:
                signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-5, 1e-3))
                try:
                    armed = True
                    _step(False)
                    armed = False
                except KeyboardInterrupt:
                    armed = False
                    interrupts += 1
                signal.setitimer(signal.ITIMER_REAL, 0)
                _nothing_is_stuck()
                assert same_bits(_step(False), right)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert interrupts > 20


def test_an_interrupt_while_others_write_leaves() -> None:
    """After each call there is, also in what Python's own modules do for it: others can write leaves as ever."""
    files, came = (*OURS, threading.__file__), 0
    for count in itertools.count():
        writes, interrupt = threading.Event(), _InterruptAt(count, files)

        def other(writes: threading.Event = writes) -> None:
            writes.set()
            time.sleep(0.002)

        thread = threading.Thread(target=lambda other=other: LEAF_WRITES.in_turn(other))
        thread.start()
        assert writes.wait(20)
        sys.setprofile(interrupt)
        try:
            LEAF_WRITES.in_turn(lambda: None)
            LEAF_WRITES.through_nodes(lambda: None)
        except KeyboardInterrupt:
            came += 1
        finally:
            sys.setprofile(None)
        thread.join(20)
        _nothing_is_stuck()
        if not interrupt.came:
            break
    assert came > 15


@pytest.mark.parametrize("raises", [False, True])
def test_an_interrupt_around_the_hooks_of_a_leaf(raises: bool) -> None:
    """From when the leaf is locked until after its hooks, and where one of them has raised before."""
    files = _files("accumulate.py", "leaf_writes.py", "program.py")
    called = 0

    def hook(leaf: torch.Tensor) -> None:
        nonlocal called
        called += 1
        if raises:
            raise KeyboardInterrupt

    def loss() -> torch.Tensor:
        leaf = torch.ones(4, requires_grad=True)
        leaf.register_post_accumulate_grad_hook(hook)
        leaf.register_post_accumulate_grad_hook(lambda _: None)
        return (leaf * 2).sum()

    with ca.enable(backend="eager", cache_dir=False):
        for _ in range(2):  # from then on, what is compiled has proved itself
            with suppress(KeyboardInterrupt):
                loss().backward()
        for count in itertools.count():
            interrupt, again = _InterruptAt(count, files), loss()
            sys.setprofile(interrupt)
            try:
                again.backward()
            except KeyboardInterrupt:
                assert interrupt.came or raises
            finally:
                sys.setprofile(None)
            _nothing_is_stuck()
            if not interrupt.came:
                break
    assert count > 20 and called > 2


@pytest.mark.parametrize("inside", ["wrapper", "__torch_dispatch__"])
def test_a_tape_that_an_interrupt_broke_is_not_run_again(inside: str) -> None:
    """In the middle of a node's report, the engine loses what the node saved: eager must not go on with stand-ins."""

    def loss(leaf: torch.Tensor) -> torch.Tensor:
        return (SineAndCosine.apply((leaf * WEIGHT).tanh())[0].exp() * WEIGHT).sum()

    leaf = torch.ones(4, 4, requires_grad=True)
    loss(leaf).backward()
    right, broken = leaf.grad, 0
    with ca.enable(backend="eager", cache_dir=False):
        for count in itertools.count():
            ca.reset()
            leaf.grad, again = None, loss(leaf)
            interrupt = _InterruptAt(count, _files("capture.py", "capture/recording.py", "zeros.py"), (inside,))
            sys.setprofile(interrupt)
            with suppress(KeyboardInterrupt):
                again.backward()
            sys.setprofile(None)
            _nothing_is_stuck()
            if not interrupt.came:
                break
            if leaf.grad is None:
                with ca.disable():
                    try:
                        again.backward()
                    except RuntimeError:
                        broken += 1
                        leaf.grad = None
                        loss(leaf).backward()
            assert same_bits(leaf.grad, right), f"after {count} calls"
    assert count and broken


@pytest.mark.skipif(sys.version_info < (3, 11), reason="there Ctrl-C may come before the first call of a finally")
def test_an_interrupt_while_the_store_is_locked_leaves_no_file_open(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "cache", create=True)
    folder.prepare()
    files = (str(ROOT / "shadow_cache"), contextlib.__file__)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for count in itertools.count():
        interrupt = _InterruptAt(count, files)
        sys.setprofile(interrupt)
        try:
            with folder.locked():
                pass
        except KeyboardInterrupt:  # not `suppress`, which would be interrupted too
            assert interrupt.came
        finally:
            sys.setprofile(None)
        gc.collect()
        if interrupt.came:
            found = len(list(Path("/proc/self/fd").iterdir()))
            assert found == before, count
        else:
            break
    assert count > 5


def test_an_interrupt_in_what_runs_before_a_fork() -> None:
    """Python tells of it and forks all the same: what holds other threads over the fork is given back after it."""
    files = _files("gate.py")
    for count in itertools.count():
        interrupt = _InterruptAt(count, files)
        sys.setprofile(interrupt)
        try:
            with suppress(KeyboardInterrupt):
                GATE.hold_over_fork()
        finally:
            sys.setprofile(None)
        GATE.release_after_fork()
        _nothing_is_stuck()
        if not interrupt.came:
            break
    assert count > 1


def test_an_interrupt_while_a_region_is_handed_to_the_background() -> None:
    """The thread that compiles could never say that it is done, and the tape would be left to eager for ever."""
    files = (*_files("queue.py"), threading.__file__)
    backend = SimpleNamespace(name="eager", slow=False)
    program: Any = SimpleNamespace(region_compiler=SimpleNamespace(kind=lambda *_: (), backend=backend))
    for count in itertools.count():
        background, interrupt = CompileQueue(), _InterruptAt(count, files)
        background._thread = SimpleNamespace(is_alive=lambda: True)  # type: ignore[assignment]
        step: Any = SimpleNamespace(inputs=[], fresh=[])
        sys.setprofile(interrupt)
        try:
            with suppress(KeyboardInterrupt):
                background.submit(program, step, [], ())
        finally:
            sys.setprofile(None)
        in_threads(functools.partial(background.wait, 0), timeout=20)
        if not interrupt.came:
            break
    assert count > 5


# ---- errors of handlers ----------------------------------------------------------------------------------------------


class _TimeIsUp(Exception):
    pass


@pytest.fixture
def raises_time_is_up() -> Iterator[None]:
    """The handler of ``SIGUSR1`` does."""

    def handler(number: int, frame: object) -> None:
        raise _TimeIsUp

    before = signal.signal(signal.SIGUSR1, handler)
    yield
    signal.signal(signal.SIGUSR1, before)


class _SignalAt(_InterruptAt):
    """The same with a signal that has a handler. Not in a generator: it may be about to be closed, and then Python
    writes what is raised there to stderr, and nothing else."""

    def __call__(self, frame: Any, event: str, argument: Any) -> None:
        if frame.f_code.co_flags & inspect.CO_GENERATOR:
            return
        try:
            super().__call__(frame, event, argument)
        except KeyboardInterrupt:
            came = True
        else:
            came = False
        if came:  # outside of the ``except``: an error has no other for its context
            signal.raise_signal(signal.SIGUSR1)


@pytest.mark.parametrize(
    ("retained", "every"),
    [(False, 211), *(pytest.param(each, 53, marks=pytest.mark.slow) for each in (False, True))],
)
def test_what_a_handler_raises_comes_out(
    retained: bool, every: int, wanted: Callable[[bool], torch.Tensor], raises_time_is_up: None
) -> None:
    """Also where an error is no reason to stop: in the midst of a capture, of lowering, of comparing."""
    with ca.disable():
        right = wanted(retained)
    came = 0
    with ca.enable(backend="eager", cache_dir=False) as session:
        _step(retained)
        for count in itertools.count(0, every):
            ca.reset()
            interrupt, x = _SignalAt(count), torch.ones(4, 4, requires_grad=True)
            loss = _loss(x, retained)
            sys.setprofile(interrupt)
            try:
                loss.backward()
            except _TimeIsUp:
                came += 1
            else:
                break
            finally:
                sys.setprofile(None)
            _nothing_is_stuck()
            assert same_bits(_step(retained), right)
    assert session.stats().backwards == _told(session)
    assert came > 50 * 53 // every and not interrupt.came


@pytest.mark.parametrize("where", ["compile", "first run", "second run"])
def test_a_handler_that_raises_while_a_backend_is_at_work(where: str, raises_time_is_up: None) -> None:
    """The region is compiled again, and did not fail."""
    due = [True]

    def signal_once() -> None:
        if due:
            due.clear()
            signal.raise_signal(signal.SIGUSR1)

    def backend(graph_module: torch.fx.GraphModule, examples: Any) -> Callable[..., Any]:
        runs = itertools.count()

        def run(*inputs: Any) -> Any:
            if where == ("first run", "second run", "")[min(next(runs), 2)]:
                signal_once()
            return graph_module(*inputs)

        if where == "compile":
            try:
                signal_once()
            except _TimeIsUp as error:
                raise RuntimeError("in the words of a compiler") from error
        return run

    weight = torch.randn(8, requires_grad=True)
    (right,) = torch.autograd.grad(weight.sin().exp().sum(), weight)
    with ca.enable(backend=backend, cache_dir=False, tune=False) as session:
        came = 0
        for _ in range(4):
            try:
                (grad,) = torch.autograd.grad(weight.sin().exp().sum(), weight)
            except _TimeIsUp:
                came += 1
            else:
                assert same_bits(grad, right)
            _nothing_is_stuck()
    stats = session.stats()
    assert came == 1 and stats.failures == 0 and stats.hits >= 2 and stats.backwards == _told(session) == 4


def test_errors_of_handlers_are_told_from_others(raises_time_is_up: None) -> None:
    def fails() -> None:
        raise ValueError

    def wraps() -> None:
        try:
            signal.raise_signal(signal.SIGUSR1)
        except _TimeIsUp:
            raise ValueError from None  # as Inductor does

    def caught(function: Callable[[], None]) -> BaseException | None:
        try:
            function()
        except (ValueError, _TimeIsUp) as error:
            try:
                raise_what_a_handler_raised(error)
            except _TimeIsUp as raised:
                return raised
        return None

    assert caught(fails) is None
    assert isinstance(caught(functools.partial(signal.raise_signal, signal.SIGUSR1)), _TimeIsUp)
    assert isinstance(caught(wraps), _TimeIsUp)
    try:
        signal.raise_signal(signal.SIGUSR1)
    except _TimeIsUp:  # who goes on training here has had it
        assert caught(fails) is None
        assert isinstance(caught(wraps), _TimeIsUp)


def test_a_handler_may_have_deleted_what_it_was_given(raises_time_is_up: None) -> None:
    class Handler:
        def __call__(self, number: int, frame: object) -> None:
            del number, frame  # not used
            raise _TimeIsUp

    def rebound(*given: object) -> None:
        given = ()
        raise _TimeIsUp(given)

    for handler in (Handler(), Handler().__call__, functools.partial(rebound, 1)):
        signal.signal(signal.SIGUSR1, handler)
        try:
            signal.raise_signal(signal.SIGUSR1)
        except _TimeIsUp as error:
            with pytest.raises(_TimeIsUp):
                raise_what_a_handler_raised(error)


@pytest.mark.parametrize("what", [None, itertools.count()], ids=["nothing", "endless"])
def test_what_stands_in_the_place_of_arguments_is_not_looked_at(what: Any) -> None:
    """An error that is no handler's is a failure like others."""

    def backend(graph_module: torch.fx.GraphModule, examples: Any) -> Callable[..., Any]:
        def fails(*given: Any) -> Callable[..., Any]:
            given = what
            raise ValueError(given)

        return fails(graph_module)

    weight = torch.randn(8, requires_grad=True)
    with ca.enable(backend=backend, cache_dir=False, tune=False) as session:
        torch.autograd.grad(weight.sin().sum(), weight)
    assert session.stats().failures == 1


def test_a_kind_of_node_is_known_after_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine hands its function over once in a process: tapes with such a node would be left to eager for ever."""

    def interrupted(*_: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(capture, "share_op", interrupted)
    monkeypatch.setattr(capture, "OPS", {})
    recording = capture.Capture(lambda *_: None)  # type: ignore[arg-type, return-value]
    assert recording.bind_function("SinBackward0", torch.sin, False, True) == "SinBackward0"
    assert capture.OPS["SinBackward0"].function is torch.sin
    assert isinstance(recording.failure, KeyboardInterrupt)


# ---- what Python itself leaves open ---------------------------------------------------------------------------------


def _code_in(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _code_in(constant)


def _jumps_past_what_is_put_back(code: types.CodeType) -> list[int | None]:
    """Lines with a jump back that no handler covers, to a place that a ``with`` or a ``finally`` covers."""
    table = [(each.start, each.end, each.target) for each in dis._parse_exception_table(code)]  # type: ignore[attr-defined]
    instructions = list(dis.get_instructions(code))
    at = {each.offset: index for index, each in enumerate(instructions)}

    def handler(offset: int) -> int | None:
        return next((target for start, end, target in table if start <= offset < end), None)

    def puts_back(target: int) -> bool:
        names = [each.opname for each in instructions[at[target] :]]
        if names[0] != "PUSH_EXC_INFO":
            return False  # it ends a generator, or a comprehension
        ends = [name for name in names if name in ("WITH_EXCEPT_START", "CHECK_EXC_MATCH", "RERAISE")]
        return ends[:1] != ["CHECK_EXC_MATCH"]

    found = []
    for each in instructions:
        if each.opname != "JUMP_BACKWARD" or handler(each.offset) is not None:
            continue
        target, seen = handler(each.argval), set[int]()
        while target is not None and target not in seen:
            if puts_back(target):
                found.append(each.positions.lineno if each.positions else None)
                break
            seen.add(target)
            target = handler(target)
    return found


@pytest.mark.skipif(sys.version_info < (3, 12), reason="there is no such jump")
@pytest.mark.parametrize("package", OURS)
def test_ctrl_c_finds_no_way_past_a_with_or_a_finally(package: str) -> None:
    """Where a condition ends a loop, the compiler of CPython 3.12 and 3.13 makes a jump back without the handlers that
    are around it (``normalize_jumps_in_block``, ``Python/flowgraph.c``), and looks for signals there: once in 26,000
    interrupts torch functions stayed off. So in a ``with`` or a ``finally`` no loop ends with a condition."""
    found = {}
    for path in Path(package).rglob("*.py"):
        module = compile(path.read_text(), str(path), "exec")
        for code in _code_in(module):
            if lines := _jumps_past_what_is_put_back(code):
                found[f"{path.name}: {code.co_name}"] = lines
    assert not found


@pytest.mark.skipif(not (3, 12) <= sys.version_info < (3, 14), reason="there is no such jump")
def test_such_a_way_is_seen() -> None:
    source = "def f(places):\n with places:\n  for place in places:\n   if place:\n    return place\n"
    assert any(_jumps_past_what_is_put_back(code) for code in _code_in(compile(source, "f", "exec")))
