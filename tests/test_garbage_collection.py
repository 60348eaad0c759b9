"""Python's search for reference cycles, made rare while graphs are made, and put back as it was."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import compiled_autograd as ca
from backends.garbage_collection import RARE_THRESHOLDS, RARELY

from .helpers import mlp


@pytest.fixture(autouse=True)
def _thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    assert gc.get_threshold() == before
    gc.set_threshold(*before)


def test_inside_and_after() -> None:
    before = gc.get_threshold()
    with RARELY:
        assert gc.get_threshold() == RARE_THRESHOLDS
        with RARELY:
            pass
        assert gc.get_threshold() == RARE_THRESHOLDS
    assert gc.get_threshold() == before


def test_what_somebody_sets_meanwhile_stays() -> None:
    before = gc.get_threshold()
    with RARELY:
        gc.set_threshold(123, 4, 5)
    found = gc.get_threshold()
    gc.set_threshold(*before)
    assert found == (123, 4, 5)


@pytest.mark.parametrize(("set_before", "inside"), [((0, 10, 10), (0, 10, 10)), ((10**6, 5, 200), (10**6, 20, 200))])
def test_it_is_never_made_more_frequent(set_before: tuple[int, int, int], inside: tuple[int, int, int]) -> None:
    before = gc.get_threshold()
    gc.set_threshold(*set_before)
    try:
        with RARELY:
            assert gc.get_threshold() == inside
        assert gc.get_threshold() == set_before
    finally:
        gc.set_threshold(*before)


def test_of_two_threads_the_last_puts_it_back() -> None:
    before, inside, leave = gc.get_threshold(), threading.Event(), threading.Event()

    def other() -> None:
        with RARELY:
            inside.set()
            leave.wait()

    thread = threading.Thread(target=other)
    with RARELY:
        thread.start()
        inside.wait()
    assert gc.get_threshold() == RARE_THRESHOLDS
    leave.set()
    thread.join()
    assert gc.get_threshold() == before


def test_users_code_runs_as_always() -> None:
    """Hooks, functions, and what a hit does: only making a graph is different."""
    before = gc.get_threshold()
    seen: list[Any] = []

    class Looks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            seen.append(gc.get_threshold())
            return grad

    made: list[Any] = []

    def backend(graph_module: Any, inputs: Any) -> Any:
        made.append(gc.get_threshold())
        return graph_module.forward

    model = mlp()
    with ca.enable(backend=backend) as session:
        for retained in (False, False, True, True):  # what is retained runs inside the engine's own call
            x = torch.ones(2, 8, requires_grad=True)
            between = model(x)
            if retained:
                between.retain_grad()
            Looks.apply(between).sum().backward()
    assert session.stats().captures == 3  # a leaf that has a .grad makes another structure
    assert set(made) == {RARE_THRESHOLDS}
    assert seen == [before] * 4


def test_after_a_capture_that_was_refused() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], requires_grad=True)
    with ca.enable(backend="eager") as session:
        torch.nested.to_padded_tensor(nested * 2, 0.0).sum().backward()
    assert session.stats().captures == 0
    assert sum(session.stats().bypasses.values()) == 1


def test_a_user_who_turns_it_off_meanwhile_and_on_again() -> None:
    before = gc.get_threshold()
    with RARELY:
        found = gc.get_threshold()
        gc.set_threshold(0)
        with RARELY:
            assert gc.get_threshold()[0] == 0
        gc.set_threshold(*found)
    assert gc.get_threshold() == before
