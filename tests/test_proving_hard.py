"""The comparison with the real calls where it is hard: what must not be refuted, and what must not go wrong meanwhile."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch

import compiled_autograd as ca
from backends.inductor import InductorBackend


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize("check", [False, "new"])
def test_code_that_writes_into_its_inputs(check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A product that is computed into an input: what lay there is gone, and the step must not go on."""
    right = InductorBackend.compile

    @functools.wraps(right)
    def compile(self: InductorBackend, graph_module: Any, examples: Any) -> Any:
        call = right(self, graph_module, examples)

        def overwriting(arguments: list[Any]) -> Any:
            taken = list(arguments)
            results = call(arguments)
            for each in taken:
                each.mul_(2)
            return results

        return overwriting

    monkeypatch.setattr(InductorBackend, "compile", compile)
    x = torch.randn(6, 6, requires_grad=True)
    kept = x.detach().clone()
    session = ca.enable(backend="inductor", cache_dir=False, tune=False, check=check)
    if check:
        with session, pytest.raises(ca.GradientMismatchError, match=r"has written into .*was overwritten"):
            torch.autograd.grad((x.sin() * x).sum(), x)
        return
    with session:
        torch.autograd.grad((x.sin() * x).sum(), x)
    assert not torch.equal(x, kept), "nobody noticed"
