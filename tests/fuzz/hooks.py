"""What programs hook onto tensors and nodes; everything that a hook sees is written down, in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .values import lay_out

See = Callable[[str, Any], None]
ON_RESULTS, ON_LEAVES = 10, 6
"""How many kinds there are; 0 is none."""


def hook_result(kind: int, name: str, tensor: torch.Tensor, see: See) -> None:
    """Hook onto the result of an operator."""
    name = f"hook {kind} on {name}"
    node = tensor.grad_fn

    def watch(grad: torch.Tensor) -> None:
        see(name, grad)

    def change(new: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
        def hook(grad: torch.Tensor) -> torch.Tensor:
            see(name, grad)
            return new(grad)

        return hook

    if kind == 1:
        tensor.register_hook(watch)
    elif kind == 2:
        tensor.register_hook(change(lambda grad: grad * 2))
    elif kind == 3:
        tensor.register_hook(change(lambda grad: lay_out(grad * 1, "transposed")))
    elif kind == 4:
        tensor.register_hook(change(lambda grad: lay_out(grad * 1, "offset")))
    elif kind == 5:
        tensor.retain_grad()
    elif kind == 6 and node is not None:
        node.register_prehook(lambda grads: see(name, grads) or tuple(_half(grad) for grad in grads))
    elif kind == 7 and node is not None:
        node.register_hook(lambda into, out: see(name, (*into, *out)))
    elif kind == 8 and node is not None:
        node.register_hook(lambda into, out: tuple(_half(grad) for grad in into))
    elif kind == 9:
        tensor.register_hook(change(lambda grad: grad.detach()))


def _half(grad: torch.Tensor | None) -> torch.Tensor | None:
    return None if grad is None else grad * 0.5


def hook_leaf(kind: int, name: str, leaf: torch.Tensor, see: See) -> None:
    """Hook onto a leaf, once in its life."""
    name = f"hook {kind} on {name}"

    def after(each: torch.Tensor) -> None:
        see(name, each.grad)

    def clipped(each: torch.Tensor) -> None:
        see(name, each.grad)
        if each.grad is not None:
            each.grad.mul_(0.5)

    if kind == 1:
        leaf.register_hook(lambda grad: see(name, grad))
    elif kind == 2:
        leaf.register_post_accumulate_grad_hook(after)
    elif kind == 3:
        leaf.register_hook(lambda grad: grad * 3)
    elif kind == 4:
        leaf.register_post_accumulate_grad_hook(clipped)
    elif kind == 5:
        leaf.register_hook(lambda grad: lay_out(grad * 1, "every_other"))


def packing(kind: int, name: str, see: See) -> Any:
    """A pair of saved-tensor hooks."""
    name = f"unpack {name}"

    def unpack(packed: Any) -> torch.Tensor:
        see(name, ())
        return packed if kind == 1 else lay_out(packed, "offset")

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().clone() if kind == 3 else tensor

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)
