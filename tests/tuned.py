"""What tests of ``tune`` share: a backend that is slower than eager, and few backwards before it is decided about."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import fx

from compiled_autograd.cache import variants
from compiled_autograd.capture import tape
from compiled_autograd.engine.session import Session
from compiled_autograd.policies import autotune, medians
from shadow_cache import Bypass

from .helpers import assert_same


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Trials begin and end after few backwards, which take turns."""
    monkeypatch.setattr(variants.Variant.__init__, "__defaults__", _defaults(3))
    monkeypatch.setattr(autotune, "SAMPLES_PER_SIDE", 3)
    monkeypatch.setattr(autotune, "IN_A_ROW", 1)
    monkeypatch.setattr(autotune, "COLD", 0)
    monkeypatch.setattr(medians, "COLDER", 0.0)
    monkeypatch.setattr(autotune, "CLOSE", (1.0, 1.0))
    monkeypatch.setattr(medians, "WIDE", math.inf)
    monkeypatch.setattr(autotune, "BACKWARDS_BEFORE_RETRIAL", 5)
    yield


def _defaults(warm: int) -> tuple[Any, ...]:
    return tuple(
        warm if value == variants.HITS_BEFORE_TIMING else value
        for value in variants.Variant.__init__.__defaults__ or ()
    )


@pytest.fixture(name="looks")
def count_looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One number for each tape whose nodes were looked at."""
    found: list[int] = []
    fingerprint = tape.fingerprint
    monkeypatch.setattr(tape, "fingerprint", lambda *ends: found.append(fingerprint(*ends)) or found[-1])
    monkeypatch.setattr(autotune, "BACKWARDS_BEFORE_RETRIAL", 10_000)
    return found


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
