"""The comparison with the real calls where it is hard: what must not be refuted, and what must not go wrong."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import signal
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

import compiled_autograd as ca
from backends.inductor.backend import InductorBackend
from compiled_autograd.lowering import region_compiler
from compiled_autograd.lowering.stored_regions import made_with
from compiled_autograd.proving import fingerprints as fingerprinting
from compiled_autograd.proving import judging, prover
from compiled_autograd.runtime import program
from compiled_autograd.steps.proof import MAX_WEAK
from compiled_autograd.steps.steps import region_record
from shadow_cache import Failure

from .helpers import assert_same, expect

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("check", [False, "new"])
def test_code_that_writes_into_its_inputs(check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A product that is computed into an input: what lay there is gone, and the step must not go on."""
    right = InductorBackend.compile

    @functools.wraps(right)
    def compile(self: InductorBackend, graph_module: Any, examples: Any) -> Any:
        call = right(self, graph_module, examples)

        def overwriting(arguments: list[Any]) -> Any:
            taken = list(arguments)
            results = call(arguments)
            for each in taken:
                each.mul_(2)
            return results

        return overwriting

    monkeypatch.setattr(InductorBackend, "compile", compile)
    x = torch.randn(6, 6, requires_grad=True)
    kept = x.detach().clone()
    session = ca.enable(backend="inductor", cache_dir=False, tune=False, check=check)
    if check:
        with session, pytest.raises(ca.GradientMismatchError, match=r"has written into .*was overwritten"):
            torch.autograd.grad((x.sin() * x).sum(), x)
        return
    with session:
        torch.autograd.grad((x.sin() * x).sum(), x)
    assert not torch.equal(x, kept), "nobody noticed"


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.uint8, torch.int16])
def test_integers_without_a_sign_are_saved(dtype: torch.dtype, backend: str) -> None:
    x, factor = torch.randn(4, requires_grad=True), torch.tensor([1, 2, 3, 0]).to(dtype)
    session = ca.enable(backend=backend, cache_dir=False, tune=False)
    for _ in range(3):
        wanted = torch.autograd.grad((x * factor).sum(), x)
        with session:
            assert_same(torch.autograd.grad((x * factor).sum(), x), wanted)
    expect(session.stats(), structure_misses=1, hits=2)


@pytest.mark.parametrize("error", [RuntimeError, NotImplementedError, torch.OutOfMemoryError])
@pytest.mark.parametrize("function", ["fingerprints", "written", "value_difference", "memory_of"])
def test_what_cannot_be_compared_costs_no_step(
    function: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = prover if hasattr(prover, function) else judging
    right, left = getattr(module, function), [1]

    def fails_once(*args: Any) -> Any:
        if left and left.pop():
            raise error("it cannot be asked")
        return right(*args)

    monkeypatch.setattr(module, function, fails_once)
    x = torch.randn(4, requires_grad=True)
    session = ca.enable(backend="eager", cache_dir=False, tune=False)
    kinds = []
    for _ in range(4):
        wanted = torch.autograd.grad((x.sin() * x).sum(), x)
        with session:
            assert_same(torch.autograd.grad((x.sin() * x).sum(), x), wanted)
        assert session.last is not None
        kinds.append([each.kind for each in session.last.reasons if isinstance(each, Failure)])
    assert kinds == [["unproved"], [], [], []]
    (compiled,) = session.graphs()[0].regions[0].compiled_regions()
    assert not compiled.proof.refuted and not any(compiled.proof.left.values())


def _no_memory(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")


def _half_as_much_again(graph_module: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
    """A backend that is wrong."""
    return lambda *arguments: [each * 1.5 for each in graph_module.forward(*arguments)]


def _steps(session: ca.Session, number: int) -> list[str]:
    """What was said of some steps, each of which gives eager's gradients."""
    x, kinds = torch.randn(4, requires_grad=True), []
    for _ in range(number):
        wanted = torch.autograd.grad((x.sin() * x).sum(), x)
        with session:
            assert_same(torch.autograd.grad((x.sin() * x).sum(), x), wanted)
        assert session.last is not None
        kinds += [each.kind for each in session.last.reasons if isinstance(each, Failure)]
    return kinds


def _writing(shapes: Sequence[tuple[int, ...]], then: Callable[[], Any] = lambda: None) -> Callable[..., Any]:
    """A backend whose code writes into what it is given."""

    def backend(graph_module: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            results = [each.clone() for each in graph_module.forward(*arguments)]
            for each in arguments:
                if tuple(each.shape) in shapes:
                    each.copy_(each.flip(0))
            then()
            return results

        return run

    return backend


_NOT_SEEN = "; nor was it seen whether the compiled code has written into what it was given"


@pytest.mark.parametrize(
    ("looks", "writes", "said"),
    [
        ([True, False], True, None),
        ([True, False], False, ""),
        ([True, False, False], True, _NOT_SEEN),
        ([True, False, False], False, _NOT_SEEN),
    ],
)
@pytest.mark.parametrize("right", [0, 1])
@pytest.mark.parametrize("kind", ["unproved", "run"])
def test_it_is_said_where_code_that_was_not_judged_may_have_written(
    kind: str, right: int, looks: list[bool], writes: bool, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has run, and there is no memory to look whether its inputs are what they were. Then its results are let go of,
    and it is looked once more."""
    look, have_memory, runs = prover.written, iter([True] * 2 * right + looks[right:]), itertools.count()
    monkeypatch.setattr(prover, "written", lambda *args: (look if next(have_memory, True) else _no_memory)(*args))

    def backend(graph_module: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        writing = _writing([(4,)] if writes else [], _fail if kind == "run" else lambda: None)(graph_module, examples)
        return lambda *arguments: (graph_module.forward if next(runs) < right else writing)(*arguments)

    x, found = torch.randn(4, requires_grad=True), []
    session = ca.enable(backend=backend, cache_dir=False, tune=False)
    wanted = torch.autograd.grad((x.sin() * x).sum(), x)
    for _ in range(right):
        assert _steps(session, 1) == []
    with contextlib.nullcontext() if said is not None else pytest.raises(ca.GradientMismatchError), session:
        found = torch.autograd.grad((x.sin() * x).sum(), x)
    if said is not None:
        assert_same(found, wanted)
        assert session.last is not None
        failure = [each for each in session.last.reasons if isinstance(each, Failure)][-1]
        assert failure.kind == kind if right else failure.kind in (kind, "compile", "unproved")
        assert failure.instead.endswith(_NOT_SEEN) == bool(said)


def _fail() -> None:
    raise RuntimeError("a kernel failed")


def test_a_run_that_failed_and_could_not_be_looked_at_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts as one of those after which a region is given up, too."""
    right, have_memory = prover.written, itertools.cycle([True, False])
    monkeypatch.setattr(prover, "written", lambda *args: (right if next(have_memory) else _no_memory)(*args))
    session = ca.enable(backend=_writing([], _no_memory), cache_dir=False, tune=False)
    assert _steps(session, MAX_WEAK + 2) == ["unproved"] * MAX_WEAK


@pytest.mark.parametrize("then", [lambda: None, _fail, _no_memory])
@pytest.mark.parametrize("copies", [True, False])
def test_that_code_has_written_is_an_error_whatever_else_fails(
    copies: bool, then: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is no memory to ask who it was, or the code has raised when it had written."""
    if not copies:
        monkeypatch.setattr(fingerprinting, "twins", _no_memory)
    x = torch.randn(4, requires_grad=True)
    with (
        ca.enable(backend=_writing([(4,)], then), cache_dir=False, tune=False),
        pytest.raises(ca.GradientMismatchError, match="was overwritten"),
    ):
        torch.autograd.grad((x.sin() * x).sum(), x)


@pytest.mark.parametrize("then", [_fail, _no_memory])
def test_what_another_thread_writes_is_not_laid_at_the_door_of_code_that_fails(then: Callable[[], Any]) -> None:
    """Threads that train one model: asked on copies, the code writes nothing before it fails again."""
    x, writes = torch.randn(4, requires_grad=True), iter([True])

    def backend(graph_module: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            if next(writes, False):
                x.detach().mul_(1.5)
            then()

        return run

    wanted = torch.autograd.grad((x.sin() * x).sum(), x)
    session = ca.enable(backend=backend, cache_dir=False, tune=False)
    with session:
        assert_same(torch.autograd.grad((x.sin() * x).sum(), x), wanted)
    assert session.stats().failures == 1 and next(writes, None) is None


@ca.traceable
class _Above2(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * ctx.saved_tensors[0].sub(2).sqrt()


def test_nor_where_the_real_calls_take_no_other_values() -> None:
    """Those that stand for what has changed give NaN here, and NaNs are looked for."""
    x, runs = torch.full([4], 9.0, requires_grad=True), itertools.count()

    def backend(graph_module: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            if next(runs) == 0:
                x.detach().add_(1)
            return graph_module.forward(*arguments)

        return run

    wanted = x.detach().sub(2).sqrt() * 3
    with torch.autograd.set_detect_anomaly(True), ca.enable(backend=backend, cache_dir=False, tune=False) as session:
        (grad,) = torch.autograd.grad((_Above2.apply(x) * 3).sum(), x)
    torch.testing.assert_close(grad, wanted)
    expect(session.stats(), structure_misses=1, captures=1, compiles=1)
    assert next(runs) > 1


@ca.traceable
class _Repeated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(times)
        return x[:2] * 1

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad.repeat_interleave(ctx.saved_tensors[0], output_size=3), None


def test_who_has_written_cannot_be_asked_where_the_real_calls_take_no_other_values() -> None:
    x, times = torch.randn(3, requires_grad=True), torch.tensor([2, 1])
    with (
        ca.enable(backend=_writing([(2,)]), cache_dir=False, tune=False),
        pytest.raises(ca.GradientMismatchError, match="was overwritten"),
    ):
        torch.autograd.grad((_Repeated.apply(x, times) * torch.tensor([1.0, 5.0])).sum(), x)


@pytest.mark.parametrize("way", ["its first run", "other strides"])
def test_passes_are_given_up_in_what_runs_now(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs may have been replaced when memory ends: in the eighth run that is not compared, here."""
    runs = itertools.count()

    def backend(graph_module: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            factor = 1.5 if next(runs) or way == "its first run" else 1.0
            results = [each * factor for each in graph_module.forward(*arguments)]
            return [each.t().contiguous().t() if way == "other strides" else each for each in results]

        return run

    x = torch.randn(4, 4, requires_grad=True)
    session = ca.enable(backend=backend, cache_dir=False, tune=False, passes=[lambda graph_module, *_: graph_module])
    module, name = (region_compiler, "put_results") if way == "its first run" else (judging, "kept_from_before")
    for step in range(MAX_WEAK + 4):
        with monkeypatch.context() as patch:
            if step < MAX_WEAK:
                patch.setattr(*((prover, "fingerprints") if step < MAX_WEAK - 1 else (module, name)), _no_memory)
            wanted = torch.autograd.grad((x.sin() * x).sum(), x)
            with session:
                assert_same(torch.autograd.grad((x.sin() * x).sum(), x), wanted)
    expect(session.stats(), structure_misses=1, shape_misses=MAX_WEAK - 1, hits=4, compiles=1, failures=MAX_WEAK)


def test_sizes_that_do_not_fit_are_not_tried_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """The form has proved itself: it is not given up, and there its real calls run once for each step."""
    right, runs = program.run_calls, []

    def run_calls(step: Any, slots: Any, *args: Any, again: bool = False, **keywords: Any) -> None:
        runs[-1] += 1
        right(step, slots, *args, again=again, **keywords)
        if again and runs[-1] == 1 and len(runs) <= MAX_WEAK:
            _no_memory()

    w, session = torch.randn(7, requires_grad=True), ca.enable(backend="eager", cache_dir=False, tune=False)

    def step(size: int) -> None:
        x = torch.randn(size, 7)
        wanted = torch.autograd.grad(((x * w.tanh()).sin() * 3).sum(), w)
        with session:
            assert_same(torch.autograd.grad(((x * w.tanh()).sin() * 3).sum(), w), wanted)

    for size in (5, 6, 5, 6, 5, 6, 5, 6):
        step(size)
    monkeypatch.setattr(program, "run_calls", run_calls)
    for _ in range(MAX_WEAK + 3):
        runs.append(0)
        step(50)
    assert runs == [2] * MAX_WEAK + [1] * 3 and session.stats().failures == MAX_WEAK
    regions = session.graphs()[-1].regions[0].compiled_regions()
    assert not any(each.proof.refuted for each in regions)


def test_what_is_given_up_holds_no_results(monkeypatch: pytest.MonkeyPatch) -> None:
    session = ca.enable(backend=_writing([]), cache_dir=False, tune=False)
    assert _steps(session, 1) == []
    (compiled,) = session.graphs()[0].regions[0].compiled_regions()
    assert compiled.proof.held
    monkeypatch.setattr(prover, "fingerprints", _no_memory)
    assert _steps(session, MAX_WEAK) == ["unproved"] * MAX_WEAK
    assert compiled.proof.refuted and not compiled.proof.held


class _OverBudget(MemoryError):
    pass


def _watchdog(*_: Any) -> None:
    raise _OverBudget("over budget")


def test_no_memory_that_a_handler_tells_of_comes_out(monkeypatch: pytest.MonkeyPatch) -> None:
    right, old, runs = program.run_calls, signal.signal(signal.SIGUSR1, _watchdog), itertools.count()

    def run_calls(*args: Any, **keywords: Any) -> None:
        right(*args, **keywords)
        if next(runs) == 0:
            signal.raise_signal(signal.SIGUSR1)

    monkeypatch.setattr(program, "run_calls", run_calls)
    x = torch.randn(4, requires_grad=True)
    try:
        with ca.enable(backend="eager", cache_dir=False, tune=False), pytest.raises(_OverBudget):
            torch.autograd.grad((x.sin() * x).sum(), x)
    finally:
        signal.signal(signal.SIGUSR1, old)


def _expect_nothing_trusted(session: ca.Session, hits: int) -> None:
    counts = {"captures": 1, "compiles": 1, "failures": MAX_WEAK}
    expect(session.stats(), structure_misses=1, shape_misses=MAX_WEAK - 1, hits=hits, **counts)
    (compiled,) = session.graphs()[0].regions[0].compiled_regions()
    assert compiled.proof.refuted


@pytest.mark.parametrize("error", [NotImplementedError, torch.OutOfMemoryError])
@pytest.mark.parametrize("function", ["written", "fingerprints"])
def test_what_can_never_be_compared_is_not_trusted(
    function: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After some steps its calls run one by one. It was taken for proved after ten, however wrong it was."""

    def fails(*args: Any) -> Any:
        raise error("it cannot be asked")

    monkeypatch.setattr(prover, function, fails)
    session = ca.enable(backend=_half_as_much_again, cache_dir=False, tune=False)
    assert _steps(session, MAX_WEAK + 6) == ["unproved"] * MAX_WEAK
    _expect_nothing_trusted(session, hits=6)


def _given(step: Any, slots: Any, shape: tuple[int, ...]) -> Iterable[torch.Tensor]:
    """The inputs of a region that have a shape."""
    inputs = (slots[slot] for slot in step.inputs)
    return (each for each in inputs if isinstance(each, torch.Tensor) and each.shape == shape)


def test_what_passes_have_made_is_given_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prover, "fingerprints", _no_memory)
    session = ca.enable(
        backend=_half_as_much_again, cache_dir=False, tune=False, passes=[lambda graph_module, *_: graph_module]
    )
    assert _steps(session, MAX_WEAK + 3) == ["unproved"] * MAX_WEAK


def _too_large_beside_its_inputs(monkeypatch: pytest.MonkeyPatch, before: Callable[[], object] = lambda: None) -> None:
    """Real calls whose first run in a comparison fails, as the inputs are held."""
    right, runs = program.run_calls, itertools.count()

    def run_calls(step: Any, slots: Any, *args: Any, again: bool = False, **keywords: Any) -> None:
        right(step, slots, *args, again=again, **keywords)
        if again and next(runs) % 2 == 0:
            before()
            _no_memory()

    monkeypatch.setattr(program, "run_calls", run_calls)


def test_what_never_fits_beside_its_real_calls_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    _too_large_beside_its_inputs(monkeypatch)
    session = ca.enable(backend=_half_as_much_again, cache_dir=False, tune=False)
    assert _steps(session, MAX_WEAK + 6) == ["unproved"] * MAX_WEAK
    _expect_nothing_trusted(session, hits=6)


def test_real_calls_that_did_not_fit_hold_no_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is freed after its last use, as under eager."""
    right, alive = program.run_calls, []

    def run_calls(step: Any, slots: Any, *args: Any, **keywords: Any) -> None:
        saved = [weakref.ref(each) for each in _given(step, slots, (3000,))]
        right(step, slots, *args, **keywords)
        alive.append([each() is not None for each in saved])
        if len(alive) == 1:
            _no_memory()

    monkeypatch.setattr(program, "run_calls", run_calls)
    w = torch.randn(3000, requires_grad=True)
    with ca.enable(backend="eager", cache_dir=False, tune=False):
        w.exp().sin().sum().backward()
    assert len(alive) == 2 and any(alive[0]) and not all(alive[1])


def test_real_calls_that_did_not_fit_draw_the_same_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is drawn is eager's, whatever the first run of them drew."""

    def step() -> torch.Tensor:
        torch.manual_seed(3)
        (grad,) = torch.autograd.grad(torch.nn.functional.rrelu(w, training=True).exp().sum(), w)
        return torch.cat([grad, torch.rand(2)])

    _too_large_beside_its_inputs(monkeypatch, lambda: torch.rand(5))
    monkeypatch.setattr(prover, "may_draw", lambda _: True)
    w = torch.randn(7, requires_grad=True)
    wanted = step()
    with ca.enable(backend="eager", cache_dir=False, tune=False) as session:
        assert_same([step()], [wanted])
    assert session.stats().failures == 1


@pytest.mark.parametrize("first", [0, 3])
def test_calls_that_write_and_did_not_fit(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is known that they write, they run on what there was before; where it is not, nobody could go on."""
    right, runs = program.run_calls, itertools.count()

    def run_calls(step: Any, slots: Any, *args: Any, **keywords: Any) -> None:
        saved = [each.detach() for each in _given(step, slots, (5, 7))]
        right(step, slots, *args, **keywords)
        for each in saved:
            each.mul_(1.5)
        if next(runs) == first:
            _no_memory()

    monkeypatch.setattr(program, "run_calls", run_calls)
    w = torch.randn(7, requires_grad=True)
    session = ca.enable(backend="inductor", cache_dir=False, tune=False)
    for _ in range(2):
        x = torch.randn(5, 7)
        wanted = torch.autograd.grad(((x * w.tanh()).clamp(min=0).sin() * 3).sum(), w)
        loss = ((x * w.tanh()).clamp(min=0).sin() * 3).sum()
        with session:
            if first == 0:
                gc.disable()
                try:
                    with pytest.raises(torch.OutOfMemoryError) as raised:
                        torch.autograd.grad(loss, w)
                    del raised
                    assert not any(type(each) is prover._Run for each in gc.get_objects()), "it holds all inputs"
                finally:
                    gc.enable()
                return
            torch.testing.assert_close(torch.autograd.grad(loss, w), wanted)
    assert session.stats().failures == 1 and next(runs) == 5


def _clamped(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """A loss whose backward is given tensors of the shapes of ``x`` and of ``w``."""
    return ((x * w.tanh() * v).clamp(min=0).sin() * 3).sum()


def test_calls_that_write_elsewhere_too_and_did_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """That they write into one input is known; in the second step, where memory ends, they write into another."""
    right, runs = program.run_calls, itertools.count()

    def run_calls(step: Any, slots: Any, *args: Any, **keywords: Any) -> None:
        number = next(runs)
        saved = [each.detach() for each in _given(step, slots, (5, 7))]
        saved += [each.detach() for each in _given(step, slots, (7,)) if number == 3]
        right(step, slots, *args, **keywords)
        for each in saved:
            each.mul_(1.5)
        if number == 3:
            _no_memory()

    monkeypatch.setattr(program, "run_calls", run_calls)
    w, session = torch.randn(7, requires_grad=True), ca.enable(backend="eager", cache_dir=False, tune=False)
    for step in range(2):
        x, v = torch.randn(5, 7), torch.randn(7)
        wanted = torch.autograd.grad(_clamped(x, w, v), w)
        loss = _clamped(x, w, v)
        with pytest.raises(torch.OutOfMemoryError) if step else contextlib.nullcontext(), session:
            assert_same(torch.autograd.grad(loss, w), wanted)


def test_calls_without_memory_do_not_say_that_they_write_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the second step they write into another input, as the compiled code may then; asked, they do not fit."""
    right, runs = program.run_calls, [0]

    def run_calls(step: Any, slots: Any, *args: Any, **keywords: Any) -> None:
        runs[-1] += 1
        if len(runs) == 2 and runs[-1] in (2, 3, 5, 6):
            _no_memory()
        saved = [each.detach() for each in _given(step, slots, (5, 7))]
        saved += [each.detach() for each in _given(step, slots, (7,)) if len(runs) == 2]
        right(step, slots, *args, **keywords)
        for each in saved:
            each.mul_(1.5)

    def backend(graph_module: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        return lambda *arguments: _writing([(7,)] if len(runs) == 2 else [])(graph_module, examples)(*arguments)

    monkeypatch.setattr(program, "run_calls", run_calls)
    w, session, kinds = torch.randn(7, requires_grad=True), ca.enable(backend=backend, cache_dir=False, tune=False), []
    for _ in range(3):
        x, v = torch.randn(5, 7), torch.randn(7)
        wanted = torch.autograd.grad(_clamped(x, w, v), w)
        loss = _clamped(x, w, v)
        with session:
            assert_same(torch.autograd.grad(loss, w), wanted)
        assert session.last is not None
        kinds += [[each.kind for each in session.last.reasons if isinstance(each, Failure)]]
        runs.append(0)
    assert kinds == [[], ["unproved"], []]


def test_what_did_not_fit_is_what_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody can look whether the calls have written before memory ended, they cannot run again."""
    monkeypatch.setattr(program, "run_calls", _no_memory)
    monkeypatch.setattr(fingerprinting, "written", lambda *_: _fail())
    x = torch.randn(4, requires_grad=True)
    with ca.enable(backend="eager", cache_dir=False, tune=False), pytest.raises(torch.OutOfMemoryError):
        torch.autograd.grad((x.sin() * x).sum(), x)


def test_what_has_proved_itself_is_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other sizes are compared later, and whatever ``check`` asks for; it may be that these alone do not fit."""

    session = ca.enable(backend="eager", cache_dir=False, tune=False)
    assert _steps(session, 4) == []
    (compiled,) = session.graphs()[0].regions[0].compiled_regions()
    compiled.proof.settled = False
    monkeypatch.setattr(program, "is_due", lambda *_: True)
    monkeypatch.setattr(prover, "fingerprints", _no_memory)
    assert set(_steps(session, MAX_WEAK + 2)) == {"unproved"} and not compiled.proof.refuted


def test_what_was_given_up_for_memory_is_tried_again_by_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the store is written once more, as it is when another of its regions is compiled later."""

    session = ca.enable(backend="eager", cache_dir=tmp_path, tune=False)
    with monkeypatch.context() as patch:
        patch.setattr(prover, "fingerprints", _no_memory)
        assert _steps(session, MAX_WEAK) == ["unproved"] * MAX_WEAK
    region = session.graphs()[0].regions[0]
    (compiled,) = region.compiled_regions()
    assert compiled.proof.refuted and region_record(region, compiled).dropped == ()
    assert not any(made.dropped for _, made in made_with(compiled.call))


def test_a_last_look_without_memory_costs_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether all is zero is asked when the results are there."""

    monkeypatch.setattr(judging, "are_zeros", _no_memory)
    session, x = ca.enable(backend="eager", cache_dir=False, tune=False), torch.randn(4, requires_grad=True)
    for _ in range(3):
        with session:
            assert_same(torch.autograd.grad((x * torch.zeros(4)).sum(), x), [torch.zeros(4)])
    assert session.stats().failures == 0


def test_whether_calls_that_did_not_fit_have_written_is_asked_when_they_are_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The error has the frames that it came through, and these all that was computed until then."""
    right, made, alive = program.run_calls, [], []

    def run_calls(step: Any, slots: Any, *args: Any, again: bool = False, **keywords: Any) -> None:
        right(step, slots, *args, again=again, **keywords)
        if again and not made:
            result = torch.zeros(4)
            made.append(weakref.ref(result))
            made.extend(weakref.ref(slots[slot]) for _, slot in step.outputs)
            _no_memory()

    def written(*args: Any) -> list[int]:
        alive.append(sum(each() is not None for each in made))
        return []

    monkeypatch.setattr(program, "run_calls", run_calls)
    monkeypatch.setattr(fingerprinting, "written", written)
    session = ca.enable(backend="eager", cache_dir=False, tune=False)
    assert _steps(session, 1) == ["unproved"] and len(made) > 1 and alive == [0]


_DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.bool, torch.uint8]
_DTYPES += [torch.int64, torch.uint16, torch.int32]
_LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dense": lambda x: x,
    "transposed": lambda x: x.T,
    "a part": lambda x: x[1:, ::2],
    "expanded": lambda x: x[:1].expand(5, 6),
    "one": lambda x: x[2, 3],
}


@pytest.mark.parametrize("small", [-1, 1 << 16])
@pytest.mark.parametrize("layout", _LAYOUTS)
@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
def test_a_write_of_one_value_shows(
    dtype: torch.dtype, layout: str, small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of small tensors there is a copy, of others a hash."""
    monkeypatch.setattr(fingerprinting, "_SMALL", small)
    memory = torch.randint(0, 2, (5, 6)).to(dtype)
    if dtype.is_floating_point and dtype.itemsize > 1:
        memory[2, 3] = float("nan")
    tensor = _LAYOUTS[layout](memory)
    values = [None, tensor, 3, tensor.conj() if dtype.is_complex else tensor]
    before = fingerprinting.fingerprints(values)
    assert fingerprinting.written(before, values) == []
    place = tensor[(-1,) * tensor.dim()] if layout != "expanded" else memory[0, 0]
    place.copy_(~place if dtype is torch.bool else torch.tensor(3).to(dtype))
    assert fingerprinting.written(before, values) == [1, 3]


def test_copies_take_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprinting, "_MOST_COPIED", 100)
    values = [torch.randn(20), torch.randn(20), torch.randn(5)]
    before = fingerprinting.fingerprints(values)
    assert [each.numel() for each in before] == [20, 3, 5]
    values[1][7] += 1
    assert fingerprinting.written(before, values) == [1]
