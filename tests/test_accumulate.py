"""What ends up in ``.grad``, and whose memory it is: by AccumulateGrad's rules."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import compiled_autograd as ca
from compiled_autograd.steps import accumulate as module
from compiled_autograd.steps.accumulate import accumulate, obeys_layout

from .helpers import assert_same, compare, expect, in_subprocess, mlp, same_bits

Step = Callable[[list[torch.Tensor]], torch.Tensor]


def _memory(tensor: torch.Tensor | None) -> int:
    assert tensor is not None
    return tensor.untyped_storage().data_ptr()


def _train(
    make: Callable[[], list[torch.Tensor]], step: Step, steps: int = 3, keep: bool = True, backend: Any = "eager"
) -> tuple[list[torch.Tensor], ca.Session]:
    """Run ``backward`` on leaves, compiled and on eager, and compare every ``.grad`` after each step."""
    torch.manual_seed(0)
    wanted = make()
    torch.manual_seed(0)
    found = make()
    session = ca.enable(backend=backend)
    for number in range(steps):
        for leaves, context in ((wanted, ca.disable()), (found, session)):
            torch.manual_seed(number)
            if not keep:
                for leaf in leaves:
                    leaf.grad = None
            with context:
                step(leaves).backward()
        assert_same([leaf.grad for leaf in found], [leaf.grad for leaf in wanted])
    stats = session.stats()
    assert stats.backwards == steps and not stats.bypasses and not stats.failures
    return found, session


# ---- layout --------------------------------------------------------------------------------------------------------

_LAYOUTS: dict[str, Callable[[], torch.Tensor]] = {
    "contiguous": lambda: torch.randn(2, 3, 4, 4),
    "channels_last": lambda: torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "transposed": lambda: torch.randn(4, 3, 4, 2).transpose(0, 3),
    "size one": lambda: torch.randn(2, 1, 4, 1),
    "size one, odd stride": lambda: torch.randn(2, 5, 4, 4)[:, :1],
    "gaps": lambda: torch.randn(2, 3, 4, 8)[..., ::2],
    "expanded": lambda: torch.randn(2, 1, 4, 4).expand(2, 3, 4, 4),
    "empty": lambda: torch.randn(2, 0, 4, 4),
    "offset": lambda: torch.randn(3, 3, 4, 4)[1:],
}
_WAYS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "stolen": lambda x: (x * 2).sum(),
    "expanded": lambda x: x.sum(),
    "transposed": lambda x: (x.transpose(0, 3) * torch.ones(4, 1, 1, 1)).sum() * 2,
    "channels_last": lambda x: (x.contiguous(memory_format=torch.channels_last).sin()).sum(),
    "contiguous": lambda x: x.contiguous().exp().sum(),
}


@pytest.mark.parametrize("way", _WAYS)
@pytest.mark.parametrize("layout", _LAYOUTS)
def test_the_layout_of_a_gradient_is_eagers(layout: str, way: str) -> None:
    """Strides are compared too, of fresh gradients and of those that were added to."""
    _train(lambda: [_LAYOUTS[layout]().requires_grad_()], lambda leaves: _WAYS[way](leaves[0]))


@pytest.mark.parametrize("layout", _LAYOUTS)
def test_the_layout_behind_a_python_function(layout: str) -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * 2

    _train(lambda: [_LAYOUTS[layout]().requires_grad_()], lambda leaves: Twice.apply(leaves[0]).sum())


@pytest.mark.parametrize("norm", [F.layer_norm, F.batch_norm])
def test_the_layout_behind_an_operator_whose_trace_has_other_strides(norm: Any) -> None:
    """In torch 2.13 the traces of both follow the input's strides, and what the CPU's kernels give is contiguous."""
    factor = torch.randn(6, 17).t()

    def step(leaves: list[torch.Tensor]) -> torch.Tensor:
        x = leaves[0]
        normalised = norm(x, (6,)) if norm is F.layer_norm else norm(x, None, None, training=True)
        return (normalised * factor).sum()

    _, session = _train(lambda: [torch.randn(6, 17).t().requires_grad_()], step, keep=False)
    expect(session.stats(), structure_misses=1, hits=2, compiles=1)


def test_channels_last_convolution() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)).to(memory_format=torch.channels_last)

    batch = torch.randn(2, 4, 8, 8).to(memory_format=torch.channels_last)
    result = compare(make, lambda model: model(batch).square().mean(), steps=2, keep_grads=True)
    weight = result.model[0].weight
    assert weight.grad.stride() == weight.stride()


def test_obeys_layout() -> None:
    grad = torch.randn(2, 3)
    assert obeys_layout(grad, torch.randn(2, 3)) and not obeys_layout(grad, torch.randn(3, 2).t())
    assert not obeys_layout(torch.randn(1).expand(2), torch.randn(2))
    assert not obeys_layout(grad.to_sparse(), torch.randn(2, 3))
    assert obeys_layout(grad, torch.randn(2, 6)[:, ::2]) and not obeys_layout(grad.t().contiguous().t(), grad[:, ::1])


# ---- whose memory --------------------------------------------------------------------------------------------------


def _no_sharing(tensors: list[torch.Tensor]) -> None:
    memories = [_memory(tensor) for tensor in tensors]
    assert len(set(memories)) == len(memories)


def test_two_leaves_that_receive_the_same_tensor() -> None:
    def run() -> list[torch.Tensor]:
        leaves, _ = _train(
            lambda: [torch.randn(4, requires_grad=True) for _ in range(3)],
            lambda leaves: ((leaves[0] + leaves[1] + leaves[2]) * 2).sum(),
            keep=False,
        )
        return leaves

    leaves = run()
    _no_sharing([leaf.grad for leaf in leaves])  # type: ignore[misc]
    assert leaves[0].grad is not None and leaves[1].grad is not None
    leaves[0].grad.zero_()
    assert torch.equal(leaves[1].grad, torch.full((4,), 2.0))


def test_the_callers_gradient_is_never_kept() -> None:
    given = torch.randn(4)
    before = given.clone()
    x, y = torch.randn(4, requires_grad=True), torch.randn(4, requires_grad=True)
    session = ca.enable(backend="eager")
    for _ in range(3):
        x.grad = y.grad = None
        with session:
            (x + y).backward(given)
        assert x.grad is not None and y.grad is not None
        assert_same([x.grad, y.grad], [before, before])
        _no_sharing([given, x.grad, y.grad])
        x.grad.mul_(5)
        y.grad.mul_(7)
        assert torch.equal(given, before)
    expect(session.stats(), structure_misses=1, hits=2)


def test_a_leafs_own_gradient() -> None:
    given = torch.randn(4)
    x = torch.randn(4, requires_grad=True)
    with ca.enable(backend="eager"):
        x.backward(given)
        assert_same([x.grad], [given])
        assert _memory(x.grad) != _memory(given)
        x.backward(given)
    assert_same([x.grad], [given + given])


def test_a_saved_tensor_is_never_kept() -> None:
    x = torch.randn(4, requires_grad=True)
    other = torch.randn(4, requires_grad=True)
    with ca.enable(backend="eager"):
        for _ in range(2):
            x.grad = other.grad = None
            loss = (x * other).sum()
            loss.backward(retain_graph=True)
            assert x.grad is not None and other.grad is not None
            _no_sharing([x, other, x.grad, other.grad])
            first = x.grad.clone()
            x.grad.zero_()
            loss.backward()
            assert_same([x.grad], [first])


def test_a_function_that_gives_what_it_saved_or_keeps() -> None:
    kept = torch.randn(4)

    class GivesKept(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x + y

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            return kept, ctx.saved_tensors[0]

    before = kept.clone()
    leaves, _ = _train(
        lambda: [torch.randn(4, requires_grad=True), torch.randn(4, requires_grad=True)],
        lambda leaves: GivesKept.apply(*leaves).sum(),
        keep=False,
    )
    x, y = leaves
    assert x.grad is not None and y.grad is not None
    _no_sharing([kept, x, x.grad, y.grad])
    x.grad.zero_()
    y.grad.zero_()
    assert torch.equal(kept, before) and bool(x.detach().any())


def test_views_of_one_gradient() -> None:
    """Gradients of the parts that were concatenated are views of one tensor."""
    leaves, _ = _train(
        lambda: [torch.randn(3, requires_grad=True) for _ in range(4)],
        lambda leaves: (torch.cat(leaves) * torch.arange(12.0)).sum(),
        keep=False,
    )
    before = [leaf.grad.clone() for leaf in leaves]  # type: ignore[union-attr]
    leaves[0].grad.zero_()  # type: ignore[union-attr]
    assert_same([leaf.grad for leaf in leaves[1:]], before[1:])


def test_what_grad_gives_can_alias_as_under_eager_but_not_grad() -> None:
    x, y = torch.randn(4, requires_grad=True), torch.randn(4, requires_grad=True)
    with ca.enable(backend="eager"):
        a, b = torch.autograd.grad((x + y).sum(), [x, y])
        (x + y).sum().backward()
    assert_same([a, b], torch.autograd.grad((x + y).sum(), [x, y]))
    assert x.grad is not None and y.grad is not None
    _no_sharing([x.grad, y.grad])


# ---- adding to what is there -----------------------------------------------------------------------------------------


def test_the_grad_object_stays_the_same() -> None:
    x = torch.randn(4, requires_grad=True)
    with ca.enable(backend="eager"):
        (x * 2).sum().backward()
        first = x.grad
        assert first is not None
        version = first._version
        (x * 2).sum().backward()
    assert x.grad is first and first._version > version
    assert torch.equal(first, torch.full((4,), 4.0))


def test_an_alias_of_grad_sees_what_is_added() -> None:
    flat = torch.zeros(8)
    a, b = torch.randn(4, requires_grad=True), torch.randn(4, requires_grad=True)
    a.grad, b.grad = flat[:4], flat[4:]
    with ca.enable(backend="eager"):
        for _ in range(2):
            (a * 2 + b * 3).sum().backward()
    assert torch.equal(flat, torch.tensor([4.0] * 4 + [6.0] * 4))


@pytest.mark.parametrize("leaves", [1, 3, 4, 9])
def test_many_leaves_are_added_to_in_one_call(leaves: int, monkeypatch: pytest.MonkeyPatch) -> None:
    batched: list[int] = []
    right = torch._foreach_add_

    def count(into: Any, terms: Any) -> None:
        batched.append(len(into))
        right(into, terms)

    monkeypatch.setattr(module.torch, "_foreach_add_", count)
    _train(
        lambda: [torch.randn(3, requires_grad=True) for _ in range(leaves)],
        lambda given: sum((leaf * leaf).sum() for leaf in given),  # type: ignore[arg-type, return-value]
    )
    assert batched == ([leaves] * 2 if leaves >= 4 else [])


def test_two_leaves_with_the_same_grad_object() -> None:
    """Both are added to it, one after the other."""

    def make() -> list[torch.Tensor]:
        leaves = [torch.ones(3, requires_grad=True) for _ in range(6)]
        shared = torch.zeros(3)
        for leaf in leaves:
            leaf.grad = shared
        return leaves

    leaves, _ = _train(make, lambda given: sum((leaf * 2).sum() for leaf in given))  # type: ignore[arg-type, return-value]
    assert leaves[0].grad is leaves[5].grad


def test_two_leaves_whose_grads_overlap() -> None:
    def make() -> list[torch.Tensor]:
        leaves = [torch.ones(3, requires_grad=True) for _ in range(5)]
        shared = torch.zeros(7)
        for index, leaf in enumerate(leaves):
            leaf.grad = shared[index : index + 3]
        return leaves

    _train(make, lambda given: sum((leaf * leaf).sum() for leaf in given))  # type: ignore[arg-type, return-value]


def test_grad_none_and_grad_there_are_told_apart() -> None:
    x, y = torch.randn(4, requires_grad=True), torch.randn(4, requires_grad=True)
    session = ca.enable(backend="eager")
    for x_there in (False, True):
        for y_there in (False, True):
            x.grad = torch.ones(4) if x_there else None
            y.grad = torch.ones(4) if y_there else None
            with session:
                (x * 2 + y * 3).sum().backward()
            assert_same([x.grad, y.grad], [torch.full((4,), 2.0 + x_there), torch.full((4,), 3.0 + y_there)])
    expect(session.stats(), structure_misses=4)


# ---- dtypes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.complex64])
def test_dtypes(dtype: torch.dtype) -> None:
    leaves, _ = _train(
        lambda: [torch.randn(4, dtype=dtype, requires_grad=True) for _ in range(2)],
        lambda given: (given[0] * given[1]).abs().sum().float(),
    )
    assert all(leaf.grad is not None and leaf.grad.dtype == dtype for leaf in leaves)


def test_a_leaf_used_in_a_wider_dtype() -> None:
    _train(
        lambda: [torch.randn(4, dtype=torch.bfloat16, requires_grad=True)],
        lambda given: (given[0].float() * 1.1).sum() + given[0].double().sum().float(),
    )


def test_a_grad_of_another_kind_than_the_leaf_is_added_to() -> None:
    """``.grad`` may have been replaced by one with other strides; it keeps them."""

    def make() -> list[torch.Tensor]:
        leaf = torch.randn(3, 4, requires_grad=True)
        leaf.grad = torch.zeros(4, 3).t()
        return [leaf]

    _train(make, lambda given: (given[0] * given[0]).sum())


# ---- sparse --------------------------------------------------------------------------------------------------------


def _embedding(sparse: bool = True) -> Callable[[], list[torch.Tensor]]:
    return lambda: [torch.randn(6, 3, requires_grad=True)]


def _sparse(weight: torch.Tensor) -> torch.Tensor:
    index = torch.randint(6, (5,))
    return (F.embedding(index, weight, sparse=True) ** 2).sum()


def _dense(weight: torch.Tensor) -> torch.Tensor:
    return (weight * weight).sum()


def _same_sparse(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return same_bits(found, wanted) and found.is_coalesced() == wanted.is_coalesced()


@pytest.mark.parametrize("keep", [True, False])
def test_sparse_gradients(keep: bool) -> None:
    leaves, _ = _train(_embedding(), lambda given: _sparse(given[0]), keep=keep)
    assert leaves[0].grad is not None and leaves[0].grad.is_sparse


def test_sparse_and_dense_in_one_backward_are_dense() -> None:
    leaves, _ = _train(_embedding(), lambda given: _sparse(given[0]) + _dense(given[0]))
    assert leaves[0].grad is not None and not leaves[0].grad.is_sparse


@pytest.mark.parametrize("order", ["sparse first", "dense first"])
def test_sparse_and_dense_one_after_the_other(order: str) -> None:
    def make() -> tuple[torch.Tensor, ca.Session]:
        torch.manual_seed(0)
        return torch.randn(6, 3, requires_grad=True), ca.enable(backend="eager")

    results = []
    for compiled in (False, True):
        leaf, session = make()
        losses = [_sparse, _dense, _sparse] if order == "sparse first" else [_dense, _sparse, _dense]
        seen = []
        for number, loss in enumerate(losses):
            torch.manual_seed(number)
            with session if compiled else ca.disable():
                loss(leaf).backward()
            assert leaf.grad is not None
            seen.append(leaf.grad.clone())
        results.append(seen)
        if compiled:
            stats = session.stats()
            assert stats.backwards == 3 and not stats.bypasses and not stats.failures
    assert_same(results[1], results[0])


def test_a_sparse_gradient_is_not_shared_between_leaves() -> None:
    class SameSparse(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x.sum() + y.sum()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            sparse = torch.eye(3).to_sparse()
            return sparse, sparse

    x, y = torch.randn(3, 3, requires_grad=True), torch.randn(3, 3, requires_grad=True)
    with ca.enable(backend="eager"):
        SameSparse.apply(x, y).backward()
    assert x.grad is not None and y.grad is not None and x.grad.is_sparse
    x.grad._values().zero_()
    assert torch.equal(y.grad.to_dense(), torch.eye(3))


def test_embedding_bag_and_sparse_adam() -> None:
    def make() -> nn.Module:
        return nn.EmbeddingBag(8, 4, mode="sum", sparse=True)

    index = torch.tensor([[1, 2], [4, 1]])
    result = compare(make, lambda model: model(index).square().sum(), steps=3)
    assert result.stats.structure_misses == 1


# ---- parameters ------------------------------------------------------------------------------------------------------


def test_shared_and_frozen_parameters() -> None:
    def make() -> nn.Module:
        model = mlp()
        model[2].weight = model[0].weight
        model[0].bias.requires_grad_(False)
        return model

    result = compare(make, lambda model: model(torch.ones(2, 8)).square().sum(), keep_grads=True)
    assert result.model[0].bias.grad is None


def test_an_unused_parameter_keeps_no_gradient() -> None:
    def make() -> nn.Module:
        return nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    result = compare(make, lambda model: model[0](torch.ones(2, 4)).sum())
    assert result.model[1].weight.grad is None


def test_grad_zeroed_in_place_between_steps() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, requires_grad=True)
    session = ca.enable(backend="eager")
    for _ in range(4):
        if x.grad is not None:
            x.grad.zero_()
        with session:
            (x * x).sum().backward()
        assert_same([x.grad], [2 * x.detach()])
    expect(session.stats(), structure_misses=2, hits=2)


# ---- the function itself ---------------------------------------------------------------------------------------------


def test_an_undefined_gradient_leaves_grad_alone() -> None:
    x, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    y.grad = torch.ones(2)
    with torch.no_grad():
        accumulate([x, y], [None, None], [False, False])
    assert x.grad is None and torch.equal(y.grad, torch.ones(2))


def test_a_leaf_that_occurs_twice() -> None:
    x = torch.ones(2, requires_grad=True)
    with torch.no_grad():
        accumulate([x, x], [torch.ones(2), torch.ones(2)], [True, False])
    assert x.grad is not None and torch.equal(x.grad, torch.full((2,), 2.0))


def test_what_is_owned_is_kept_and_what_is_not_is_copied() -> None:
    x, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    grad = torch.ones(2)
    with torch.no_grad():
        accumulate([x, y], [grad, grad], [True, False])
    assert _memory(x.grad) == _memory(grad) != _memory(y.grad)


def test_warnings_are_eagers() -> None:
    """A gradient whose strides are not the leaf's is copied without a word."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _train(lambda: [torch.randn(4, 3).t().requires_grad_()], lambda given: given[0].contiguous().exp().sum())


@pytest.mark.parametrize("keep", [True, False])
def test_sparse_operands_of_a_product(keep: bool) -> None:
    """A sparse leaf gets a dense gradient, which Python may not assign to it; its hooks run once a step."""

    def run() -> tuple[list[torch.Tensor | None], list[str]]:
        torch.manual_seed(0)
        a = torch.randn(3, 3).to_sparse().detach().requires_grad_()
        b = torch.randn(3, 3).requires_grad_()
        seen: list[str] = []
        a.register_post_accumulate_grad_hook(lambda leaf: seen.append(str(leaf.grad.layout)))  # type: ignore[union-attr]
        for _ in range(2):
            if not keep:
                a.grad = b.grad = None
            a.mm(b).sum().backward()
        return [a.grad, b.grad], seen

    wanted, wanted_seen = run()
    with ca.enable(backend="eager") as session:
        found, seen = run()
    assert_same(found, wanted)
    assert seen == wanted_seen and len(seen) == 2
    assert session.stats().bypasses == {} and session.stats().backwards == 2


@pytest.mark.parametrize("layout", ["to_sparse", "to_sparse_csr", "to_mkldnn"])
def test_leaves_of_other_layouts(layout: str) -> None:
    def run() -> torch.Tensor:
        torch.manual_seed(0)
        x = getattr(torch.rand(4, 4), layout)().requires_grad_()
        (grad,) = torch.autograd.grad(x.to_dense(), x, torch.randn(4, 4))
        return grad

    wanted = run()
    with ca.enable(backend="eager") as session:
        found = [run(), run()]
    for each in found:
        assert each.layout == wanted.layout and torch.equal(each.to_dense(), wanted.to_dense())
    expect(session.stats(), structure_misses=1, hits=1)


def test_no_sympy_is_imported_where_nothing_is_traced() -> None:
    """It takes half a second, in the middle of a step that does not wait for a compiler."""
    done = in_subprocess(
        """
import sys, torch
from compiled_autograd.steps.accumulate import obeys_layout
assert obeys_layout(torch.ones(3, 4), torch.ones(3, 4)) and not obeys_layout(torch.ones(4, 3).t(), torch.ones(3, 4))
assert obeys_layout(torch.ones(3, 4), torch.ones(3, 8)[:, ::2])  # not dense: then it is contiguous
print("sympy" in sys.modules)
"""
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("lies", ["as it came", "in another layout"])
@pytest.mark.parametrize("is_view", [False, True])
def test_hooks_of_the_node_of_a_leaf_see_the_gradient_that_came(lies: str, is_view: bool) -> None:
    """The leaf keeps that, or a copy: what a hook writes there is in ``.grad`` or not."""

    def run() -> list[Any]:
        x = torch.linspace(-1, 1, 12).reshape(3, 4)
        x = (x.t().contiguous().t() if lies == "in another layout" else x).requires_grad_()
        seen = []

        def hook(_: Any, grads: tuple[torch.Tensor, ...]) -> None:
            seen.append(torch.tensor(grads[0].stride()))
            grads[0].mul_(3)

        node = x.view_as(x).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
        node.register_hook(hook)
        ((x.expand(2, 3, 4) if is_view else x) * torch.linspace(0, 2, 12).reshape(3, 4)).sum().backward()
        return [x.grad, *seen]

    wanted = run()
    with ca.enable(backend="eager", tune=False) as session:
        for _ in range(4):
            assert_same(run(), wanted)
    expect(session.stats(), structure_misses=1, hits=3, compiles=1)
