"""Keeps Inductor from fusing outer loops if their shared buffer holds one row of several (before torch 2.14, CPU).

Kernels with the same outer loop become one loop with several inner ones (``OuterLoopFusedSchedulerNode`` in
``torch/_inductor/codegen/cpp.py``). The result of one inner loop then reaches the next through a local buffer of one
row. If the outer loop takes several rows in a step, since a transposed operand made two-dimensional tiles of both
loops, each row overwrites the one before, and all readers get the last: finite, plausible and wrong, by a tenth of the
largest value and more. ``check_outer_fusion_loop_level_attr`` compares the outer loops, but not their steps.

Seen in the gradient of a softmax whose transpose goes into a second one: random tapes met it, the code that was
generated shows it, and ``torch.compile`` alone does it too. Here that question is answered with no where there are
local buffers and an outer loop takes more than one row; Inductor has a way without fusion for that answer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from ...versions import fuses_outer_loops_of_several_rows
from .instead import Instead


def _check(before: Callable[..., bool], node: Any, proxies: Sequence[Any], depth: int) -> bool:
    if _has_local_buffers() and any(_takes_several_rows(proxy, depth) for proxy in proxies):
        return False
    return before(node, proxies, depth)


_INSTEAD = Instead(
    "torch._inductor.codegen.cpp:OuterLoopFusedSchedulerNode", "check_outer_fusion_loop_level_attr", _check
)


def sound_outer_loops(graph_module: fx.GraphModule) -> contextlib.AbstractContextManager[None]:
    """Inside, in this thread, Inductor fuses the outer loops of a graph only where that is right.

    The graph gets a mark, which Inductor makes part of the key of its cache on disk (``FxGraphCachePickler`` takes all
    that a graph module has): what ``torch.compile`` has put there for the same graph may be wrong.
    """
    if not fuses_outer_loops_of_several_rows():
        return contextlib.nullcontext()
    graph_module.sound_outer_loops = True  # type: ignore[assignment]
    return _INSTEAD.inside()


def _has_local_buffers() -> bool:
    from torch._inductor.virtualized import V

    return bool(getattr(V.local_buffer_context, "local_buffers", None))


def _takes_several_rows(proxy: Any, depth: int) -> bool:
    """Return whether an outer loop of a kernel has another step than one."""
    loops = getattr(getattr(proxy, "loop_nest", None), "loops", None) or ()
    return any(loop.steps != 1 for loop in loops[:depth])
