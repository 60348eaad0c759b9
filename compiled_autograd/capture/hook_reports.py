"""Methods of the capture for hooks: those on tensors, on nodes and on leaves, and those that packed saved tensors.

The protocol is that of :mod:`compiled_autograd.capture.capture`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from .. import ir
from ..user_code.split_gradients import FITTED
from .recording import Recording, keeps_failures


class HookReports(Recording):
    """The methods of the protocol for hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.needs_engine = False  # the graph has a hook that runs only inside the engine
        self._packed_in: int | None = None
        self._leaves: list[fx.Node] = []

    @keeps_failures
    def unpack_hook(self, hook: int, data: int) -> torch.Tensor:
        """A saved tensor that the user packed; the node that is about to report needs it."""
        packed = self._placeholder("packed", data)
        self._packed_in = self.calls[-1].index
        return self._stand_in(self._call(ir.unpack_hook, (self._placeholder("object", hook), packed)))

    def _partly_packed(self, saved: Sequence[Any], kind: type) -> bool:
        """Return whether hooks have packed only some of a node's saved tensors: the engine's key does not say which."""
        if self._packed_in != self.calls[-1].index:
            return False
        values = itertools.chain(*[each if isinstance(each, (list, tuple)) else (each,) for each in saved])
        nodes = [self._values.get(id(value)) for value in values if isinstance(value, kind)]
        return not all(isinstance(node, fx.Node) and node.target is ir.unpack_hook for node in nodes)

    @keeps_failures
    def tensor_pre_hook(self, grads: list[Any], hook: int, index: int) -> list[Any]:
        """A hook on a tensor, here the one whose gradient enters a node as number ``index``."""
        grads[index] = self._hooked(ir.tensor_hook, self._placeholder("object", hook), grads[index])
        return grads

    @keeps_failures
    def cpp_tensor_pre_hook(self, grads: list[Any], hook: int, index: int) -> list[Any]:
        """Record a hook on a tensor that C++ registered."""
        self.needs_engine = True
        if len(grads) > 1:  # the engine's key does not say which of them
            self.refuse(f"a hook of C++, such as retain_grad's, on one of several outputs of {self.calls[-1].name}")
        grads[index] = self._hooked(ir.cpp_hook, hook, grads[index])
        return grads

    def _hooked(self, target: Any, hook: Any, grad: torch.Tensor | None) -> torch.Tensor | None:
        node = self._call(target, (hook, grad))
        return None if grad is None else self._stand_in(node)

    @keeps_failures
    def pre_hook(self, grads: Sequence[Any], hook: int) -> list[Any]:
        """A hook that sees all gradients that enter a node."""
        self._refuse_pieces()
        node = self._call(ir.pre_hook, (self._placeholder("object", hook), list(grads)))
        return self._replaced(node, grads)

    @keeps_failures
    def post_hook(self, outputs: list[Any], grads: Sequence[Any], hook: int) -> list[Any]:
        """A hook that sees what a node gave and what it got."""
        self._refuse_pieces()
        node = self._call(ir.post_hook, (self._placeholder("object", hook), list(outputs), list(grads)))
        reached = [each for each in self._leaves if each.meta["call"] == node.meta["call"]]
        if reached:  # of a leaf, the engine does not say what it got
            node.update_arg(2, [reached[0]])
        return self._replaced(node, outputs)

    def _refuse_pieces(self) -> None:
        """The engine's key does not say how many gradients such a node gets, and a hook would see it."""
        if self.calls[-1].name in FITTED:
            self.refuse(f"a hook on {self.calls[-1].name}, which sees a gradient for each piece")

    def _replaced(self, node: fx.Node, before: Sequence[Any]) -> list[torch.Tensor | None]:
        return [None if grad is None else self._stand_in((node, index)) for index, grad in enumerate(before)]

    @keeps_failures
    def post_acc_grad_hook(self, variable: torch.Tensor, hook: int) -> list[Any]:
        """A hook that sees a leaf after its ``.grad`` was written."""
        self._call(ir.post_accumulate_hook, (self._placeholder("object", hook), variable))
        return [variable]


def as_captured(output: Any) -> Any:
    """Return a requested gradient as eager gives it: before the tensor's hooks if its node runs for other inputs too,
    and else after them (2.13, ``Engine::evaluate_function``). The seam always gives the latter."""
    if not isinstance(output, fx.Node) or not output.users:  # a node that runs has what it got among its arguments
        return output
    while output.target in (ir.tensor_hook, ir.cpp_hook):
        output = output.args[1]
    return output
