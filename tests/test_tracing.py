"""Recording ATen operators: as ``make_fx`` does, without changing ``torch.nn.Module``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._decomp import get_decompositions
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from compiled_autograd.lowering.fake_tensors import TracingMode
from compiled_autograd.lowering.tracing import trace


def _examples() -> list[torch.Tensor]:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    return [mode.from_tensor(torch.ones(3, 4)), mode.from_tensor(torch.ones(3, 4, dtype=torch.double))]


def _function(*tensors: torch.Tensor) -> list[torch.Tensor]:
    x, y = tensors
    values, indices = x.max(1)
    buffer = torch.zeros(4)
    buffer.add_(values.sum())
    return [buffer, x, indices, y.tanh() + torch.ops.aten.tanh_backward(y, y), torch.tensor(2.0) * x]


@pytest.mark.parametrize("table", [None, get_decompositions([torch.ops.aten.tanh_backward])])
def test_the_graph_is_that_of_make_fx(table: dict[Any, Any] | None) -> None:
    wanted = make_fx(_function, table, "real", _allow_non_fake_inputs=True)(*_examples())
    found = trace(_function, table, _examples())
    assert [str(node) for node in found.graph.nodes] == [str(node) for node in wanted.graph.nodes]
    assert found.code == wanted.code
    for one, other in zip(found.graph.nodes, wanted.graph.nodes, strict=True):
        assert sorted({*one.meta} - {"torch_fn"}) == sorted({*other.meta} - {"torch_fn"})


def test_no_table_is_left_behind() -> None:
    trace(_function, get_decompositions([torch.ops.aten.tanh_backward]), _examples())
    for found in (trace(_function, None, _examples()), make_fx(_function)(*_examples())):
        assert "aten.tanh_backward" in found.code


def test_what_is_traced_runs() -> None:
    real = [torch.rand(3, 4), torch.rand(3, 4, dtype=torch.double)]
    for one, other in zip(trace(_function, None, _examples())(*real), _function(*real), strict=True):
        assert torch.equal(one, other)


def test_modules_are_left_alone() -> None:
    seen = []

    def function(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        seen.append((torch.nn.Module.__call__, torch.nn.Module.__getattr__))
        return [x]

    trace(function, None, _examples())
    assert seen == [(torch.nn.Module.__call__, torch.nn.Module.__getattr__)]
    make_fx(function, None, "real", _allow_non_fake_inputs=True)(*_examples())
    assert seen[1] != seen[0]  # else there is no need for a way of our own


def test_an_error_comes_through_and_leaves_no_mode_behind() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        raise KeyError("own")

    with pytest.raises(KeyError, match="own"):
        trace(function, None, _examples())
    assert type(torch.ones(2) + 1) is torch.Tensor


def test_two_results_that_have_one_fake_tensor_stay_two() -> None:
    """As those of ``mkldnn_rnn_layer_backward``; what an operator hands on of its arguments stays one."""

    @torch.library.custom_op("compiled_autograd_tests::twice", mutates_args=())
    def twice(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return x + 1, x + 2, x + 3

    @twice.register_fake
    def _(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        one = torch.empty_like(x)
        return one, torch.empty_like(x), one

    mode = TracingMode(allow_non_fake_inputs=True)
    example = mode.from_tensor(torch.ones(2, 3).t())
    graph_module = trace(lambda x: list(torch.ops.compiled_autograd_tests.twice(x)), None, [example])
    assert [each.flatten()[0].item() for each in graph_module(torch.ones(3, 2))] == [2, 3, 4]
    first, _, last = (node.meta["val"] for node in graph_module.graph.output_node().args[0])
    assert first is not last and first.stride() == last.stride() and first.fake_mode is last.fake_mode is mode

    with mode:
        parts = torch.ops.aten.split.Tensor(example, 3)
    assert (
        len(parts) == 1
        and parts[0]._is_view()
        and parts[0].untyped_storage()._cdata == example.untyped_storage()._cdata
    )
