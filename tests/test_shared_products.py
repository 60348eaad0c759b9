"""Sums of products that become one product, and the backward of recurrent cells: what they give, and when."""

from __future__ import annotations

import functools
import operator
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from backends.inductor.cuda.recurrent_cells import CELLS
from backends.inductor.cuda.shared_products import sum_shared_products

_aten = torch.ops.aten


def _traced(function: Callable[..., Any], *inputs: Any) -> fx.GraphModule:
    """As graphs come to the backend: products of transposes, and no composite operators."""
    table = {_aten.t.default: lambda x: _aten.permute.default(x, [1, 0])}
    return make_fx(function, table, tracing_mode="fake")(*inputs)


def _joined(graph_module: fx.GraphModule) -> int:
    values = (node.meta["val"] for node in graph_module.graph.nodes if node.op == "placeholder")
    with next(iter(values)).fake_mode:
        fewer = sum_shared_products(graph_module)
    graph_module.graph.lint()
    return fewer


def _count(graph_module: fx.GraphModule, target: Any) -> int:
    return len(graph_module.graph.find_nodes(op="call_function", target=target))


def _tensors(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


def _check(function: Callable[..., Any], *inputs: Any) -> tuple[fx.GraphModule, int]:
    wanted = function(*inputs)
    graph_module = _traced(function, *inputs)
    fewer = _joined(graph_module)
    found = graph_module(*inputs)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)
    for one, other in zip(found, wanted, strict=True):
        assert one.stride() == other.stride()
    return graph_module, fewer


def _sum(terms: Iterable[Tensor]) -> Tensor:
    return functools.reduce(operator.add, terms)


def _gradients(rows: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Of the weight and the bias of a layer that is used many times."""
    weight = _sum(d.t().mm(x) for d, x in zip(rows, inputs, strict=True))
    return [weight, _sum(d.sum(0, keepdim=True).view(-1) for d in rows)]


def test_a_weight_and_a_bias_that_are_used_at_many_steps() -> None:
    rows, inputs = _tensors(*[(2, 32)] * 10), _tensors(*[(2, 16)] * 10)
    graph_module, fewer = _check(_gradients, rows, inputs)
    assert fewer == 9
    assert (_count(graph_module, _aten.mm.default), _count(graph_module, _aten.sum.dim_IntList)) == (1, 1)
    assert _count(graph_module, _aten.cat.default) == 2


def test_two_weights_share_what_is_concatenated() -> None:
    rows, first, second = (_tensors(*[(2, size)] * 8) for size in (32, 16, 24))

    def gradients(rows: Any, first: Any, second: Any) -> list[Tensor]:
        return [*_gradients(rows, first), *_gradients(rows, second)]

    graph_module, fewer = _check(gradients, rows, first, second)
    assert fewer == 14 and _count(graph_module, _aten.cat.default) in (3, 4)


@pytest.mark.parametrize("steps", [2, 3])
def test_few_products_stay(steps: int) -> None:
    _, fewer = _check(_gradients, _tensors(*[(4, 32)] * steps), _tensors(*[(4, 16)] * steps))
    assert fewer == 0


def test_large_operands_are_not_copied() -> None:
    _, fewer = _check(_gradients, _tensors(*[(256, 8)] * 10), _tensors(*[(256, 8)] * 10))
    assert fewer == 0


def test_groups_are_as_large_as_memory_allows() -> None:
    rows, inputs = _tensors(*[(16, 64)] * 20), _tensors(*[(16, 64)] * 20)
    graph_module, fewer = _check(_gradients, rows, inputs)
    assert (_count(graph_module, _aten.mm.default), fewer) == (5, 15)
    for node in graph_module.graph.find_nodes(op="call_function", target=_aten.cat.default):
        assert node.meta["val"].numel() <= 2 * 64 * 64


def test_what_somebody_else_needs_stays() -> None:
    rows, inputs = _tensors(*[(2, 32)] * 10), _tensors(*[(2, 16)] * 10)

    def gradients(rows: Any, inputs: Any) -> list[Tensor]:
        products = [d.t().mm(x) for d, x in zip(rows, inputs, strict=True)]
        return [_sum(products), products[3], products[4] * 2]

    graph_module, fewer = _check(gradients, rows, inputs)
    assert fewer == 7 and _count(graph_module, _aten.mm.default) == 3


def test_a_right_operand_may_be_the_same_at_every_step() -> None:
    """And be, once, the left operand of another sum."""
    rows, states, (code,) = _tensors(*[(2, 32)] * 6), _tensors(*[(2, 32)] * 5), _tensors((2, 32))

    def gradients(rows: Any, states: Any, code: Any) -> list[Tensor]:
        first = _sum(d.t().mm(code) for d in rows)
        return [first, _sum(x.t().mm(d) for x, d in zip([code, *states], rows, strict=True))]

    _, fewer = _check(gradients, rows, states, code)
    assert fewer == 10


def test_a_sum_that_is_a_term_of_another_is_made_once() -> None:
    (first, second), (one, other) = ([_tensors(*[(2, size)] * 6) for _ in range(2)] for size in (32, 16))

    def gradients(first: Any, second: Any, one: Any, other: Any) -> list[Tensor]:
        inner = _sum(d.t().mm(x) for d, x in zip(first, one, strict=True))
        return [inner.sin(), _sum([inner, *(d.t().mm(x) for d, x in zip(second, other, strict=True))])]

    graph_module, fewer = _check(gradients, first, second, one, other)
    assert (fewer, _count(graph_module, _aten.mm.default)) == (10, 2)


def test_results_keep_their_strides() -> None:
    """A term with another layout comes behind the product that it stood between."""
    rows, inputs, (other,) = _tensors(*[(2, 32)] * 6), _tensors(*[(2, 16)] * 6), _tensors((16, 32))

    def gradients(rows: Any, inputs: Any, other: Any) -> list[Tensor]:
        first, *products = [d.t().mm(x) for d, x in zip(rows, inputs, strict=True)]
        return [_sum([first, other.t(), *products]), _sum([other.t(), first * 2, *products])]

    _check(gradients, rows, inputs, other)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_of_16_bits_are_rounded_where_eager_rounds(dtype: torch.dtype) -> None:
    rows, inputs = ([each.to(dtype) for each in _tensors(*[(2, size)] * 6)] for size in (32, 16))
    assert _joined(_traced(_gradients, rows, inputs)) == 0


def test_sums_of_everything_are_left_alone() -> None:
    rows, inputs = _tensors(*[(2, 32)] * 6), _tensors(*[(2, 16)] * 6)

    def gradients(rows: Any, inputs: Any) -> list[Tensor]:
        whole = [_aten.sum.dim_IntList(each, None, True).view([1]) for each in rows]
        return [*_gradients(rows, inputs), _sum(whole)]

    _, fewer = _check(gradients, rows, inputs)
    assert fewer == 5


class _Random:
    """A graph of sums with terms of all kinds, in any order."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.inner, self.rows, self.columns = (self.draw.choice((1, 2, 4, 8)) for _ in range(3))
        count = self.draw.randint(5, 12)
        self.left = _tensors(*[(self.inner, 8 * self.rows)] * count)
        self.right = _tensors(*[(self.inner, 8 * self.columns)] * count)
        self.large = _tensors(*[(8 * self.rows, 8 * self.columns)] * 3)
        self.seed = seed

    def __call__(self, left: list[Tensor], right: list[Tensor], large: list[Tensor]) -> list[Tensor]:
        draw = random.Random(self.seed)  # the same in each call
        pool, results = [*left], []
        for _ in range(draw.randint(1, 4)):
            terms: list[Tensor] = []
            for at in draw.sample(range(len(left)), draw.randint(2, len(left))):
                rows = pool[at] if draw.random() < 0.8 else pool[at].sin()
                kind = draw.random()
                if kind < 0.7:
                    terms.append(rows.t().mm(right[at]))
                elif kind < 0.8:
                    terms.append(right[at].t().mm(rows).t())
                elif kind < 0.9:
                    terms.append(large[draw.randrange(3)] * 2)
                else:
                    terms.append(rows.t().contiguous().mm(right[at].t().contiguous().t()))
            while len(terms) > 1:
                at = 0 if draw.random() < 0.7 else draw.randrange(len(terms) - 1)
                terms[at : at + 2] = [terms[at] + terms[at + 1]]
            results.append(terms[0])
            if draw.random() < 0.5:
                results.append(_sum(each.sum(0) for each in pool))
            if draw.random() < 0.4:  # later rows depend on an earlier sum
                pool = [each + terms[0].mean().tanh() for each in pool]
        return results


def _fuzz(seeds: range) -> int:
    fewer = 0
    for seed in seeds:
        program = _Random(seed)
        inputs = program.left, program.right, program.large
        wanted = program(*inputs)
        graph_module = _traced(program, *inputs)
        fewer += _joined(graph_module)
        for one, other in zip(graph_module(*inputs), wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-12 * float(other.abs().max() + 1))
            assert one.stride() == other.stride()
    return fewer


def test_random_sums() -> None:
    assert _fuzz(range(12)) > 12


@pytest.mark.slow
def test_many_random_sums() -> None:
    assert _fuzz(range(1000, 2500)) > 1500


# ---- cells -------------------------------------------------------------------------------------------------------


def _lstm_workspace(gates: Tensor) -> Tensor:
    i, f, g, o = gates.chunk(4, 1)
    return torch.cat([i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()], 1)


@pytest.mark.parametrize("which", ["both", "state", "cell"])
def test_the_backward_of_an_lstm_cell(which: str) -> None:
    """Beside autograd's own, of a cell that is written out."""
    gates, cx = (torch.randn(3, size, dtype=torch.float64, requires_grad=True) for size in (20, 5))
    i, f, g, o = _lstm_workspace(gates).chunk(4, 1)
    cy = f * cx + i * g
    hy = o * cy.tanh()
    grad_hy = torch.randn_like(hy) if which != "cell" else None
    grad_cy = torch.randn_like(cy) if which != "state" else None
    given = [(value, grad) for value, grad in ((hy, grad_hy), (cy, grad_cy)) if grad is not None]
    wanted = torch.autograd.grad([value for value, _ in given], [gates, cx], [grad for _, grad in given])
    decomposed = CELLS[_aten._thnn_fused_lstm_cell_backward_impl.default]
    workspace = _lstm_workspace(gates.detach())
    found = decomposed(grad_hy, grad_cy, cx.detach(), cy.detach(), workspace, True)
    torch.testing.assert_close(found, (*wanted, wanted[0].sum(0)))
    assert decomposed(None, None, cx, cy, workspace, True) is NotImplemented
    transposed = [None if each is None else each.t().contiguous().t() for each in (grad_hy, grad_cy)]
    *found, bias = decomposed(*transposed, cx.detach(), cy.detach(), workspace, False)
    torch.testing.assert_close(tuple(found), wanted)
    assert bias is None and all(each.is_contiguous() for each in found)


def test_the_backward_of_a_gru_cell() -> None:
    of_input, of_hidden, hx = (torch.randn(3, size, dtype=torch.float64, requires_grad=True) for size in (15, 15, 5))
    (ir, iz, inner), (hr, hz, hidden) = of_input.chunk(3, 1), of_hidden.chunk(3, 1)
    r, z = (ir + hr).sigmoid(), (iz + hz).sigmoid()
    n = (inner + r * hidden).tanh()
    hy = n + z * (hx - n)
    grad = torch.randn_like(hy)
    wanted = torch.autograd.grad(hy, [of_input, of_hidden, hx], grad)
    workspace = torch.cat([r, z, n, hx, hidden], 1).detach()
    found = CELLS[_aten._thnn_fused_gru_cell_backward.default](grad, workspace, True)
    torch.testing.assert_close(found, (*wanted, wanted[0].sum(0), wanted[1].sum(0)))
    found = CELLS[_aten._thnn_fused_gru_cell_backward.default](grad.t().contiguous().t(), workspace, False)
    torch.testing.assert_close(found[:3], wanted)
    assert found[3:] == (None, None) and all(each.is_contiguous() for each in found[:3])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell])
def test_cells_on_a_device(cuda: str, cell: Any, dtype: torch.dtype) -> None:
    """Beside the operators of PyTorch, which they are in place of."""
    torch.manual_seed(0)
    module, x = cell(6, 5).to(cuda, dtype), torch.randn(3, 6, device=cuda, dtype=dtype)
    state = module(x)
    output = state[0] if isinstance(state, tuple) else state
    node = output.grad_fn
    while "Fused" not in node.name():
        node = node.next_functions[0][0]
    grads = [torch.randn_like(each) for each in (state if isinstance(state, tuple) else (state,))]
    if isinstance(state, tuple):
        saved = node._saved_cx, state[1].detach(), node._saved_result2
        target, given = _aten._thnn_fused_lstm_cell_backward_impl.default, (*grads, *saved, True)
    else:
        target, given = _aten._thnn_fused_gru_cell_backward.default, (*grads, node._saved_result1, True)
    wanted, found = target(*given), CELLS[target](*given)
    torch.testing.assert_close(found, wanted, rtol=2e-3 if dtype == torch.float16 else 1e-5, atol=1e-3)
    assert [each.dtype for each in found] == [each.dtype for each in wanted]
