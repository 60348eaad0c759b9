"""Outer loops that Inductor may fuse, and those that it may not."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch

import compiled_autograd as ca
from backends.inductor import backend as inductor
from backends.inductor.workarounds import outer_loops
from backends.versions import fuses_outer_loops_of_several_rows

SIZE = 16


def transposed_softmaxes() -> torch.Tensor:
    """The gradient of a softmax of a transpose of another: a local buffer, and tiles of two dimensions."""
    torch.manual_seed(0)
    x, gradient = torch.randn(SIZE, SIZE, requires_grad=True), torch.randn(SIZE, SIZE)
    first = torch.softmax(x, 1) + x
    return torch.autograd.grad(torch.softmax(torch.tanh(first.t()), 1), x, gradient)[0]


def _softmaxes() -> torch.Tensor:
    torch.manual_seed(0)
    x = torch.randn(SIZE, SIZE, requires_grad=True)
    return torch.autograd.grad(torch.log_softmax(torch.softmax(x, 1), 1), x, torch.randn(SIZE, SIZE))[0]


def without_the_mending(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor decides alone."""
    monkeypatch.setattr(inductor, "sound_outer_loops", lambda graph_module: contextlib.nullcontext())


def error_of(run: object) -> float:
    assert callable(run)
    wanted = run()
    ca.reset()
    with ca.enable(backend="inductor", cache_dir=False, check=False, tune=False) as session:
        found = run()
    assert session.stats().compiles == 1
    return float((found - wanted).abs().max() / wanted.abs().max())


def test_rows_do_not_overwrite_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Right, although Inductor's cache on disk has the wrong code for the same graph."""
    with monkeypatch.context() as patch:
        without_the_mending(patch)
        error_of(transposed_softmaxes)
    assert error_of(transposed_softmaxes) < 1e-5


def test_what_is_right_is_still_fused() -> None:
    from torch._inductor import config, metrics

    metrics.reset()
    with config.patch(force_disable_caches=True):
        assert error_of(_softmaxes) < 1e-5
    assert [count.local_buffer_number for count in metrics.cpp_outer_loop_fused_inner_counts] == [1]


def test_nothing_is_different_outside_and_in_other_threads() -> None:
    inside: list[int] = []
    with outer_loops.sound_outer_loops(torch.fx.symbolic_trace(torch.nn.Identity())):
        thread = threading.Thread(target=lambda: inside.append(outer_loops._INSTEAD.depth))
        thread.start()
        thread.join()
        inside.append(outer_loops._INSTEAD.depth)
    assert [*inside, outer_loops._INSTEAD.depth] == [0, int(fuses_outer_loops_of_several_rows()), 0]
