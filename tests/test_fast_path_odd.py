"""The fast path beside Dynamo, other people's wrappers, Ctrl-C, and other threads that change something meanwhile."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.autograd import Variable

import compiled_autograd as ca
from compiled_autograd.engine.fast_path import arming
from compiled_autograd.engine.fast_path.arming import FAST_PATH
from compiled_autograd.engine.native_hits import NativeHits
from compiled_autograd.engine.session import Session
from compiled_autograd.guards import ambient
from compiled_autograd.torch_api import op_registry

from .helpers import assert_same, mlp, trials_of_two_rows
from .test_fast_path import _UNTIL_FAST, Make, _eager, _session, _step, _until_fast
from .test_fast_path import hits as hits  # a fixture, as the next
from .test_fast_path import net as net


def test_in_what_torch_compile_runs_as_python(hits: NativeHits, net: tuple[Make, list[torch.Tensor]]) -> None:
    """Dynamo would look at each frame that C++ calls there, those that capture and compile among them."""
    make, leaves = net
    session = _session()
    _until_fast(session, make, leaves)

    @torch.compile(backend="eager")
    def step() -> None:
        make(1).backward()

    served = FAST_PATH.served
    for _ in range(3):
        for leaf in leaves:
            leaf.grad = None
        with session:
            step()
        assert_same([leaf.grad for leaf in leaves], _eager(make, leaves, 1), bitwise=False)
    assert FAST_PATH.served == served and session.stats().bypasses == {}
    _step(session, make, leaves, 1)
    assert FAST_PATH.served == served + 1


def test_each_of_two_variants_is_timed(hits: NativeHits, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the tape was taken with the plan as another variant of it has it."""
    trials_of_two_rows(monkeypatch)
    model, inputs = mlp(depth=1), [torch.randn(rows, 8) for rows in (3, 5)]
    session, served = _session(tune=True, dynamic=False, compile_budget=float("inf")), FAST_PATH.served
    for step in range(150):
        _step(session, lambda step: (model(inputs[step % 2] + step) ** 2).mean(), [*model.parameters()], step)
    (graph,) = session.graphs()
    assert [variant.timing is None for variant in graph.variants] == [False, False]
    assert session.stats().tuning == 10 and FAST_PATH.served > served, "they share a trial"


def test_ctrl_c_once_the_tape_is_taken(
    hits: NativeHits, net: tuple[Make, list[torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session is told, as by Python: nobody can run that tape again."""
    make, leaves = net
    session, asked, raises = _session(), ambient.chosen_settings, False

    def ask() -> str:
        if raises:
            raise KeyboardInterrupt
        return asked()

    monkeypatch.setattr(ambient, "chosen_settings", ask)
    monkeypatch.setattr(ambient, "questions_about_settings", lambda: [(ask, None, asked())])
    _until_fast(session, make, leaves)
    found = []
    for forgets in (False, True):
        if forgets:
            FAST_PATH.forget()
        before, raises = session.stats(), True
        with pytest.raises(KeyboardInterrupt):
            _step(session, make, leaves, 1)
        raises, after = False, session.stats()
        found.append((after.backwards - before.backwards, after.hits - before.hits, after.bypasses["interrupted"]))
    assert found == [(1, 0, 1), (1, 0, 2)]


def test_a_gradient_of_a_vmap_that_is_over_is_eagers(hits: NativeHits, net: tuple[Make, list[torch.Tensor]]) -> None:
    make, leaves = net
    session = _session()
    _until_fast(session, make, leaves)
    for around in (ca.disable(), session):
        with pytest.raises(RuntimeError, match="Batching rule not implemented"):
            _step(around, make, leaves, 1, gradient=torch._add_batch_dim(torch.ones(2), 0, 1))
    assert session.stats().bypasses == {"batched_grads": 1}


@pytest.fixture
def engine() -> Iterator[Any]:
    with ca.enable():
        engine: Any = Variable._execution_engine
    before = vars(engine).pop("run_backward", None)
    yield engine
    vars(engine).pop("run_backward", None)
    if before is not None:
        engine.run_backward = before


def test_what_others_have_put_in_its_place_stays(
    hits: NativeHits, net: tuple[Make, list[torch.Tensor]], engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, leaves = net
    monkeypatch.setattr(FAST_PATH, "_path", None)
    session, called, original = _session(), [], engine.run_backward

    def counted(*arguments: Any, **named: Any) -> Any:
        called.append(1)
        return original(*arguments, **named)

    engine.run_backward = counted
    for step in range(2 * _UNTIL_FAST):
        assert_same(_step(session, make, leaves, step), _eager(make, leaves, step), bitwise=False)
    assert len(called) == 4 * _UNTIL_FAST and engine.run_backward is counted
    assert session.stats().hits == 2 * _UNTIL_FAST - 1


class _Unequal:
    """Is found where a text is looked for, and cannot be compared with it."""

    def __hash__(self) -> int:
        return hash("asked for")

    def __eq__(self, other: object) -> bool:
        raise ValueError


def test_a_key_that_cannot_be_compared(
    hits: NativeHits, net: tuple[Make, list[torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A question that raises has not its answer, also when it is handed over."""
    make, leaves = net
    session, asked = _session(), {_Unequal(): True}
    questions: list[Any] = [(functools.partial(asked.get, "asked for"), None, True)]
    monkeypatch.setattr(ambient, "questions_about_settings", lambda: questions)
    for step in range(2 * _UNTIL_FAST):
        served = FAST_PATH.served
        assert_same(_step(session, make, leaves, step), _eager(make, leaves, step), bitwise=False)
        assert FAST_PATH.served == served
    assert FAST_PATH._handed, "with a question that never holds"
    asked.clear()
    asked["asked for"] = True  # type: ignore[index]
    _step(session, make, leaves, 1)
    assert FAST_PATH.served == served + 1


def test_a_state_that_changes_before_it_is_asked(
    hits: NativeHits, net: tuple[Make, list[torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As another thread may change it, once Python has asked and run: no hit of that state is served in the other."""
    make, leaves = net
    session, record, changes = _session(), Session.record, True

    def recorded(*arguments: Any) -> None:
        record(*arguments)
        torch.use_deterministic_algorithms(changes)

    monkeypatch.setattr(Session, "record", recorded)
    try:
        for step in range(2 * _UNTIL_FAST):
            torch.use_deterministic_algorithms(False)
            _step(session, make, leaves, step)
        changes, served = False, FAST_PATH.served
        torch.use_deterministic_algorithms(True)
        found = _step(session, make, leaves, 1)
    finally:
        torch.use_deterministic_algorithms(False)
    assert FAST_PATH.served == served and session.last is not None and session.last.outcome == "shape_miss"
    assert_same(found, _eager(make, leaves, 1), bitwise=False)


def test_a_program_that_is_dropped_before_it_is_asked_for(
    hits: NativeHits, net: tuple[Make, list[torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As another thread may drop it."""
    make, leaves = net
    session, ask = _session(), arming.ambient.questions

    def dropped() -> Any:
        (variant,) = session.graphs()[0].variants
        native: Any = variant.native.current
        native.compiled.call.drop("straight-line program")
        return ask()

    monkeypatch.setattr(arming.ambient, "questions", dropped)
    for step in range(2 * _UNTIL_FAST):
        served = FAST_PATH.served
        assert_same(_step(session, make, leaves, step), _eager(make, leaves, step), bitwise=False)
        assert FAST_PATH.served == served
    assert not FAST_PATH._handed


def test_counts_that_are_read_meanwhile(hits: NativeHits, net: tuple[Make, list[torch.Tensor]]) -> None:
    """Each backward is among them with what it was, or not at all. Another thread may come in at each call."""
    make, leaves = net
    session = _session()
    _until_fast(session, make, leaves)
    served = FAST_PATH.served
    sys.setprofile(lambda *event: _step(session, make, leaves, 1))
    try:
        stats = session.stats()
        last = session.last
    finally:
        sys.setprofile(None)
    assert last is not None and session.last is not last, "another one came meanwhile"
    assert FAST_PATH.served > served + 2 and stats.hits + stats.structure_misses == stats.backwards


def test_pytorchs_own_is_not_taken_for_missing_while_it_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    partial = types.ModuleType(op_registry._OTHERS)
    partial.__spec__ = types.SimpleNamespace(_initializing=True)  # type: ignore[assignment]
    monkeypatch.setitem(sys.modules, op_registry._OTHERS, partial)
    ((ask, _, answer),) = op_registry.questions_about_others()
    assert ask() != answer
    monkeypatch.delitem(sys.modules, op_registry._OTHERS)
    assert ask() == answer
