"""Hooks of DDP's reducer on leaves. They are C++ hooks, so the engine refuses to report a tape with them.

During a walk they are silenced, and they are calls of the tape graph's form for such a tape. The reducer is DDP's own,
with its buckets, its order and its communication. The queue of callbacks is private to the engine. Written against
torch 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch.autograd import Variable

from ..native.interface import Module
from ..process_state import PROCESS

Groups = tuple[tuple[int, ...], ...]
"""Indices of a tape's lifted tensors that are leaves with such hooks, in the order in which they are written. The hooks
of one group are called together."""

FIRST_GROUP = 1 << 20
GROUP = 25 << 20
"""Bytes of gradients after which a group ends: DDP's own sizes for its first bucket and the others."""


class Reducers:
    """Calls hooks of DDP's reducer.

    Attributes:
        module: the extension, once a tape had such hooks.
        backward: has the eager engine run a backward of a number.
    """

    def __init__(self) -> None:
        self.module: Module | None = None
        self.backward: Callable[[torch.Tensor], None] | None = None

    def forget(self) -> None:
        """Forget all, as if no tape had such hooks."""
        self.module = None

    def backward_of_hooks(self, leaves: Sequence[torch.Tensor]) -> None:
        """Call the hooks of these leaves. Callbacks that they queue for the end of the backward, such as the wait for
        the reducer's communication, join those of hooks in Python."""
        module, backward = self.module, self.backward
        assert module is not None and backward is not None
        number = module.tape_of_hooks(leaves)
        backward(number)
        if module.has_queued(number):
            Variable._execution_engine.queue_callback(partial(backward, number))


def grouped(runs: Sequence[Sequence[tuple[int, torch.Tensor]]]) -> Groups:
    """Leaves with such hooks in groups, none of which is in two runs. Leaves are given with their numbers, in the order
    in which they are written."""
    groups: list[tuple[int, ...]] = []
    for run in runs:
        group: list[int] = []
        size = 0
        for number, leaf in run:
            group.append(number)
            size += leaf.numel() * leaf.element_size()
            if size >= (GROUP if groups else FIRST_GROUP):
                groups.append(tuple(group))
                group, size = [], 0
        groups += [tuple(group)] if group else []
    return tuple(groups)


REDUCERS = Reducers()
PROCESS.register(REDUCERS, restart=REDUCERS.forget)  # after a reset in its midst, a backward has hooks to call yet


def reducer_hooks(*leaves: torch.Tensor) -> None:
    """Tell DDP's reducer that these leaves have their gradients."""
    REDUCERS.backward_of_hooks(leaves)
