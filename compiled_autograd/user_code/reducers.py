"""The hooks that DDP's reducer has on leaves: they are C++, and the engine refuses to report a tape that has them.

So they are moved aside while the engine walks, and are calls of the tape graph's form for such a tape. The reducer is
DDP's own, with its buckets, its order and its communication.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..native.library import Module
from ..process_state import PROCESS

Groups = tuple[tuple[int, ...], ...]
"""Of a tape's lifted tensors those that are leaves with such hooks, in the order in which they are written; those of
one group have their hooks called together."""

FIRST_GROUP = 1 << 20
GROUP = 25 << 20
"""Bytes of gradients after which a group ends: DDP's own sizes for its first bucket and the others."""


class Reducers:
    """What calls such hooks.

    Attributes:
        module: the extension, once a tape had such hooks.
        backward: has the eager engine run a backward of a number.
    """

    def __init__(self) -> None:
        self.module: Module | None = None
        self.backward: Callable[[torch.Tensor], object] | None = None

    def forget(self) -> None:
        """As if no tape had such hooks."""
        self.module = None

    def groups(self, leaves: Sequence[tuple[int, torch.Tensor]]) -> Groups:
        """Those of leaves, given with their numbers, that have such hooks."""
        groups: list[tuple[int, ...]] = []
        group: list[int] = []
        size = 0
        assert self.module is not None
        for number, leaf in leaves:
            if not self.module.has_hooks(leaf):
                continue
            group.append(number)
            size += leaf.numel() * leaf.element_size()
            if size >= (GROUP if groups else FIRST_GROUP):
                groups.append(tuple(group))
                group, size = [], 0
        return (*groups, tuple(group)) if group else tuple(groups)


REDUCERS = Reducers()
PROCESS.register(REDUCERS, reset=REDUCERS.forget)


def reducer_hooks(*leaves: torch.Tensor) -> None:
    """Tell DDP's reducer that these leaves have their gradients."""
    assert REDUCERS.module is not None and REDUCERS.backward is not None
    REDUCERS.backward(REDUCERS.module.tape_of_hooks(leaves))
