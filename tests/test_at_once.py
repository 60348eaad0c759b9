"""Backwards whose arguments alone leave them to eager: nothing is read of their tapes, and each is counted as any."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

import compiled_autograd as ca
from compiled_autograd.capture import tape
from compiled_autograd.diagnostics import reporting
from compiled_autograd.diagnostics.bypass import MAX_NESTED
from compiled_autograd.engine import engine
from compiled_autograd.engine.fast_path.arming import FastPaths

from .helpers import assert_same, expect

Run = Callable[[], tuple[Tensor, ...]]


class Labelled(Tensor):
    """A tensor whose functions are Python's."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(function, types, args, kwargs or {})


class Cube(torch.autograd.Function):
    """Saves what built-in nodes would not show."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return 3 * ctx.saved_tensors[0] ** 2 * grads[0]


def _leaf() -> Tensor:
    return torch.linspace(-1, 1, 4).requires_grad_()


def _create() -> tuple[Tensor, ...]:
    x = _leaf()
    return torch.autograd.grad(x.exp().sum(), x, create_graph=True)


def _batched() -> tuple[Tensor, ...]:
    x = _leaf()
    return torch.autograd.grad(x.sin(), x, torch.eye(4), is_grads_batched=True)


def _batched_and_inside() -> tuple[Tensor, ...]:
    h = _leaf().sin()
    return torch.autograd.grad(h.exp(), h, torch.eye(4), is_grads_batched=True)


def _inside(make: Callable[[Tensor], Any] = torch.sin, keep: bool = False) -> tuple[Tensor, ...]:
    h = make(_leaf())
    return torch.autograd.grad(h.exp().sum(), h, retain_graph=keep)


def _two_inside() -> tuple[Tensor, ...]:
    h = _leaf().sin()
    k = h.cos()
    return torch.autograd.grad((h * k.exp()).sum(), [h, k])


def _edge() -> tuple[Tensor, ...]:
    h = _leaf().sin()
    return torch.autograd.grad(h.exp().sum(), get_gradient_edge(h))


RUNS: dict[str, tuple[Run, str]] = {
    "create_graph": (_create, "create_graph"),
    "batched": (_batched, "batched_grads"),
    "batched and inside": (_batched_and_inside, "batched_grads"),
    "inside": (_inside, "intermediate_input"),
    "two inside": (_two_inside, "intermediate_input"),
    "an edge": (_edge, "intermediate_input"),
    "of a function": (lambda: _inside(Cube.apply), "intermediate_input"),
    "of a subclass": (lambda: _inside(lambda x: x.sin().as_subclass(Labelled)), "intermediate_input"),
}
each_run = pytest.mark.parametrize(("run", "kind"), RUNS.values(), ids=RUNS)


def _eager(run: Run) -> tuple[Tensor, ...]:
    with ca.disable():
        return run()


@each_run
def test_it_is_counted_with_its_seconds(run: Run, kind: str) -> None:
    session, seconds = ca.enable(backend="eager", cache_dir=False), []
    for _ in range(5):
        wanted = _eager(run)
        with session:
            assert_same(run(), wanted)
        assert session.last is not None and [each.kind for each in session.last.reasons] == [kind]
        seconds.append(session.last.seconds["run"])
    with session:
        for _ in range(2 * engine._TOLD):
            run()
    expect(session.stats(), bypasses={kind: 5 + 2 * engine._TOLD})
    (event,) = session._steps.events()
    assert (event.number, event.count, event.outcome) == (5 + 2 * engine._TOLD, 5 + 2 * engine._TOLD, "bypass")
    assert event.seconds["run"] > sum(seconds) > 0 < min(seconds)


@each_run
def test_nothing_of_the_tape_is_read(run: Run, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    session = ca.enable(backend="eager", cache_dir=False)

    def read(*args: Any) -> Any:
        raise AssertionError("the tape was read")

    for name in ("first_nodes", "peek", "walk"):
        monkeypatch.setattr(tape, name, read)
    with session:
        run()
    expect(session.stats(), bypasses={kind: 1})


def test_an_input_that_may_be_released_is_no_reason() -> None:
    """Its node saved nothing; or the tape is kept; or what the node saved is needed by one below it."""
    session = ca.enable(backend="eager", cache_dir=False, tune=False)

    def below() -> tuple[Tensor, ...]:
        x = _leaf()
        h = x.sin()
        return torch.autograd.grad(h.exp().sum(), [h, x])

    for run in (lambda: _inside(lambda x: x + 1), lambda: _inside(keep=True), below):
        for _ in range(3):
            wanted = _eager(run)
            with session:
                assert_same(run(), wanted)
    assert not session.stats().bypasses


@each_run
def test_who_wants_an_error_gets_one(run: Run, kind: str) -> None:
    with ca.enable(backend="eager", cache_dir=False, on_unsupported="raise") as session:
        for _ in range(3):
            with pytest.raises(ca.UnsupportedBackwardError, match=kind):
                run()
    expect(session.stats(), bypasses={kind: 3})


@each_run
def test_the_log_has_each_from_when_it_is_asked(run: Run, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    with ca.enable(backend="eager", cache_dir=False) as session:
        run()
        before = reporting._log.level
        try:
            reporting._log.setLevel(logging.INFO)
            monkeypatch.setattr(reporting, "_write", lambda level, text: told.append(text))
            for _ in range(2 * engine._TOLD):
                run()
        finally:
            reporting._log.setLevel(before)
    assert len(told) > engine._TOLD and all(text.startswith(f"bypass: {kind}") for text in told)
    expect(session.stats(), bypasses={kind: 1 + 2 * engine._TOLD})


@each_run
def test_an_error_of_eager_is_counted_too(run: Run, kind: str) -> None:
    def fails(*_: Any) -> None:
        raise ZeroDivisionError

    with (
        ca.enable(backend="eager", cache_dir=False) as session,
        torch.autograd.graph.saved_tensors_hooks(lambda x: x, fails),
    ):
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                run()
    expect(session.stats(), bypasses={kind: 2})


def test_deep_inside_others_the_depth_is_the_reason() -> None:
    def nest(level: int, run: Run) -> None:
        x = _leaf()
        y = x * 2

        def inner(_: Tensor) -> None:
            with torch.enable_grad():
                nest(level - 1, run) if level else run()

        y.register_hook(inner)
        y.sum().backward()

    for run, kind in RUNS.values():
        session = ca.enable(backend="eager", cache_dir=False, tune=False)
        with session:
            nest(MAX_NESTED, run)
        expected = kind if kind == "create_graph" else "deep_reentrant"
        assert session.stats().bypasses == {expected: 1}


def test_others_come_between() -> None:
    """Reasons that take turns, with hits among them, are counted each in its place."""
    session = ca.enable(backend="eager", cache_dir=False, tune=False)
    for _ in range(4):
        for run, _ in RUNS.values():
            wanted = _eager(run)
            with session:
                assert_same(run(), wanted)
        with session:
            _leaf().exp().sum().backward()
    stats = session.stats()
    assert stats.bypasses == {"create_graph": 4, "batched_grads": 8, "intermediate_input": 20}
    assert (stats.hits, stats.structure_misses, stats.backwards) == (3, 1, 36)
    numbers = [(each.number, each.count) for each in session._steps.events()]
    assert sum(count for _, count in numbers) == 33 and numbers == sorted(numbers)


def test_it_is_counted_at_once_where_hits_are_served_without_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """C++ leaves the hits of a session to Python as long as some backwards are not counted."""
    monkeypatch.setattr(FastPaths, "is_armed", True)
    session = ca.enable(backend="eager", cache_dir=False)
    for run, _ in RUNS.values():
        with session:
            run()
        assert session.left is None
    expect(session.stats(), bypasses={"create_graph": 1, "batched_grads": 2, "intermediate_input": 5})


def test_a_reset_has_the_next_one_looked_at() -> None:
    session = ca.enable(backend="eager", cache_dir=False, tune=False)
    with session:
        for _ in range(40):
            _batched()
        x = _leaf()
        ca.reset()
        x.exp().sum().backward()
    assert session.last is not None and session.last.outcome == "structure_miss"
