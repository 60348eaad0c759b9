"""Memory that two results share, or a result and something else, where the real calls' do not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from ..steps.memory import memory_of
from ..steps.proof import Proof
from .comparison import value_difference

_HELD_BYTES = 1 << 20
"""So much of what a run gave is held until the next, to see whether that one writes there."""


@dataclass(frozen=True, slots=True)
class Result:
    """One result of a region: its node, its slot, the real calls' value, and the compiled code's.

    ``slot`` is that of the result, or of the leaf that the compiled code made it for. ``leaf`` is the leaf that may
    keep a result made for it. Such a result must share memory with nothing.
    """

    node: fx.Node
    slot: int
    want: torch.Tensor | None
    found: torch.Tensor | None
    leaf: torch.Tensor | None = None


def newly_shared(results: Sequence[Result], given: set[int | None]) -> tuple[Result, str] | None:
    """A result that shares memory with an input or another result, where that of the real calls does not; in words.

    Args:
        results: of one run.
        given: the memory of the region's inputs.
    """
    theirs: dict[int, int] = {}
    for result in results:
        found, want = memory_of(result.found), memory_of(result.want)
        if found is None:
            continue
        if result.leaf is not None:
            allowed = False
        else:
            allowed = want in given if found in given else found not in theirs or theirs[found] == want
        if (found in given or found in theirs) and not allowed:
            other = "an input" if found in given else "another result"
            return result, f"it shares memory with {other}, which no result of the real calls does"
        if want is not None:
            theirs[found] = want
    return None


def kept_from_before(proof: Proof, results: Sequence[Result], given: set[int | None]) -> tuple[Result, str] | None:
    """Return a result in memory that the run before gave out and that is still held; then hold small results of this
    run."""
    held = {memory_of(tensor) for tensor, _ in proof.held}
    for result in results:
        if memory_of(result.found) in held - {None}:
            return result, "it lies where the run before left a result that is still held"
    for tensor, copy in proof.held:
        if value_difference(copy, tensor, 0.0, lambda _: None) is not None:
            return results[0], "the run has written into what the run before gave"
    proof.held = _small(results, given)
    return None


def _small(results: Sequence[Result], given: set[int | None]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    own = [result.found for result in results if memory_of(result.found) not in given]
    tensors = sorted((each for each in own if each is not None), key=lambda each: each.untyped_storage().nbytes())
    held, room = [], _HELD_BYTES
    for tensor in tensors:
        room -= 2 * tensor.untyped_storage().nbytes()
        if room < 0:
            break
        held.append((tensor, tensor.detach().clone()))
    return held
