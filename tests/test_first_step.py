"""What a first step needs besides a compile: names, a search for cycles, the extension."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import compiled_autograd as ca
from backends import Backend, garbage_collection, registry
from backends.garbage_collection import RARE_THRESHOLDS, RARELY
from compiled_autograd.capture import parameter_names, unnamed
from compiled_autograd.engine import execution
from compiled_autograd.engine.native_hits import NATIVE_HITS, NativeHits
from compiled_autograd.engine.own_loop import running
from compiled_autograd.errors import CacheMissError
from compiled_autograd.policies import own_loop
from compiled_autograd.policies.own_loop import OWN_LOOPS
from tests.both_walks import MODE, own_plans
from tests.helpers import assert_same, expect, mlp


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows with each search of all living modules."""
    asked: list[str] = []
    search = parameter_names.all_parameter_names

    def counted() -> Any:
        asked.append("search")
        return search()

    monkeypatch.setattr(parameter_names, "all_parameter_names", counted)
    return asked


class _Slow(Backend):
    """A backend that takes long, and says when it compiles."""

    name = "slow"
    slow = True

    def __init__(self) -> None:
        self.asked: list[str] = []

    def compile(self, graph_module: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        self.asked.append("compiler started")
        return lambda inputs: graph_module(*inputs)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> _Slow:
    """A backend with this name."""
    backend = _Slow()
    monkeypatch.setitem(registry._loaded, "slow", backend)
    return backend


def test_names_are_looked_for_after_a_compile(searches: list[str], slow: _Slow) -> None:
    slow.asked, model = searches, mlp()
    with ca.enable(backend="slow") as session:
        model(torch.randn(3, 8)).sum().backward()
    assert searches == ["compiler started", "search"]
    assert session.last is not None and session.last.graph is not None
    (reason,) = session.last.reasons
    assert reason.kind == "first_seen" and "of Sequential" in reason.where
    assert "parameter=0.weight" in session.last.graph.readable()
    expect(session.stats(), structure_misses=1, captures=1, compiles=1)


def test_else_at_the_end_of_the_backward(searches: list[str]) -> None:
    model = mlp()
    with ca.enable(backend="eager") as session:
        model(torch.randn(3, 8)).sum().backward()
    assert searches == ["search"]
    readable = session.graphs()[0].readable()
    names = {f"parameter={name}" for name, _ in model.named_parameters()}
    assert all(name in readable for name in names)
    expect(session.stats(), structure_misses=1, captures=1, compiles=1)


def test_or_when_somebody_asks_before(searches: list[str]) -> None:
    """Here a backend, which is given a pass that asks for the names of leaves."""
    model, asked = mlp(), []

    def look(graph_module: torch.fx.GraphModule) -> None:
        asked.extend(node.meta.get("gradient_of") for node in graph_module.graph.nodes)
        asked.append(len(searches))

    with ca.enable(backend="eager", passes=[look]):
        model(torch.randn(3, 8)).sum().backward()
    assert "0.weight" in str(asked) and asked[-1] == 1
    assert searches == ["search"]


def test_no_parameter_is_held_on_to() -> None:
    model = mlp()
    parameters = [weakref.ref(parameter) for parameter in model.parameters()]
    with ca.enable(backend="eager"):
        model(torch.randn(3, 8)).sum().backward()
    del model
    gc.collect()
    assert not [each for each in parameters if each() is not None]


def test_nor_after_an_error_of_the_users(searches: list[str]) -> None:
    model = mlp()
    out = model(torch.randn(3, 8))

    def fail(gradient: torch.Tensor) -> None:
        raise KeyboardInterrupt

    out.register_hook(fail)
    with ca.enable(backend="eager") as session, pytest.raises(KeyboardInterrupt):
        out.sum().backward()
    assert searches == ["search"] and not unnamed._thread.unnamed
    assert "parameter=0.weight" in session.graphs()[0].readable()


def test_a_refused_miss_says_of_what(searches: list[str]) -> None:
    model = mlp()
    with ca.enable(backend="eager", on_miss="raise"), pytest.raises(CacheMissError, match="of Sequential"):
        model(torch.randn(3, 8)).sum().backward()
    with ca.enable(backend="eager", on_miss="eager") as session:
        model(torch.randn(3, 8)).sum().backward()
    assert session.last is not None
    assert [getattr(each, "where", "of Sequential") for each in session.last.reasons][-1].count("of Sequential") == 1
    assert not unnamed._thread.unnamed


def test_known_names_are_not_looked_for_again(searches: list[str]) -> None:
    model = mlp()
    with ca.enable(backend="eager"):
        for rows in (3, 5):
            (model(torch.randn(rows, 8)) * rows).sum().backward()
            model(torch.randn(rows, 8)).exp().sum().backward()
    assert searches == ["search"]


def test_parameters_can_still_be_swapped() -> None:
    """Nothing refers to them, not even weakly."""
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    with ca.enable(backend="eager"):
        model(torch.randn(4, 3)).sum().backward()
    torch.utils.swap_tensors(model.weight, other.weight)


# ---- the search for cycles -------------------------------------------------------------------------------------------


class _Cycle:
    def __init__(self) -> None:
        self.me = self


@pytest.mark.parametrize("many", [0, 1 << 60])
def test_cycles_are_found_and_thresholds_stay(monkeypatch: pytest.MonkeyPatch, many: int) -> None:
    """However much lives, what was made lately is searched."""
    monkeypatch.setattr(garbage_collection, "_MANY_BLOCKS", many)
    before = gc.get_threshold()
    cycle = weakref.ref(_Cycle())
    with RARELY:
        RARELY.search_now()
        assert cycle() is None
        assert gc.get_threshold() == RARE_THRESHOLDS
    assert gc.get_threshold() == before


@pytest.mark.parametrize("turned_off", [gc.disable, lambda: gc.set_threshold(0)])
def test_who_has_turned_it_off_has_none(turned_off: Callable[[], None]) -> None:
    before = gc.get_threshold()
    cycle = weakref.ref(_Cycle())
    turned_off()
    try:
        with RARELY:
            RARELY.search_now()
        assert cycle() is not None
    finally:
        gc.set_threshold(*before)
        gc.enable()


@pytest.fixture
def extension(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows with each time that the extension, and its own loop, are looked for."""
    if MODE != "off":
        pytest.skip("there the walks of every test ask for it")
    asked: list[str] = []
    monkeypatch.setattr(NATIVE_HITS, "_wanted", 0)  # no tape of an earlier test is to be learnt
    monkeypatch.setattr(NativeHits, "module", lambda hits, settings, build=True: asked.append("extension"))
    monkeypatch.setattr(OWN_LOOPS, "find", lambda settings: asked.append("own loop"))
    return asked


@pytest.mark.parametrize(
    ("settings", "asked"),
    [
        ({"extension": "auto", "tune": True}, ["extension"]),
        ({"extension": "auto", "tune": False}, ["extension"]),
        ({"extension": "off", "tune": False}, []),
    ],
)
def test_the_extension_is_loaded_after_a_compile(
    extension: list[str], slow: _Slow, settings: dict[str, Any], asked: list[str]
) -> None:
    """To load and to check it takes as long as ten steps of a small model. The own loop is checked when no lock is held
    any more, since the engine is asked."""
    slow.asked, x = extension, torch.ones(3, requires_grad=True)
    with ca.enable(backend="slow", cache_dir=False, **settings) as session:
        x.exp().sum().backward()
    own_loop = ["own loop"] if settings["tune"] else []
    assert extension == ["compiler started", *asked, *own_loop]
    expect(session.stats(), structure_misses=1, captures=1, compiles=1)


def test_it_is_ready_once_something_was_compiled(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, slow: _Slow
) -> None:
    """The real one, in the midst of a backward."""
    monkeypatch.setattr(own_loop, "why_own_loop_is_unchecked", lambda: "")
    plans = own_plans(request.config, monkeypatch)
    monkeypatch.setattr(execution, "NATIVE_HITS", plans)
    monkeypatch.setattr(running, "NATIVE_HITS", plans)
    OWN_LOOPS.clear()
    x, y = torch.linspace(-1, 1, 8).requires_grad_(), torch.linspace(-1, 1, 8).requires_grad_()
    (y.exp() * y.sin()).sum().backward()
    with ca.enable(backend="slow", cache_dir=False, extension="auto", tune=True) as session:
        (x.exp() * x.sin()).sum().backward()
    assert plans.library is not None and plans.library.reason == ""
    assert OWN_LOOPS.module is not None and not OWN_LOOPS.reason
    assert_same([x.grad], [y.grad])
    expect(session.stats(), structure_misses=1, captures=1, compiles=1)
