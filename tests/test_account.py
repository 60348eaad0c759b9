"""What is told of a backward hides none of its errors, costs none of its gradients, and is told once."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import compiled_autograd as ca
from compiled_autograd.diagnostics import reporting
from compiled_autograd.engine import account, execution

from .helpers import expect


def _loss(x: torch.Tensor) -> torch.Tensor:
    return x.sin().exp().sum()


def _fails(graph_module: Any, inputs: Any) -> Any:
    raise RuntimeError("this backend never works")


def test_warnings_that_are_errors_cost_no_gradient(caplog: pytest.LogCaptureFixture) -> None:
    """The warning becomes a line of the log: raised, it would take the results along."""
    x = torch.randn(4, requires_grad=True)
    wanted = torch.autograd.grad(_loss(x), x)
    with warnings.catch_warnings(), caplog.at_level(logging.WARNING):
        warnings.simplefilter("error")
        with ca.enable(backend=_fails) as session:
            assert torch.equal(torch.autograd.grad(_loss(x), x)[0], wanted[0])
            _loss(x).backward()
    assert x.grad is not None and torch.equal(x.grad, wanted[0])
    expect(session.stats(), structure_misses=2, failures=2)
    assert "this backend never works" in caplog.text


def test_a_store_that_cannot_be_used_costs_no_gradient_either(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("no folder")
    x = torch.randn(4, requires_grad=True)
    with warnings.catch_warnings(), caplog.at_level(logging.WARNING):
        warnings.simplefilter("error")
        with ca.enable(backend="eager", cache_dir=str(tmp_path / "file")) as session:
            _loss(x).backward()
    assert x.grad is not None
    expect(session.stats(), structure_misses=1)
    assert "graphs are kept only in memory" in caplog.text


def test_an_error_before_anything_runs_is_raised_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> Any:
        raise MemoryError("no memory for that")

    x = torch.randn(4, requires_grad=True)
    with ca.enable(backend="eager") as session:
        torch.autograd.grad(_loss(x), x)
        monkeypatch.setattr(execution, "ambient", fails)
        with pytest.raises(MemoryError, match="no memory for that"):
            torch.autograd.grad(_loss(x), x)
    expect(session.stats(), structure_misses=1, bypasses={"interrupted": 1})


def test_what_fails_while_it_is_told_does_not_hide_the_users_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> Any:
        raise KeyError("in the account")

    def hook(grad: torch.Tensor) -> None:
        raise ValueError("the user's")

    x = torch.randn(4, requires_grad=True)
    h = x.sin()
    h.register_hook(hook)
    monkeypatch.setattr(account.RunAccount, "_settle", fails)
    with ca.enable(backend="eager") as session, pytest.raises(ValueError, match="the user's"):
        h.sum().backward()
    expect(session.stats(), structure_misses=1)
    assert "KeyError: 'in the account', after ValueError" in caplog.text


def test_texts_that_differ_in_addresses_are_one() -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(3):
            reporting.warn_once(f"<backend object at {hex(id(object()) + len(seen))}> failed")
        reporting.warn_once("another one failed")
    assert len(seen) == 2


def test_texts_are_not_kept_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporting, "_MAX_WARNED", 10)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for index in range(40):
            reporting.warn_once(f"number {index}")
    assert len(reporting._warned) == 10
