"""``check=True`` and ``check=N``: whole backwards beside the eager engine's, and region by region where they differ."""

from __future__ import annotations

import functools
import itertools
import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import compiled_autograd as ca
from backends.protocol import PROVING_RUNS
from compiled_autograd.cache.variants import Handover
from compiled_autograd.engine import backward, execution, seam
from compiled_autograd.engine.native_hits import NativeHits
from compiled_autograd.engine.whole import beside
from compiled_autograd.proving.comparison import worst
from compiled_autograd.reproduction import writing
from compiled_autograd.runtime import program
from compiled_autograd.runtime.native_run import NativeRun
from compiled_autograd.steps.schedule import Schedule
from shadow_cache import Failure, Mismatch
from shadow_cache.cli import main

from .both_walks import library_of
from .helpers import assert_grads, assert_same, expect, mlp

BATCH = torch.linspace(-1, 1, 32).view(4, 8)
Wrongly = Callable[[list[torch.Tensor], Sequence[torch.Tensor]], Any]

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The regions that were compared with their real calls."""
    found: list[Any] = []
    prove = program.prove

    def counting(region_compiler: Any, step: Any, *more: Any) -> bool:
        found.append(step)
        return prove(region_compiler, step, *more)

    monkeypatch.setattr(program, "prove", counting)
    return found


def _several_regions(monkeypatch: pytest.MonkeyPatch, max_calls: int = 4) -> None:
    """Cut tapes into regions of a few calls."""
    monkeypatch.setattr(program, "Schedule", lambda *given: Schedule(*given[:4], max_calls))


def _plus(results: list[torch.Tensor], arguments: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [results[0] + 0.01, *results[1:]]


class Backend:
    """A backend for code that is right until it is told to be wrong.

    Attributes:
        compiled: how many regions it compiled.
        runs: how often code of it ran.
        wrong: for the numbers of such regions, what is done to their results.
    """

    __name__ = "planted"

    def __init__(self) -> None:
        self.compiled = self.runs = 0
        self.wrong: dict[int, Wrongly] = {}

    def __call__(self, graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        number, self.compiled = self.compiled, self.compiled + 1

        def run(*arguments: Any) -> Any:
            self.runs += 1
            results = list(graph_module.forward(*arguments))
            return self.wrong[number](results, arguments) if number in self.wrong else results

        return run


class Pair:
    """A model on eager, and the same compiled."""

    def __init__(self, make: Callable[[], nn.Module] = mlp, backend: Any = None, **settings: Any) -> None:
        self.backend = Backend() if backend is None else backend
        self.reference, self.model = make(), make()
        self.model.load_state_dict(self.reference.state_dict())
        settings = {"cache_dir": False, "tune": False, **settings}
        self.session = ca.enable(backend=self.backend, **settings)

    def step(self, batch: torch.Tensor = BATCH, zero: bool = True, loss: Any = None) -> ca.Outcome:
        """One step of both; the gradients are eager's, bit for bit, whatever is raised."""
        loss = loss or (lambda model: model(batch).square().mean())
        try:
            for each in (self.reference, self.model):
                if zero:
                    each.zero_grad()
            loss(self.reference).backward()
            with self.session:
                loss(self.model).backward()
        finally:
            assert_grads(self.model, self.reference)
        assert self.session.last is not None
        return self.session.last


def _failures(outcome: ca.Outcome | None) -> list[Failure]:
    assert outcome is not None
    return [reason for reason in outcome.reasons if isinstance(reason, Failure)]


# ---- whole backwards -------------------------------------------------------------------------------------------------


def test_a_backward_runs_once_on_eager_and_once_compiled(compared: list[Any]) -> None:
    pair = Pair(check=True)
    for number in range(5):
        before = pair.backend.runs
        outcome = pair.step(BATCH + number)
        assert "prove" in outcome.seconds
        assert pair.backend.runs == before + 1
    assert len(compared) == PROVING_RUNS, "what was proved is not compared region by region"
    expect(pair.session.stats(), structure_misses=1, hits=4, captures=1, compiles=1)


def test_gradients_that_are_there_are_added_to() -> None:
    pair = Pair(check=True)
    for _ in range(5):
        pair.step(zero=False)
    expect(pair.session.stats(), structure_misses=2, hits=3, captures=2, compiles=2)


@pytest.mark.parametrize("wrong", range(4))
@pytest.mark.parametrize("zero", [True, False], ids=["no .grad", "added to .grad"])
def test_the_region_that_is_wrong_is_named(monkeypatch: pytest.MonkeyPatch, wrong: int, zero: bool) -> None:
    _several_regions(monkeypatch)
    pair = Pair(check=True)
    for _ in range(PROVING_RUNS + 2):
        pair.step(zero=zero)
    regions = pair.session.last.graph.variants[-1].regions  # type: ignore[union-attr]
    assert len(regions) >= 4
    first = pair.backend.compiled - len(regions)
    pair.backend.wrong = {first + wrong: _plus}
    with pytest.raises(ca.GradientMismatchError, match="The right gradients were written") as raised:
        pair.step(zero=zero)
    (mismatch,) = raised.value.mismatches
    calls = [node.meta["call"] for node in regions[wrong].region.nodes]
    assert f"{len(calls)} calls, of its nodes #{min(calls)} to #{max(calls)}" in mismatch.where
    assert "0.01" in mismatch.error
    for _ in range(3):  # that region's calls run one by one
        assert not _failures(pair.step(zero=zero))


def test_a_nan_of_compiled_code_alone_is_a_mismatch() -> None:
    pair = Pair(check=True)
    for _ in range(3):
        pair.step()
    pair.backend.wrong = {0: lambda results, arguments: [results[0] * torch.nan, *results[1:]]}
    with pytest.raises(ca.GradientMismatchError, match="not finite in one of the two alone"):
        pair.step()


def test_code_that_is_wrong_only_now_and_then_costs_no_step() -> None:
    """The regions are right when they run again: nobody can say more than that."""
    pair = Pair(check=True)
    for _ in range(3):
        pair.step()
    (number,) = range(pair.backend.compiled)
    at = pair.backend.runs + 1

    def once(results: list[torch.Tensor], arguments: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return _plus(results, arguments) if pair.backend.runs == at else results

    pair.backend.wrong = {number: once}
    (failure,) = _failures(pair.step())
    assert failure.kind == "unproved" and "was 0.01 from eager's, and 0 when" in failure.error
    assert not _failures(pair.step())
    expect(pair.session.stats(), structure_misses=1, shape_misses=1, hits=3, compiles=1, failures=1)


def test_what_is_rounding_is_asked_about_once(monkeypatch: pytest.MonkeyPatch, compared: list[Any]) -> None:
    """Each region is off by less than a gradient may be, and all of them together by more."""
    _several_regions(monkeypatch, 2)
    x = torch.linspace(1, 2, 64, dtype=torch.float64, requires_grad=True)

    def slightly(results: list[torch.Tensor], arguments: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [each * (1 + 1e-10) if each.is_contiguous() else each for each in results]

    backend = Backend()
    session = ca.enable(backend=backend, check=True, cache_dir=False, tune=False)

    def step() -> int:
        before = len(compared)
        found = []
        for each in (ca.disable(), session):
            y = x
            for _ in range(12):
                y = y.sin() * 1.1
            with each:
                found += torch.autograd.grad(y.sum(), x)
        assert_same(found[1:], found[:1])
        return len(compared) - before

    regions, *_, last = [step() for _ in range(PROVING_RUNS + 1)]
    assert last == 0
    backend.wrong = dict.fromkeys(range(backend.compiled), slightly)
    asked = [step() for _ in range(3)]
    assert asked == [regions, 0, 0]
    assert session.stats().failures == 0


def test_code_that_writes_into_what_it_was_given_is_found() -> None:
    x, weight = torch.randn(3, requires_grad=True), torch.randn(3)

    def writes(results: list[torch.Tensor], arguments: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        next(each for each in arguments if each.shape == (3,)).mul_(2)
        return results

    backend = Backend()
    with ca.enable(backend=backend, check=True, cache_dir=False, tune=False):
        for _ in range(3):
            (x * weight).sum().backward()
            x.grad = None
        backend.wrong = {0: writes}
        wanted = weight.clone()
        with pytest.raises(ca.GradientMismatchError, match="was overwritten"):
            (x * weight).sum().backward()
    assert_same([x.grad], [wanted])


def test_what_was_written_once_is_told() -> None:
    """Where the regions run again, nothing is written."""
    x, weight = torch.randn(3, requires_grad=True), torch.randn(3)
    backend = Backend()
    with ca.enable(backend=backend, check=True, cache_dir=False, tune=False) as session:
        for _ in range(3):
            (x * weight).sum().backward()
            x.grad = None
        at, wanted = backend.runs + 1, weight.clone()

        def writes(results: list[torch.Tensor], arguments: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            if backend.runs == at:
                next(each for each in arguments if each.shape == (3,)).mul_(2)
            return results

        backend.wrong = {0: writes}
        with pytest.raises(ca.GradientMismatchError, match="was overwritten"):
            (x * weight).sum().backward()
        assert_same([x.grad, weight], [wanted, 2 * wanted])
        (x * weight).sum().backward()
        assert_same([x.grad], [3 * wanted])
    assert session.stats().failures == 1


def test_what_is_wrong_each_other_time_is_no_rounding() -> None:
    """It is right where its regions are compared, and wrong as a whole each time."""
    pair = Pair(check=True)
    for _ in range(3):
        pair.step()
    at = pair.backend.runs + 1

    def sometimes(results: list[torch.Tensor], arguments: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [5 * each for each in results] if (pair.backend.runs - at) % 2 == 0 else results

    pair.backend.wrong = {0: sometimes}
    assert {failure.kind for failure in _failures(pair.step())} == {"unproved"}
    pair.backend.wrong = {0: lambda results, arguments: [5 * each for each in results]}
    with pytest.raises(ca.GradientMismatchError):
        pair.step()


def test_a_tape_that_was_taken_for_another_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was handed over is wrong, so that the real calls are, too."""
    pair = Pair(check=True)
    for _ in range(3):
        assert not _failures(pair.step())
    slots = Handover.slots

    def others(self: Handover) -> list[Any]:
        return [2 * each if isinstance(each, torch.Tensor) and each is BATCH else each for each in slots(self)]

    monkeypatch.setattr(Handover, "slots", others)
    (failure, *_) = _failures(pair.step())
    assert failure.kind == "unproved" and "real calls of the tape graph gave it, too" in failure.error


def test_code_that_raises_costs_no_step() -> None:
    def raises(results: list[torch.Tensor], arguments: Sequence[torch.Tensor]) -> Any:
        raise ValueError("a backend's own")

    pair = Pair(check=True)
    for _ in range(3):
        pair.step()
    pair.backend.wrong = {0: raises}
    for _ in range(2):
        (failure,) = _failures(pair.step())
        assert failure.kind == "run" and "a backend's own" in failure.error
    pair.backend.wrong = {}
    assert not _failures(pair.step())
    expect(pair.session.stats(), structure_misses=1, shape_misses=2, hits=3, compiles=1, failures=2)


def test_no_memory_for_both_costs_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(check=True)
    for _ in range(3):
        pair.step()
    on_eager = execution.on_eager

    def too_little(*given: Any) -> None:
        on_eager(*given)
        raise torch.OutOfMemoryError("after all was written")

    monkeypatch.setattr(execution, "on_eager", too_little)
    (failure,) = _failures(pair.step())
    assert failure.kind == "unproved" and "not compared with eager" in failure.instead


def test_nan_in_both_is_no_mismatch(compared: list[Any]) -> None:
    pair = Pair(check=True, backend="eager")
    for number in range(4):
        factor = torch.nan if number % 2 else 1.0
        pair.step(loss=lambda model, factor=factor: (model(BATCH) * factor).sum())
    assert not _failures(pair.session.last)
    assert pair.session.stats().failures == 0


def test_undefined_and_sparse_gradients_are_compared() -> None:
    class Embedded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(5, 3, sparse=True)
            self.unused = nn.Parameter(torch.ones(3))

        def forward(self, indices: torch.Tensor) -> torch.Tensor:
            return self.table(indices) * self.unused.detach()

    pair = Pair(Embedded, check=True)
    for _ in range(4):
        pair.step(torch.tensor([1, 2, 2]))
    assert pair.session.stats().failures == 0


def test_a_tensor_that_two_leaves_get_is_of_each_alone() -> None:
    x, y = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    gradient = torch.ones(3)
    with ca.enable(backend=Backend(), check=True, cache_dir=False, tune=False) as session:
        for step in range(4):
            (x + y).backward(gradient)
            assert x.grad is not None and y.grad is not None
            assert len({each.data_ptr() for each in (x.grad, y.grad, gradient)}) == 3
            assert_same([x.grad, y.grad], [torch.full((3,), step + 1.0)] * 2)
    assert session.stats().failures == 0


# ---- what a backward was asked for -----------------------------------------------------------------------------------


def test_the_tape_is_freed_where_it_would_be() -> None:
    x = torch.randn(3, requires_grad=True)
    with ca.enable(backend=Backend(), check=True, cache_dir=False, tune=False):
        for _ in range(4):
            loss = (x.sin() * x).sum()
            loss.backward(retain_graph=True)
            loss.backward()
            with pytest.raises(RuntimeError, match="backward through the graph a second time"):
                loss.backward()
    wanted = torch.autograd.grad((x.sin() * x).sum(), x)[0]
    assert x.grad is not None and torch.allclose(x.grad, 8 * wanted)


@pytest.mark.parametrize("every", [1, 3])
def test_a_tape_that_is_not_compared_after_all_is_freed(every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compiled_autograd.engine.execution.may_run_beside", lambda *given: False)
    x = torch.randn(3, requires_grad=True)
    with ca.enable(backend=Backend(), check=every, cache_dir=False, tune=False) as session:
        for _ in range(6):
            loss = (x.sin() * x).sum()
            loss.backward()
            with pytest.raises(RuntimeError, match="second time"):
                loss.backward()
            x.grad = None
    assert session.stats().hits == 5


def test_gradients_that_are_asked_for() -> None:
    x, y = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    backend = Backend()
    with ca.enable(backend=backend, check=True, cache_dir=False, tune=False) as session:
        for step in range(5):
            hidden = x * y
            wanted = [hidden.detach().cos() * y, hidden.detach().cos()]
            if step == 4:
                backend.wrong = {0: _plus}
                with pytest.raises(ca.GradientMismatchError):
                    torch.autograd.grad(hidden.sin().sum(), (x, hidden))
                continue
            assert_same(torch.autograd.grad(hidden.sin().sum(), (x, hidden)), wanted)
        with pytest.raises(RuntimeError, match="appears to not have been used"):
            torch.autograd.grad((x * 2).sum(), y)
        assert torch.autograd.grad((x * 2).sum(), y, allow_unused=True) == (None,)
    assert x.grad is None and (session.stats().hits, session.stats().failures) == (3, 1)


def test_a_backward_for_some_leaves_alone() -> None:
    x, y = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    with ca.enable(backend=Backend(), check=True, cache_dir=False, tune=False) as session:
        for _ in range(4):
            x.grad = None
            (x * y).sum().backward(inputs=[x])
            assert_same([x.grad, y.grad], [y.detach(), None])
    assert session.stats().failures == 0 and session.stats().hits == 3


# ---- every Nth -------------------------------------------------------------------------------------------------------


def test_each_variant_is_counted_by_itself(compared: list[Any]) -> None:
    pair = Pair(check=3, dynamic=False)
    whole = []
    for number in range(6):
        for rows in (4, 2):
            whole.append((number, rows, "prove" in pair.step(BATCH[:rows]).seconds))
    due = [(number, rows) for number, rows, proved in whole if proved and number >= PROVING_RUNS]
    assert due == [(2, 4), (2, 2), (5, 4), (5, 2)]
    assert len(compared) == 2 * PROVING_RUNS
    stats = pair.session.stats()
    assert stats.hits == 10 and stats.failures == 0


@pytest.mark.parametrize("every", [2, 3])
def test_every_nth_finds_what_is_wrong(every: int) -> None:
    pair = Pair(check=every)
    for _ in range(2 * every):
        pair.step()
    pair.backend.wrong = {0: lambda results, arguments: [each + 1 for each in results]}
    for _ in range(every - 1):
        for each in (pair.reference, pair.model):
            each.zero_grad()
        with pair.session:
            pair.model(BATCH).square().mean().backward()  # nobody looks
        assert not _failures(pair.session.last)
    with pytest.raises(ca.GradientMismatchError):
        pair.step()


def test_a_variant_that_does_not_come_again_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tape is handed over whole for a while; then it is compared region by region, when it comes."""
    monkeypatch.setattr("compiled_autograd.engine.whole.checks._PATIENCE", 4)
    pair = Pair(check=3, dynamic=False)
    for _ in range(2):
        pair.step(BATCH[:2])
    kept = []
    hand_over = beside.may_run_twice
    monkeypatch.setattr(
        "compiled_autograd.engine.backward.may_run_twice", lambda graph: kept.append(graph) or hand_over(graph)
    )
    x = torch.randn(3, requires_grad=True)
    with pair.session:
        torch.autograd.grad(x.sin().sum(), x)
        for _ in range(7):
            torch.autograd.grad(x.sin().sum(), x)
    assert 0 < len(kept) <= 4 + 3 * 2
    pair.backend.wrong = {0: _plus}
    with pytest.raises(ca.GradientMismatchError):
        pair.step(BATCH[:2])


# ---- what is the user's ----------------------------------------------------------------------------------------------


class Counted(torch.autograd.Function):
    """Counts how often its backward runs."""

    runs = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        Counted.runs += 1
        return gradient * 2


@pytest.mark.parametrize("wrong", [0, 1])
def test_hooks_and_functions_run_once(wrong: int) -> None:
    backend = Backend()
    Counted.runs = 0
    calls: list[int] = []
    x = torch.randn(3, requires_grad=True)

    def loss() -> torch.Tensor:
        hidden = x.sin()
        hidden.register_hook(lambda gradient: calls.append(1) or gradient * 3)
        return Counted.apply(hidden).cos().sum()

    with ca.disable():
        (wanted,) = torch.autograd.grad(loss(), x)
    Counted.runs = 0
    calls.clear()
    with ca.enable(backend=backend, check=True, cache_dir=False, tune=False) as session:
        for step in range(1, 6):
            if step == 5:
                backend.wrong = {wrong: lambda results, arguments: [each * 1.1 for each in results]}
                with pytest.raises(ca.GradientMismatchError):
                    torch.autograd.grad(loss(), x)
            else:
                assert_same(torch.autograd.grad(loss(), x), [wanted])
            assert (len(calls), Counted.runs) == (step, step)
    assert (session.stats().hits, session.stats().failures) == (3, 1)


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_an_optimizer_in_the_backward_leaves_eagers_parameters(backend: str) -> None:
    def train(session: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
        for parameter in model.parameters():
            optimizer = torch.optim.AdamW([parameter], lr=0.05)

            def update(each: torch.Tensor, optimizer: Any = optimizer) -> None:
                optimizer.step()
                optimizer.zero_grad()

            parameter.register_post_accumulate_grad_hook(update)
        for step in range(5):
            loss = model(BATCH + step).square().mean()
            with session:
                loss.backward()
        return [parameter.detach() for parameter in model.parameters()]

    session = ca.enable(backend=backend, check=True, cache_dir=False, tune=False)
    assert_same(train(session), train(ca.disable()))
    assert session.stats().hits == 4 and session.stats().failures == 0


def test_what_is_drawn_is_what_eager_draws() -> None:
    """Dropout that reentrant checkpointing runs again in the backward, and a gradient that is random itself."""

    def run(session: Any) -> tuple[list[Any], torch.Tensor]:
        torch.manual_seed(3)
        x = torch.randn(16, requires_grad=True)
        found = []
        for _ in range(5):
            x.grad = None
            hidden = torch.utils.checkpoint.checkpoint(lambda y: F.dropout(y.sin(), 0.5), x, use_reentrant=True)
            with session:
                hidden.sum().backward()
            found.append(x.grad)
            x.grad = None
            with session:
                F.rrelu(x * 1.0, training=True).sum().backward()
            found.append(x.grad)
        return found, torch.rand(4)

    session = ca.enable(backend="eager", check=True, cache_dir=False, tune=False)
    (found, drawn), (wanted, expected) = run(session), run(ca.disable())
    assert_same(found, wanted)
    assert torch.equal(drawn, expected)
    assert session.stats().failures == 0


def test_what_is_wrong_inside_a_backward_costs_no_step() -> None:
    """The backward around it, of reentrant checkpointing, goes on; then the error is raised."""

    def loss(model: nn.Module) -> torch.Tensor:
        hidden = model[0](BATCH)
        hidden = torch.utils.checkpoint.checkpoint(lambda y: model[2](y.sin()), hidden, use_reentrant=True)
        return hidden.square().mean()

    pair = Pair(check=True)
    for _ in range(3):
        pair.step(loss=loss)
    pair.backend.wrong = dict.fromkeys(range(pair.backend.compiled), _plus)
    with pytest.raises(ca.GradientMismatchError) as raised:
        pair.step(loss=loss)
    tapes = {mismatch.where.partition("compiled code of ")[2].split()[0] for mismatch in raised.value.mismatches}
    assert tapes == {"AddmmBackward0", "MeanBackward0"}, "the inner one, and the outer one"
    assert not _failures(pair.step(loss=loss))


def test_code_that_draws_is_rewound() -> None:
    """The generator ends where eager leaves it, whatever compiled code draws, and however often it runs."""

    def draws(results: list[torch.Tensor], arguments: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        torch.rand(7)
        return _plus(results, arguments)

    pair = Pair(check=True)
    for _ in range(3):
        pair.step()
    for step in pair.session.last.graph.variants[0].regions:  # type: ignore[union-attr]
        for compiled in step.compiled_regions():
            compiled.proof.draws = True
    pair.backend.wrong = {0: draws}
    state = torch.get_rng_state()
    with pytest.raises(ca.GradientMismatchError):
        pair.step()
    assert torch.equal(torch.get_rng_state(), state)


def test_saved_tensor_hooks_unpack_once() -> None:
    unpacked: list[int] = []
    x = torch.randn(3, requires_grad=True)

    def unpack(packed: torch.Tensor) -> torch.Tensor:
        unpacked.append(1)
        return packed

    with ca.enable(backend=Backend(), check=True, cache_dir=False, tune=False) as session:
        for step in range(1, 5):
            with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor * 1, unpack):
                loss = x.exp().sum()
            assert_same(torch.autograd.grad(loss, x), [x.detach().exp()])
            assert len(unpacked) == step
    assert session.stats().failures == 0


def test_the_graph_of_the_users_passes_is_what_is_compared_with() -> None:
    def doubled(graph_module: fx.GraphModule) -> None:
        (output,) = graph_module.graph.find_nodes(op="output")
        (value,) = output.args[0]
        with graph_module.graph.inserting_before(output):
            output.args = ([graph_module.graph.call_function(torch.ops.aten.mul.Tensor, (value, 2.0))],)
        graph_module.recompile()

    x = torch.randn(3, requires_grad=True)
    with ca.enable(backend=Backend(), check=True, passes=[doubled], cache_dir=False, tune=False) as session:
        for _ in range(4):
            assert_same(torch.autograd.grad(x.sin().sum(), x), [2 * x.detach().cos()])
    assert session.stats().failures == 0


# ---- other settings --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_sizes_that_change(backend: str) -> None:
    pair = Pair(check=True, backend=backend)
    for rows in (4, 3, 2, 4, 3):
        pair.step(BATCH[:rows])
    assert pair.session.stats().failures == 0 and pair.session.stats().hits >= 3


def test_what_is_compiled_in_the_background() -> None:
    pair = Pair(check=True, on_miss="background")
    pair.step()
    assert pair.session.wait(60)
    for _ in range(4):
        outcome = pair.step()
    assert outcome.outcome == "hit" and "prove" in outcome.seconds
    pair.backend.wrong = {0: _plus}
    with pytest.raises(ca.GradientMismatchError):
        pair.step()


def test_what_is_compared_is_not_timed() -> None:
    pair = Pair(check=True, tune=True)
    for _ in range(40):
        pair.step()
    (variant,) = pair.session.last.graph.variants  # type: ignore[union-attr]
    assert variant.hits == 0 and pair.session.stats().bypasses == {}


def test_threads_that_train_one_model() -> None:
    reference, model = mlp(), mlp()
    model.load_state_dict(reference.state_dict())
    errors: list[BaseException] = []
    steps = 20

    def train() -> None:
        try:
            with ca.enable(backend="eager", check=True, cache_dir=False, tune=False):
                for _ in range(steps):
                    model(BATCH).square().mean().backward()
        except BaseException as error:  # noqa: BLE001  it is looked at below
            errors.append(error)

    threads = [threading.Thread(target=train) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not errors
    for _ in range(3 * steps):
        reference(BATCH).square().mean().backward()
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        assert torch.allclose(one.grad, other.grad, rtol=1e-4)


def test_a_leaf_that_was_frozen_after_the_forward() -> None:
    for session in (ca.disable(), ca.enable(backend=Backend(), check=True, cache_dir=False, tune=False)):
        x, y = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
        for _ in range(3):
            x.requires_grad_()
            loss = (x * y).sum()
            x.requires_grad_(False)
            with session:
                loss.backward()
        assert x.grad is None and y.grad is not None


def test_anomaly_mode_tells_of_nans_as_ever() -> None:
    x = torch.zeros(3, requires_grad=True)
    with ca.enable(backend=Backend(), check=True, cache_dir=False, tune=False), torch.autograd.detect_anomaly():
        for _ in range(3):
            with pytest.raises(RuntimeError, match="returned nan values in its 0th output"):
                (x.sqrt() * 0).sum().backward()


def test_counts_go_on_where_the_setting_is_another_one() -> None:
    """Two sessions share variants; each compares its own share."""
    pair = Pair(check=False)
    every = functools.partial(ca.enable, backend=pair.backend, cache_dir=False, tune=False)
    pair.session = every(check=False)
    for _ in range(3):
        pair.step()
    pair.session = every(check=2)
    proved = ["prove" in pair.step().seconds for _ in range(PROVING_RUNS + 4)]
    assert proved == [True] * PROVING_RUNS + [False, True] * 2


# ---- what is told ----------------------------------------------------------------------------------------------------


def test_a_mismatch_says_what_and_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameter, module, region, where the largest error lies and both values, and a file that shows it again."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(writing, "_numbers", itertools.count())  # a process writes twenty of its own accord

    def wrong(results: list[torch.Tensor], arguments: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        ours = [each.clone() for each in results]
        index = next(number for number, each in enumerate(ours) if each.shape == (5, 8))
        ours[index][3, 6] += 0.25
        return ours

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 1))

    pair = Pair(make, check=True)
    for _ in range(3):
        pair.step()
    pair.backend.wrong = {0: wrong}
    with pytest.raises(ca.GradientMismatchError) as raised:
        pair.step()
    (mismatch,) = raised.value.mismatches
    eager = float(pair.reference[0].weight.grad[3, 6])  # type: ignore[index, union-attr]
    assert isinstance(mismatch, Mismatch)
    assert (mismatch.parameter, mismatch.module, mismatch.region) == ("0.weight", "0", 1)
    assert (mismatch.index, mismatch.eager) == ((3, 6), eager)
    assert mismatch.largest == pytest.approx(0.25, rel=1e-4) and mismatch.found == pytest.approx(eager + 0.25)
    assert f"at [3, 6] the real calls give {eager:.6g}, and it is {mismatch.found:.6g}" in str(raised.value)
    assert mismatch.reproduction is not None and mismatch.reproduction in str(raised.value)
    assert "another process can run once it is given the backend, a function" in str(raised.value)
    assert ca.load(mismatch.reproduction).about.difference == mismatch.error


def test_mismatches_of_the_past_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def why(*more: str) -> tuple[Any, str]:
        with pytest.raises(SystemExit) as ended:
            main(["why", "--mismatches", *more, "--cache-dir", str(tmp_path)])
        said = capsys.readouterr()
        return ended.value.code, said.out + said.err

    pair = Pair(check=True, cache_dir=tmp_path)
    for _ in range(3):
        pair.step()
    assert why() == (0, f"no mismatch is recorded in {tmp_path}\n")
    pair.backend.wrong = {0: _plus}
    with pytest.raises(ca.GradientMismatchError) as raised:
        pair.step()
    (mismatch,) = raised.value.mismatches
    code, text = why()
    assert code == 0 and "1 mismatch;" in text
    words = " ".join(text.split())
    assert mismatch.where in words and mismatch.error in words
    code, text = why("--format", "json")
    (recorded,) = json.loads(text)
    assert code == 0 and recorded["miss"]["where"] == mismatch.where
    assert why("--last")[0] == 2


@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64, torch.bfloat16, torch.int64])
def test_where_the_largest_error_lies(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    want = torch.ones(shape, dtype=dtype)
    found, last = want.clone(), tuple(size - 1 for size in shape)
    found[last] = 3
    most = worst(want, found)
    assert most is not None and (most.index, most.error, most.want, most.found) == (last, 2, 1, 3)
    if dtype.is_floating_point:
        found[last] = torch.nan
        most = worst(want, found)
        assert most is not None and most.index == last and most.error == torch.inf
        want[last] = torch.nan
        most = worst(want, found)
        assert most is not None and most.error == 0, "a NaN is a NaN"
    assert worst(want, None) is None and worst(want, want.unsqueeze(0)) is None


# ---- hits in between -------------------------------------------------------------------------------------------------


def test_hits_in_between_run_without_python(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every 4th backward is compared; what lies between is walked in C++, and is a hit."""
    hits = NativeHits()
    hits.library = library_of(request.config)
    for each in (backward, seam):
        monkeypatch.setattr(each, "NATIVE_HITS", hits)
    ran: list[int] = []
    run = NativeRun.run
    monkeypatch.setattr(NativeRun, "run", lambda *given: ran.append(1) or run(*given))
    pair = Pair(backend="inductor", check=4, extension="auto")
    pair.step = functools.partial(_close_step, pair)  # type: ignore[method-assign]
    proved = ["prove" in pair.step().seconds for _ in range(20)]
    assert [number for number, each in enumerate(proved, 1) if each and number > 4] == [8, 12, 16, 20]
    assert len(ran) >= 9 and hits.hits >= 12
    expect(pair.session.stats(), structure_misses=1, hits=19, captures=1, compiles=1)


def _close_step(pair: Pair) -> ca.Outcome:
    for each in (pair.reference, pair.model):
        each.zero_grad()
    pair.reference(BATCH).square().mean().backward()
    with pair.session:
        pair.model(BATCH).square().mean().backward()
    assert_grads(pair.model, pair.reference, bitwise=False)
    assert pair.session.last is not None
    return pair.session.last
