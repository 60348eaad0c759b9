"""What AccumulateGrad does with ``.grad``, for all leaves of a step at once.

The rules are those of ``torch/csrc/autograd/functions/accumulate_grad.h`` and ``utils/grad_layout_contract.h`` (2.13),
for grad mode off: a leaf without ``.grad`` keeps the gradient itself if nothing else can see its memory and it has the
leaf's layout, else a copy in that layout; an existing ``.grad`` is added to in place, unless it is sparse and the
gradient is not. We are stricter in one point: what a leaf keeps never shares memory with a tensor of the user's.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

_DENSE = torch.ops.aten.is_non_overlapping_and_dense.default
_OUR_REFERENCES = 3  # the caller's, our argument, and the one of sys.getrefcount
_BATCH = 4
"""From so many in-place additions on, one ``torch._foreach_add_`` does them all."""


def _dense(tensor: torch.Tensor) -> bool:
    """Whether a strided tensor's elements lie side by side, in whatever order."""
    if isinstance(tensor, FakeTensor):  # sizes may be symbols
        # Private in torch 2.13. It imports sympy, which takes half a second: traces have done so before.
        from torch._prims_common import is_non_overlapping_and_dense_or_false

        return is_non_overlapping_and_dense_or_false(tensor)
    return _DENSE(tensor)


def obeys_layout(grad: torch.Tensor, leaf: torch.Tensor) -> bool:
    """Whether ``grad`` has the layout that ``leaf`` wants its ``.grad`` to have; False for anything but strided."""
    if leaf.layout is not torch.strided or grad.layout is not torch.strided:
        return False
    if not _dense(leaf):
        return grad.is_contiguous()
    return all(
        stride != 0 if size == 1 else stride == wanted
        for size, stride, wanted in zip(grad.shape, grad.stride(), leaf.stride(), strict=True)
    )


def clone_obeying_layout(grad: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
    """A copy of ``grad`` in the layout that ``leaf`` wants, with ``grad``'s dtype and device."""
    if leaf.layout is torch.strided and _dense(leaf):
        return grad.new_empty_strided(leaf.shape, leaf.stride()).copy_(grad)
    return grad.clone(memory_format=torch.contiguous_format)


def own_copy(grad: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
    """A copy of ``grad`` that ``leaf`` can keep."""
    if grad.layout is not torch.strided or grad.is_nested:
        return grad.clone()
    return clone_obeying_layout(grad, leaf)


def stealable(grad: torch.Tensor, leaf: torch.Tensor) -> bool:
    """Whether ``leaf`` can keep a gradient that users' code made: nobody else holds it, or other views of its memory.

    To be called with the one reference to ``grad`` that the caller has.
    """
    sparse = grad.layout is torch.sparse_coo
    if type(grad) is not torch.Tensor or not (sparse or obeys_layout(grad, leaf)):
        return False
    held_in_cpp = grad._use_count() > 1  # type: ignore[attr-defined]
    if sys.getrefcount(grad) > _OUR_REFERENCES or held_in_cpp or grad.requires_grad:
        return False
    if sparse:
        return grad._indices().is_contiguous() and grad._values().is_contiguous()
    # Two: the tensor's own, and that of the storage object that is made to ask.
    return torch._C._storage_Use_Count(grad.untyped_storage()._cdata) <= 2


def _kept(grad: torch.Tensor) -> torch.Tensor:
    """What becomes ``.grad``: of a sparse gradient, which cannot be detached, another tensor of the same parts."""
    if grad.layout is not torch.sparse_coo:
        return grad
    return torch.sparse_coo_tensor(grad._indices(), grad._values(), grad.shape, check_invariants=False)


def accumulate(leaves: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None], owned: Sequence[bool]) -> None:
    """Give each leaf its gradient, with grad mode off.

    Args:
        leaves: the tensors whose ``.grad`` is written; one may occur twice.
        grads: for each leaf a gradient of its shape, or None for an undefined one, which leaves ``.grad`` alone.
        owned: whether the gradient lies in memory of its own and in the leaf's layout, so that it can be kept.
    """
    into: list[torch.Tensor] = []
    terms: list[torch.Tensor] = []
    for leaf, grad, own in zip(leaves, grads, owned, strict=True):
        if grad is None:
            continue
        old = leaf.grad
        if old is None:
            _assign(leaf, _kept(grad) if own else own_copy(grad, leaf))
        elif old.layout is not torch.strided and grad.layout is torch.strided:
            _assign(leaf, grad + old)
        else:
            into.append(old)
            terms.append(grad)
    if into:
        _add_in_place(into, terms)


def _assign(leaf: torch.Tensor, grad: torch.Tensor) -> None:
    """``leaf.grad = grad``, also where Python may not: a sparse leaf with a dense gradient. The engine's node may."""
    if leaf.layout in (torch.strided, grad.layout):
        leaf.grad = grad
        return
    leaf.grad = None
    hooks = leaf._post_accumulate_grad_hooks or {}
    set_aside = dict(hooks)  # they are called later, by whoever runs the tape graph
    hooks.clear()
    try:
        _leaf_node(leaf)(grad)
    finally:
        hooks.update(set_aside)


def _leaf_node(leaf: torch.Tensor) -> Any:
    with torch.enable_grad():
        return leaf.clone().grad_fn.next_functions[0][0]  # type: ignore[union-attr]


def _add_in_place(into: list[torch.Tensor], terms: list[torch.Tensor]) -> None:
    distinct = len({id(each) for each in into}) == len(into)
    if len(into) >= _BATCH and distinct and all(_plain(a) and _plain(b) for a, b in zip(into, terms, strict=True)):
        torch._foreach_add_(into, terms)
        return
    for old, grad in zip(into, terms, strict=True):
        old.add_(grad)


def _plain(tensor: torch.Tensor) -> bool:
    return type(tensor) is torch.Tensor and tensor.layout is torch.strided
