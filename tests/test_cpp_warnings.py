"""Warnings of C++ code are Python warnings, at each step, as under the eager engine."""

from __future__ import annotations

import warnings

import pytest
import torch

import compiled_autograd as ca
from compiled_autograd.torch_api.cpp_warnings import issuing_warnings

from .helpers import expect


def _warned() -> list[str]:
    leaf = torch.zeros((), requires_grad=True)
    loss = torch._C._nn._test_warn_in_autograd(leaf)  # type: ignore[attr-defined]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loss.backward()
    assert leaf.grad is not None
    return [str(each.message) for each in caught]


def test_a_built_in_function_warns_at_each_step() -> None:
    wanted = _warned()
    assert len(wanted) == 1 and "Warn from backward" in wanted[0]
    with ca.enable(backend="eager") as session:
        assert [_warned(), _warned()] == [wanted, wanted]
    expect(session.stats(), structure_misses=1, hits=1)


def test_a_warning_that_is_an_error_is_raised() -> None:
    leaf = torch.zeros((), requires_grad=True)
    with warnings.catch_warnings(), ca.enable(backend="eager"):
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="Warn from backward"):
            torch._C._nn._test_warn_in_autograd(leaf).backward()  # type: ignore[attr-defined]


def test_errors_come_through_as_they_are() -> None:
    error = KeyError("own")

    def raises() -> None:
        raise error

    with pytest.raises(KeyError) as caught:
        issuing_warnings(raises)
    assert caught.value is error
