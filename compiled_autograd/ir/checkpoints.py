"""Tensors of checkpointed calls, unpacked together.

Where a tape was checkpointed without reentrance, each node of a checkpointed call unpacks what it saved just before it
runs, and a region would end at each. But only the first of these hooks does anything that can be seen: it computes the
forward again, and keeps all that this saves. The others hand that out. So they run just after the first one, as far as
nothing else of the user's runs between, and the call's nodes become one region.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from torch import fx

from .operations import USERS_CODE, unpack_hook
from .tape_graph import TapeGraph

Frames = tuple[tuple[int, int], ...]
"""The checkpointed call of each unpack hook of a tape, in the tape graph's order. A pair has the call's number, in
order of first occurrence, and how many hooks in a row belong to it. -1 is for hooks of other kinds."""


def numbered(frames: Iterable[object | None]) -> Frames:
    """Number the checkpointed calls of hooks, given an object for each hook's call; None for a hook of another kind."""
    numbers: dict[int, int] = {}
    every = (-1 if frame is None else numbers.setdefault(id(frame), len(numbers)) for frame in frames)
    return tuple((number, sum(1 for _ in hooks)) for number, hooks in itertools.groupby(every))


def unpacks(tape: TapeGraph) -> tuple[int, ...]:
    """Return the indices of the lifted objects that are unpack hooks and that the tape graph calls, in its order."""
    hooks = [node.args[0] for node in tape.graph.nodes if node.target is unpack_hook]
    return tuple(hook.meta["lifted"].index for hook in hooks if isinstance(hook, fx.Node))


def unpacked_together(tape: TapeGraph, frames: Frames) -> TapeGraph:
    """The tape graph with each such hook just after the one before it of the same checkpointed call.

    What such a hook gives may be memory of a ``.grad`` that is added to before the hook's own node runs: ``early`` in
    the metadata of its call has whoever runs it look.
    """
    tape = tape.copy(tape.calls)
    numbers = itertools.chain.from_iterable(itertools.repeat(number, count) for number, count in frames)
    last: dict[int, fx.Node] = {}
    for node in list(tape.graph.nodes):
        if node.target is unpack_hook:
            number = next(numbers)
            if number < 0:
                last.clear()
                continue
            if number in last:
                last[number].append(node)
                node.meta["early"] = True
            last[number] = node
        elif node.target in USERS_CODE:
            last.clear()
    return tape
