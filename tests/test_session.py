"""Sessions and their account; ``compile_step``, ``inspect`` and ``reset``."""

from __future__ import annotations

import contextlib
import copy
import inspect as python_inspect
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import networkx as nx
import pytest
import torch

import compiled_autograd as ca
from compiled_autograd.cache.graphs import GRAPHS
from compiled_autograd.diagnostics import reporting

from .helpers import expect, in_subprocess, total


def _square(x: torch.Tensor) -> torch.Tensor:
    return (x * x).sum()


def _leaf(*shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (3,)), requires_grad=True)


# ---- counting --------------------------------------------------------------------------------------------------------


def test_every_backward_is_counted_exactly_once() -> None:
    """A mixture of everything that can become of a backward; after each, the four counts add up."""
    session = ca.enable(backend="eager")
    hooked = _leaf()
    hooked.register_hook(lambda grad: grad)

    def fails() -> None:
        with pytest.raises(RuntimeError):
            loss = _square(_leaf())
            loss.backward()
            loss.backward()

    works: list[Any] = [
        lambda: _square(_leaf()).backward(),
        lambda: _square(_leaf()).backward(),
        lambda: _square(_leaf(4)).backward(),
        lambda: _square(_leaf().exp()).backward(),
        lambda: _square(hooked).backward(),
        lambda: _square(_leaf()).backward(create_graph=True),
        fails,
        lambda: torch.autograd.grad(_square(_leaf()), [_leaf()], allow_unused=True),
    ]
    outcomes = []
    with session:
        for work in works:
            before = session.stats().backwards
            work()
            stats = session.stats()
            assert stats.backwards - before == (2 if work is fails else 1)
            assert stats.backwards == total(stats)
            assert session.last is not None
            outcomes.append(session.last.outcome)
    assert outcomes[:6] == ["structure_miss", "hit", "shape_miss", "structure_miss", "structure_miss", "bypass"]
    assert outcomes[6] == "bypass"


def test_stats_are_a_copy() -> None:
    session = ca.enable(backend="eager")
    before = session.stats()
    with session:
        _square(_leaf()).backward(create_graph=True)
    assert before.backwards == 0 and before.bypasses == {}
    session.stats().bypasses.clear()
    assert session.stats().bypasses == {"create_graph": 1}


def test_a_session_counts_its_own_though_graphs_are_shared() -> None:
    first, second = ca.enable(backend="eager"), ca.enable(backend="eager")
    with first:
        _square(_leaf()).backward()
    with second:
        _square(_leaf()).backward()
    expect(first.stats(), structure_misses=1, captures=1, compiles=1)
    expect(second.stats(), hits=1, captures=0, compiles=0)
    assert second.stats().compile_seconds == 0.0 < first.stats().compile_seconds


def test_last() -> None:
    session = ca.enable(backend="eager")
    assert session.last is None
    with session:
        _square(_leaf()).backward()
        first = session.last
        _square(_leaf()).backward()
        second = session.last
        _square(_leaf()).backward(create_graph=True)
        third = session.last
    assert first is not None and second is not None and third is not None
    assert (first.outcome, second.outcome, third.outcome) == ("structure_miss", "hit", "bypass")
    assert [reason.kind for reason in first.reasons] == ["first_seen"]  # type: ignore[union-attr]
    assert second.reasons == () and second.graph is first.graph and third.graph is None
    assert str(third.reasons[0]).startswith("create_graph: ")
    assert set(first.seconds) == {"capture", "lower", "compile", "prove", "run"}
    assert set(second.seconds) == {"capture", "prove", "run"}
    assert set(third.seconds) == {"run"}
    assert all(seconds >= 0 for outcome in (first, second, third) for seconds in outcome.seconds.values())


def test_a_structure_miss_says_how_it_differs() -> None:
    session = ca.enable(backend="eager")
    with session:
        _leaf().exp().sum().backward()
        _leaf().sin().sum().backward()
    assert session.last is not None
    (miss,) = session.last.reasons
    assert (miss.kind, miss.old, miss.new) == ("new_node", "ExpBackward0", "SinBackward0")  # type: ignore[union-attr]


def test_graphs_are_those_that_this_session_met_first() -> None:
    session, other = ca.enable(backend="eager"), ca.enable(backend="eager")
    with session:
        _square(_leaf()).backward()
        _square(_leaf().exp()).backward()
        _square(_leaf()).backward()
    with other:
        _square(_leaf()).backward()
    graphs = session.graphs()
    assert len(graphs) == 2 and graphs[1].number == graphs[0].number + 1
    assert other.graphs() == []
    assert "ExpBackward0" in graphs[1].readable() and "ExpBackward0" not in graphs[0].readable()
    assert all(len(graph.variants) == 1 and len(graph.regions) == 1 and len(graph.aten) == 1 for graph in graphs)
    assert isinstance(graphs[0].to_networkx(), nx.DiGraph)
    assert "aten.mul" in str(graphs[0].aten[0].graph)
    assert "nodes, 1 variants" in repr(graphs[0])


def test_a_variant_that_another_session_compiles_is_listed_by_it() -> None:
    session, other = ca.enable(backend="eager"), ca.enable(backend="eager")
    with session:
        _square(_leaf(3)).backward()
    with other:
        _square(_leaf(4)).backward()
    assert session.graphs() == other.graphs() and len(session.graphs()[0].variants) == 2


# ---- reset -----------------------------------------------------------------------------------------------------------


def test_reset_forgets_graphs_and_keeps_counts() -> None:
    session = ca.enable(backend="eager")
    with session:
        _square(_leaf()).backward()
        assert len(GRAPHS) == 1
        ca.reset()
        assert len(GRAPHS) == 0
        _square(_leaf()).backward()
    expect(session.stats(), structure_misses=2, captures=2, compiles=2)
    assert session.last is not None and session.last.reasons[0].kind == "first_seen"


def test_a_session_lists_what_it_compiled_after_a_reset() -> None:
    session = ca.enable(backend="eager")
    with session:
        _square(_leaf()).backward()
        ca.reset()
        _leaf().exp().sum().backward()
    assert any("ExpBackward0" in graph.readable() for graph in session.graphs())


def test_reset_inside_a_backward() -> None:
    class Resets(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            ca.reset()
            return grad * 2

    session = ca.enable(backend="eager")
    for _ in range(2):
        x = _leaf()
        with session:
            Resets.apply(x.exp()).sin().sum().backward()
        reference = x.detach().clone().requires_grad_()
        Resets.apply(reference.exp()).sin().sum().backward()
        assert torch.equal(x.grad, reference.grad)  # type: ignore[arg-type]
    assert session.stats().backwards == 2 and not session.stats().bypasses


# ---- compile_step ------------------------------------------------------------------------------------------------


class _Calls(torch.autograd.Function):
    """Calls something in its backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, call: Any) -> torch.Tensor:
        ctx.call = call
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.call()
        return grad, None


@pytest.mark.parametrize("retained", [False, True])
def test_reset_inside_the_engines_call(retained: bool) -> None:
    """Where the engine still has what would go, it goes before the next walk."""

    def grad(call: Any) -> torch.Tensor:
        x = torch.ones(3, requires_grad=True)
        between = x.exp()
        if retained:
            between.retain_grad()
        _Calls.apply(between, call).sum().backward()
        assert x.grad is not None
        return x.grad

    wanted = grad(lambda: None)
    with ca.enable(backend="eager") as session:
        for call in (lambda: None, ca.reset, lambda: None, lambda: None):
            assert torch.equal(grad(call), wanted)
    expect(session.stats(), structure_misses=2, hits=2, captures=2)


_RESETS = """
import random, sys, threading, time
import torch
import compiled_autograd as ca
torch.set_num_threads(1)
sys.setswitchinterval(1e-6)
stop, errors = threading.Event(), []

def work(seed):
    choose = random.Random(seed)
    with ca.enable(backend="eager") as session:
        while not stop.is_set():
            x = torch.randn(3, requires_grad=True)
            h = x
            for _ in range(choose.randint(1, 20)):
                h = choose.choice((torch.sin, torch.tanh))(h)
            if choose.random() < 0.2:
                h.retain_grad()
            loss = h.sum()
            try:
                found = torch.autograd.grad(loss, x, retain_graph=True)
                with ca.disable():
                    assert torch.equal(found[0], torch.autograd.grad(loss, x)[0])
            except BaseException as error:
                errors.append(error)
                return
    assert session.stats().captures > 10, session.stats()

threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
for thread in threads:
    thread.start()
end = time.monotonic() + 4
while time.monotonic() < end:
    ca.reset()
    time.sleep(0.0005)
stop.set()
for thread in threads:
    thread.join()
sys.exit(repr(errors[0]) if errors else 0)
"""


def test_reset_beside_running_backwards() -> None:
    result = in_subprocess(_RESETS, OMP_NUM_THREADS="1")
    assert result.returncode == 0, result.stderr


def test_compile_step_without_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPILED_AUTOGRAD_BACKEND", "eager")

    @ca.compile_step
    def step(x: torch.Tensor, *, scale: float = 1.0) -> str:
        """What it does."""
        (_square(x) * scale).backward()
        return "done"

    x = _leaf()
    assert step(x, scale=2.0) == "done" == step(_leaf())
    assert torch.equal(x.grad, 4 * x.detach())  # type: ignore[arg-type]
    assert step.__name__ == "step" and step.__doc__ == "What it does."
    assert list(python_inspect.signature(step).parameters) == ["x", "scale"]
    assert step.session.stats().backwards == 2  # type: ignore[attr-defined]
    assert step.session.settings.backend == "eager"  # type: ignore[attr-defined]


def test_compile_step_with_settings() -> None:
    @ca.compile_step(backend="eager", on_unsupported="raise")
    def step(x: torch.Tensor, create_graph: bool) -> None:
        _square(x).backward(create_graph=create_graph)

    step(_leaf(), False)
    with pytest.raises(ca.UnsupportedBackwardError):
        step(_leaf(), True)
    expect(step.session.stats(), structure_misses=1, bypasses={"create_graph": 1})  # type: ignore[attr-defined]


def test_compile_step_rejects_settings_when_it_decorates() -> None:
    with pytest.raises(ca.UnknownSettingError, match="Did you mean 'backend'"):
        ca.compile_step(backnd="eager")(lambda: None)


def test_every_backward_of_a_step_is_counted() -> None:
    @ca.compile_step(backend="eager")
    def step(x: torch.Tensor) -> None:
        _square(x).backward()
        x.grad = None
        _square(x).backward()
        torch.autograd.grad(x.exp().sum(), x)

    step(_leaf())
    expect(step.session.stats(), structure_misses=2, hits=1)  # type: ignore[attr-defined]


def test_a_step_that_raises_leaves_its_session() -> None:
    @ca.compile_step(backend="eager")
    def step() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        step()
    _square(_leaf()).backward()
    expect(step.session.stats())  # type: ignore[attr-defined]


# ---- the public face -------------------------------------------------------------------------------------------------


def test_everything_that_is_public_is_there() -> None:
    assert set(ca.__all__) >= {"enable", "disable", "compile_step", "inspect", "reset", "Session", "Stats", "Outcome"}
    assert all(hasattr(ca, name) for name in ca.__all__)
    assert all(getattr(ca, name).__doc__ for name in ca.__all__ if callable(getattr(ca, name)))


def test_leaving_sessions_in_another_order_than_they_were_entered() -> None:
    """As generators and exit stacks do it: each must remove itself, not whatever is on top."""
    first, second = ca.enable(backend="eager"), ca.enable(backend="eager")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    try:
        _square(_leaf()).backward()
        inside = second.stats().backwards, first.stats().backwards
    finally:
        second.__exit__(None, None, None)
    assert inside == (1, 0)


def test_others_may_put_something_on_a_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name of theirs, or in tests something in the place of a method."""
    session: Any = ca.enable(backend="eager")
    session.name = "mine"
    monkeypatch.setattr(session, "stats", lambda: "planted")
    assert (session.name, session.stats()) == ("mine", "planted")


# ---- sessions without a backward -------------------------------------------------------------------------------------


def _warnings_of(use: Callable[[], object]) -> list[str]:
    with pytest.MonkeyPatch.context() as monkeypatch, warnings.catch_warnings(record=True) as caught:
        monkeypatch.setattr(reporting, "_warned", {})
        warnings.simplefilter("always")
        use()
    return [str(each.message) for each in caught if "saw no backward" in str(each.message)]


def _forward_alone() -> None:
    session = ca.enable(backend="eager")
    for _ in range(3):
        with session:
            torch.ones(3, requires_grad=True).sum()


def _error() -> None:
    with contextlib.suppress(KeyError), ca.enable(backend="eager"):
        raise KeyError


def _nested() -> None:
    with ca.enable(backend="eager"), ca.enable(backend="eager"):
        torch.ones(3, requires_grad=True).sum().backward()


def _entered_again() -> None:
    session = ca.enable(backend="eager")
    for _ in range(2):
        with session:
            torch.ones(3, requires_grad=True).sum().backward()
    with session:
        pass


def _left_to_eager() -> None:
    with ca.enable(backend="eager"):
        x = torch.ones(3, requires_grad=True)
        torch.autograd.grad(x.sum(), x, create_graph=True)


@pytest.mark.parametrize(
    ("use", "expected"),
    [
        (_forward_alone, 1),
        (_error, 0),
        (_nested, 0),
        (_entered_again, 0),
        (_left_to_eager, 0),
        (ca.compile_step(backend="eager")(lambda: None), 0),
    ],
)
def test_a_session_that_saw_no_backward_warns_once(use: Callable[[], object], expected: int) -> None:
    assert len(_warnings_of(use)) == expected


# ---- copies ----------------------------------------------------------------------------------------------------------


def test_a_session_is_not_copied_with_what_has_it() -> None:
    model = torch.nn.Linear(3, 1)
    model.session = session = ca.enable(backend="eager", cache_dir=False)  # type: ignore[assignment]
    average = torch.optim.swa_utils.AveragedModel(model)
    assert average.module.session is session and average.module.weight is not model.weight
    assert copy.copy(session) is copy.deepcopy([session])[0] is session
    with session:
        average(torch.ones(2, 3)).sum().backward()
    assert session.stats().backwards == 1


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_session_is_not_pickled(protocol: int) -> None:
    with pytest.raises(ca.WrongUseError, match=r"leave it out of what is saved .* call enable\(\) there"):
        pickle.dumps({"session": ca.enable(backend="eager", cache_dir=False)}, protocol)
