"""Inductor's code does all writes into a part of a complex tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import compiled_autograd as ca
from backends.inductor.backend import InductorBackend
from compiled_autograd.lowering.fake_tensors import TracingMode
from compiled_autograd.lowering.tracing import trace

from .helpers import expect

aten: Any = torch.ops.aten


def _two_writes(x: torch.Tensor) -> list[torch.Tensor]:
    """Found by a random tape: one of the writes was done after what reads its result, and so it was left out."""
    total = aten.expand.default(aten.sum.default(x), [1])
    one = aten.as_strided_scatter.default(aten.new_zeros.default(x, [1]), aten.squeeze.dim(total, 0), [], [], 0)
    other = aten.slice_scatter.default(x, total, 0, 0, 1)
    parts = [aten.add.Tensor(one, 0), other]
    return [aten.add.Tensor(*[aten.view.default(aten.view.dtype(part, torch.float64), [1, 2]) for part in parts])]


def _each(x: torch.Tensor) -> list[torch.Tensor]:
    square = aten.view.default(aten.expand.default(x, [9]), [3, 3])
    square = aten.select_scatter.default(square, aten.expand.default(x, [3]), 0, 1)
    square = aten.diagonal_scatter.default(square, aten.expand.default(aten.mul.Tensor(x, 2), [3]))
    square = aten.slice_scatter.default(square, aten.mul.Tensor(square, 3), 1, 0, 3)
    square = aten.as_strided_scatter.default(square, x, [1], [1], 4)
    return [aten.mul.Tensor(aten.view.dtype(square, torch.float64), 2)]


def _values_are_a_view(x: torch.Tensor) -> list[torch.Tensor]:
    square = aten.mul.Tensor(aten.view.default(aten.expand.default(x, [9]), [3, 3]), 2)
    index = aten.cumsum.default(aten.new_zeros.default(x, [2], dtype=torch.int64), 0)
    return [aten.index_put.default(square, [index], aten.slice.Tensor(square, 0, 1, 3), True)]


def _read_again(x: torch.Tensor) -> list[torch.Tensor]:
    """Found by a random graph on 2.14 and 2.15; code of 2.13 is right."""
    square = aten.mul.Tensor(aten.view.default(x, [3, 3]), 2)
    one = aten.as_strided_scatter.default(square, aten.select.int(square, 0, 0), [3], [1], 3)
    index = aten.cumsum.default(aten.new_zeros.default(x, [2], dtype=torch.int64), 0)
    put = aten.index_put.default(one, [index], aten.slice.Tensor(square, 0, 1, 3), True)
    diagonal = aten.diagonal_scatter.default(square, aten.select.int(put, 0, 2))
    column = aten.select_scatter.default(put, aten.select.int(put, 1, 1), 0, 2)
    rows = aten.slice_scatter.default(put, aten.slice.Tensor(one, 0, 0, 2), 0, 1, 3)
    first, second, third = (aten.mul.Tensor(aten.view.dtype(e, torch.float64), 2) for e in (column, diagonal, rows))
    return [aten.add.Tensor(aten.add.Tensor(first, second), third)]


_fails_on_2_11 = pytest.mark.skipif(
    torch.__version__ < "2.12", reason="Inductor raises an error for such code, which is a failure of the backend"
)


PROGRAMS = [(_two_writes, 1), (_each, 1), (_values_are_a_view, 1), (_read_again, 9)]
"""Functions of a complex tensor, and how many values it has."""


@pytest.mark.parametrize(
    "program", [pytest.param(each, marks=_fails_on_2_11) if each[0] is _each else each for each in PROGRAMS]
)
def test_writes_into_complex_tensors_are_done(program: tuple[Any, int]) -> None:
    function, values = program
    torch.manual_seed(0)
    x = torch.randn(values, dtype=torch.complex128)
    mode = TracingMode()
    fake = mode.from_tensor(x)
    with torch.no_grad():  # else view.dtype would be followed by a detach
        graph_module = trace(function, None, [fake], ["saved0_1"])
    with mode:
        compiled = InductorBackend().compile(graph_module, [fake])
    (wanted,) = function(x)
    assert wanted.abs().min() > 0.1
    torch.testing.assert_close(compiled([x])[0], wanted)


def test_what_has_such_writes_is_found_in_the_store(tmp_path: Path) -> None:
    def backward(session: Any) -> list[Any]:
        torch.manual_seed(0)
        x = torch.randn(4, 3, dtype=torch.complex64, requires_grad=True)
        y = torch.randn(3, dtype=torch.complex64, requires_grad=True)
        written = x * 2
        written[1] = y * y
        loss = (written * written).abs().sum()
        if session is None:
            loss.backward()
        else:
            with session:
                loss.backward()
        return [x.grad, y.grad]

    wanted = backward(None)
    for loads in (0, 1):
        session = ca.enable(cache_dir=tmp_path, tune=False)
        for _ in range(3):
            for found, want in zip(backward(session), wanted, strict=True):
                torch.testing.assert_close(found, want)
        expect(session.stats(), structure_misses=1 - loads, hits=2 + loads, compiles=1 - loads)
        assert session.stats().loads == loads
        ca.reset()
