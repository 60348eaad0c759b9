"""Attributes of users' tensors, read past Python: ``attributes.grad(leaf)`` in the place of ``leaf.grad``.

The eager engine reads and writes the C++ fields of a tensor. Python's lookup may find something else: a property that a
library puts on ``torch.Tensor`` during a backward, or an attribute that a class of parameters defines. User code would
then run in the middle of a backward and answer in the tensor's place. The descriptors of ``torch._C.TensorBase`` read
the C++ fields, and Python cannot change that type. Roots, leaves and tensors that may be one of these are read with
them. ``tests/test_overridden_attributes.py`` plants an override of each attribute.

Tensors that this package or PyTorch's tracing made need none of this. A ``FakeTensor`` must not be asked for its
``device`` here: its own is a property of its class.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch.autograd.graph import GradientEdge

_TYPE: Any = torch._C.TensorBase

grad = cast(Callable[[torch.Tensor], torch.Tensor | None], _TYPE.grad.__get__)
set_grad = cast(Callable[[torch.Tensor, torch.Tensor | None], None], _TYPE.grad.__set__)
grad_dtype = cast(Callable[[torch.Tensor], torch.dtype | None], _TYPE.grad_dtype.__get__)
grad_fn = cast(Callable[[torch.Tensor], Any], _TYPE.grad_fn.__get__)
output_nr = cast(Callable[[torch.Tensor], int], _TYPE.output_nr.__get__)
is_leaf = cast(Callable[[torch.Tensor], bool], _TYPE.is_leaf.__get__)
requires_grad = cast(Callable[[torch.Tensor], bool], _TYPE.requires_grad.__get__)
post_accumulate_grad_hooks = cast(Callable[[torch.Tensor], Any], _TYPE._post_accumulate_grad_hooks.__get__)
shape = cast(Callable[[torch.Tensor], torch.Size], _TYPE.shape.__get__)
dtype = cast(Callable[[torch.Tensor], torch.dtype], _TYPE.dtype.__get__)
device = cast(Callable[[torch.Tensor], torch.device], _TYPE.device.__get__)
layout = cast(Callable[[torch.Tensor], torch.layout], _TYPE.layout.__get__)
is_nested = cast(Callable[[torch.Tensor], bool], _TYPE.is_nested.__get__)
is_quantized = cast(Callable[[torch.Tensor], bool], _TYPE.is_quantized.__get__)
is_cuda = cast(Callable[[torch.Tensor], bool], _TYPE.is_cuda.__get__)
base = cast(Callable[[torch.Tensor], torch.Tensor | None], _TYPE._base.__get__)
version = cast(Callable[[torch.Tensor], int], _TYPE._version.__get__)
data = cast(Callable[[torch.Tensor], torch.Tensor], _TYPE.data.__get__)

stride = cast(Callable[..., Any], _TYPE.stride)
dim = cast(Callable[[torch.Tensor], int], _TYPE.dim)
is_contiguous = cast(Callable[[torch.Tensor], bool], _TYPE.is_contiguous)
is_conj = cast(Callable[[torch.Tensor], bool], _TYPE.is_conj)
is_neg = cast(Callable[[torch.Tensor], bool], _TYPE.is_neg)
is_zerotensor = cast(Callable[[torch.Tensor], bool], _TYPE._is_zerotensor)
is_inference = cast(Callable[[torch.Tensor], bool], _TYPE.is_inference)
is_floating_point = cast(Callable[[torch.Tensor], bool], _TYPE.is_floating_point)
is_complex = cast(Callable[[torch.Tensor], bool], _TYPE.is_complex)
is_view = cast(Callable[[torch.Tensor], bool], _TYPE._is_view)
numel = cast(Callable[[torch.Tensor], int], _TYPE.numel)
untyped_storage = cast(Callable[[torch.Tensor], torch.UntypedStorage], _TYPE.untyped_storage)
view_as = cast(Callable[[torch.Tensor, torch.Tensor], torch.Tensor], _TYPE.view_as)
detach = cast(Callable[[torch.Tensor], torch.Tensor], _TYPE.detach)
clone = cast(Callable[[torch.Tensor], torch.Tensor], _TYPE.clone)
add_ = cast(Callable[[torch.Tensor, torch.Tensor], torch.Tensor], _TYPE.add_)


def leaf_node(leaf: torch.Tensor) -> Any:
    """Return the engine's ``AccumulateGrad`` node of a leaf; the caller has disabled ``__torch_function__``."""
    with torch.enable_grad():
        like = view_as(leaf, leaf) if layout(leaf) is torch.strided else clone(leaf)  # there are no views of others
        return grad_fn(like).next_functions[0][0]


def entered(end: torch.Tensor | GradientEdge) -> Any:
    """Return the node that a gradient of an end of a tape enters; None for a leaf and for a tensor without a tape."""
    return end.node if isinstance(end, GradientEdge) else grad_fn(end)


def edge(tensor: torch.Tensor) -> GradientEdge:
    """Return the edge by which a gradient enters the tape of a tensor that an operator made."""
    return GradientEdge(grad_fn(tensor), output_nr(tensor))
