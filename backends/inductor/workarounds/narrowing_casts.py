"""Keeps Inductor from leaving out a cast to 16 bits that is followed by one to more (before torch 2.13).

A pass makes one cast of two (``pointless_convert`` in ``torch/_inductor/fx_passes/joint_graph.py``), whatever lies
between. Where float32 goes through float16, a value is rounded there, or overflows: with autocast that is so wherever
a layer that computes in float32 is between two that do not. The setting that has Inductor round as eager does is not
asked by this pass; from 2.13 on it is. Here the pass is left out for graphs that are compiled with that setting.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ...versions import leaves_out_casts


@contextlib.contextmanager
def all_casts_kept() -> Iterator[None]:
    """Keep all casts during the passes over one graph. Another thread that compiles meanwhile lacks a pass, without
    harm."""
    if not leaves_out_casts():
        yield
        return
    from torch._inductor.fx_passes import joint_graph

    before = joint_graph.patterns.patterns
    joint_graph.patterns.patterns = type(before)(
        list, {key: [each for each in entries if not _is_it(each)] for key, entries in before.items()}
    )
    try:
        yield
    finally:
        joint_graph.patterns.patterns = before


def _is_it(entry: object) -> bool:
    from torch._inductor.fx_passes.joint_graph import pointless_convert

    return getattr(entry, "handler", None) is pointless_convert
