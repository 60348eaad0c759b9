"""Regions that are the same are compiled once."""

from __future__ import annotations

import copy
import gc
import math
import random
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import compiled_autograd as ca
from backends import get_backend
from backends.eager import EagerBackend
from backends.inductor.straight_line.straight_line import StraightLine
from compiled_autograd.cache.graphs import GRAPHS
from compiled_autograd.compiling.worker_process import _request
from compiled_autograd.guards.ambient import ambient
from compiled_autograd.lowering import stored_regions
from compiled_autograd.lowering.graph_hash import graph_hash
from compiled_autograd.lowering.region_compiler import CompiledRegion, RegionCompiler
from compiled_autograd.lowering.stored_regions import InMemoryGraph, Made, copy_of
from compiled_autograd.steps.steps import region_record

from .helpers import assert_grads, assert_same, expect, mlp, switching_every

LAYERS = 5


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.gelu(self.linear(self.norm(x)))


def _model() -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(_Block() for _ in range(LAYERS))


def _loss(layers: nn.ModuleList) -> torch.Tensor:
    x = torch.linspace(-1, 1, 24).view(3, 8).requires_grad_()
    for layer in layers:
        x = checkpoint(layer, x, use_reentrant=False)
    return x.square().sum()


def _compiled(session: ca.Session) -> list[CompiledRegion]:
    assert session.last is not None and session.last.graph is not None
    return [each for region in session.last.graph.regions for each in region.compiled_regions()]


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EagerBackend, "slow", True, raising=False)


@pytest.mark.usefixtures("slow")
def test_repeated_layers_are_compiled_once() -> None:
    model, reference = _model(), _model()
    _loss(reference).backward()
    with ca.enable(backend="eager") as session:
        for _ in range(2):
            model.zero_grad()
            _loss(model).backward()
            assert_grads(model, reference)
    compiled = _compiled(session)
    distinct = len({id(each.call) for each in compiled})
    assert len(compiled) == LAYERS + 1 and distinct <= 3  # before the last layer, in it, in the others
    expect(session.stats(), structure_misses=1, hits=1, captures=1, compiles=distinct)


def test_where_compiling_takes_no_time_each_is_compiled() -> None:
    with ca.enable(backend="eager") as session:
        _loss(_model()).backward()
    compiled = _compiled(session)
    assert len({id(each.call) for each in compiled}) == len(compiled) == session.stats().compiles


@pytest.mark.usefixtures("slow")
def test_repeated_layers_are_loaded_once(tmp_path: Path) -> None:
    model, reference = _model(), _model()
    _loss(reference).backward()
    with ca.enable(backend="eager", cache_dir=tmp_path) as session:
        _loss(model).backward()
    compiled = len(_compiled(session))
    ca.reset()
    model.zero_grad()
    with ca.enable(backend="eager", cache_dir=tmp_path) as session:
        _loss(model).backward()
    assert_grads(model, reference)
    expect(session.stats(), hits=1, captures=1, compiles=0)
    loaded = _compiled(session)
    assert session.stats().loads == len(loaded) == compiled
    assert len({id(each.call) for each in loaded}) <= 3


@pytest.mark.usefixtures("slow")
def test_what_fails_serves_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each region whose code cannot run runs call by call, and none of them counts."""

    def broken(self: EagerBackend, graph_module: Any, example_inputs: Any) -> Any:
        def run(arguments: list[Any]) -> Any:
            raise ValueError("broken")

        return run

    monkeypatch.setattr(EagerBackend, "compile", broken)
    model, reference = _model(), _model()
    _loss(reference).backward()
    with ca.enable(backend="eager") as session, pytest.warns(UserWarning, match="broken"):
        _loss(model).backward()
    assert_grads(model, reference)
    assert session.stats().compiles == 0 and session.stats().failures > 1


# ---- of several structures -------------------------------------------------------------------------------------------


def _accumulated(model: nn.Module, session: Any, batches: int) -> None:
    """Gradients of so many small batches: the first finds no ``.grad``, the others add to one."""
    torch.manual_seed(1)
    model.zero_grad()
    for _ in range(batches):
        loss = model(torch.randn(5, 8)).square().mean()
        with session:
            loss.backward()


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_accumulation_compiles_once(backend: str, request: pytest.FixtureRequest) -> None:
    if backend == "eager":
        request.getfixturevalue("slow")
    model = mlp()
    reference = copy.deepcopy(model)
    session = ca.enable(backend=backend, cache_dir=False, tune=False)
    for step in range(6):
        for each, context in ((model, session), (reference, ca.disable())):
            _accumulated(each, context, 1 + step % 3)
        assert_grads(model, reference, bitwise=backend == "eager")
    expect(session.stats(), structure_misses=2, hits=10, captures=2, compiles=1)


@pytest.mark.usefixtures("slow")
def test_another_state_of_the_process_has_code_of_its_own() -> None:
    model, session, threads = mlp(), ca.enable(backend="eager", cache_dir=False), torch.get_num_threads()
    try:
        _accumulated(model, session, 1)
        torch.set_num_threads(threads + 1)
        _accumulated(model, session, 2)
    finally:
        torch.set_num_threads(threads)
    expect(session.stats(), structure_misses=2, shape_misses=1, captures=2, compiles=2)


@pytest.mark.usefixtures("slow")
def test_code_goes_with_the_last_structure_that_has_it() -> None:
    model, session = mlp(), ca.enable(backend="eager", cache_dir=False)
    _accumulated(model, session, 2)
    assert session.stats().compiles == 1 and len(stored_regions.MADE) == 1
    assert session.last is not None and session.last.graph is not None
    session.last.graph.evict()
    _accumulated(model, session, 1)  # it has the other one last
    gc.collect()
    assert len(stored_regions.MADE) == 1, "the first structure has it"
    ca.reset()
    gc.collect()
    assert not stored_regions.MADE


@pytest.mark.usefixtures("slow")
def test_code_that_was_found_to_be_wrong_serves_no_structure(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the proof of one finds, those know that had taken the same code, and none takes it later."""
    spoils = False

    def compile(self: EagerBackend, graph_module: Any, example_inputs: Any) -> Any:
        def run(arguments: list[Any]) -> Any:
            given = [*graph_module(*arguments)]
            arguments.clear()
            return [each + 1 for each in given] if spoils else given

        return run

    monkeypatch.setattr(EagerBackend, "compile", compile)
    model, session = mlp(), ca.enable(backend="eager", cache_dir=False)
    reference = copy.deepcopy(model)
    for batches in (1, 1, 1, 1):  # the first structure is proved by now, and the second is not
        _accumulated(model, session, batches)
    assert session.stats().compiles == 1
    spoils = True
    with pytest.warns(UserWarning, match="differs from|gave something else|mismatch"):
        model.zero_grad()
        _accumulated(model, session, 2)
    spoils = False
    for each, context in ((model, session), (reference, ca.disable())):
        _accumulated(each, context, 2)
    assert_grads(model, reference)
    assert all(each.proof.refuted for graph in GRAPHS for step in graph.regions for each in step.compiled_regions())
    assert not stored_regions.MADE


@pytest.mark.usefixtures("slow")
def test_what_shares_code_is_looked_through_while_another_thread_compiles() -> None:
    model, session = mlp(), ca.enable(backend="eager", cache_dir=False)
    _accumulated(model, session, 1)
    assert session.last is not None and session.last.graph is not None
    (step,) = session.last.graph.regions
    (compiled,) = step.compiled_regions()
    (made,) = stored_regions.MADE.values()
    (compiler,) = made.taken_by
    done, rounds = threading.Event(), 0

    def others() -> None:
        nonlocal rounds
        while not done.is_set():
            rounds += 1
            more = [Made(compiled.call) for _ in range(64)]
            takers = [RegionCompiler(compiler.backend, (), {}) for _ in more]
            stored_regions.MADE.update((object(), each) for each in more)
            made.taken_by.update(dict.fromkeys(takers))

    thread = threading.Thread(target=others)
    with switching_every(1e-6):
        thread.start()
        try:
            while rounds < 200 and thread.is_alive():
                assert compiler._alike(step, compiled) == [(compiler, step, compiled)]
                stored_regions.give_no_more(_no_code)
        finally:
            done.set()
            thread.join()
    assert rounds >= 200


def _no_code(arguments: list[Any]) -> Any:
    raise AssertionError("nobody calls it")


class _TwoForms:
    """Code that runs in a form which is wrong until that is dropped."""

    def __init__(self, graph_module: Any) -> None:
        self.graph_module, self.form = graph_module, "fast"

    def __call__(self, arguments: list[Any]) -> list[Any]:
        given = [*self.graph_module(*arguments)]
        arguments.clear()
        return [each + 1 for each in given] if self.form == "fast" else given

    def form_for(self, arguments: list[Any]) -> str:
        return self.form

    def drop(self, form: str) -> bool:
        was, self.form = self.form, "slow"
        return was == form == "fast"


@pytest.mark.usefixtures("slow")
def test_who_takes_code_later_knows_which_form_of_it_was_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the store is told: another process would run that form again."""
    monkeypatch.setattr(EagerBackend, "compile", lambda self, graph_module, examples: _TwoForms(graph_module))
    model, session = mlp(), ca.enable(backend="eager", cache_dir=False)
    reference = copy.deepcopy(model)
    with pytest.warns(UserWarning, match="a slower form of it runs from now on"):
        _accumulated(model, session, 1)
    for each, context in ((model, session), (reference, ca.disable())):
        _accumulated(each, context, 2)
    assert_grads(model, reference)
    expect(session.stats(), structure_misses=2, hits=1, captures=2, compiles=1, failures=1)
    records = [
        region_record(step, each) for graph in GRAPHS for step in graph.regions for each in step.compiled_regions()
    ]
    assert [record.dropped for record in records] == [("fast",), ("fast",)]


@pytest.mark.usefixtures("slow")
def test_code_that_fails_in_a_later_structure_was_compiled_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    fails: list[bool] = []

    def compile(self: EagerBackend, graph_module: Any, example_inputs: Any) -> Any:
        def run(arguments: list[Any]) -> Any:
            if any(fails):
                raise ValueError("broken")
            return graph_module(*arguments)

        return run

    monkeypatch.setattr(EagerBackend, "compile", compile)
    model, session = mlp(), ca.enable(backend="eager", cache_dir=False)
    reference = copy.deepcopy(model)
    _accumulated(model, session, 1)
    model.zero_grad()
    for each, context in ((model, session), (reference, ca.disable())):
        torch.manual_seed(1)
        each.zero_grad()
        for fails[:] in ([False], [True]):
            loss = each(torch.randn(5, 8)).square().mean()
            with context, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                loss.backward()
    assert_grads(model, reference)
    expect(session.stats(), structure_misses=2, hits=1, captures=2, compiles=1, failures=1)


def _random_net(draw: random.Random) -> tuple[list[torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]:
    """Leaves of several layouts, some frozen, some used twice; and a loss of them."""
    width, layers = draw.choice([3, 4, 8]), draw.randint(1, 4)
    layouts: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda x: x,
        lambda x: x.t().contiguous().t(),
        lambda x: torch.cat([x, x], 1)[:, ::2],
        lambda x: x[:1].expand(width, width),
    ]
    leaves = [draw.choice(layouts)(torch.randn(width, width)).detach() for _ in range(layers)]
    leaves += [torch.randn(width) for _ in range(layers)]
    for leaf in leaves:
        leaf.requires_grad_(draw.random() < 0.8)
    leaves[0].requires_grad_()
    used = [draw.randrange(layers) for _ in range(layers + 1)]
    acts = [draw.choice([torch.tanh, torch.sin, lambda x: x * 2, torch.relu]) for _ in used]
    residual = draw.random() < 0.5

    def loss(x: torch.Tensor) -> torch.Tensor:
        x = x[:, :width] @ leaves[0]
        for index, act in zip(used, acts, strict=True):
            y = act(x @ leaves[index] + leaves[layers + index])
            x = x + y if residual else y
        return x.square().mean()

    return leaves, loss


@pytest.mark.parametrize(
    ("backend", "seeds"),
    [
        pytest.param("eager", range(8), id="eager, few"),
        pytest.param("eager", range(40), id="eager", marks=pytest.mark.slow),
        pytest.param("inductor", range(40, 43), id="inductor", marks=pytest.mark.slow),
        pytest.param("inductor", range(100, 160), id="inductor, many", marks=pytest.mark.slow),
    ],
)
def test_random_nets_whose_leaves_have_gradients_or_none(
    backend: str, seeds: range, request: pytest.FixtureRequest
) -> None:
    if backend == "eager":
        request.getfixturevalue("slow")
    saved = 0
    for seed in seeds:
        draw = random.Random(seed)
        torch.manual_seed(seed)
        leaves, loss = _random_net(draw)
        session, grads = ca.enable(backend=backend, cache_dir=False, tune=False, dynamic=False), [None] * len(leaves)
        for _ in range(10):
            x = torch.randn(draw.choice([2, 5]), 8)
            grads = [None if draw.random() < 0.5 else each for each in grads]
            found = []
            for context in (ca.disable(), session):
                for leaf, grad in zip(leaves, grads, strict=True):
                    leaf.grad = None if grad is None else torch.clone(grad)
                with context:
                    loss(x).backward()
                found.append([leaf.grad for leaf in leaves])
            grads = found[0]
            assert_same(found[1], found[0], [f"{seed}: {index}" for index in range(len(leaves))], backend == "eager")
        stats = session.stats()
        assert not stats.bypasses and not stats.failures
        saved += stats.shape_misses + stats.structure_misses - stats.compiles
        ca.reset()
    assert saved > len(seeds)


# ---- what is the same ------------------------------------------------------------------------------------------------


def _hash(function: Any, *examples: Any) -> Any:
    return graph_hash(make_fx(function)(*examples), examples)


def test_the_same_operators_on_the_same_kinds() -> None:
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    assert _hash(lambda a: [a.sin() * 2], x) == _hash(lambda a: [a.sin() * 2], y) is not None


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.randn(3, 4), torch.randn(4, 3)),
        (torch.randn(3, 4), torch.randn(4, 3).t()),
        (torch.randn(3, 4), torch.randn(3, 4, dtype=torch.float64)),
        (torch.randn(3, 4), torch.randn(3, 4, device="meta")),
        (torch.randn(2, dtype=torch.complex64), torch.randn(2, dtype=torch.complex64).conj()),
    ],
)
def test_other_inputs_are_another(one: torch.Tensor, other: torch.Tensor) -> None:
    graph = make_fx(lambda x: [x * x])(one)
    assert None is not graph_hash(graph, [one]) != graph_hash(graph, [other]) is not None


def test_other_operators_and_numbers_are_another() -> None:
    x = torch.randn(3, 4)
    functions = [lambda a: [a.sin()], lambda a: [a.cos()], lambda a: [a * 2], lambda a: [a * 3]]
    assert len({_hash(function, x) for function in functions}) == 4


def test_constants_and_symbols_are_never_the_same() -> None:
    x, constant = torch.randn(3, 4), torch.randn(4)
    assert _hash(lambda a: [a * constant], x) is None
    symbolic = make_fx(lambda a: [a.sin()], tracing_mode="symbolic")(x)
    fake = next(iter(symbolic.graph.nodes)).meta["val"]
    assert graph_hash(symbolic, [fake]) is None
    narrow = fake[:2, :3]  # its sizes are numbers, its strides are not
    assert narrow.shape == (2, 3) and isinstance(narrow.stride()[0], torch.SymInt)
    assert graph_hash(make_fx(lambda a: [a.sin()])(x), [narrow]) is None


def test_what_the_worker_could_not_know_is_compiled_here() -> None:
    x = torch.randn(2, dtype=torch.complex64)
    graph = make_fx(lambda a: [a * a])(x)
    assert _request(ambient(), get_backend("inductor"), graph, [x]) is not None
    assert _request(ambient(), get_backend("inductor"), graph, [x.conj()]) is None


# ---- the same code, inputs of other strides --------------------------------------------------------------------------


class _HandsOn(torch.autograd.Function):
    """Hands on its gradient with rows or columns one after the other."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, columns: bool) -> torch.Tensor:
        ctx.columns = columns
        return x * 1

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        return (g.t().contiguous().t() if ctx.columns else g.contiguous()), None


def test_regions_with_the_same_code_and_other_strides_are_each_right(tmp_path: Path) -> None:
    """A product's generated code does not say of which strides its factors are; the program that is made of it does."""
    torch.manual_seed(0)
    w, x, c = torch.randn(16, 16), torch.randn(16, 16), torch.randn(16, 16)

    def gradient(columns: bool) -> torch.Tensor:
        leaf = x.clone().requires_grad_()
        (_HandsOn.apply(_HandsOn.apply(leaf, False) @ w, columns) * c).sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    expected = gradient(False)
    for stored in (False, True):
        with ca.enable(backend="inductor", cache_dir=tmp_path, tune=False) as session:
            for columns in [False, True] * 4:
                torch.testing.assert_close(gradient(columns), expected)
        compiled = _compiled(session)
        lines = [each.call for each in compiled if isinstance(each.call, StraightLine)]
        assert [line.why_not for line in lines] == [""] * len(lines)
        assert len({id(line.program) for line in lines}) == len(lines) > 1
        if stored:
            expect(session.stats(), hits=8, compiles=0)
            assert session.stats().loads == len(compiled)
        ca.reset()


def _chain(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    for _ in range(30):
        x = torch.mm(x, y).tanh()
    return x


def test_threads_that_ask_for_the_text_of_one_graph_at_once() -> None:
    """FX changes the nodes while it writes them (``override_node_repr`` in ``torch/fx/graph.py``)."""
    graph = InMemoryGraph(copy_of(fx.symbolic_trace(_chain)), Made(_chain))
    wanted = copy_of(fx.symbolic_trace(_chain)).graph.python_code("self").src
    with switching_every(1e-5), ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: {graph.text() for _ in range(50)}, range(4)))
    assert found == [{wanted}] * 4


def test_a_thread_that_runs_a_graph_while_another_asks_for_its_text() -> None:
    """FX writes it when it is first called too."""
    traced = copy_of(fx.symbolic_trace(_chain))
    x, wanted, code = torch.ones(2, 2), traced.graph.python_code("self").src, traced.code
    with switching_every(1e-5), ThreadPoolExecutor(1) as thread:
        for _ in range(250):
            graph, begun = InMemoryGraph(copy_of(traced), Made(_chain)), threading.Event()

            def texts() -> set[str]:
                begun.set()  # noqa: B023
                return {graph.text() for _ in range(6)}  # noqa: B023

            asked = thread.submit(texts)
            assert begun.wait(60)
            assert torch.equal(graph.graph_module()(x, x), _chain(x, x))
            assert asked.result() == {wanted} and graph.module.code == code


def test_a_graph_of_a_text_changes_nothing_for_other_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """``fx.symbolic_trace`` patches ``nn.Module.__call__`` while it traces, for all threads."""

    def calls(x: torch.Tensor, weight: torch.Tensor) -> Any:
        half = torch.tensor([0.5, 0.25])
        zeros = torch.full((3, 3), 0.0, dtype=torch.float32)
        return (
            torch.where(torch.arange(3) > 1, x.sin() @ weight, zeros),
            (half * weight.sum(0)[1:]).to(torch.float64),
            weight * x.shape[0] / math.inf,
        )

    given = torch.randn(3, 4), torch.randn(4, 3)
    made = make_fx(calls)(*given)
    text = InMemoryGraph(made, Made(StraightLine.__call__)).text()

    def no_trace(*_: Any) -> Any:
        raise AssertionError

    monkeypatch.setattr(fx.Tracer, "trace", no_trace)
    found = stored_regions.graph_of(text)
    assert [(each.op, each.target) for each in found.graph.nodes] == [(e.op, e.target) for e in made.graph.nodes]
    found._tensor_constant0 = made._tensor_constant0  # of which a text has only the name
    assert_same(found(*given), calls(*given))
