"""``AccumulateGrad`` for all leaves of a step at once (``docs/internals/steps.md`` has a table).

The rules are those of ``torch/csrc/autograd/functions/accumulate_grad.h`` and ``utils/grad_layout_contract.h`` (2.13),
for grad mode off. One rule is stricter here: a kept gradient never shares memory with a tensor of the user.

Nothing is called between the last read of a leaf's ``.grad`` and the write of another one. In a call, Python may run a
signal's handler or a finalizer of ``gc``, and they may run another backward that gives to this leaf.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

from ..ir import is_plain
from ..threads.leaf_writes import LEAF_WRITES
from ..torch_api import attributes
from ..torch_api.references import COUNT_OF_UNSHARED, references
from .steps import AccumulateStep

_DENSE = torch.ops.aten.is_non_overlapping_and_dense.default
_BATCH = 4
"""Number of in-place additions from which one ``torch._foreach_add_`` does them all."""


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a strided tensor's elements lie side by side, in any order."""
    if isinstance(tensor, FakeTensor):  # sizes may be symbols
        # Private in torch 2.13. It imports sympy, which takes half a second: traces have done so before.
        from torch._prims_common import is_non_overlapping_and_dense_or_false

        with disable_proxy_modes_tracing():  # what it asks of sizes is no part of a trace
            return is_non_overlapping_and_dense_or_false(tensor)
    return _DENSE(tensor)


def obeys_layout(grad: torch.Tensor, leaf: torch.Tensor) -> bool:
    """Return whether ``grad`` has the layout that ``leaf`` wants for its ``.grad``; False if one is not strided."""
    if attributes.layout(leaf) is not torch.strided or attributes.layout(grad) is not torch.strided:
        return False
    if not is_dense(leaf):
        return attributes.is_contiguous(grad)
    layout = zip(attributes.shape(grad), attributes.stride(grad), attributes.stride(leaf), strict=True)
    return all(stride != 0 if size == 1 else stride == wanted for size, stride, wanted in layout)


def own_copy(grad: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
    """A copy of ``grad`` that ``leaf`` can keep: in the layout that it wants, with ``grad``'s dtype and device."""
    if attributes.layout(grad) is not torch.strided or attributes.is_nested(grad):
        return grad.clone()
    if attributes.layout(leaf) is torch.strided and is_dense(leaf):
        return grad.new_empty_strided(attributes.shape(leaf), attributes.stride(leaf)).copy_(grad)
    return grad.clone(memory_format=torch.contiguous_format)


def copy_laid_out_as(grad: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
    """Copy as :func:`own_copy` does, without the leaf's sizes: a trace with symbols knows no products of them."""
    if not is_dense(leaf):
        return grad.clone(memory_format=torch.contiguous_format)
    order = outermost_first(leaf)
    copy = grad.permute(order).clone(memory_format=torch.contiguous_format)
    return copy.permute([order.index(dim) for dim in range(leaf.dim())])


def outermost_first(dense: torch.Tensor) -> tuple[int, ...]:
    """The order of a dense tensor's dimensions in memory; of one element, as PyTorch's memory formats have them."""
    return tuple(sorted(range(dense.dim()), key=lambda dim: (dense.stride(dim), dense.shape[dim]), reverse=True))


def stealable(only: list[torch.Tensor], leaf: torch.Tensor) -> bool:
    """Return whether ``leaf`` can keep a gradient that users' code made. Nothing else may hold the gradient, or another
    view of its memory. In this package, only the list ``only`` may refer to the gradient."""
    if references(only, 0) > COUNT_OF_UNSHARED:
        return False
    (grad,) = only
    sparse = attributes.layout(grad) is torch.sparse_coo
    if type(grad) is not torch.Tensor or not (sparse or obeys_layout(grad, leaf)):
        return False
    held_in_cpp = grad._use_count() > 1  # type: ignore[attr-defined]
    if held_in_cpp or attributes.requires_grad(grad):
        return False
    if sparse:
        return grad._indices().is_contiguous() and grad._values().is_contiguous()
    # Two: the tensor's own, and that of the storage object that is made to ask.
    holders = torch._C._storage_Use_Count(attributes.untyped_storage(grad)._cdata)
    return holders <= 2 or (holders == 3 and _holds_its_base_alone(grad))


def _holds_its_base_alone(grad: torch.Tensor) -> bool:
    """Return whether a tensor is a view of a base that only the view keeps alive, as ``sum`` and ``view`` make them."""
    base = [attributes.base(grad)]
    if base[0] is None or attributes.numel(base[0]) != attributes.numel(grad):
        return False  # the leaf would keep more memory than it needs
    # The view refers to the tensor, which keeps the object of Python that was made to ask; and that one to the tensor.
    return references(base, 0) <= COUNT_OF_UNSHARED + 1 and base[0]._use_count() <= 2  # type: ignore[attr-defined]


def _kept(grad: torch.Tensor) -> torch.Tensor:
    """Return the tensor that becomes ``.grad``. It is no view, for it may be detached in place, and no user's sparse
    tensor.

    The engine keeps ``grad.detach()``. ``data`` does the same in less time for a tensor without history. A sparse
    gradient cannot be detached, so another tensor of the same parts is made.
    """
    if attributes.layout(grad) is torch.sparse_coo:
        return torch.sparse_coo_tensor(grad._indices(), grad._values(), attributes.shape(grad), check_invariants=False)
    return attributes.data(grad) if attributes.is_view(grad) else grad


def write(step: AccumulateStep, slots: list[Any]) -> None:
    """Give the leaves of a step what lies in its slots, with grad mode off."""
    if not LEAF_WRITES.in_turn(functools.partial(_write_all, step, slots)):
        LEAF_WRITES.through_nodes(functools.partial(_write_one_by_one, step, slots))


def keep(step: AccumulateStep, slots: list[Any], kept: dict[int, Any]) -> None:
    """Write no leaf, but say what each would be given, by its slot."""
    for leaf, own, shared in zip(step.leaves, step.owned, step.shared, strict=True):
        kept[leaf] = slots[shared] if slots[own] is None else slots[own]


def give(leaves: Sequence[torch.Tensor], grads: list[torch.Tensor | None]) -> None:
    """Give leaves their gradients from the eager engine, as the engine would, and empty ``grads``. A leaf can keep a
    gradient that nothing else holds. A leaf that no longer requires a gradient gets none."""
    count = len(leaves)
    numbers = list(range(3 * count))
    shared = numbers[2 * count :]
    slots = [*leaves, *[None] * count, *grads]
    grads.clear()
    step = AccumulateStep(numbers[:count], numbers[count : 2 * count], shared, [0] * count, shared, frozenset(shared))
    step.after_users_code = True
    with torch._C.DisableTorchFunctionSubclass():
        write(step, slots)


def _write_all(step: AccumulateStep, slots: list[Any]) -> None:
    leaves: list[torch.Tensor] = []
    grads: list[torch.Tensor | None] = []
    dropped = step.dropped
    for leaf, own, shared in zip(step.leaves, step.owned, step.shared, strict=True):
        if step.after_users_code and not attributes.requires_grad(slots[leaf]):  # a hook has frozen it
            continue
        grad = slots[own]
        if grad is not None:
            if own in dropped:
                slots[own] = None
            variable = slots[leaf]
            kept = attributes.data(grad) if attributes.is_view(grad) else grad
            if attributes.grad(variable) is None:  # a region made it for this leaf: both are strided
                try:
                    attributes.set_grad(variable, kept)
                except RuntimeError:
                    _assign_as_made(step, leaf, variable, kept)
            else:
                leaves.append(variable)
                grads.append(grad)
            continue
        only = [slots[shared]]
        if only[0] is None:
            continue
        if shared in dropped:  # else a later step needs it, and that reference keeps the leaf from stealing it
            slots[shared] = None
        if attributes.grad(slots[leaf]) is None:
            can_keep = stealable(only, slots[leaf])
            try:
                accumulate([slots[leaf]], only, [can_keep])
            except RuntimeError:
                _assign_as_made(step, leaf, slots[leaf], only[0])
        else:
            leaves.append(slots[leaf])
            grads += only
        if own not in dropped:  # a hook of the leaf's node sees what the leaf may have kept
            slots[own] = only[0]
    accumulate(leaves, grads, [True] * len(leaves))


def _write_one_by_one(step: AccumulateStep, slots: list[Any]) -> None:
    """Write leaves while another thread is in the eager engine, or does so too."""
    for leaf, own, shared in zip(step.leaves, step.owned, step.shared, strict=True):
        grad = slots[shared] if slots[own] is None else slots[own]
        if grad is None or not attributes.requires_grad(slots[leaf]):
            continue
        if own not in step.dropped:
            slots[own] = grad
        _give_through_node(slots[leaf], grad)


def _give_through_node(leaf: torch.Tensor, grad: torch.Tensor) -> None:
    """Have the engine's node of a leaf write it. The node would call post-accumulate hooks: a leaf with some is written
    here. Nothing prevents a thread without a session from writing that leaf at the same time."""
    if attributes.post_accumulate_grad_hooks(leaf):
        LEAF_WRITES.in_turn(functools.partial(accumulate, [leaf], [grad], [False]), beside_eager=True)
    else:
        attributes.leaf_node(leaf)(grad)


def accumulate_into(leaf: torch.Tensor, grad: torch.Tensor | None) -> None:
    """Give one leaf its gradient, which other code may hold too."""
    if grad is None or not attributes.requires_grad(leaf):  # a hook has frozen it
        return
    if not LEAF_WRITES.in_turn(functools.partial(accumulate, [leaf], [grad], [False])):
        LEAF_WRITES.through_nodes(functools.partial(_give_through_node, leaf, grad))


def accumulate(leaves: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None], owned: Sequence[bool]) -> None:
    """Give each leaf its gradient, with grad mode off, in this thread's turn.

    Args:
        leaves: the tensors whose ``.grad`` is written; one may occur twice.
        grads: for each leaf a gradient of its shape, or None for an undefined one, which leaves ``.grad`` alone.
        owned: whether the gradient lies in memory of its own and in the leaf's layout, so that it can be kept.
    """
    have: list[torch.Tensor] = []
    into: list[torch.Tensor] = []
    terms: list[torch.Tensor] = []
    for leaf, grad, own in zip(leaves, grads, owned, strict=True):
        if grad is None:
            continue
        while (old := attributes.grad(leaf)) is None or _is_replaced(old, grad):
            new = grad + old if old is not None else _kept(grad) if own else own_copy(grad, leaf)
            if _assigned(leaf, old, new):
                break
        else:
            have.append(leaf)
            into.append(old)
            terms.append(grad)
    if into:
        _add_in_place(have, into, terms)


def _is_replaced(old: torch.Tensor, grad: torch.Tensor) -> bool:
    """Return whether ``.grad`` is replaced: the sum of a dense gradient and a sparse ``.grad`` is a new tensor."""
    return attributes.layout(old) is not torch.strided and attributes.layout(grad) is torch.strided


def _assigned(leaf: torch.Tensor, old: torch.Tensor | None, grad: torch.Tensor) -> bool:
    """``leaf.grad = grad``, if it is still ``old``; also where Python may not: a sparse leaf with a dense gradient. The
    engine's node may."""
    if attributes.layout(leaf) in (torch.strided, attributes.layout(grad)):
        if attributes.grad(leaf) is not old:
            return False
        attributes.set_grad(leaf, grad)
    else:
        _assign_as_node(leaf, grad)
    return True


def _assign_as_made(step: AccumulateStep, slot: int, leaf: torch.Tensor, grad: torch.Tensor) -> None:
    """Give a leaf what Python has refused, where that has the dtype that the tape was made for, and the leaf has been
    given another one since; else the error that is handled is raised."""
    wanted = step.dtypes[step.leaves.index(slot)] if step.dtypes else None
    if (
        attributes.dtype(grad) is not wanted
        or attributes.dtype(grad) is attributes.grad_dtype(leaf)
        or attributes.shape(grad) != attributes.shape(leaf)
    ):
        raise
    _assign_as_node(leaf, grad)


def _assign_as_node(leaf: torch.Tensor, grad: torch.Tensor) -> None:
    attributes.set_grad(leaf, None)
    hooks = attributes.post_accumulate_grad_hooks(leaf) or {}
    set_aside = dict(hooks)  # they are called later, by whoever runs the tape graph
    hooks.clear()
    try:
        attributes.leaf_node(leaf)(grad)
    finally:
        hooks.update(set_aside)


def _add_in_place(leaves: Sequence[torch.Tensor], into: list[torch.Tensor], terms: list[torch.Tensor]) -> None:
    """``leaf.grad += term`` for each leaf, into what it was found to have. One that has another ``.grad`` since is
    looked at again: what Python runs in the midst of this with ``create_graph`` gives it one."""
    distinct = len({id(each) for each in into}) == len(into)
    if len(into) >= _BATCH and distinct and all(map(is_plain, (*into, *terms))):
        # In one go: they are looked at and added to, and nothing comes between.
        same = map(all, (map(operator.is_, map(attributes.grad, leaves), into),))
        if [*itertools.starmap(torch._foreach_add_, itertools.compress([(into, terms)], same))]:
            return
    for leaf, old, grad in zip(leaves, into, terms, strict=True):
        if attributes.grad(leaf) is old:
            attributes.add_(old, grad)
        else:
            accumulate([leaf], [grad], [False])
