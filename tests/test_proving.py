"""Compiled code that is wrong, in all the ways in which it can be: found in its first runs, at no cost of a step."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import compiled_autograd as ca
from backends.eager import EagerBackend
from backends.inductor.straight_line.straight_line import PROGRAM, StraightLine
from backends.protocol import PROVING_RUNS
from compiled_autograd.proving import fingerprints, judging, prover
from compiled_autograd.proving.fingerprints import is_seeded, names_random, twins
from compiled_autograd.runtime import program
from compiled_autograd.steps.accumulate import outermost_first
from compiled_autograd.steps.proof import MAX_WEAK, PROVING_SIZES, Proof
from shadow_cache import Failure, Mismatch

from .helpers import assert_grads, assert_same, expect, mlp

BATCH = torch.linspace(-1, 1, 32).view(4, 8)
Run = Callable[[Sequence[torch.Tensor], Callable[..., Any]], Any]

pytestmark = pytest.mark.filterwarnings("ignore")


def _backend(run: Callable[[int, Sequence[Any], Callable[..., Any]], Any]) -> Callable[..., Any]:
    """A backend whose code is ``run(number of the run, arguments, what the graph computes)``."""

    def backend(graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        number = 0

        def compiled(*arguments: Any) -> Any:
            nonlocal number
            number += 1
            return run(number, arguments, graph_module.forward)

        return compiled

    return backend


def _wrong_from(first: int, last: int = 1 << 30) -> Callable[..., Any]:
    def run(number: int, arguments: Sequence[Any], right: Callable[..., Any]) -> Any:
        results = list(right(*arguments))
        if first <= number <= last:
            results[0] = results[0] + 0.01
        return results

    return _backend(run)


def _train(backend: Any, steps: int, **settings: Any) -> tuple[ca.Session, list[ca.Outcome]]:
    """Every gradient is eager's; gives the session and what became of each backward."""
    reference, model = mlp(), mlp()
    model.load_state_dict(reference.state_dict())
    session = ca.enable(backend=backend, cache_dir=False, tune=False, **settings)
    outcomes = []
    for step in range(steps):
        for each in (reference, model):
            each.zero_grad()
        (reference(BATCH + step)).square().mean().backward()
        with session:
            model(BATCH + step).square().mean().backward()
        assert_grads(model, reference)
        assert session.last is not None
        outcomes.append(session.last)
    return session, outcomes


def _failures(outcome: ca.Outcome) -> list[Failure]:
    return [reason for reason in outcome.reasons if isinstance(reason, Failure)]


# ---- what is compared --------------------------------------------------------------------------------------------


def test_right_code_is_compared_twice_and_then_no_more() -> None:
    session, outcomes = _train(_wrong_from(1 << 30), steps=PROVING_RUNS + 2)
    expect(session.stats(), structure_misses=1, hits=PROVING_RUNS + 1, captures=1, compiles=1)
    assert ["prove" in outcome.seconds for outcome in outcomes] == [True] * PROVING_RUNS + [False] * 2


@pytest.mark.parametrize("first", range(1, PROVING_RUNS + 1))
def test_wrong_values_cost_no_step_and_are_not_met_again(first: int) -> None:
    with pytest.warns(UserWarning, match="mismatch in") as warned:
        session, outcomes = _train(_wrong_from(first), steps=5)
    (failure,) = _failures(outcomes[first - 1])
    assert failure.kind == "mismatch" and "one by one from now on" in failure.instead
    assert "the largest difference is 0.01" in failure.error
    assert "weight" in failure.where and "MeanBackward0 of Sequential" in failure.where
    (text,) = [str(each.message) for each in warned]
    assert "Gradients are right" in text and "Compiled code was wrong" in text and "only slower" not in text
    assert all(not outcome.reasons for outcome in outcomes[first:]), "hits, of calls one by one"
    stats = session.stats()
    assert (stats.failures, stats.compiles, stats.bypasses) == (1, 1, {})


def test_a_mismatch_leaves_a_reproduction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the region, as it was compiled; and code that is wrong shows there too."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("compiled_autograd.reproduction.writing._MAX_KEPT", 1000)
    session, outcomes = _train(_wrong_from(1), steps=1)
    (path,) = tmp_path.glob("*/reproduction.zip")
    (failure,) = _failures(outcomes[0])
    assert str(path) in failure.instead
    reproduction = ca.load(path)
    assert (reproduction.about.where, reproduction.about.difference) == (failure.where, failure.error)
    (wrong,) = [each for each in reproduction.compare(_wrong_from(1)).differences if not each.is_rounding]
    assert "bias" in wrong.name and wrong.error == pytest.approx(0.01)
    (graph,) = session.graphs()
    assert [each.code for each in reproduction.graph("eager").aten] == [each.code for each in graph.aten]


def _other_dtype(number: int, arguments: Sequence[Any], right: Callable[..., Any]) -> Any:
    return [each.double() for each in right(*arguments)]


def _undefined(number: int, arguments: Sequence[Any], right: Callable[..., Any]) -> Any:
    return [None for _ in right(*arguments)]


def _another_shape(number: int, arguments: Sequence[Any], right: Callable[..., Any]) -> Any:
    return [each[None] for each in right(*arguments)]


@pytest.mark.parametrize(
    ("run", "what"),
    [(_other_dtype, "dtype"), (_undefined, "undefined"), (_another_shape, "shape")],
)
def test_what_can_be_seen_beside_the_values(run: Any, what: str) -> None:
    x = torch.randn(3, 4, requires_grad=True)
    wanted = torch.autograd.grad((x.sin() * x).sum(), x)
    reasons: list[str] = []
    with ca.enable(backend=_backend(run), cache_dir=False) as session:
        for _ in range(3):
            assert_same(torch.autograd.grad((x.sin() * x).sum(), x), wanted)
            assert session.last is not None
            reasons += [failure.error for failure in _failures(session.last)]
    assert len(reasons) == 1 and what in reasons[0]
    expect(session.stats(), structure_misses=1, hits=2, failures=1, compiles=1)


@pytest.mark.parametrize("first", range(1, PROVING_RUNS + 2))
def test_other_strides_are_those_of_the_real_calls_from_then_on(first: int) -> None:
    """Decompositions and traces may have others than the kernels. What is handed on is copied, where somebody sees."""

    def run(number: int, arguments: Sequence[Any], right: Callable[..., Any]) -> Any:
        results = right(*arguments)
        return results if number < first else [each.t().contiguous().t() for each in results]

    x = torch.randn(3, 4, requires_grad=True)
    wanted = torch.autograd.grad((x.sin() * x).sum(), x)
    found = []
    with ca.enable(backend=_backend(run), cache_dir=False) as session:
        for _ in range(PROVING_RUNS + 2):
            found += torch.autograd.grad((x.sin() * x).sum(), x)
    expect(session.stats(), structure_misses=1, hits=PROVING_RUNS + 1, compiles=1)
    (compiled,) = session.graphs()[0].regions[0].compiled_regions()
    if first <= PROVING_RUNS:
        assert_same(found, wanted * len(found))
        assert len(compiled.wiring.permuted) == 1
    else:
        assert [each.stride() for each in found][-2:] == [(1, 3)] * 2, "nobody looks any more"


@pytest.mark.parametrize("backend", ["inductor", "eager"])
@pytest.mark.parametrize("check", ["new", True])
def test_other_strides_of_what_is_repeated(backend: str, check: Any) -> None:
    """An expanded gradient over a permuted one: the real calls give it strides that no dense tensor has."""
    seen: list[tuple[int, ...]] = []

    class Seen(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            seen.append(grad.stride())
            return grad * 2

    w = torch.randn(2, 1, 3).permute(2, 1, 0)
    session = ca.enable(backend=backend, cache_dir=False, tune=False, check=check)
    for _ in range(5):
        x = torch.randn(3, 4, 2, requires_grad=True)
        (wanted,) = torch.autograd.grad((Seen.apply(x).sum(1, keepdim=True).sin() * w).sum(), x)
        with session:
            (found,) = torch.autograd.grad((Seen.apply(x).sum(1, keepdim=True).sin() * w).sum(), x)
        torch.testing.assert_close(found, wanted)
        assert found.stride() == wanted.stride()
    assert set(seen) == {(1, 0, 3)} and session.stats().failures == 0


def test_other_strides_of_what_has_symbols_for_sizes_follow_the_sizes() -> None:
    def run(number: int, arguments: Sequence[Any], right: Callable[..., Any]) -> Any:
        return [each.transpose(0, 2).contiguous().transpose(0, 2) for each in right(*arguments)]

    with ca.enable(backend=_backend(run), cache_dir=False, dynamic=True) as session:
        for size in (3, 3, 3, 5, 6, 7, 8):
            x = torch.randn(2, 1, size, requires_grad=True)
            found = torch.autograd.grad((x.sin() * x).sum(), x)
            with ca.disable():
                assert_same(found, torch.autograd.grad((x.sin() * x).sum(), x))
    expect(session.stats(), structure_misses=1, hits=6, compiles=1)
    (compiled,) = session.graphs()[0].regions[0].compiled_regions()
    assert len(compiled.wiring.permuted) == 1


def test_whether_channels_come_last_is_handed_on_also_where_there_is_one_channel() -> None:
    """Nobody sees the strides of one channel; but operators, and the regions that come next, go by them."""

    def run(number: int, arguments: Sequence[Any], right: Callable[..., Any]) -> Any:
        return [each.as_strided(each.shape, (25, 1, 5, 1)) for each in right(*arguments)]

    seen: list[tuple[int, ...]] = []
    with ca.enable(backend=_backend(run), cache_dir=False) as session:
        for _ in range(5):
            x = torch.randn(2, 1, 5, 5, requires_grad=True)
            y = x.sin()
            y.register_hook(lambda gradient: seen.append(gradient.stride()))
            (found,) = torch.autograd.grad((y * y).sum(), x)
            seen.append(found.stride())
    assert seen == [(25, 25, 5, 1)] * 10
    expect(session.stats(), structure_misses=1, hits=4, compiles=2)
    assert outermost_first(torch.randn(50).as_strided((2, 1, 5, 5), (25, 1, 5, 1))) == (0, 2, 3, 1)
    assert outermost_first(torch.randn(50).as_strided((2, 1, 5, 5), (25, 25, 5, 1))) == (0, 1, 2, 3)


def test_other_strides_of_what_shares_memory_are_a_difference() -> None:
    def run(number: int, arguments: Sequence[Any], right: Callable[..., Any]) -> Any:
        return [each.t().contiguous().t() for each in right(*arguments)]

    x, y = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    w = torch.randn(3, 4)
    with ca.enable(backend=_backend(run), cache_dir=False) as session:
        for _ in range(3):
            one, other = torch.autograd.grad((((x + y) * w).sum()), (x, y))
            assert one.stride() == other.stride() == (4, 1) and one.data_ptr() == other.data_ptr()
    assert session.stats().failures == 1


def test_memory_that_is_given_out_twice_is_found_at_the_second_run() -> None:
    buffers: list[torch.Tensor] = []

    def run(number: int, arguments: Sequence[Any], right: Callable[..., Any]) -> Any:
        results = right(*arguments)
        if not buffers:
            buffers.extend(each.clone() for each in results)
        for buffer, each in zip(buffers, results, strict=True):
            buffer.copy_(each)
        return list(buffers)

    session, outcomes = _train(_backend(run), steps=4)
    assert [len(_failures(outcome)) for outcome in outcomes] == [0, 1, 0, 0]
    assert "still held" in _failures(outcomes[1])[0].error
    assert session.stats().hits == 2


def test_a_run_that_writes_into_what_the_one_before_gave() -> None:
    given: list[torch.Tensor] = []

    def run(number: int, arguments: Sequence[Any], right: Callable[..., Any]) -> Any:
        for each in given:
            each.zero_()
        given[:] = right(*arguments)
        return [each.clone() for each in given] if number > 1 else list(given)

    _, outcomes = _train(_backend(run), steps=3)
    assert [len(_failures(outcome)) for outcome in outcomes] == [0, 1, 0]


@pytest.mark.parametrize(("first", "failures"), [(1, []), (2, ["shares memory with an input"])])
def test_results_that_share_memory_with_an_input(first: int, failures: list[str]) -> None:
    """From the first run on they are copied; one that begins later is not what it was."""

    def run(number: int, arguments: Sequence[Any], right: Callable[..., Any]) -> Any:
        results = right(*arguments)
        return [arguments[0].view_as(each) for each in results] if number >= first else results

    x, gradient = torch.ones(3, requires_grad=True), torch.ones(3)
    errors: list[str] = []
    with ca.enable(backend=_backend(run), cache_dir=False) as session:
        for _ in range(4):
            (found,) = torch.autograd.grad(x * torch.ones(3), x, gradient)
            assert found.untyped_storage().data_ptr() != gradient.untyped_storage().data_ptr()
            assert session.last is not None
            errors += [failure.error for failure in _failures(session.last)]
    assert len(errors) == len(failures) and all(what in error for what, error in zip(failures, errors, strict=True))


def test_code_that_writes_into_its_inputs_is_an_error() -> None:
    """What was given to it is no more, and nobody can bring it back: the step must not go on as if nothing were."""

    def run(number: int, arguments: Sequence[Any], right: Callable[..., Any]) -> Any:
        results = right(*arguments)
        max(arguments, key=lambda each: each.numel()).mul_(2)
        return results

    w = torch.randn(5, 5, requires_grad=True)
    x = torch.randn(3, 5, requires_grad=True)
    with (
        ca.enable(backend=_backend(run), cache_dir=False) as session,
        pytest.raises(ca.GradientMismatchError, match=r"has written into .*MmBackward0.*was overwritten"),
    ):
        (x @ w).sum().backward()
    assert session.stats().backwards == 1


@pytest.mark.parametrize("value", [0.0, 3.0])
def test_code_that_writes_the_same_into_its_inputs_each_time(value: float) -> None:
    def run(number: int, arguments: Sequence[Any], right: Callable[..., Any]) -> Any:
        results = right(*arguments)
        max(arguments, key=lambda each: each.numel()).fill_(value)
        return results

    w, x = torch.ones(5, 5, requires_grad=True), torch.randn(3, 5, requires_grad=True)
    with (
        ca.enable(backend=_backend(run), cache_dir=False),
        pytest.raises(ca.GradientMismatchError, match="overwritten"),
    ):
        (x @ w).sum().backward()


@pytest.mark.parametrize("value", [0, 1])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool])
def test_code_that_writes_the_same_into_indices_and_masks(dtype: torch.dtype, value: int) -> None:
    """Where indices are all 0 afterwards no other value is known to be one: this alone is not found."""

    def run(number: int, arguments: Sequence[Any], right: Callable[..., Any]) -> Any:
        results = right(*arguments)
        next(each for each in arguments if each.dtype is dtype).fill_(value)
        return results

    given = torch.tensor([1, 0, 1, 0]).to(dtype)
    x = torch.randn(4, 4, requires_grad=True)
    is_index = dtype in (torch.int64, torch.int32)
    loss = (x.sin().index_select(0, given) if is_index else x.sin() * given).cos().sum()
    raises = pytest.raises(ca.GradientMismatchError, match="overwritten")
    with ca.enable(backend=_backend(run), cache_dir=False) as session:
        if is_index and value == 0:
            loss.backward()
            assert session.stats().failures == 0
        else:
            with raises:
                loss.backward()


@pytest.mark.parametrize("change", [lambda a: a.flip(0), lambda a: a.flip(1), lambda a: a.t(), lambda a: a.roll(1, 1)])
def test_code_that_moves_what_it_was_given(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    def run(number: int, arguments: Sequence[Any], right: Callable[..., Any]) -> Any:
        results = right(*arguments)
        for each in arguments:
            if each.shape == (5, 5):
                each.copy_(change(each).clone())
        return results

    w, x = torch.arange(25.0).reshape(5, 5).requires_grad_(), torch.randn(3, 5, requires_grad=True)
    with (
        ca.enable(backend=_backend(run), cache_dir=False),
        pytest.raises(ca.GradientMismatchError, match="overwritten"),
    ):
        (x @ w).sum().backward()


def test_copies_of_views_share_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    clone = torch.UntypedStorage.clone
    monkeypatch.setattr(torch.UntypedStorage, "clone", lambda self: made.append(self.nbytes()) or clone(self))
    whole = torch.randn(6, 4)
    copies = twins([whole[0], whole[1:3], whole.t()])
    assert made == [96]
    assert len({each.untyped_storage().data_ptr() for each in copies}) == 1
    assert_same(copies, [whole[0], whole[1:3], whole.t()])


@pytest.mark.parametrize("wrong", [False, True])
def test_what_somebody_else_changes_meanwhile_is_compared_on_copies(wrong: bool) -> None:
    w = torch.randn(5, 5, requires_grad=True)

    def run(number: int, arguments: Sequence[Any], right: Callable[..., Any]) -> Any:
        results = right(*arguments)
        if number < 3:
            w.data.mul_(1.5)  # as a thread does that trains the same model
        return [result + 0.01 for result in results] if wrong else results

    x = torch.randn(3, 5, requires_grad=True)
    with ca.enable(backend=_backend(run), cache_dir=False) as session:
        for _ in range(6):
            (x @ w).sum().backward()
            x.grad = w.grad = None
    assert session.stats().failures == wrong
    (compiled,) = session.graphs()[0].regions[0].compiled_regions()
    assert compiled.proof.settled != wrong and compiled.proof.refuted == wrong and compiled.proof.weak == 0


def test_operators_that_write_into_what_was_saved_for_them() -> None:
    """An LSTM's backward on the CPU writes into the workspace of its forward, not in each run."""
    torch.manual_seed(0)
    model, x = torch.nn.LSTM(4, 6), torch.randn(5, 2, 4)
    for backend, failures in ((_backend(lambda number, arguments, right: right(*arguments)), 0), (_wrong_from(1), 1)):
        session = ca.enable(backend=backend, cache_dir=False, tune=False)
        for _ in range(4):
            wanted = torch.autograd.grad(model(x)[0].square().mean(), list(model.parameters()))
            with session:
                found = torch.autograd.grad(model(x)[0].square().mean(), list(model.parameters()))
            assert_same(found, wanted)
        stats = session.stats()
        assert (stats.failures, stats.hits, stats.compiles) == (failures, 3, 1)
        (compiled,) = session.graphs()[0].regions[0].compiled_regions()
        assert compiled.proof.refuted == bool(failures) and compiled.proof.weak == 0


@pytest.fixture
def real_runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Runs of the real calls in each of the steps below. They write into what was saved for them, in each run other
    bytes: so does an LSTM's backward, but not in each run."""
    runs, right = [0], program.run_calls

    def run_calls(step: Any, slots: list[Any], *args: Any, **keywords: Any) -> Any:
        inputs = [slots[slot] for slot in step.inputs]
        result = right(step, slots, *args, **keywords)
        for each in inputs:
            if isinstance(each, torch.Tensor) and each.shape == _CLAMPED:
                each.detach().mul_(1.5)
        runs[-1] += 1
        return result

    monkeypatch.setattr(program, "run_calls", run_calls)
    return runs


_CLAMPED = (5, 7)


def _steps_whose_calls_write(session: ca.Session, runs: list[int]) -> list[list[Failure]]:
    """What was found wrong in each of four steps."""
    torch.manual_seed(0)
    w, found = torch.randn(7, requires_grad=True), []
    for _ in range(4):
        x = torch.randn(_CLAMPED)
        wanted = torch.autograd.grad(((x * w.tanh()).clamp(min=0).sin() * 3).sum(), w)
        loss = ((x * w.tanh()).clamp(min=0).sin() * 3).sum()
        with session:
            torch.testing.assert_close(torch.autograd.grad(loss, w), wanted)
        assert session.last is not None
        found.append([each for each in session.last.reasons if isinstance(each, Failure)])
        runs.append(0)
    return found


def test_where_the_calls_write_they_run_once_for_a_comparison(real_runs: list[int]) -> None:
    """And twice more where it is first seen. The faster form is compared in the step that compiles, as elsewhere."""
    session = ca.enable(backend="inductor", cache_dir=False, tune=False)
    assert not any(_steps_whose_calls_write(session, real_runs))
    assert real_runs == [3, 1, 0, 0, 0]


def test_a_wrong_program_is_found_where_the_calls_write(real_runs: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    right = StraightLine.run_form

    def run_form(self: StraightLine, form: str, arguments: list[Any], change: Any = None) -> Sequence[Any]:
        results = right(self, form, arguments, change)
        return [each + 0.01 for each in results] if form == PROGRAM else results

    monkeypatch.setattr(StraightLine, "run_form", run_form)
    session = ca.enable(backend="inductor", cache_dir=False, tune=False)
    found = _steps_whose_calls_write(session, real_runs)
    assert [len(each) for each in found] == [1, 0, 0, 0]
    assert isinstance(found[0][0], Mismatch) and found[0][0].form == PROGRAM


def test_where_the_calls_write_they_have_copies_in_float64_too(
    real_runs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Float64 of a float64 is that tensor itself: the next form would be given what they have written."""
    in_double = []

    def each_in_double(nodes: Any, given: dict[fx.Node, Any], wanted: Any) -> Any:
        for each in given.values():
            if isinstance(each, torch.Tensor) and each.shape == _CLAMPED:
                each.detach().mul_(1.5)
                in_double.append(each)
        return [(node, None) for node in wanted]

    monkeypatch.setattr(judging, "each_in_double", each_in_double)
    monkeypatch.setattr(judging, "plainly_alike", lambda *_: False)
    session = ca.enable(backend="inductor", cache_dir=False, tune=False)
    assert not any(_steps_whose_calls_write(session, real_runs)) and len(in_double) >= 2


def test_code_that_writes_elsewhere_than_the_calls_do_is_found_on_copies(real_runs: list[int]) -> None:
    """Nothing of the user's was written into: the step goes on."""

    def run(number: int, arguments: Sequence[Any], right: Callable[..., Any]) -> Any:
        results = right(*arguments)
        if number >= 2:  # the second that is compared
            for each in arguments:
                if each.shape == (7,):
                    each.mul_(2)
        return results

    session = ca.enable(backend=_backend(run), cache_dir=False, tune=False)
    found = _steps_whose_calls_write(session, real_runs)
    assert [len(each) for each in found] == [0, 1, 0, 0]
    assert "has written into" in str(found[1][0].error)


def _move(values: Sequence[Any]) -> list[torch.Tensor]:
    """Write into one of the tensors that the calls do not write into, as another thread may."""
    moved = [each.detach() for each in values if isinstance(each, torch.Tensor) and each.shape == (7,)]
    return [each.mul_(1.5) for each in moved]


def test_others_write_where_the_calls_do(real_runs: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that train one model: what the two ways were given would differ."""
    right, elsewhere = program.run_calls, []

    def run_calls(step: Any, slots: list[Any], *args: Any, **keywords: Any) -> Any:
        if len(real_runs) == 2 and not elsewhere:  # the second step, in which it is known that the calls write
            elsewhere.extend(_move([slots[slot] for slot in step.inputs]))
        return right(step, slots, *args, **keywords)

    monkeypatch.setattr(program, "run_calls", run_calls)
    monkeypatch.setattr(torch.testing, "assert_close", lambda *_: None)  # eager has not seen that write
    session = ca.enable(backend="eager", cache_dir=False, tune=False)
    assert not any(_steps_whose_calls_write(session, real_runs)) and elsewhere
    assert real_runs == [3, 4, 0, 0, 0], "in the second step they run again, on copies"


def test_both_ways_are_given_the_same_whoever_writes(real_runs: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time when something was copied, here. A difference that is none would widen what is taken for rounding."""
    right, made = prover.copied, []

    def copied(step: Any, compiled: Any, slots: list[Any], *args: Any) -> Any:
        copies = right(step, compiled, slots, *args)
        if len(real_runs) == 1 and not any(slots is each for each in made):
            _move([slots[slot] for slot in step.inputs])
        made.append(copies)
        return copies

    monkeypatch.setattr(prover, "copied", copied)
    backend = _backend(lambda number, arguments, right: [each * 1.2 for each in right(*arguments)])
    session = ca.enable(backend=backend, cache_dir=False, tune=False)
    assert [len(each) for each in _steps_whose_calls_write(session, real_runs)] == [1, 0, 0, 0]


def test_what_the_real_calls_write_is_not_laid_at_the_door_of_the_compiled_code() -> None:
    """Threads train one LSTM: its backward writes into what its forward saved, and other bytes where a weight moves."""
    torch.manual_seed(0)
    model, x = torch.nn.LSTM(8, 16, num_layers=2), torch.randn(5, 4, 8)

    def run(number: int, arguments: Sequence[Any], right: Callable[..., Any]) -> Any:
        results = right(*arguments)
        for weight in (model.weight_ih_l0, model.weight_ih_l1):
            weight.data.mul_(1.001)
        return results

    with ca.enable(backend=_backend(run), cache_dir=False, tune=False) as session:
        for _ in range(4):
            torch.autograd.grad(model(x)[0].square().mean(), list(model.parameters()))
    expect(session.stats(), structure_misses=1, hits=3)


def test_what_both_write_may_differ_by_rounding() -> None:
    """An LSTM's backward writes what depends on its gradients, and Inductor rounds these otherwise."""
    torch.manual_seed(0)
    model, x, target = torch.nn.LSTM(16, 32, num_layers=2), torch.randn(12, 8, 16), torch.randn(12, 8, 32)

    def loss() -> torch.Tensor:
        return (F.gelu(model(x)[0].tanh() * 1.7 + 0.3).softmax(-1) * target).exp().mean() * 3

    session = ca.enable(backend="inductor", cache_dir=False, tune=False, check=True)
    for _ in range(4):
        wanted = torch.autograd.grad(loss(), list(model.parameters()))
        with session:
            found = torch.autograd.grad(loss(), list(model.parameters()))
        torch.testing.assert_close(found, wanted)
    expect(session.stats(), structure_misses=1, hits=3, compiles=1)


@pytest.mark.parametrize("changes", [False, True])
def test_random_numbers_are_drawn_once(changes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprints, "_RANDOM", re.compile("cos"))

    def run(number: int, arguments: Sequence[Any], right: Callable[..., Any]) -> Any:
        torch.rand(100)
        if changes and number == 1:
            x.data.mul_(1.5)  # as another thread
        return right(*arguments)

    torch.manual_seed(3)
    wanted = torch.rand(2)
    torch.manual_seed(3)
    x = torch.randn(3, generator=torch.Generator()).requires_grad_()
    with ca.enable(backend=_backend(run), cache_dir=False):
        x.sin().sum().backward()
    assert torch.equal(torch.rand(2), wanted), "what the real calls draw is what was drawn: nothing"


def test_what_draws_is_not_computed_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other numbers would be drawn, and a mistake would be no further off than what they give."""
    monkeypatch.setattr(fingerprints, "_RANDOM", re.compile("cos"))
    monkeypatch.setattr(judging, "is_seeded", lambda text: "cos" in text)
    monkeypatch.setattr(judging, "each_in_double", lambda *_: pytest.fail("float64 was asked for"))
    session, x = ca.enable(backend=_wrong_from(1), cache_dir=False, tune=False), torch.randn(3, requires_grad=True)
    with session:
        (found,) = torch.autograd.grad(x.sin().sum(), x)
    assert_same([found], [x.detach().cos()])
    assert session.stats().failures == 1


def test_what_draws_is_told_by_its_operators() -> None:
    def text_of(function: Callable[[torch.Tensor], Any]) -> str:
        return make_fx(function)(torch.ones(3)).code

    def reads_a_mask(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten.native_dropout_backward(x, x > 0, 2.0)

    assert is_seeded(text_of(torch.rand_like)) and is_seeded(text_of(lambda x: F.dropout(x, 0.5)))
    assert not is_seeded(text_of(reads_a_mask)) and names_random(text_of(reads_a_mask))
    assert not is_seeded("torch.ops.aten._scaled_dot_product_flash_attention_backward.default(x)")
    assert is_seeded(text_of(torch._standard_gamma)) and not names_random(text_of(torch._standard_gamma))


def test_what_operators_of_others_draw_is_told_by_their_names() -> None:
    """They need not say so; and those that run other operators have no tags."""

    ours = torch.ops.compiled_autograd_tests
    run = torch.ops.higher_order.auto_functionalized
    for target, inner in ((ours.noise_rand, None), (ours.jitter, None), (run, ours.noise_rand), (run, ours.jitter)):
        graph = fx.Graph()
        arguments = (graph.placeholder("x"),) if inner is None else (inner.default,)
        graph.output(graph.call_function(target if inner else target.default, arguments))
        assert is_seeded(graph.python_code("self").src), (target, inner)


_NOISE = torch.library.Library("compiled_autograd_tests", "FRAGMENT")
_NOISE.define("noise_rand(Tensor gradient) -> Tensor")
_NOISE.define("jitter(Tensor gradient) -> Tensor", tags=[torch.Tag.nondeterministic_seeded])
for _name in ("noise_rand", "jitter"):
    _NOISE.impl(_name, lambda gradient: gradient * torch.rand_like(gradient), "CompositeExplicitAutograd")
    _NOISE.impl(_name, torch.empty_like, "Meta")


@ca.traceable
class _Noise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, name: str) -> torch.Tensor:
        ctx.name = name
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.name == "gamma":
            return gradient * torch._standard_gamma(torch.ones_like(gradient)), None
        return getattr(torch.ops.compiled_autograd_tests, ctx.name)(gradient), None


@pytest.mark.parametrize("name", ["noise_rand", "jitter", "gamma"])
def test_a_mistake_is_found_beside_what_is_drawn(name: str) -> None:
    """In float64 other numbers were drawn: anything was as near to these as the real calls were. And what is drawn next
    is what eager would draw."""
    backend = _backend(lambda number, arguments, right: [each * 1.5 for each in right(*arguments)])
    session, w = ca.enable(backend=backend, cache_dir=False, tune=False), torch.randn(50, requires_grad=True)
    for step in range(4):
        torch.manual_seed(step)
        wanted = [*torch.autograd.grad((_Noise.apply(w * 2, name) * 3).sum(), w), torch.rand(3)]
        torch.manual_seed(step)
        with session:
            found = [*torch.autograd.grad((_Noise.apply(w * 2, name) * 3).sum(), w), torch.rand(3)]
        assert_same(found, wanted)
    assert session.stats().failures == 1


def test_a_gradient_of_zeros_shows_nothing() -> None:
    """As of an adapter whose second factor is zero in the beginning: it is compared until it is not."""
    session = ca.enable(backend=_wrong_only_where_not_zero(), cache_dir=False, tune=False)
    x = torch.randn(4, requires_grad=True)
    for step in range(5):
        factor = torch.zeros(4) if step < 3 else torch.ones(4)
        with session:
            (found,) = torch.autograd.grad((x * factor * 3).sum(), x)
        assert_same([found], [factor * 3])
    assert session.stats().failures == 1


def test_of_runs_that_give_zeros_alone_the_first_is_compared_and_those_after_many() -> None:
    runs = []

    def run(number: int, arguments: Sequence[Any], right: Callable[..., Any]) -> Any:
        runs.append(number)
        return [each + 1 if number == 3 else each for each in right(*arguments)]

    session, x, at = (
        ca.enable(backend=_backend(run), cache_dir=False, tune=False),
        torch.ones(4, requires_grad=True),
        [],
    )
    for _ in range(MAX_WEAK + PROVING_RUNS + 1):
        before = len(runs)
        with session:
            (found,) = torch.autograd.grad((x * torch.zeros(4) * 3).sum(), x)
        assert_same([found], [torch.zeros(4)])
        at.append(len(runs) - before)
    assert at == [1] + [0] * (MAX_WEAK - 1) + [1, 1] + [0] * (PROVING_RUNS - 1)
    assert session.stats().failures == 1, "the third run was wrong"


@pytest.mark.parametrize("other", [torch.tensor([0.0, 1e-3, 0, 0]), None])
def test_zeros_beside_anything_else_are_compared(other: torch.Tensor | None) -> None:
    session = ca.enable(backend=_wrong_from(2), cache_dir=False, tune=False)
    x, y = torch.ones(4, requires_grad=True), torch.ones(4, requires_grad=True)
    for _ in range(2):
        factor = torch.ones(4, dtype=torch.float64) if other is None else other
        with session:
            found = torch.autograd.grad((x * torch.zeros(4)).sum() + (y * factor).sum(), (x, y))
        assert_same(found, [torch.zeros(4), factor.float()])
    assert session.stats().failures == 1


def _wrong_only_where_not_zero() -> Callable[..., Any]:
    def run(number: int, arguments: Sequence[Any], right: Callable[..., Any]) -> Any:
        return [each * 1.1 for each in right(*arguments)]

    return _backend(run)


# ---- the setting -------------------------------------------------------------------------------------------------


def test_every_run_is_compared_and_a_difference_raises_with_the_right_gradients_written() -> None:
    model, reference = mlp(), mlp()
    reference.load_state_dict(model.state_dict())
    reference(BATCH).sum().backward()
    session = ca.enable(backend=_wrong_from(4), check=True, cache_dir=False)
    for _ in range(3):
        model.zero_grad()
        with session:
            model(BATCH).sum().backward()
    model.zero_grad()
    with session, pytest.raises(ca.GradientMismatchError, match=r"mismatch in .*The right gradients were written"):
        model(BATCH).sum().backward()
    assert_grads(model, reference)
    assert session.stats().backwards == 4


@pytest.mark.parametrize(("every", "found_at"), [(3, 6), (5, 5)])
def test_every_nth_run_is_compared_too(every: int, found_at: int) -> None:
    session = ca.enable(backend=_wrong_from(PROVING_RUNS + 2), check=every, cache_dir=False)
    x = torch.randn(3, requires_grad=True)
    for number in range(1, found_at + 1):
        with session:
            if number == found_at:
                with pytest.raises(ca.GradientMismatchError):
                    torch.autograd.grad(x.sin().sum(), x)
            else:
                torch.autograd.grad(x.sin().sum(), x)


def test_nothing_is_compared_where_that_was_asked_for() -> None:
    x = torch.randn(3, requires_grad=True)
    with ca.enable(backend=_wrong_from(1), check=False, cache_dir=False) as session:
        (found,) = torch.autograd.grad(x.sin().sum(), x)
    assert_same([found], [x.detach().cos() + 0.01])
    assert session.last is not None and "prove" not in session.last.seconds


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("wrong_at_bound", [True, False])
def test_a_gradient_that_is_wrong_where_a_case_ends_is_found(dtype: torch.dtype, wrong_at_bound: bool) -> None:
    """Moving the inputs by their rounding has the gradient of one value jump: that excuses neither it nor another."""
    x = torch.tensor([1.0, 0.3, 0.7, 1.5], dtype=dtype, requires_grad=True)
    factors = torch.tensor([1.0, 0.9, 1.1, 1.2], dtype=dtype)
    (wanted,) = torch.autograd.grad((x.clamp(0, 1) * factors).sum(), x)
    at_bound = float(wanted[0])
    assert at_bound in (0, 1), "it is 0 since 2.14, and was 1"

    def run(number: int, arguments: Sequence[Any], right: Callable[..., Any]) -> Any:
        wrong = torch.tensor([1 - 2 * at_bound, 0, 0, 0] if wrong_at_bound else [0, 0.9, 0, 0], dtype=dtype)
        return [each + wrong for each in right(*arguments)]

    with ca.enable(backend=_backend(run), cache_dir=False) as session:
        for _ in range(3):
            (found,) = torch.autograd.grad((x.clamp(0, 1) * factors).sum(), x)
            assert torch.equal(found, wanted)
    expect(session.stats(), structure_misses=1, hits=2, compiles=1, failures=1)


def test_a_small_gradient_that_is_wrong_beside_a_large_one_is_found() -> None:
    """A regression on features that nobody has normalised: the bias's gradient is a millionth of the weight's."""

    def run(number: int, arguments: Sequence[Any], right: Callable[..., Any]) -> Any:
        return [torch.zeros_like(each) if each.numel() == 1 else each for each in right(*arguments)]

    features, target = torch.linspace(-1e6, 2e6, 24).view(8, 3), torch.linspace(-1, 1, 8).view(8, 1)
    reference, model = nn.Linear(3, 1), nn.Linear(3, 1)
    model.load_state_dict(reference.state_dict())
    session = ca.enable(backend=_backend(run), cache_dir=False)
    for _ in range(3):
        reference.zero_grad()
        model.zero_grad()
        nn.functional.huber_loss(reference(features), target).backward()
        with session:
            nn.functional.huber_loss(model(features), target).backward()
        assert_grads(model, reference)
    expect(session.stats(), structure_misses=1, hits=2, compiles=1, failures=1)


def test_what_the_users_passes_make_of_the_graph_is_what_was_asked_for() -> None:
    def doubled(graph_module: fx.GraphModule) -> None:
        output = graph_module.graph.find_nodes(op="output")[0]
        with graph_module.graph.inserting_before(output):
            twice = [graph_module.graph.call_function(torch.ops.aten.mul.Tensor, (each, 2)) for each in output.args[0]]
        output.args = (twice,)
        graph_module.recompile()

    x = torch.randn(3, requires_grad=True)
    session = ca.enable(backend=_wrong_from(2), passes=[doubled], cache_dir=False)
    for _ in range(3):
        with session:
            (found,) = torch.autograd.grad(x.sin().sum(), x)
        assert_same([found], [x.detach().cos() * 2])
    assert session.stats().failures == 1


def _without_copies(graph_module: fx.GraphModule) -> None:
    for node in list(graph_module.graph.nodes):
        if node.target in (torch.ops.aten.clone.default, torch.ops.aten.copy.default):
            node.replace_all_uses_with(node.args[-1])
            graph_module.graph.erase_node(node)
    graph_module.graph.eliminate_dead_code()
    graph_module.recompile()


def test_a_leaf_keeps_a_gradient_of_its_own_whatever_the_users_passes_leave_out() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    session = ca.enable(backend="eager", passes=[_without_copies], cache_dir=False)
    for _ in range(3):
        with session:
            x.sum().backward()
        assert x.grad is not None and x.grad.stride() == (4, 1) and torch.equal(x.grad, torch.ones(3, 4))
        x.grad = None
    expect(session.stats(), structure_misses=1, hits=2, compiles=1)
    (compiled,) = session.graphs()[0].regions[0].compiled_regions()
    assert "clone" not in compiled.aten.text() and "copy" not in compiled.aten.text()


def test_so_it_does_where_the_operators_of_the_passes_graph_run_one_by_one() -> None:
    """The compiled code gave each result memory of its own; the graph gives the inputs out."""

    def run(number: int, arguments: Sequence[Any], right: Callable[..., Any]) -> Any:
        return [torch.full((3, 4), float(number)) for _ in right(*arguments)]

    x, y, z = (torch.randn(3, 4, requires_grad=True) for _ in range(3))
    session = ca.enable(backend=_backend(run), passes=[_without_copies], cache_dir=False)
    for _ in range(4):
        x.grad = y.grad = z.grad = None
        gradient = torch.ones(3, 4)
        with session:
            torch.autograd.backward([x + y, z.sum()], [gradient, torch.ones(())])
        made = [leaf.grad for leaf in (x, y, z)]
        assert_same(made, [torch.ones(3, 4)] * 3)
        assert len({each.untyped_storage().data_ptr() for each in (*made, gradient) if each is not None}) == 4
    expect(session.stats(), structure_misses=1, shape_misses=1, hits=2, compiles=1, failures=1)


# ---- forms -------------------------------------------------------------------------------------------------------


class _TwoForms:
    """A faster form takes over at the second run, which is in the first step: there is no need to wait for another one
    to compare it. ``wrong`` ones give something else."""

    def __init__(self, right: Callable[..., Any], wrong: Sequence[str]) -> None:
        self.right, self.wrong = right, wrong
        self.forms = ["slow", "fast"]
        self.ran: list[str] = []

    def form_for(self, arguments: Sequence[Any]) -> str:
        return self.forms[-1] if self.ran else self.forms[0]

    def drop(self, form: str) -> bool:
        self.forms.remove(form)
        return bool(self.forms)

    def __call__(self, arguments: list[Any]) -> Any:
        form = self.form_for(arguments)
        self.ran.append(form)
        taken = tuple(arguments)
        arguments.clear()
        return [each + 0.5 if form in self.wrong else each for each in self.right(*taken)]


@pytest.mark.parametrize(
    ("wrong", "ran", "failures"),
    [
        ([], ["slow", "fast", "fast", "fast", "fast"], 0),
        (["fast"], ["slow", "fast", "slow", "slow", "slow"], 1),
        (["slow"], ["slow", "fast", "fast", "fast", "fast"], 1),
        (["slow", "fast"], ["slow", "fast"], 2),
    ],
)
def test_a_form_that_is_wrong_gives_way_to_a_slower_one(
    wrong: list[str], ran: list[str], failures: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[_TwoForms] = []

    def compile(self: EagerBackend, graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        made.append(_TwoForms(graph_module.forward, wrong))
        return made[-1]

    monkeypatch.setattr(EagerBackend, "compile", compile)
    session, outcomes = _train("eager", steps=4)
    assert made[0].ran == ran
    assert session.stats().failures == failures
    assert ["prove" in outcome.seconds for outcome in outcomes][:2] == [True, failures < 2]


def test_what_like_regions_share_is_dropped_in_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is found to be wrong for one, the others had trusted it already."""

    class Apart(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad.clone()

    def compile(self: EagerBackend, graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        def run(arguments: list[Any]) -> Any:
            return [each + (0.5 if bool((each > 1000).any()) else 0) for each in graph_module.forward(*arguments)]

        return run

    monkeypatch.setattr(EagerBackend, "compile", compile)
    monkeypatch.setattr(EagerBackend, "slow", True, raising=False)
    session = ca.enable(backend="eager", cache_dir=False, tune=False)

    def step(*factors: float) -> None:
        x = torch.full((6,), 0.3, requires_grad=True)
        y = Apart.apply(x.sin())
        for factor in factors:
            y = Apart.apply(y * torch.full((6,), factor))
        (wanted,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        with session:
            y.sum().backward()
        assert_same([x.grad], [wanted])

    for _ in range(PROVING_RUNS + 1):
        step(0.0, 1.0, 1.0)  # of zeros the last of the three products learns nothing
    made = [each for region in session.graphs()[0].regions for each in region.compiled_regions()][1:4]
    assert len({id(each.call) for each in made}) == 1
    assert [each.proof.settled for each in made] == [True, True, False]
    step(1e6, 1.0, 1.0)
    assert all(each.proof.refuted for each in made)
    step(1.0, 1.0, 1e6)


def test_which_runs_are_compared() -> None:
    proof = Proof()
    asked = []
    for form in ("slow", "fast", "fast", "fast"):
        asked.append(proof.due(form, PROVING_RUNS, None))
        proof.shown(form, None, telling=True)
    assert asked == [True, True, True, False] and proof.settled

    proof = Proof()
    sizes = [(size,) for size in (3, 3, 3, 4, 5, 5, 6, 7, 8)]
    asked = []
    for each in sizes:
        asked.append(proof.due("only", PROVING_RUNS, each))
        if asked[-1]:
            proof.shown("only", each, telling=True)
    assert asked == [True, True, False, True, True, False, True, False, False]
    assert sum(asked) == PROVING_RUNS + PROVING_SIZES and proof.settled


def test_code_for_symbols_is_compared_for_three_more_sets_of_sizes() -> None:
    def run(number: int, arguments: Sequence[Any], right: Callable[..., Any]) -> Any:
        results = right(*arguments)
        size = max(each.shape[0] for each in arguments if isinstance(each, torch.Tensor) and each.dim())
        return [each + 1 for each in results] if size == 9 else results

    session = ca.enable(backend=_backend(run), cache_dir=False, dynamic=True)
    for size in (5, 5, 5, 6, 9, 9):
        x = torch.randn(size, requires_grad=True)
        with session:
            (found,) = torch.autograd.grad((x.sin() * x).sum(), x)
        assert_same([found], torch.autograd.grad((x.sin() * x).sum(), x))
    assert session.stats().failures == 1 and session.stats().compiles == 1


# ---- the store ---------------------------------------------------------------------------------------------------


def _step(x: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad((x.sin() * x).sum(), x)[0]


def _wrong_when_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    right = EagerBackend.load

    def load(self: EagerBackend, data: bytes) -> Any:
        call = right(self, data)
        return lambda arguments: [each + 1 for each in call(arguments)]

    monkeypatch.setattr(EagerBackend, "load", load)


def test_what_was_loaded_proves_itself_too_and_the_next_process_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(4, requires_grad=True)
    wanted = _step(x)
    with ca.enable(backend="eager", cache_dir=tmp_path):
        assert_same([_step(x)], [wanted])
    ca.reset()
    with monkeypatch.context() as patch, ca.enable(backend="eager", cache_dir=tmp_path) as session:
        _wrong_when_loaded(patch)
        for _ in range(3):
            assert_same([_step(x)], [wanted])
    assert (session.stats().loads, session.stats().failures, session.stats().compiles) == (1, 1, 0)
    ca.reset()
    with ca.enable(backend="eager", cache_dir=tmp_path) as session:
        assert_same([_step(x)], [wanted])
        assert session.last is not None
        (failure,) = _failures(session.last)
        assert failure.kind == "mismatch" and "in an earlier process" in failure.error
        assert_same([_step(x)], [wanted])
    assert session.stats().compiles == 0 and session.last.outcome == "hit"


def test_the_background_compiles_and_the_step_that_takes_over_compares() -> None:
    x = torch.randn(4, requires_grad=True)
    wanted = _step(x)
    with ca.enable(backend=_wrong_from(2), on_miss="background", cache_dir=False, tune=False) as session:
        for _ in range(5):
            assert_same([_step(x)], [wanted])
            assert session.wait(30)
    assert session.stats().failures == 1


# ---- too little memory -------------------------------------------------------------------------------------------


def test_too_little_memory_for_the_compiled_run_costs_no_step() -> None:
    def run(number: int, arguments: Sequence[Any], right: Callable[..., Any]) -> Any:
        if number == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return right(*arguments)

    session, outcomes = _train(_backend(run), steps=4)
    assert [each.kind for each in _failures(outcomes[0])] == ["unproved"]
    assert not any(_failures(outcome) for outcome in outcomes[1:])
    assert session.stats().compiles == 1
    (compiled,) = session.graphs()[0].regions[0].compiled_regions()
    assert compiled.checked and compiled.proof.settled


def test_too_little_memory_for_the_real_calls_costs_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    from compiled_autograd.runtime import program

    interpret, left = program.run_calls, [1]

    def fail_once(step: Any, slots: Any, *args: Any, **keywords: Any) -> None:
        interpret(step, slots, *args, **keywords)
        if left and left.pop():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(program, "run_calls", fail_once)
    _, outcomes = _train(_wrong_from(1 << 30), steps=3)
    assert [each.kind for each in _failures(outcomes[0])] == ["unproved"]
    assert not any(_failures(outcome) for outcome in outcomes[1:])


def test_too_little_memory_for_a_first_run_alone_is_not_for_ever() -> None:
    """The calls run one by one, each of which frees what it was given; later steps run what was compiled."""

    def run(number: int, arguments: Sequence[Any], right: Callable[..., Any]) -> Any:
        if number == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return right(*arguments)

    session, outcomes = _train(_backend(run), steps=5, check=False)
    assert [each.kind for each in _failures(outcomes[0])] == ["run"]
    assert not any(_failures(outcome) for outcome in outcomes[1:])
    assert session.stats().compiles == 1
    (compiled,) = session.graphs()[0].regions[0].compiled_regions()
    assert compiled.checked


# ---- no false alarms ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_ill_conditioned_region_raises_no_alarm(dtype: torch.dtype) -> None:
    """A bias before a batch norm has a gradient that is zero but for rounding."""
    model = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)).to(dtype)
    x = torch.randn(16, 8, dtype=dtype) * 100
    with ca.enable(backend="inductor", cache_dir=False, tune=False) as session:
        for _ in range(5):
            model.zero_grad()
            model(x).square().mean().backward()
    expect(session.stats(), structure_misses=1, hits=4, captures=1, compiles=1)


def _bias_before_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))


def _step_beside_eager(model: nn.Module, x: torch.Tensor, session: ca.Session) -> None:
    wanted = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
    model.zero_grad()
    with session:
        model(x).square().mean().backward()
    for each, want in zip(model.parameters(), wanted, strict=True):
        assert each.grad is not None
        torch.testing.assert_close(each.grad, want, rtol=1e-4, atol=1e-6)


def test_what_float64_has_shown_to_be_zero_but_for_rounding_is_not_computed_so_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []
    right = judging.each_in_double

    def each_in_double(nodes: Any, given: Any, wanted: Any, moved: int = 0) -> Any:
        asked.extend(each.name for each in wanted)
        return right(nodes, given, wanted, moved)

    monkeypatch.setattr(judging, "each_in_double", each_in_double)
    session, model, by_step = ca.enable(backend="inductor", cache_dir=False, tune=False), _bias_before_norm(), []
    for size in (16, 17, 19, 22, 25, 18):
        before = len(asked)
        _step_beside_eager(model, torch.randn(size, 8), session)
        by_step.append(len(asked) - before)
    assert by_step[0] > 0 and by_step[1] > 0, "once for numbers, once for symbols"
    assert by_step[2:].count(0) >= 3, "but for chance: rounding may be larger another time"
    expect(session.stats(), structure_misses=1, shape_misses=1, hits=4, compiles=2)


@pytest.mark.parametrize("wrong", [1e-3, float("nan"), float("inf")])
def test_what_was_zero_but_for_rounding_and_is_more_is_found(wrong: float) -> None:
    def run(number: int, arguments: Sequence[Any], right: Callable[..., Any]) -> Any:
        results = list(right(*arguments))
        bias = [each.shape == (6,) and bool(each.abs().max() < 1e-5) for each in results]
        assert sum(bias) == 1
        return [each + (wrong if number == 2 else 1e-9) * at for each, at in zip(results, bias, strict=True)]

    session, model = ca.enable(backend=_backend(run), cache_dir=False, tune=False), _bias_before_norm()
    for _ in range(3):
        _step_beside_eager(model, torch.randn(16, 8), session)
    stats = session.stats()
    assert (stats.failures, stats.compiles, stats.captures, stats.bypasses) == (1, 1, 1, {})


def test_a_value_that_overflowed_once_is_no_rounding_of_later_ones() -> None:
    def run(number: int, arguments: Sequence[Any], right: Callable[..., Any]) -> Any:
        return [each.nan_to_num(posinf=6e4) if number == 1 else each * 3 + 1 for each in right(*arguments)]

    session, x = ca.enable(backend=_backend(run), cache_dir=False, tune=False), torch.ones(4).half().requires_grad_()
    for step in range(4):
        factors = torch.tensor([6e4 if step == 0 else 1.0, 1, 1, 1]).half()
        with session:
            (found,) = torch.autograd.grad((x * factors * torch.tensor([2, 1, 1, 1]).half()).sum(), x)
        assert_same([found], [factors * torch.tensor([2, 1, 1, 1])])
    assert session.stats().failures == 1


def test_a_value_that_jumps_once_is_no_rounding_of_later_ones() -> None:
    def run(number: int, arguments: Sequence[Any], right: Callable[..., Any]) -> Any:
        return [each * (1.001 if number == 1 else 1.5) for each in right(*arguments)]

    session, factors = ca.enable(backend=_backend(run), cache_dir=False, tune=False), torch.arange(1.0, 9)
    for step in range(4):
        x = torch.full((8,), 0.05)
        x[-1] = 0.1 if step == 0 else 0.05  # in float64 more than the threshold, above which the gradient is 1
        x.requires_grad_()
        (wanted,) = torch.autograd.grad((nn.functional.softplus(x, 1, 0.1) * factors).sum(), x)
        with session:
            (found,) = torch.autograd.grad((nn.functional.softplus(x, 1, 0.1) * factors).sum(), x)
        assert_same([found], [wanted])
        assert session.stats().failures == min(step, 1), "at first a thousandth is nothing beside the jump"


def test_what_was_zero_but_for_rounding_may_have_no_values_at_other_sizes() -> None:
    assert judging.at_most(1e-9, torch.ones(0), torch.ones(0))
    assert judging.noise_of(torch.tensor([True]), torch.tensor([True]), torch.tensor([False]), 1.0) is None


def test_zeros_of_eight_bits_are_zeros() -> None:
    session = ca.enable(backend="eager", cache_dir=False, tune=False)
    x = torch.ones(4).to(torch.float8_e4m3fn).requires_grad_()
    for _ in range(3):
        with session:
            (found,) = torch.autograd.grad((x.float() * torch.zeros(4)).sum(), x)
        assert not found.float().any()
    expect(session.stats(), structure_misses=1, hits=2)
