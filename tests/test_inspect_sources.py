"""``ca.trace_sources``: the lines of the forward, noted while it runs."""

from __future__ import annotations

import inspect
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import compiled_autograd as ca
from compiled_autograd.capture import forward_lines


def _line(function: object, text: str) -> str:
    """Where a function of this file has some text."""
    lines, first = inspect.getsourcelines(function)  # type: ignore[arg-type]
    (found,) = [number for number, line in enumerate(lines, first) if text in line]
    return f"{__file__}:{found} in {function.__name__}"  # type: ignore[attr-defined]


def _forward(x: torch.Tensor) -> torch.Tensor:
    hidden = x.exp()
    return F.gelu(
        hidden,
    ).sum()


def _sources(view: ca.TapeView) -> dict[str, str | None]:
    return {node.name: node.source for node in view.nodes}


def _leaf() -> torch.Tensor:
    return torch.randn(3, requires_grad=True)


def test_lines_are_those_of_the_callers() -> None:
    with ca.trace_sources():
        loss = _forward(_leaf())
    sources = _sources(ca.inspect(loss))
    assert sources["ExpBackward0"] == _line(_forward, "x.exp()")
    assert sources["GeluBackward0"] == _line(_forward, "F.gelu(")
    assert sources["AccumulateGrad"] is None


def test_lines_inside_pytorch_are_left_out() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    with ca.trace_sources():
        loss = model(torch.ones(1, 3)).sum()
    here = _line(test_lines_inside_pytorch_are_left_out, "loss = model" + "(")
    assert {node.source for node in ca.inspect(loss).nodes if node.name != "AccumulateGrad"} == {here}


def test_without_it_there_are_no_lines() -> None:
    assert set(_sources(ca.inspect(_forward(_leaf()))).values()) == {None}
    with ca.trace_sources():
        _forward(_leaf())
    assert set(_sources(ca.inspect(_forward(_leaf()))).values()) == {None}


def test_entered_twice_it_is_one() -> None:
    with ca.trace_sources(), ca.trace_sources():
        loss = _forward(_leaf())
    assert _sources(ca.inspect(loss))["ExpBackward0"] == _line(_forward, "x.exp()")


def test_captured_graphs_have_the_lines_too() -> None:
    x = _leaf()
    with ca.enable(backend="eager") as session, ca.trace_sources():
        loss = _forward(x)
        loss.backward()
    assert (session.stats().structure_misses, session.stats().bypasses) == (1, {})
    assert session.last is not None and session.last.graph is not None
    sources = {call.name: call.source for call in session.last.graph.tape.calls}
    assert sources["ExpBackward0"] == _line(_forward, "x.exp()")
    again = x.detach().requires_grad_()
    _forward(again).backward()
    assert x.grad is not None and again.grad is not None and torch.equal(x.grad, again.grad)


def test_a_line_that_two_threads_claim_is_nobodys() -> None:
    losses: list[torch.Tensor] = []
    both = threading.Barrier(2)

    def run() -> None:
        with ca.trace_sources():
            losses.append(_forward(_leaf()))
        both.wait(60)  # a thread's identity is given to another one when it has ended

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # Both threads count from their own beginning: the numbers are the same.
    assert losses[0].grad_fn._sequence_nr() == losses[1].grad_fn._sequence_nr()  # type: ignore[union-attr]
    assert set(_sources(ca.inspect(losses[0])).values()) == {None}


def test_the_lines_of_a_thread_that_ended_are_forgotten_with_its_identity() -> None:
    lines = forward_lines._Lines()
    lines.note(5, 7, 1)
    lines.note(7, 9, 2)
    assert [lines.find(number) for number in (4, 5, 6, 7, 9)] == [None, 1, 1, 2, None]
    lines.note(0, 2, 3)
    assert [lines.find(number) for number in (0, 5)] == [3, None]


def test_only_the_last_calls_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward_lines, "_MOST_CALLS", 10)
    lines = forward_lines._Lines()
    for number in range(25):
        lines.note(number, number + 1, number)
        assert lines.find(number) == number and len(lines.line) <= 10
    assert lines.find(0) is None
