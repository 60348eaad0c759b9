"""What tests of ``tune`` share: a backend that is slower than eager, and few backwards before it is decided about."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import fx

from compiled_autograd.engine.session import Session
from compiled_autograd.policies import ledger
from compiled_autograd.policies.ledger import LEDGER
from shadow_cache import Bypass

from .helpers import assert_same

NOW = 1.75e9


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials end after few backwards, and begin again after few: two on each side take turns, of which one counts."""
    for name, value in (("SAMPLES", 3), ("MOST_SAMPLES", 3), ("ROWS", (2,)), ("REST", 5)):
        monkeypatch.setattr(ledger, name, value)


def compute(seconds: float = 0.005) -> None:
    """To sleep would be no time of the processor's."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def slow(graph_module: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
    def run(*arguments: Any) -> Any:
        compute()
        return graph_module.forward(*arguments)

    return run


def run_small(session: Session, weight: torch.Tensor, times: int) -> list[str]:
    labels = []
    for _ in range(times):
        expected = torch.autograd.grad((weight.exp() * weight).sum(), weight)
        loss = (weight.exp() * weight).sum()
        with session:
            assert_same(torch.autograd.grad(loss, weight), expected)
        assert session.last is not None
        first = session.last.reasons[0] if session.last.reasons else None
        labels.append(first.label if isinstance(first, Bypass) else session.last.outcome)
    return labels


def leave(session: Session, weight: torch.Tensor, times: int) -> None:
    """Backwards that are left to eager, without a question about any of them in between."""
    with session:
        for _ in range(times):
            torch.autograd.grad((weight.exp() * weight).sum(), weight)


@pytest.fixture(name="takes")
def said_to_take(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Milliseconds that each backward of a trial is said to take."""
    takes, time = {"eager": 2.0, "compiled": 3.0}, LEDGER._time

    def timed(record: Any, times: list[float], seconds: float) -> None:
        time(record, times, takes["eager" if times is record.eager else "compiled"] / 1e3)

    monkeypatch.setattr(LEDGER, "_time", timed)
    monkeypatch.setattr(ledger.time, "time", lambda: NOW)
    return takes


def outcome_of(session: Session) -> str:
    """Return the outcome of the last backward, or the kind of its reason."""
    last = session.last
    assert last is not None
    return last.reasons[0].kind if last.outcome == "bypass" else last.outcome  # type: ignore[union-attr]
