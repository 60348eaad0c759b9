"""Hits that run from the tape to ``.grad`` without Python leave what the Python way leaves, bit for bit."""

from __future__ import annotations

import copy
import gc
import logging
import random
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn

import compiled_autograd as ca
from backends.inductor.straight_line.straight_line import PROGRAM, StraightLine
from compiled_autograd.cache import graphs
from compiled_autograd.diagnostics import node_log, reporting
from compiled_autograd.engine import backward
from compiled_autograd.engine.fast_path.arming import FAST_PATH
from compiled_autograd.runtime import native_run
from compiled_autograd.runtime.native_run import NativeRun
from compiled_autograd.threads.gate import GATE
from compiled_autograd.threads.leaf_writes import LEAF_WRITES

from .both_walks import own_plans
from .helpers import assert_same, mlp, switching_every

Make = Callable[[int], torch.Tensor]
_LEARNT_AFTER = 3
"""Backwards until a tape is known, where its program was run and proved by others: met, met again, and learnt."""
_UNTIL_NATIVE = 6
"""Backwards until a program runs so: learnt, run as Python, and both forms proved."""


class Counted:
    """How many backwards ran without Python in the middle (``fast``: from end to end), and how many of those had their
    leaves written by Python."""

    def __init__(self) -> None:
        self.by_python = self.written_by_python = 0
        self._before = FAST_PATH.served

    @property
    def fast(self) -> int:
        return FAST_PATH.served - self._before

    @property
    def runs(self) -> int:
        return self.by_python + self.fast


@pytest.fixture
def counted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Counted]:
    own_plans(request.config, monkeypatch)
    counted = Counted()
    run, write = NativeRun.run, native_run.write

    def count_run(*arguments: Any) -> None:
        counted.by_python += 1
        run(*arguments)

    def count_write(*arguments: Any) -> None:
        counted.written_by_python += 1
        write(*arguments)

    monkeypatch.setattr(NativeRun, "run", count_run)
    monkeypatch.setattr(native_run, "write", count_write)
    yield counted
    ca.reset()


def _session(**settings: Any) -> ca.Session:
    return ca.enable(**{"backend": "inductor", "cache_dir": False, "tune": False, "extension": "auto", **settings})


def _step(session: Any, make: Make, leaves: list[torch.Tensor], step: int, **how: Any) -> list[torch.Tensor | None]:
    loss = make(step)
    with session:
        loss.backward(**how)
    return [None if leaf.grad is None else leaf.grad.clone() for leaf in leaves]


def _compare(
    counted: Counted,
    make: Make,
    leaves: list[torch.Tensor],
    steps: int = 10,
    between: Callable[[], None] | None = None,
    low: bool = False,
) -> ca.Session:
    """Each step three ways: eager, and the same compiled code fed by Python and in C++. Gives the session of the last.

    ``between`` is what is done to the gradients before each step, in the place of having none.
    """
    ways: list[Any] = [ca.disable(), _session(extension="off"), _session()]
    before: list[torch.Tensor | None] = [None] * len(leaves)
    for step in range(steps):
        found, runs = [], counted.runs
        for way in ways:
            for leaf, grad in zip(leaves, before, strict=True):
                leaf.grad = None if grad is None or between is None else grad.clone()
            if between is not None:
                between()
            found.append(_step(way, make, leaves, step))
        before = found[0]
        for one, other in zip(found[1], found[2], strict=True):
            assert one is None or (other is not None and one.stride() == other.stride())
        assert_same(found[1], found[0], bitwise=False, low=low)
        if counted.runs > runs:
            assert_same(found[2], found[1])
        else:  # one of them may be what the real calls gave, while compiled code is proved
            assert_same(found[2], found[1], bitwise=False, low=low)
    return ways[-1]


@pytest.fixture
def net() -> tuple[Make, list[torch.Tensor]]:
    model, x = mlp(depth=1), torch.randn(3, 8)
    return lambda step: (model(x + step) ** 2).mean(), list(model.parameters())


# ---- what they leave -------------------------------------------------------------------------------------------------


def test_fresh_gradients(counted: Counted, net: tuple[Make, list[torch.Tensor]]) -> None:
    session = _compare(counted, *net)
    assert counted.runs == 10 - _LEARNT_AFTER and not counted.written_by_python
    stats = session.stats()
    assert (stats.hits, stats.compiles, stats.failures) == (10, 0, 0)  # the session before has captured and compiled


@pytest.mark.parametrize("leaves_of", [slice(None), slice(2)], ids=["in one call", "one by one"])
def test_gradients_that_are_added_to(counted: Counted, net: tuple[Make, list[torch.Tensor]], leaves_of: slice) -> None:
    make, leaves = net
    for leaf in leaves:
        leaf.requires_grad_(False)
    for leaf in leaves[leaves_of]:
        leaf.requires_grad_()
    _compare(counted, make, leaves[leaves_of], 12, between=lambda: None)
    assert counted.runs > 2 and not counted.written_by_python


def test_gradients_are_added_in_place(counted: Counted, net: tuple[Make, list[torch.Tensor]]) -> None:
    make, leaves = net
    session = _session()
    for leaf in leaves:
        leaf.grad = torch.zeros_like(leaf)
    held = [leaf.grad for leaf in leaves]
    for step in range(10):
        versions = [grad._version for grad in held if grad is not None]
        _step(session, make, leaves, step)
        assert all(leaf.grad is grad for leaf, grad in zip(leaves, held, strict=True))
        assert [grad._version for grad in held if grad is not None] == [version + 1 for version in versions]
    assert counted.runs > 0


def test_long_additions_are_left_to_python(counted: Counted) -> None:
    """Which lets other threads run meanwhile."""
    # Small, since the first `tanh` of a process may round otherwise than all after it, and `1 - tanh(24)**2` shows it.
    weight, x = torch.randn(600, 600, requires_grad=True), torch.randn(4, 600) / 100
    _compare(counted, lambda step: (x @ weight).tanh().sum() * (step + 1), [weight], 12, between=lambda: None)
    assert counted.written_by_python == counted.runs > 0


def test_a_gradient_that_came_while_the_tape_was_run(
    counted: Counted, net: tuple[Make, list[torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By another thread: nothing of either is lost."""
    make, leaves = net
    session, asked, comes = _session(), LEAF_WRITES.none_needed, False

    def meanwhile() -> bool:
        if comes:
            leaves[0].grad = torch.ones_like(leaves[0])
        return asked()

    monkeypatch.setattr(LEAF_WRITES, "none_needed", meanwhile)
    for step in range(_UNTIL_NATIVE):
        alone = _fresh(session, make, leaves, step)
    for fast in (1, 0):
        for leaf in leaves:
            leaf.grad = None
        comes, before, before_fast = True, counted.runs, counted.fast
        found = _step(session, make, leaves, _UNTIL_NATIVE - 1)
        comes = False
        assert (counted.runs, counted.fast) == (before + 1, before_fast + fast)
        assert alone[0] is not None
        assert_same(found, [alone[0] + 1, *alone[1:]])
        FAST_PATH.forget()


def test_leaves_that_others_write_are_left_to_python(counted: Counted, net: tuple[Make, list[torch.Tensor]]) -> None:
    make, leaves = net
    session = _session()
    _step(session, make, leaves, 0)  # inside a write nothing is compiled
    _step(session, make, leaves, 0)  # inside a write nothing is compiled
    for step in range(8):
        for leaf in leaves:
            leaf.grad = None
        found: list[torch.Tensor] = []
        assert LEAF_WRITES.in_turn(lambda found=found, step=step: found.extend(_step(session, make, leaves, step)))
        for leaf in leaves:
            leaf.grad = None
        torch.testing.assert_close(found, _step(ca.disable(), make, leaves, step))
    assert counted.written_by_python == counted.runs > 0


def test_calls_of_python_in_a_program(counted: Counted) -> None:
    """What Python computes in between sees tensors, and no mode that the user has on."""
    weights = [torch.randn(8, 8, requires_grad=True) for _ in range(3)]
    x = torch.randn(4, 8)

    def make(step: int) -> torch.Tensor:
        parts = [(x + step) @ weight for weight in weights]
        return torch.cat([part.sort(dim=1).values for part in parts], 1).cumsum(1).tanh().sum()

    _compare(counted, make, weights)
    assert counted.runs > 0


def test_autocast(counted: Counted, net: tuple[Make, list[torch.Tensor]]) -> None:
    make, leaves = net
    with torch.autocast("cpu", torch.bfloat16):
        _compare(counted, make, leaves, low=True)
    assert counted.runs > 0


def test_frozen_shared_and_unused_leaves(counted: Counted) -> None:
    shared, frozen, unused = (torch.randn(6, 6, requires_grad=each != 1) for each in range(3))
    bias = torch.randn(6, requires_grad=True)
    x = torch.randn(5, 6)

    def make(step: int) -> torch.Tensor:
        y = torch.relu((x * (step + 1)) @ shared + bias) @ frozen
        return ((y @ shared.t()) ** 2).sum() + unused.detach().sum()

    _compare(counted, make, [shared, bias, unused])
    assert counted.runs > 0


def test_a_leaf_that_has_two_nodes(counted: Counted) -> None:
    """It loses its node where its data gets another dtype, and has another one from then on."""
    model, x = nn.Linear(4, 4), torch.randn(3, 4)

    def make(step: int) -> torch.Tensor:
        first = (model(x) * (step + 1)).sum()
        model.double().float()
        return first + model(x).sin().sum()

    _compare(counted, make, list(model.parameters()))
    assert counted.runs == 0 < backward.NATIVE_HITS.hits, "what one gives the leaf, the other adds to"


def test_the_reference_backend(counted: Counted) -> None:
    """Bitwise eager's, where gradients are fresh and where they are added to."""
    model, x, session = mlp(), torch.randn(3, 8), _session(backend="eager")
    other = copy.deepcopy(model)
    for step in range(16):
        for each in (model, other):
            each.zero_grad(set_to_none=step % 4 == 0)
        found = _step(session, lambda step: model(x + step).sin().sum(), list(model.parameters()), step)
        assert_same(
            found, _step(ca.disable(), lambda step: other(x + step).sin().sum(), list(other.parameters()), step)
        )
    assert counted.runs > 4 and not counted.written_by_python


@pytest.mark.parametrize("boxed", [True, False], ids=["empties its list", "keeps its inputs"])
def test_what_is_no_straight_line_program_is_called_in_python(
    counted: Counted, net: tuple[Make, list[torch.Tensor]], boxed: bool
) -> None:
    make, leaves = net

    def backend(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        def run(arguments: list[Any]) -> list[Any]:
            given = [*graph(*arguments)]
            arguments.clear()
            return given

        run._boxed_call = True  # type: ignore[attr-defined]
        return run if boxed else graph

    sessions = [ca.disable(), _session(extension="off", backend=backend), _session(backend=backend)]
    for step in range(10):
        found = []
        for session in sessions:
            for leaf in leaves:
                leaf.grad = None
            found.append(_step(session, make, leaves, step))
        assert_same(found[2], found[1])
        assert_same(found[1], found[0], bitwise=False)
    assert bool(counted.runs) == boxed and not counted.written_by_python


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (lambda given: given[:1], RuntimeError),
        (lambda given: [], RuntimeError),
        (lambda given: [3 for _ in given], RuntimeError),
        (lambda given: given[0], RuntimeError),
        (lambda given: [each.flatten() for each in given], RuntimeError),
        (lambda given: [each.double() for each in given], RuntimeError),
        (lambda given: 3, TypeError),
    ],
    ids=["too few", "none at all", "numbers", "one tensor", "other shapes", "other dtypes", "no sequence"],
)
def test_results_that_no_leaf_can_have_are_errors(
    counted: Counted, spoil: Callable[[list[torch.Tensor]], Any], error: type[Exception]
) -> None:
    """A backend that gives something else than when it was proved."""
    model, x, spoils = nn.Linear(4, 3), torch.randn(2, 4), False

    def backend(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        def run(arguments: list[Any]) -> Any:
            given = [*graph(*arguments)]
            arguments.clear()
            return spoil(given) if spoils else given

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    session = _session(backend=backend)
    for step in range(_UNTIL_NATIVE + 2):
        model.zero_grad()
        _step(session, lambda step: model(x).sin().sum(), [], step)
    runs, spoils = counted.runs, True
    model.zero_grad()
    loss = model(x).sin().sum()
    with session, pytest.raises(error):
        loss.backward()
    assert counted.runs == runs + 1 > 1


def test_a_backend_that_gives_back_a_parameter(counted: Counted) -> None:
    """It gave new tensors while it was proved. No tensor can be its own gradient."""
    weight, gives_back = torch.randn(5, requires_grad=True), False

    def backend(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        def run(arguments: list[Any]) -> list[Any]:
            given = [*graph(*arguments)]
            found = [each for each in arguments if torch.equal(each, weight)] if gives_back else given
            arguments.clear()
            return found

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    session = _session(backend=backend)
    for step in range(_UNTIL_NATIVE + 2):
        weight.grad = None
        _step(session, lambda _: (weight * weight).sum() / 2, [weight], step)
    runs, gives_back = counted.runs, True
    weight.grad, loss = None, (weight * weight).sum() / 2
    with session, pytest.raises(RuntimeError, match="own grad"):
        loss.backward()
    assert weight.grad is None and counted.runs == runs + 1 > 1


def test_an_error_of_what_is_called_in_python(counted: Counted, net: tuple[Make, list[torch.Tensor]]) -> None:
    make, leaves = net
    breaks = False

    def backend(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        def run(arguments: list[Any]) -> list[Any]:
            given = [*graph(*arguments)]
            arguments.clear()
            if breaks:
                raise ValueError("not today")
            return given

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    session = _session(backend=backend)
    for step in range(8):
        _step(session, make, leaves, step)
    runs, breaks = counted.runs, True
    loss = make(0)
    with session, pytest.raises(ValueError, match="not today"):
        loss.backward()
    assert counted.runs == runs + 1 > 1
    breaks = False
    for leaf in leaves:
        leaf.grad = None
    found = _step(session, make, leaves, 0)
    for leaf in leaves:
        leaf.grad = None
    assert_same(found, _step(ca.disable(), make, leaves, 0), bitwise=False)


def test_kept_tapes(counted: Counted, net: tuple[Make, list[torch.Tensor]]) -> None:
    make, leaves = net
    session = _session()
    for step in range(10):
        loss = make(step)
        twice = []
        for _ in range(2):
            for leaf in leaves:
                leaf.grad = None
            with session:
                loss.backward(retain_graph=True)
            twice.append([leaf.grad for leaf in leaves])
        assert_same(*twice, bitwise=counted.runs > 1)  # before that, what the real calls gave
        assert all(one is not other for one, other in zip(*twice, strict=True))
    assert counted.runs > 10


def test_inputs_are_let_go_as_they_are_not_needed_any_more(counted: Counted) -> None:
    """What the tape saved is gone after the backward, and gradients alone are left."""
    weight, x = torch.randn(64, 64, requires_grad=True), torch.randn(64, 64)
    session = _session()
    for _ in range(_UNTIL_NATIVE + 2):
        weight.grad = None
        hidden = (x @ weight).tanh()
        counts = [hidden._use_count()]
        loss = (hidden * hidden).sum()
        counts.append(hidden._use_count())
        with session:
            loss.backward()
        assert counts[1] > counts[0] and hidden._use_count() == counts[0]
    assert counted.runs > 0


# ---- when they run ---------------------------------------------------------------------------------------------------


def test_other_shapes_have_programs_of_their_own(counted: Counted) -> None:
    model = mlp(depth=1)
    leaves = list(model.parameters())
    xs = [torch.randn(rows, 8) for rows in (3, 5)]
    ways: list[Any] = [ca.disable(), _session(dynamic=False)]
    for step in range(24):
        found = []
        for way in ways:
            for leaf in leaves:
                leaf.grad = None
            found.append(_step(way, lambda step: model(xs[step % 2] * (step + 1)).sum(), leaves, step))
        torch.testing.assert_close(*found)
    assert counted.runs > 8


@pytest.mark.parametrize("settings", [{"check": True}, {"extension": "off"}], ids=str)
def test_settings_under_which_none_runs(
    counted: Counted, net: tuple[Make, list[torch.Tensor]], settings: dict[str, Any]
) -> None:
    make, leaves = net
    session = _session(**settings)
    for step in range(10):
        _step(session, make, leaves, step)
    assert counted.runs == 0


def test_a_program_that_is_dropped_is_not_run(counted: Counted, net: tuple[Make, list[torch.Tensor]]) -> None:
    make, leaves = net
    _compare(counted, make, leaves)
    session, before = _session(), counted.runs
    runs = [variant.native.current for each in _known_shapes() for variant in each.variants()]
    (run,) = [each for each in runs if each is not None]
    line = run.compiled.call
    assert isinstance(line, StraightLine) and line.program is run.function and line.drop(PROGRAM)
    assert not run.is_current()
    for leaf in leaves:
        leaf.grad = None
    found = _step(session, make, leaves, 0)
    for leaf in leaves:
        leaf.grad = None
    assert_same(found, _step(ca.disable(), make, leaves, 0), bitwise=False)
    (run,) = [each.native.current for shapes in _known_shapes() for each in shapes.variants() if each.native.current]
    assert run.function is line, "the code that the program was made of, in Python"
    assert counted.runs == before + 1


def _known_shapes() -> list[Any]:
    return [shapes for each in backward.NATIVE_HITS._learnt for shapes in each.shapes.values()]


def test_settings_in_turn_have_programs_of_their_own(counted: Counted, net: tuple[Make, list[torch.Tensor]]) -> None:
    """One tape, one set of shapes, two variants: whichever comes, it is that one that runs."""
    make, leaves = net
    sessions = [_session(), _session(passes=(_doubled,))]
    for step in range(60):
        wanted = _fresh(ca.disable(), make, leaves, step)
        for factor, session in zip((1, 2), sessions, strict=True):
            found = _fresh(session, make, leaves, step)
            torch.testing.assert_close(found, [factor * each for each in wanted if each is not None])
    assert counted.runs > 60


def test_threads_with_other_settings_have_programs_of_their_own(
    counted: Counted, net: tuple[Make, list[torch.Tensor]]
) -> None:
    _, leaves = net
    wrong: list[Any] = []

    def train(factor: int, session: ca.Session) -> None:
        own = copy.deepcopy(leaves)
        model = mlp(depth=1)
        for mine, given in zip(model.parameters(), own, strict=True):
            mine.data = given.data
        x = torch.ones(3, 8)

        def make(step: int) -> torch.Tensor:
            return (model(x + step) ** 2).mean()

        try:
            for step in range(150):
                wanted = torch.autograd.grad(make(step), list(model.parameters()))
                found = _fresh(session, make, list(model.parameters()), step)
                assert session.last is not None
                left = (
                    session.last.outcome == "bypass"
                )  # while the other thread compiled: the pass is for compiled code
                torch.testing.assert_close(found, [each if left else factor * each for each in wanted])
        except BaseException as error:  # noqa: BLE001  shown below
            wrong.append((error, session.last))

    sessions = [_session(), _session(passes=(_doubled,))]
    threads = [threading.Thread(target=train, args=each) for each in zip((1, 2), sessions, strict=True)]
    with switching_every(1e-5):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong and counted.runs > 0


def _fresh(session: Any, make: Make, leaves: list[torch.Tensor], step: int) -> list[torch.Tensor | None]:
    for leaf in leaves:
        leaf.grad = None
    return _step(session, make, leaves, step)


def _doubled(graph_module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """A user's pass, by which the gradients are told apart."""
    graph = graph_module.graph
    (output,) = graph.find_nodes(op="output")
    with graph.inserting_before(output):
        twice = [
            None if each is None else graph.call_function(torch.ops.aten.mul.Tensor, (each, 2))
            for each in output.args[0]
        ]
    output.args = (tuple(twice),)
    graph_module.recompile()
    return graph_module


def test_a_profiler_sees_operators(counted: Counted, net: tuple[Make, list[torch.Tensor]]) -> None:
    make, leaves = net
    _compare(counted, make, leaves)
    before = counted.runs
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        _step(_session(), make, leaves, 0)
    assert counted.runs == before


def test_the_log_has_each_node(
    counted: Counted, net: tuple[Make, list[torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    make, leaves = net
    _compare(counted, make, leaves)
    written: list[str] = []
    for logs in (False, True, False):
        before = counted.runs
        for leaf in leaves:
            leaf.grad = None
        with monkeypatch.context() as patch:
            patch.setattr(node_log, "tell_of_nodes", written.append)
            session, level = _session(), reporting._log.level
            try:
                reporting._log.setLevel(logging.DEBUG if logs else level)
                _step(session, make, leaves, 0)
            finally:
                reporting._log.setLevel(level)
        assert session.stats().hits == 1 and counted.runs == before + (not logs)
    assert sum("backward of" in text for text in written) == 1 and any("AccumulateGrad" in text for text in written)


def test_a_backward_that_is_to_be_saved_with_its_values(
    counted: Counted, net: tuple[Make, list[torch.Tensor]], tmp_path: Path
) -> None:
    make, leaves = net
    session = _compare(counted, make, leaves)
    before, path = counted.runs, tmp_path / "backward.zip"
    assert session.last is not None and session.last.graph is not None
    session.last.graph.save(path, values=True)
    for leaf in leaves:
        leaf.grad = None
    found = _step(session, make, leaves, 0)
    assert counted.runs == before and path.exists()
    reproduction = ca.load(path).eager()
    assert_same(sorted(reproduction.values(), key=_size), sorted(found, key=_size), bitwise=False)
    _step(session, make, leaves, 0)
    assert session.last.graph.saving is None


def _size(gradient: torch.Tensor | None) -> float:
    return 0.0 if gradient is None else float(gradient.abs().sum())


def test_an_error_of_a_program_is_raised_and_everything_let_go(
    counted: Counted, net: tuple[Make, list[torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    make, leaves = net
    asked, fails = LEAF_WRITES.none_needed, False

    def ask() -> bool:
        if fails:
            raise MemoryError("here")
        return asked()

    monkeypatch.setattr(LEAF_WRITES, "none_needed", ask)
    _compare(counted, make, leaves)
    for fast in (1, 0):
        session, before, before_fast = _session(), counted.runs, counted.fast
        for leaf in leaves:
            leaf.grad = None
        fails = True
        with pytest.raises(MemoryError, match="here"):
            _step(session, make, leaves, 0)
        fails = False
        assert (counted.runs, counted.fast) == (before + 1, before_fast + fast)
        assert all(leaf.grad is None for leaf in leaves)
        assert torch.is_grad_enabled() and (session.stats().backwards, session.stats().hits) == (1, 1)
        assert session.last is not None and session.last.outcome == "hit"
        torch.testing.assert_close(_fresh(session, make, leaves, 0), _fresh(ca.disable(), make, leaves, 0))
        assert counted.runs == before + 2
        FAST_PATH.forget()


@pytest.mark.parametrize(("most", "different"), [(2, 3), pytest.param(4, 8, marks=pytest.mark.slow)])
def test_variants_that_went_are_freed(
    counted: Counted, monkeypatch: pytest.MonkeyPatch, most: int, different: int
) -> None:
    """Plans keep none alive: a structure has no more than it may have."""
    monkeypatch.setattr(graphs, "MAX_VARIANTS", most)
    model, session = mlp(depth=1), _session(dynamic=False)
    seen: list[weakref.ref[Any]] = []
    for rows in range(2, 2 + different):
        for _ in range(_UNTIL_NATIVE):
            model.zero_grad()
            _step(session, lambda _, rows=rows: model(torch.ones(rows, 8)).sum(), [], 0)  # type: ignore[misc]
        seen += [weakref.ref(each) for each in session.graphs()[0].variants]
    assert counted.runs > different
    gc.collect()
    assert len({id(each()) for each in seen} - {id(None)}) == len(session.graphs()[0].variants) == most


def test_plans_that_are_forgotten_while_a_tape_is_freed(
    counted: Counted, net: tuple[Make, list[torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By another thread: nodes are freed without the GIL."""
    make, leaves = net
    other = torch.randn(3, requires_grad=True)
    _compare(counted, make, leaves)
    for step in range(_UNTIL_NATIVE):
        _step(_session(), lambda _: (other * 2).sum(), [other], step)
    hits = backward.NATIVE_HITS
    assert len(hits._learnt) == 2
    FAST_PATH.forget()  # of which tests/test_fast_path.py has the same
    before, wanted = hits.hits, _fresh(ca.disable(), make, leaves, 0)
    served = hits._served

    def forgotten(learnt: Any) -> None:
        hits.forget()
        served(learnt)

    monkeypatch.setattr(hits, "_served", forgotten)
    torch.testing.assert_close(_fresh(_session(), make, leaves, 0), wanted)
    assert hits.hits == before + 1 and not hits._learnt


def test_nobody_comes_in_between_the_questions_whether_leaves_may_be_written() -> None:
    """Neither calls a function of Python's, at which another thread may take over."""
    called: list[str] = []
    sys.setprofile(lambda frame, event, _: called.append(frame.f_code.co_name) if "call" in event else None)
    try:
        answer = LEAF_WRITES.none_needed()
    finally:
        sys.setprofile(None)
    assert answer and called[0] == "none_needed" and len(called) == 2, "the second is the call that ends it"
    for threads in (GATE.idents, GATE.in_call, LEAF_WRITES.writing, LEAF_WRITES._through_nodes):
        threads.append(-1)
        try:
            assert not LEAF_WRITES.none_needed()
        finally:
            threads.remove(-1)


def test_threads_that_train_one_model(counted: Counted, net: tuple[Make, list[torch.Tensor]]) -> None:
    """Each gradient is added once, whoever adds it."""
    make, leaves = net
    session = _session()
    for leaf in leaves:
        leaf.grad = torch.zeros_like(leaf)
    for _ in range(_UNTIL_NATIVE + 2):
        _step(session, lambda _: make(0), leaves, 0)
    for leaf in leaves:
        leaf.grad = torch.zeros_like(leaf)
    before, errors = counted.runs, []

    def train() -> None:
        try:
            for _ in range(20):
                loss = make(0)
                with session:
                    loss.backward()
        except BaseException as error:  # noqa: BLE001  shown below
            errors.append(error)

    threads = [threading.Thread(target=train) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and counted.runs > before
    found = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    (alone,) = [_step(ca.disable(), make, leaves, 0)]
    for grad, one in zip(found, alone, strict=True):
        assert grad is not None and one is not None
        torch.testing.assert_close(grad, 80 * one)


# ---- whatever is drawn -----------------------------------------------------------------------------------------------


class _Drawn:
    """A random net: layers, layouts, frozen and shared weights, residuals, slices, in-place writes."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._generator = torch.Generator().manual_seed(seed)
        self.width = self._random.choice([1, 3, 8, 17])
        self.rows = self._random.choice([1, 2, 5])
        self.leaves: list[torch.Tensor] = []
        self._layers = [self._layer() for _ in range(self._random.randint(1, 6))]
        self._inputs = [self._tensor(self.rows, self.width) for _ in range(2)]

    def _tensor(self, *shape: int) -> torch.Tensor:
        whole = torch.randn(*[size + 2 for size in shape], generator=self._generator)
        kind = self._random.choice(["dense", "transposed", "offset"])
        if kind == "transposed" and len(shape) == 2:
            return whole[: shape[0], : shape[1]].t().contiguous().t().clone(memory_format=torch.preserve_format)
        cut = whole[tuple(slice(1, 1 + size) for size in shape)]
        return cut if kind == "offset" else cut.contiguous()

    def _weight(self, *shape: int) -> torch.Tensor:
        alike = [leaf for leaf in self.leaves if leaf.shape == shape]
        if alike and self._random.random() < 0.25:
            return self._random.choice(alike)
        weight = self._tensor(*shape)
        if self._random.random() < 0.85:
            weight.requires_grad_()
        self.leaves.append(weight)
        return weight

    def _layer(self) -> Callable[[torch.Tensor], torch.Tensor]:
        width, kind = self.width, self._random.randrange(8)
        if kind == 0:
            weight, bias = self._weight(width, width), self._weight(width)
            return lambda x: nn.functional.linear(x, weight, bias)
        if kind == 1:
            weight, bias = self._weight(width), self._weight(width)
            return lambda x: nn.functional.layer_norm(x, (width,), weight, bias, eps=0.5)  # else it magnifies rounding
        if kind == 2:
            weight = self._weight(width, width)
            return lambda x: x + torch.tanh(x @ weight) @ weight.t()
        if kind == 3:
            weight = self._weight(width)
            return lambda x: torch.cat([x[:, : width // 2], x[:, width // 2 :] * weight[width // 2 :]], 1)
        if kind == 4:
            weight = self._weight(width, width)
            return lambda x: torch.relu((x @ weight).mul_(0.5)) + x
        if kind == 5:
            weight = self._weight(width)
            return lambda x: x.clone().add_(weight).sigmoid_() * 2
        if kind == 6:
            weight = self._weight(1, width)
            return lambda x: x * weight.expand(x.shape[0], width)
        weight = self._weight(width, width)
        return lambda x: torch.addmm(x, x, weight, beta=0.5, alpha=2.0)

    def loss(self, step: int) -> torch.Tensor:
        first = next((leaf for leaf in self.leaves if leaf.requires_grad), None)
        x = self._inputs[step % 2] * (1 + step / 8)
        for layer in self._layers:
            x = layer(x)
        total = (x**2).mean()
        return total if first is None else total + first.sum() * 0.01


def _draw(seed: int, counted: Counted) -> None:
    drawn = _Drawn(seed)
    leaves = [leaf for leaf in dict.fromkeys(drawn.leaves) if leaf.requires_grad]
    if not leaves:
        return
    policy = random.Random(seed).choice(["none", "zero", "add", "some"])

    def between() -> None:
        for index, leaf in enumerate(leaves):
            if policy == "none" or (policy == "some" and index % 2):
                leaf.grad = None
            elif policy == "zero" and leaf.grad is not None:
                leaf.grad.zero_()

    _compare(counted, drawn.loss, leaves, 12, between)


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(each, marks=pytest.mark.slow) for each in range(2, 6))])
def test_random_nets(counted: Counted, seed: int) -> None:
    _draw(seed, counted)


@pytest.mark.slow
def test_many_random_nets(counted: Counted) -> None:
    for seed in range(100, 250):
        _draw(seed, counted)
        ca.reset()
    assert counted.runs > 300
