"""The structures in the store on disk with which a new one is compared: those of this program and this model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from .. import ir
from ..diagnostics.node_names import call_name, module_of
from ..diagnostics.users_line import program
from ..shadow_cache import Entry, Structure

if TYPE_CHECKING:
    from ..shadow_cache.store import Store

_MOST = 16
"""The maximum number of structures that are compared with a new one."""
_LEAF = "AccumulateGrad of "


def neighbours(store: Store, tape: ir.TapeGraph, shapes: Sequence[Sequence[int]]) -> Iterator[tuple[Structure, bool]]:
    """Yield structures of the store, and whether this program stored each of this model: these first, last used first.
    A program without a file, as in a notebook, has no name to compare, and so no structure of its own there.

    Args:
        shapes: those of the lifted tensors.

    Raises:
        StoreError: the store cannot be read.
    """
    here, leaves = (program(), module_of(tape)), _leaves(tape, shapes)
    ours = {each.structure: here[0] is not None and (each.program, each.module) == here for each in store.summaries()}
    for id_ in sorted(ours, key=ours.__getitem__, reverse=True)[:_MOST]:
        structure = store.structure(id_)
        if structure is not None:
            yield structure, ours[id_] and _are_alike(leaves, store.find(id_))


def _leaves(tape: ir.TapeGraph, shapes: Sequence[Sequence[int]]) -> dict[str, tuple[str, ...]]:
    """The shapes of named parameters."""
    written = tape.graph.find_nodes(op="call_function", target=ir.accumulate_grad)
    lifted = [(call_name(tape, node.meta["call"]), node.args[0].meta["lifted"]) for node in written]
    return {
        where.partition(_LEAF)[2]: tuple(map(str, shapes[leaf.index]))
        for where, leaf in lifted
        if _LEAF in where and leaf.kind == "input" and leaf.index < len(shapes)
    }


def _are_alike(leaves: dict[str, tuple[str, ...]], entries: Iterable[Entry]) -> bool:
    """Compare parameters by name: some names are in both tapes, each with one shape. Tapes without names are alike."""
    for entry in entries:
        others = {each.where.partition(_LEAF)[2]: each.shape for each in entry.inputs if _LEAF in each.where}
        shared = leaves.keys() & others.keys()
        if leaves and others:
            return bool(shared) and all(leaves[name] == others[name] for name in shared)
    return True
