"""Hooks that users' code registers and removes while a backward runs. PyTorch does not announce such changes. So the
handles do (``torch.utils.hooks.RemovableHandle``, 2.13), of which each registration makes one."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch.autograd.function import _HookMixin
from torch.utils.hooks import RemovableHandle

from ..process_state import PROCESS

ON_TENSOR, ON_LEAF, ON_NODE, REMOVED = "tensor", "leaf", "node", "removed"


@dataclass(slots=True, eq=False)
class HookChange:
    """A hook that was registered or removed.

    Attributes:
        kind: the function that registered it: ``register_hook`` of a tensor, ``register_post_accumulate_grad_hook`` of
            a leaf, or one of a node's; or that it was removed.
        hooks: its dict, with its ``number`` as key; tensors and nodes have one dict for each kind of hooks.
        tensor: the tensor with the hook; None for nodes.
        hook: the removed hook.
    """

    kind: str
    hooks: Any
    number: int
    tensor: torch.Tensor | None = None
    hook: Any = None


_REGISTERING: dict[CodeType, str] = {
    torch.Tensor.register_hook.__code__: ON_TENSOR,
    torch.Tensor.register_post_accumulate_grad_hook.__code__: ON_LEAF,
    _HookMixin._register_hook.__code__: ON_NODE,
}


class _Thread(threading.local):
    """``told`` are the lists that this thread's changes are added to: of each compiled backward that is under way.
    It is set by assigning, since Ctrl-C comes between calls."""

    told: tuple[list[HookChange], ...] = ()


HANDLES = PROCESS.register(_Thread())


def listen() -> None:
    """Have handles tell of what they are made for and of what they remove. Done once."""
    if hasattr(RemovableHandle.__init__, "__wrapped__"):
        return
    RemovableHandle.__init__ = _telling_of_new(RemovableHandle.__init__)  # type: ignore[method-assign]
    RemovableHandle.remove = _telling_of_removal(RemovableHandle.remove)  # type: ignore[method-assign]


def _telling_of_new(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: RemovableHandle, hooks_dict: Any, **rest: Any) -> None:
        original(self, hooks_dict, **rest)
        lists = HANDLES.told
        if lists:
            caller = sys._getframe(1)
            kind = _REGISTERING.get(caller.f_code)
            if kind is not None:  # else it is a module's
                tensor = None if kind == ON_NODE else caller.f_locals["self"]
                for changes in lists:
                    changes.append(HookChange(kind, hooks_dict, self.id, tensor))

    return __init__


def _telling_of_removal(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def remove(self: RemovableHandle) -> None:
        lists = HANDLES.told
        hooks = self.hooks_dict_ref() if lists else None
        hook = None if hooks is None else hooks.get(self.id)
        original(self)
        for changes in lists if hook is not None else ():
            changes.append(HookChange(REMOVED, hooks, self.id, hook=hook))

    return remove


def hooks_of_node(node: Any, before: bool) -> Any:
    """Return the dict of a node's hooks, which has no other access.

    Args:
        before: the hooks that run before the node, else those after it.
    """
    outer = HANDLES.told
    try:
        HANDLES.told = ()
        handle = (node.register_prehook if before else node.register_hook)(_nothing)
        hooks = handle.hooks_dict_ref()
        handle.remove()
    finally:
        HANDLES.told = outer
    return hooks


def _nothing(*_: Any) -> None:
    pass
