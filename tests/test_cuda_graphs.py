"""Regions that run as CUDA graphs, on a stand-in for the device: what is replayed, when, and whose memory is given."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import fx

import compiled_autograd as ca
from backends.eager import EagerBackend
from backends.inductor.backend import InductorBackend
from backends.inductor.cuda import capture, graphs, inputs
from backends.inductor.cuda.graphs import FIRST_RUNS, REPLAY, SIGHTINGS, Replayed
from backends.inductor.poison import run_poisoned
from backends.protocol import ONLY_FORM, Compiled

from .cuda_stand_in import StandIn
from .helpers import Squares, assert_same, expect, mlp, same_bits


def _products(arguments: list[Any]) -> list[Any]:
    a, b = arguments
    arguments.clear()
    return [a * b, None, (a + b).t(), a * 2]


class Region:
    """A region beside what it should give: two matrices and what else a test adds."""

    def __init__(self, compiled: Compiled = _products) -> None:
        self.compiled, self.device = compiled, StandIn()
        self.replayed = Replayed(compiled, self.device)

    def run(self, *arguments: Any) -> list[Any]:
        """What it gives; it is what the code gives, bit for bit, in the same strides."""
        wanted = self.compiled(list(arguments))
        given = list(arguments)
        found = list(self.replayed(given))
        assert not given
        assert_same(found, wanted)
        return found

    def warm(self, *arguments: Any) -> None:
        for _ in range(FIRST_RUNS):
            self.run(*arguments)
        assert self.replayed.captures == 0


def _pair(fill: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.full((3, 3), fill), torch.arange(9.0).view(3, 3)


def test_what_lies_where_it_lay_is_replayed() -> None:
    region, (a, b) = Region(), _pair()
    region.warm(a, b)
    for step in range(5):
        a.fill_(step)
        region.run(a, b)
    assert (region.replayed.captures, region.replayed.replays) == (1, 5)


def test_other_addresses_run_the_code_and_are_captured_when_they_come_again() -> None:
    region, kept = Region(), [_pair(step) for step in range(8)]
    for pair in [*kept, *kept]:
        region.run(*pair)
    assert region.replayed.captures == 0
    for pair in kept[::-1]:
        region.run(*pair)
    assert region.replayed.captures == region.replayed.replays == 8


def test_what_was_given_is_not_written_to_while_anybody_holds_it() -> None:
    region, (a, b) = Region(), _pair()
    region.warm(a, b)
    kept: list[tuple[Any, Any]] = []
    for step in range(6):
        a.fill_(step + 1)
        found = region.run(a, b)
        kept.append((found[0][1:], found[0].clone()[1:]))  # a view is enough
    assert region.replayed.captures == region.replayed.replays == 2  # of the same addresses there are two at most
    for one, other in kept:
        assert torch.equal(one, other)
    kept.clear()
    del found
    region.run(a, b)
    assert (region.replayed.captures, region.replayed.replays) == (2, 3)


@pytest.mark.parametrize(
    "hold", [lambda x: x.untyped_storage(), lambda x: x.numpy(), lambda x: x.__dlpack__(), lambda x: x.detach()]
)
def test_whatever_holds_the_memory_counts(hold: Callable[[torch.Tensor], Any]) -> None:
    region, (a, b) = Region(), _pair()
    region.warm(a, b)
    held = hold(region.run(a, b)[0])
    region.run(a, b)
    assert region.replayed.captures == 2
    del held
    for _ in range(3):
        region.run(a, b)
    assert region.replayed.captures == 2 and region.replayed.replays == 5


def test_a_grad_that_is_added_to_needs_two() -> None:
    region, (a, b), leaf = Region(), _pair(), torch.zeros(3, 3)
    region.warm(a, b)
    for step in range(12):
        if step % 4 == 0:
            leaf.grad = None
        grad = region.run(a, b)[0]
        leaf.grad = grad if leaf.grad is None else leaf.grad.add_(grad)
        del grad
        assert torch.equal(leaf.grad, (step % 4 + 1) * a * b)
    assert (region.replayed.captures, region.replayed.replays) == (2, 12)


def test_numbers_are_part_of_a_graph() -> None:
    region, (a, _) = Region(lambda arguments: [arguments.pop(0) * arguments.pop(0)]), _pair()
    half, quarter = (torch.tensor(value, dtype=torch.float64) for value in (0.5, 0.25))
    region.warm(a, half)
    region.run(a, torch.tensor(0.5, dtype=torch.float64))  # another tensor with the same number
    assert (region.replayed.captures, region.replayed.replays) == (1, 1)
    region.run(a, quarter)
    assert region.replayed.replays == 1
    half.fill_(0.75)
    region.run(a, half)
    assert region.replayed.replays == 1


@pytest.mark.parametrize("numbers", [(0.0, -0.0), (complex(1, 0.0), complex(1, -0.0)), (0, False)])
def test_equal_numbers_that_differ_in_a_bit_have_graphs_of_their_own(numbers: tuple[Any, Any]) -> None:
    region, a = Region(lambda arguments: [torch.copysign(arguments.pop(0), arguments.pop(0))]), torch.ones(3)
    if isinstance(numbers[0], complex):
        region = Region(lambda arguments: [arguments.pop(0) * arguments.pop(0)])
    one, other = map(torch.tensor, numbers)
    region.warm(a, one)
    region.run(a, one)
    region.run(a, other)
    assert (region.replayed.captures, region.replayed.replays) == (1, 1)


def test_nan_is_no_number_that_comes_again() -> None:
    region = Region(lambda arguments: [arguments.pop(0) * arguments.pop(0).isnan()])
    for _ in range(FIRST_RUNS + 3):
        region.run(torch.ones(3), torch.tensor(torch.nan))
    assert region.replayed.captures == 0


def test_another_stream_has_graphs_of_its_own() -> None:
    region, (a, b) = Region(), _pair()
    region.warm(a, b)
    region.run(a, b)
    region.device.number = 7
    for _ in range(SIGHTINGS):
        region.run(a, b)
    assert (region.replayed.captures, region.replayed.replays) == (1, 1)
    region.run(a, b)
    assert (region.replayed.captures, region.replayed.replays) == (2, 2)


def test_results_in_the_memory_of_an_input_follow_it() -> None:
    def through(arguments: list[Any]) -> list[Any]:
        a, b = arguments
        arguments.clear()
        return [a, b.view(9)[3:], a * b]

    region, (a, b) = Region(through), _pair()
    region.warm(a, b)
    region.run(a, b)
    found = region.run(a, b)
    assert region.replayed.replays == 2
    assert found[0].data_ptr() == a.data_ptr() and found[1].data_ptr() == b.data_ptr() + 12
    assert not any(each._is_view() for each in found)


def test_expanded_results() -> None:
    region, (a, b) = Region(lambda arguments: [(arguments.pop() + arguments.pop())[:, :1].expand(3, 5)]), _pair()
    region.warm(a, b)
    region.run(a, b)
    assert region.replayed.replays == 1


def test_what_cannot_be_captured_runs_as_it_is() -> None:
    region, (a, b) = Region(), _pair()
    region.device.refuses = "operation not permitted when stream is capturing"
    for _ in range(FIRST_RUNS + 3):
        region.run(a, b)
    assert region.replayed.why_not == region.device.refuses and region.replayed.captures == 1
    assert region.replayed.is_last(ONLY_FORM) and region.replayed.form_for([a, b]) == ONLY_FORM


def test_what_lies_elsewhere_keeps_a_region_from_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    region, (a, b) = Region(), _pair()
    monkeypatch.setattr(region.device, "kind", "cuda")
    for _ in range(FIRST_RUNS + 1):
        region.run(a, b)
    assert "neither on its device" in region.replayed.why_not


def test_results_that_lie_otherwise_at_each_run() -> None:
    runs: list[int] = []

    def changing(arguments: list[Any]) -> list[Any]:
        runs.append(0)
        return [torch.ones(len(runs))]

    replayed = Replayed(changing, StandIn())
    for count in range(1, FIRST_RUNS + 1):
        assert len(replayed([torch.ones(1)])[0]) == count
    a = torch.ones(1)
    for _ in range(3):
        replayed([a])
    assert replayed.why_not == "its results lie otherwise at each run"


def test_nobody_captures_beside_another() -> None:
    region, (a, b) = Region(), _pair()
    region.warm(a, b)
    with capture.CAPTURING:
        region.run(a, b)
    region.device.somebody_captures = True
    region.run(a, b)
    assert region.replayed.captures == 0
    region.device.somebody_captures = False
    region.run(a, b)
    assert (region.replayed.captures, region.replayed.replays) == (1, 1)


def test_the_number_of_graphs_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"MAX_GRAPHS": 3, "MAX_SEEN": 6, "FREE_CAPTURES": 5}.items():
        monkeypatch.setattr(graphs, name, value)
    region, kept = Region(), [_pair(step) for step in range(6)]
    for _ in range(4):
        for pair in kept:
            region.run(*pair)
    assert region.replayed.captures == 3 and len(region.replayed._graphs) == 3  # all of which are in use
    for _ in range(2):
        for pair in kept:
            region.run(*pair)
    assert region.replayed.replays > 5


def test_addresses_that_never_come_again_are_not_looked_at_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "PATIENCE", 20)
    region, kept = Region(), []
    for step in range(25):
        kept.append(_pair(step))
        region.run(*kept[-1])
    assert region.replayed.captures == 0 and region.replayed.why_not == "its inputs lie elsewhere at each call"
    assert not region.replayed._seen


def test_threads_that_share_a_region() -> None:
    region, kept = Region(), [_pair(step) for step in range(4)]

    def work(number: int) -> None:
        a, b = kept[number % len(kept)]
        for _ in range(60):
            found = region.replayed([a, b])
            copy = [each.clone() for each in found if each is not None]
            assert torch.equal(copy[0], a * b) and torch.equal(copy[1], (a + b).t())
            assert_same([each for each in found if each is not None], copy)

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(work, range(8))) == [None] * 8
    assert region.replayed.replays > 0


def _moving(region: Region, steps: int, keep: list[Any] | None = None) -> None:
    """Calls with one input that stays and one that lies elsewhere each time."""
    stays = torch.arange(9.0).view(3, 3)
    for step in range(steps):
        moves = torch.full((4, 3), float(step))[1:]
        if keep is not None:
            keep.append(moves)
        region.run(moves, stays)


def test_small_inputs_that_move_are_copied_in() -> None:
    region, kept = Region(), list[Any]()
    _moving(region, inputs.WINDOW, kept)
    assert region.replayed.replays == 0 and region.replayed._inputs.copied == (0,)
    _moving(region, 30, kept)
    assert region.replayed.captures == 1 and region.replayed.replays == 30 - SIGHTINGS


def test_large_inputs_that_move_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "MAX_COPIED", 35)
    region, kept = Region(), list[Any]()
    _moving(region, 3 * inputs.WINDOW, kept)
    assert region.replayed._inputs.copied == () and region.replayed.captures == 0


def test_inputs_of_regions_that_share_their_code() -> None:
    """Each has a weight that stays; there are as many places of it as of any."""
    region, weights, kept = Region(), [torch.full((3, 3), float(each)) for each in range(4)], []
    for step in range(60):
        kept.append(torch.full((3, 3), float(step)))
        region.run(kept[-1], weights[step % 4])
    assert region.replayed._inputs.copied == (0,)
    assert region.replayed.captures == 4 and region.replayed.replays >= 20


def test_results_in_the_memory_of_an_input_that_is_copied_in() -> None:
    def through(arguments: list[Any]) -> list[Any]:
        a, b = arguments
        arguments.clear()
        return [a[1:], b.view(9)[3:], a.t(), a * b]

    region, kept = Region(through), list[Any]()
    _moving(region, 40, kept)
    assert region.replayed.replays >= 10
    found = region.run(kept[-1], torch.ones(3, 3))
    assert found[0].data_ptr() == kept[-1].data_ptr() + 12


def test_expanded_and_integer_inputs_are_copied_in() -> None:
    def code(arguments: list[Any]) -> list[Any]:
        a, b, index = arguments
        arguments.clear()
        return [a * b, index * 2, b.sum(0)]

    region, kept = Region(code), list[Any]()
    stays = torch.arange(9.0).view(3, 3)
    for step in range(40):
        kept.append((torch.full((3, 1), float(step)).expand(3, 3), torch.tensor([step % 3, 0, 1])))
        region.run(kept[-1][0], stays, kept[-1][1])
    assert region.replayed._inputs.copied == (0, 2) and region.replayed.replays >= 15


def test_what_is_captured_anew_gets_the_memory_of_what_is_stale() -> None:
    region, kept = Region(), [_pair(step) for step in range(4)]
    for pair in kept:
        for _ in range(FIRST_RUNS + SIGHTINGS + 4):
            region.run(*pair)
    assert region.replayed.captures == 4
    assert sum(map(len, region.replayed._graphs.values())) == 1 and sum(map(len, region.replayed._spare.values())) == 0


@pytest.mark.parametrize(
    "spoil",
    [
        lambda result: result.resize_(100),
        lambda result: result.untyped_storage().resize_(0),
        lambda result: torch.ones(50, out=result),
    ],
)
def test_memory_of_a_result_that_is_moved_is_not_written_to(spoil: Callable[[torch.Tensor], Any]) -> None:
    region, (a, b) = Region(), _pair()
    region.warm(a, b)
    for step in range(6):
        a.fill_(step)
        spoil(region.run(a, b)[0])
    assert 1 <= region.replayed.captures <= 6 and sum(map(len, region.replayed._graphs.values())) <= 2
    for _ in range(3 + SIGHTINGS):
        region.run(a, b)
    assert region.replayed.why_not == "" and region.replayed.captures <= 7


def test_where_memory_of_results_is_moved_again_and_again_there_are_no_graphs() -> None:
    region, (a, b) = Region(), _pair()
    region.warm(a, b)
    for _ in range(40):
        region.run(a, b)[0].untyped_storage().resize_(0)
    assert region.replayed.why_not == "the memory of its results is moved" and region.replayed.captures <= 10


def test_results_that_see_the_memory_of_an_input_otherwise() -> None:
    """As other numbers, or beyond its own elements: there may be something else behind it at the next run."""

    def code(arguments: list[Any]) -> list[Any]:
        a, b = arguments
        arguments.clear()
        return [torch.view_as_real(a)[1:], a.view(torch.int64), b[1:], a * 2]

    region = Region(code)
    a = torch.arange(6).to(torch.complex64).view(2, 3)
    whole = torch.arange(6.0)
    region.warm(a, whole[:4])
    region.run(a, whole[:4])
    found = region.run(a, whole[:4])
    assert region.replayed.replays == 2
    assert found[2].data_ptr() == whole.data_ptr() + 4 and found[0].data_ptr() != a.data_ptr() + 24

    region = Region(lambda arguments: [arguments.pop().as_strided((4,), (1,), 1), arguments.pop() + 1])
    region.warm(a, whole[:2])
    region.run(a, whole[:2])
    assert region.run(a, whole[:2])[0].data_ptr() != whole.data_ptr() + 4 and region.replayed.replays == 2


@pytest.mark.parametrize("bit", [torch.conj, torch._neg_view])
def test_results_with_a_bit_are_no_graphs(bit: Callable[[torch.Tensor], torch.Tensor]) -> None:
    region, a = Region(lambda arguments: [bit(arguments.pop() * 2)]), torch.ones(3, dtype=torch.complex64)
    for _ in range(FIRST_RUNS + 3):
        region.run(a)
    assert "conjugate or negative bit" in region.replayed.why_not


def test_memory_of_results_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over all streams; and what is in use is not let go for what would be."""
    region, kept = Region(), [_pair(float(step)) for step in range(6)]
    monkeypatch.setattr(graphs, "MAX_BYTES", 3 * 108)  # three of nine floats each
    for _ in range(FIRST_RUNS + SIGHTINGS + 30):
        for pair in kept:
            region.run(*pair)
    assert region.replayed._memories() == 3 and region.replayed.captures <= 8
    for stream in range(1, 6):
        region.device.number = stream
        for _ in range(SIGHTINGS + 30):
            region.run(*kept[0])
        assert region.replayed._memories() <= 3
    held = []
    for _ in range(30):  # of the same addresses there could be another one
        held[:] = region.run(*kept[0])
    assert region.replayed.captures <= 20
    monkeypatch.setattr(graphs, "MAX_BYTES", 100)
    region = Region()
    for _ in range(FIRST_RUNS + 1):
        region.run(*kept[0])
    assert region.replayed.why_not == "its results take 108 bytes"


def test_memory_of_a_stream_stays_that_streams() -> None:
    """What the stream is still to do reads it."""
    region, (a, b) = Region(), _pair()
    region.warm(a, b)
    place = region.run(a, b)[0].data_ptr()
    region.replayed._drop_all()
    region.device.number = 7
    for _ in range(SIGHTINGS):
        region.run(a, b)
    assert region.run(a, b)[0].data_ptr() != place and region.replayed.captures == 2
    region.device.number = 0
    for _ in range(SIGHTINGS):
        region.run(a, b)
    assert region.run(a, b)[0].data_ptr() == place and region.replayed.captures == 3


def test_random_trainings() -> None:
    """Inputs move or stay, results are kept or not, numbers change, graphs come and go: the code's results always."""
    for seed in range(30):
        chance = random.Random(seed)

        def code(arguments: list[Any], swap: int = seed % 3) -> list[Any]:
            a, b, number = arguments
            arguments.clear()
            return [a * b * number, b[1:].t(), None, (a @ b).expand(2, 3, 3), a if swap else a + 1]

        region = Region(code)
        region.device.captured = 0
        places = [_pair(chance.random()) for _ in range(3)]
        held: list[tuple[Any, Any]] = []
        for _ in range(120):
            a, b = chance.choice(places)
            a.fill_(chance.random())
            if chance.random() < 0.1:
                places[chance.randrange(3)] = a, b = _pair(chance.random())
            number = torch.tensor(chance.choice((0.5, 0.5, 0.5, 2.0, 0.0, -0.0)))
            region.device.number = chance.choice((0, 0, 0, 1))
            found = region.run(a, b, number)
            if chance.random() < 0.4:
                own = [found[0], found[3]]
                held.append((own, [each.clone() for each in own]))
            if held and chance.random() < 0.4:
                held.pop(chance.randrange(len(held)))
            for one, other in held:
                assert all(map(torch.equal, one, other))
            del found
        assert region.replayed.replays > 5


def test_what_is_copied_has_the_strides_and_nobodys_memory() -> None:
    base = torch.arange(24.0)
    values = [
        base.view(4, 6),
        base.view(4, 6).t(),
        base.view(2, 3, 4).permute(1, 2, 0)[:, 1:],
        base[:6].view(6, 1).expand(6, 5),
        base[0].expand(3, 4),
        base[3],
        base[:0].view(0, 7),
        base.as_strided((3, 4), (2, 1)),  # neighbours overlap, without a stride of 0
        base > 7,
        base.to(torch.complex64)[::2],
    ]
    found = [torch.empty_strided(each.shape, each.stride(), dtype=each.dtype) for each in values]
    inputs.copy_all(found, values)
    assert all(map(same_bits, found, values))
    wanted = [each.clone() for each in values]
    base.fill_(-1)
    assert all(map(torch.equal, found, wanted))
    inputs.copy_all([], [])


# ---- in a session --------------------------------------------------------------------------------------------------


class _Graphs:
    """In place of Inductor: the operators of a region, as a CUDA graph of the stand-in."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, spoilt: bool = False) -> None:
        self.made: list[Replayed] = []
        self.spoilt = spoilt
        monkeypatch.setattr(InductorBackend, "compile", lambda _, *given: self.compile(*given))

    def compile(self, graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Compiled:
        compiled, device = EagerBackend().compile(graph_module, example_inputs), StandIn()
        if self.spoilt:
            compiled = _wrong_when_captured(compiled, device)
        self.made.append(Replayed(compiled, device))
        return self.made[-1]


def _wrong_when_captured(compiled: Compiled, device: StandIn) -> Compiled:
    """As code that reads a number while it is captured, which changes later."""

    def run(arguments: list[Any]) -> list[Any]:
        return [each * 2 if device.replaying and each is not None else each for each in compiled(arguments)]

    return run


def _steps(model: Any, session: Any, steps: int) -> list[torch.Tensor]:
    """Gradients of one tape, step by step: all that it saved lies where it lay."""
    loss, grad = model(torch.linspace(-1, 1, 32).view(4, 8)).square().mean(), torch.ones(())
    found: list[torch.Tensor] = []
    for _ in range(steps):
        with session:
            found += torch.autograd.grad(loss, list(model.parameters()), grad, retain_graph=True)
    return found


def test_a_session_proves_both_forms_and_goes_on_with_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    model, backend = mlp(), _Graphs(monkeypatch)
    wanted = _steps(model, ca.disable(), 12)
    session = ca.enable(backend="inductor")
    found = _steps(model, session, 12)
    assert_same(found, wanted, bitwise=False)
    expect(session.stats(), structure_misses=1, hits=11, captures=1)
    (replayed,) = backend.made
    assert replayed.captures >= 1 and replayed.replays >= 2
    assert session.last is not None and session.last.graph is not None
    (compiled,) = session.last.graph.variants[0].regions[0].compiled_regions()
    assert compiled.proof.settled and compiled.proof.left == {ONLY_FORM: 0, REPLAY: 0}


@pytest.mark.parametrize("somebody", ["captures", "runs it"])
def test_a_graph_that_did_not_run_has_shown_nothing(monkeypatch: pytest.MonkeyPatch, somebody: str) -> None:
    """Where a graph was expected, and the code ran: a wrong graph is found later all the same."""
    model, backend = mlp(), _Graphs(monkeypatch, spoilt=True)
    wanted = _steps(model, ca.disable(), 16)
    session = ca.enable(backend="inductor")
    found = _steps(model, session, 3)
    (replayed,) = backend.made
    with capture.CAPTURING if somebody == "captures" else replayed._lock:
        found += _steps(model, session, 5)
    assert replayed.replays == 0
    with pytest.warns(UserWarning, match="mismatch .* a slower form of it runs from now on"):
        found += _steps(model, session, 8)
    assert_same(found, wanted, bitwise=False)
    assert session.stats().failures == 1


def test_a_graph_that_gives_something_else_is_found_and_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model, backend = mlp(), _Graphs(monkeypatch, spoilt=True)
    wanted = _steps(model, ca.disable(), 8)
    session = ca.enable(backend="inductor")
    with pytest.warns(UserWarning, match="mismatch .* a slower form of it runs from now on"):
        found = _steps(model, session, 8)
    assert_same(found, wanted, bitwise=False)
    assert session.stats().failures == 1 and not backend.made[0]._graphs


def test_in_a_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """What leaves keep, hooks see and users hold is nobody else's."""
    torch.manual_seed(0)
    models = [mlp() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    backend, kept = _Graphs(monkeypatch), ([], [])  # type: ignore[var-annotated]
    session = ca.enable(backend="inductor")
    x = torch.linspace(-1, 1, 32).view(4, 8)
    for step in range(10):
        for model, around, seen in zip(models, (ca.disable(), session), kept, strict=True):
            if step % 3 == 0:
                model.zero_grad(set_to_none=step % 2 == 0)
            hidden = Squares.apply(model[:2](x))
            hidden.register_hook(seen.append)
            with around:
                model[2:](hidden).square().mean().backward()
            seen += [each.grad.clone() for each in model.parameters()]
    assert_same(kept[1], kept[0], bitwise=False)
    assert backend.made
    expect(session.stats(), structure_misses=2, hits=8)


def test_poison_goes_into_the_code_and_not_into_a_graph() -> None:
    module = fx.symbolic_trace(lambda x: [torch.ops.aten.empty_like.default(x), torch.ops.aten.mul.Tensor(x, 2)])
    region, a = Replayed(EagerBackend().compile(module, ()), StandIn()), torch.ones(3)
    assert run_poisoned(region, [a])[0].isnan().all()
    for _ in range(FIRST_RUNS - 1):
        region([a])
    assert region.form_for([a]) == REPLAY
    assert torch.equal(run_poisoned(region, [a])[1], 2 * a) and region.replays == 1
    assert run_poisoned(region, [a], ONLY_FORM)[0].isnan().all() and region.replays == 1
