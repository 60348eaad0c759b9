"""Inputs and results of a compiled region."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import fx

from ..guards.shapes import Guard, Spec, is_static
from ..ir import is_plain
from ..steps.accumulate import obeys_layout, outermost_first
from ..steps.memory import first_along, memory_of, repeated
from ..steps.steps import Wiring, is_given, lies_apart


def owned(
    wiring: Wiring,
    results: Sequence[Any],
    arguments: Sequence[Any],
    leaves: Sequence[Any],
    specs: Sequence[Spec | None],
) -> Wiring:
    """Return a wiring that copies gradients whose memory something else sees, and gradients with other strides than in
    the trace. Inductor's ``native_layer_norm_backward`` follows the input's strides, for example, and the CPU's does
    not.

    Args:
        results: of the backend's code.
        arguments: of the backend's code.
        leaves: the region's fresh leaves.
        specs: of the leaves. If a spec has a history, no guard asks for the leaf's strides. Then each run checks
            whether the leaf can keep a gradient.
    """
    shared = _not_owned(results, [index for _, index in (*wiring.apart, *wiring.fresh)], arguments)
    obeying = [
        (position, index)
        for position, index in wiring.fresh
        if results[index] is None or (is_static(specs[position]) and obeys_layout(results[index], leaves[position]))
    ]
    return msgspec.structs.replace(
        wiring,
        values=tuple(pair for pair in wiring.values if pair not in wiring.apart or pair[1] not in shared),
        copied_values=tuple(pair for pair in wiring.apart if pair[1] in shared),
        fresh=tuple(pair for pair in obeying if pair[1] not in shared),
        copied=tuple(pair for pair in obeying if pair[1] in shared),
        other_strides=tuple(pair for pair in wiring.fresh if pair not in obeying),
    )


def all_copied(wiring: Wiring) -> Wiring:
    """Return a wiring for results whose memory was never examined: each that must not share memory is copied."""
    elsewhere = {position for position, _, _ in wiring.permuted}
    return msgspec.structs.replace(
        wiring,
        values=tuple(pair for pair in wiring.values if pair not in wiring.apart),
        copied_values=tuple(pair for pair in wiring.apart if pair[0] not in elsewhere),
        fresh=(),
        copied=(),
        other_strides=(*wiring.fresh, *wiring.copied, *wiring.other_strides),
    )


def restrided(wiring: Wiring, like: Mapping[int, torch.Tensor]) -> Wiring | None:
    """Return a wiring that copies results with other strides; None if that is impossible.

    Args:
        like: the real calls' results for outputs of the region, by index. They are dense, except for repeated
            dimensions. The order of the other dimensions in memory is kept, for any sizes.
    """
    given = dict(wiring.values)
    if not all(lies_apart(wiring, each) for each in like):
        return None  # what shares memory is to share it
    return msgspec.structs.replace(
        wiring,
        values=tuple(pair for pair in wiring.values if pair[0] not in like),
        permuted=(*wiring.permuted, *((each, given[each], _order(one)) for each, one in like.items())),
    )


def strides_widened(
    guard: Guard, nodes: Sequence[fx.Node], arguments: Sequence[Any], specs: Mapping[fx.Node, Spec]
) -> Iterator[tuple[fx.Node, Spec]]:
    """Specs of those of a region's arguments whose strides are others than its guard asks for: these are symbols from
    now on. Of tensors with sizes that change, guards alone ask for strides, so no other variant is made."""
    for argument, (node, value) in enumerate(zip(nodes, arguments, strict=True)):
        spec = specs.get(node)
        if spec is not None and is_given(node) and is_plain(value) and not is_static(spec):
            yield node, guard.with_strides(spec, value, argument)


def _order(tensor: torch.Tensor) -> tuple[int, ...]:
    again = repeated(tensor)
    return tuple(dim for dim in outermost_first(first_along(tensor, again)) if dim not in again)


def _not_owned(results: Sequence[Any], fresh: Sequence[int], arguments: Sequence[Any]) -> set[int]:
    """Return the indices of results whose memory something else sees, against the graph."""
    seen = {memory_of(value) for value in arguments}
    seen.update(memory_of(value) for index, value in enumerate(results) if index not in set(fresh))
    shared = set()
    for index in fresh:
        memory = memory_of(results[index])
        if memory is not None and memory in seen:
            shared.add(index)
        seen.add(memory)
    return shared
