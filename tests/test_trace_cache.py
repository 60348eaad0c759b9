"""Calls that were traced before are copied: the graph is the one that tracing them again would give."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import fx
from torch._decomp import get_decompositions
from torch._subclasses.fake_tensor import FakeTensorMode

import compiled_autograd as ca
from compiled_autograd import ir
from compiled_autograd.lowering import lower, trace_cache
from compiled_autograd.lowering.trace_cache import TracedCalls
from compiled_autograd.lowering.tracing import trace

from .helpers import compare, mlp

Table = dict[Any, Any] | None


@pytest.fixture(autouse=True)
def _nothing_is_remembered() -> Iterator[None]:
    trace_cache.TRACED.clear()
    yield
    trace_cache.TRACED.clear()


class _Op:
    """An engine's function of our own, which counts how often it is run."""

    def __init__(self, function: Callable[..., Any], **kinds: bool) -> None:
        self.runs = 0
        self.function = function
        self.target = ir.OpaqueOp("TestBackward0", self._call, **kinds)

    def _call(self, *arguments: Any) -> Any:
        self.runs += 1
        return self.function(*arguments)


def _traced(
    op: _Op, calls: Callable[..., Sequence[Sequence[Any]]], tensors: Sequence[torch.Tensor], table: Table = None
) -> tuple[fx.GraphModule, list[Any]]:
    """The graph of an op, called with each of the arguments that ``calls`` makes of fake tensors; and what it gave."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    given: list[Any] = []

    def run(*fakes: torch.Tensor) -> list[Any]:
        traced = TracedCalls(table)
        for arguments in calls(*fakes):
            given.append(traced.call(op.target, arguments, op.target))
        return [each for result in given for each in result if isinstance(each, torch.Tensor)]

    with torch.no_grad():
        return trace(run, table, [mode.from_tensor(tensor) for tensor in tensors]), given


def _metadata(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_metadata(each) for each in value]
    if not isinstance(value, torch.Tensor):
        return value
    return (value.shape, value.stride(), value.storage_offset(), value.dtype, value.device, value.is_conj())


def _in_place(grads: Any) -> list[Any]:
    made = grads[0] * 2
    made[0].mul_(3)
    return [made, made[1], None]


FUNCTIONS = {
    "elementwise": lambda grads: [grads[0].sin() * 2, None],
    "views": lambda grads: [grads[0].t()[1:], grads[0].expand(2, 3, 4)],
    "its argument": lambda grads: [grads[0], grads[0].view(12)],
    "a tuple": lambda grads: (None, grads[0].sum(0)),
    "several results": lambda grads: [*grads[0].max(1), grads[0].dtype.is_complex],
    "in place": _in_place,
    "conjugated": lambda grads: [
        torch.complex(grads[0], grads[0]).conj(),
        torch.complex(grads[0], grads[0]).conj().imag,
    ],
    "decomposed": lambda grads: [torch.ops.aten.tanh_backward(grads[0], grads[0])],
    "pieces": lambda grads: list(torch.ops.aten.native_layer_norm(grads[0], [4], None, None, 1e-5))[:1],
}


@pytest.mark.parametrize("table", [None, get_decompositions([torch.ops.aten.tanh_backward])], ids=["plain", "table"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_copy_is_what_was_traced(name: str, table: Table) -> None:
    x = [torch.rand(3, 4)]
    op = _Op(FUNCTIONS[name])
    wanted, first = _traced(op, lambda x: [([x],)], x, table)
    found, second = _traced(op, lambda x: [([x],)], x, table)
    assert op.runs == 1
    assert found.code == wanted.code
    assert _metadata(second) == _metadata(first)
    for one, other in zip(found.graph.nodes, wanted.graph.nodes, strict=True):
        assert one.name == other.name
        assert sorted({*one.meta, "val"}) == sorted({*other.meta, "val"})
        assert _metadata(one.meta.get("val")) == _metadata(other.meta.get("val"))
    eager = [each for each in op.function(x) if isinstance(each, torch.Tensor)]
    for one, other, real in zip(found(*x), wanted(*x), eager, strict=True):
        assert torch.equal(one, other)
        torch.testing.assert_close(one, real)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_memory_is_shared_as_it_was(name: str) -> None:
    op = _Op(FUNCTIONS[name])
    shared = []
    for _ in range(2):
        graph_module, _ = _traced(op, lambda x: [([x],)], [torch.rand(3, 4)])
        values = [node.meta.get("val") for node in graph_module.graph.nodes if node.op != "output"]
        storages = [value.untyped_storage()._cdata for value in values if isinstance(value, torch.Tensor)]
        shared.append([storages.index(each) for each in storages])
    assert op.runs == 1
    assert shared[0] == shared[1]


def test_a_copy_can_be_copied_from() -> None:
    """Nodes of what was copied are arguments of what is traced next, and the other way about."""
    op = _Op(lambda grads: [grads[0].sin() + grads[-1]])

    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def run(x: torch.Tensor) -> list[Any]:
        traced, known = TracedCalls(None), x
        for _ in range(4):
            (known,) = traced.call(op.target, ([known, x],), op.target)
        return [known]

    x = torch.rand(3)
    with torch.no_grad():
        graph_module = trace(run, None, [mode.from_tensor(x)])
    assert op.runs == 2  # that the two tensors are one is seen
    assert torch.equal(graph_module(x)[0], x.sin().add(x).sin().add(x).sin().add(x).sin().add(x))


DIFFERENT = {
    "shapes": lambda x, y: [([x],), ([x[:, 1:]],)],
    "strides": lambda x, y: [([x],), ([x.t().contiguous().t()],)],
    "offsets": lambda x, y: [([y[0]],), ([y[1]],)],
    "dtypes": lambda x, y: [([x],), ([x.double()],)],
    "one memory or two": lambda x, y: [([x, y],), ([x, x.view(3, 4)],)],
    "one tensor or two views": lambda x, y: [([x, x],), ([x, x.view(3, 4)],)],
    "numbers of another type": lambda x, y: [([x], 1), ([x], 1.0), ([x], True)],
    "zeros of another sign": lambda x, y: [([x], 0.0), ([x], -0.0)],
    "undefined": lambda x, y: [([x, None],), ([None, x],)],
    "lists and tuples": lambda x, y: [([x], [1]), ([x], (1,))],
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_makes_a_difference_is_heeded(name: str) -> None:
    op = _Op(lambda grads, *others: [each.sin() for each in grads if each is not None])
    x = torch.rand(3, 4)
    count = len(DIFFERENT[name](x, x))
    for _ in range(2):
        _traced(op, DIFFERENT[name], [x, torch.rand(3, 4)])
        assert op.runs == count


def test_the_state_of_the_process_is_heeded() -> None:
    op = _Op(lambda grads: [torch.ops.aten.arange(3) * 1.5 + grads[0]])
    x = [torch.rand(3)]
    _traced(op, lambda x: [([x],)], x)
    torch.set_default_dtype(torch.double)
    try:
        graph_module, _ = _traced(op, lambda x: [([x],)], x)
        assert graph_module(*x)[0].dtype is torch.double
    finally:
        torch.set_default_dtype(torch.float)
    assert op.runs == 2
    assert _traced(op, lambda x: [([x],)], x)[0](*x)[0].dtype is torch.float
    assert op.runs == 2


def test_requiring_grad_is_heeded() -> None:
    """Some of the engine's functions ask for it."""
    op = _Op(lambda grads: [grads[0].sin() if grads[0].requires_grad else grads[0].cos()])
    x, y = torch.rand(3), torch.rand(3, requires_grad=True)
    graph_module, _ = _traced(op, lambda x, y: [([x],), ([y],)], [x, y])
    assert op.runs == 2
    found = graph_module(x, y)
    assert torch.equal(found[0], x.cos())
    assert torch.equal(found[1], y.sin())


def _adds_to_its_argument(grads: Any) -> list[Any]:
    grads[0].add_(1)
    return [grads[0] * 2]


NOT_REMEMBERED = {
    "writes into its argument": (_adds_to_its_argument, {}),
    "a constant tensor": (lambda grads: [grads[0] * torch.tensor([2.0, 3.0, 4.0])], {}),
    "a user's function": (lambda grads: [grads[0] * 2], {"custom": True}),
    "not to be traced": (lambda grads: [grads[0] * 2], {"traceable": False}),
}


@pytest.mark.parametrize("name", NOT_REMEMBERED)
def test_what_does_more_than_its_nodes_is_run_each_time(name: str) -> None:
    function, kinds = NOT_REMEMBERED[name]
    op = _Op(function, **kinds)
    x = torch.rand(3)
    for count in (1, 2, 3):
        graph_module, _ = _traced(op, lambda x: [([x],)], [x])
        assert op.runs == count
        assert torch.equal(graph_module(x.clone())[0], function([x.clone()])[0])


def test_arguments_that_are_known_by_value_or_not_known_at_all() -> None:
    op = _Op(lambda grads, *others: [grads[0] * 2])
    generator = torch.Generator()
    for count in (1, 2):
        _traced(op, lambda x: [([x], generator)], [torch.rand(3)])
        assert op.runs == count
    for count in (3, 4):
        _traced(op, lambda x: [([torch.tensor(2.0)],)], [torch.rand(3)])
        assert op.runs == count


def test_those_not_used_for_long_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_cache, "MAX_TRACES", 2)
    op = _Op(lambda grads, number: [grads[0] * number])
    for number, count in ((1, 1), (2, 2), (1, 2), (3, 3), (1, 3), (2, 4)):
        _traced(op, lambda x, number=number: [([x], number)], [torch.rand(3)])
        assert op.runs == count


def test_repeated_layers_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    call = TracedCalls.call

    def counted(self: TracedCalls, target: Any, arguments: Any, run: Any) -> Any:
        ran = []

        def noted(*given: Any) -> Any:
            ran.append(target)
            return run(*given)

        result = call(self, target, arguments, noted)
        counts.append(len(ran))
        return result

    monkeypatch.setattr(TracedCalls, "call", counted)
    result = compare(lambda: mlp(depth=20), lambda model: model(torch.ones(2, 8)).square().mean(), steps=2)
    assert result.stats.captures == 1
    assert sum(counts) < len(counts) / 4


def test_reset_forgets_them() -> None:
    op = _Op(lambda grads: [grads[0] * 2])
    for count in (1, 2):
        _traced(op, lambda x: [([x],)], [torch.rand(3)])
        assert op.runs == count
        ca.reset()


def test_a_long_sum_is_traced_once_and_copied_term_by_term(monkeypatch: pytest.MonkeyPatch) -> None:
    run = lower.raising
    sums: list[Any] = []

    def counting(caught: Any, function: Any, *arguments: Any) -> Any:
        sums.extend([function] * (function is ir.sum_gradients))
        return run(caught, function, *arguments)

    monkeypatch.setattr(lower, "raising", counting)

    def loss(model: torch.nn.Module) -> torch.Tensor:
        state = torch.ones(2, 4)
        for _ in range(20):
            state = model(state).sin()
        return state.sum()

    compare(lambda: torch.nn.Linear(4, 4), loss, steps=2)
    assert 0 < len(sums) <= 2  # of weights and of biases
