"""A trace of FX in the thread that compiles beside the training, and modules that other threads call meanwhile."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import fx, nn

import compiled_autograd as ca
from compiled_autograd.torch_api.fx_traces import trace_alone

from .helpers import in_threads


class _Pauses(nn.Module):
    """Its trace stops until another thread has called a module."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.traces, self.goes_on = nn.Linear(2, 2), threading.Event(), threading.Event()

    def forward(self, x: Any) -> Any:
        x = self.inner(x)
        self.traces.set()
        assert self.goes_on.wait(60)
        return self.inner(x).relu()


def test_modules_are_called_in_other_threads_while_one_traces() -> None:
    module, traced = _Pauses(), []

    def trace() -> None:
        trace_alone()
        traced.append(fx.symbolic_trace(module))

    thread = threading.Thread(target=trace)
    before = nn.Module.__call__
    thread.start()
    assert module.traces.wait(60)
    try:
        model, x = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.0)), torch.randn(2, 3)
        assert torch.equal(model(x), nn.functional.linear(x, model[0].weight, model[0].bias))
        assert torch.equal(torch.compile(model, backend="eager")(x), model(x))
    finally:
        module.goes_on.set()
        thread.join()
    (found,) = traced
    assert [node.op for node in found.graph.nodes] == ["placeholder", *["call_module"] * 2, "call_method", "output"]
    assert nn.Module.__call__ is before


def test_the_thread_of_the_compiler_traces_alone() -> None:
    """A model is called while a backend traces there."""
    module, x = _Pauses(), torch.randn(3, requires_grad=True)

    def backend(graph_module: fx.GraphModule, examples: Any) -> Any:
        fx.symbolic_trace(module)
        return graph_module.forward

    session = ca.enable(backend=backend, on_miss="background", cache_dir=False)
    with session:
        x.exp().sum().backward()
        assert module.traces.wait(60)
        nn.Linear(3, 3)(x.detach())
    module.goes_on.set()
    assert session.wait(60) and session.stats().failures == 0


def test_a_trace_elsewhere_is_as_ever() -> None:
    in_threads(trace_alone)
    found = fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    assert [node.op for node in found.graph.nodes] == ["placeholder", "call_module", "call_module", "output"]
