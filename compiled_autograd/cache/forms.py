"""The forms in which the tape graph of a structure runs, and what decides between them beside the ambient state."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch

from .. import ir
from ..guards.ambient import CHECKPOINTED, REDUCED, TRACED, Ambient, ambient
from ..ir import checkpoints, nan_checks, reduced
from ..process_state import free_in_child
from ..torch_api.checkpointing import frame_of
from ..user_code.reducers import Groups, grouped
from ..user_code.traceable import described
from .variants import Handover

_MAX_KEPT = 32
_MAKING = free_in_child(threading.RLock())  # milliseconds


class Forms:
    """The forms of one tape graph.

    Attributes:
        traced: which of the lifted objects are those of functions that their author has marked as traceable.
        unpacks: which of the lifted objects are unpack hooks that it calls, in its order, if there are several.
    """

    def __init__(self, tape: ir.TapeGraph) -> None:
        unpacks = checkpoints.unpacks(tape)
        self.unpacks = unpacks if len(unpacks) > 1 else ()
        self.traced = tuple(
            node.args[0].meta["lifted"].index for node in tape.graph.nodes if isinstance(node.target, ir.TracedBackward)
        )
        self._tape = tape
        self._checked: ir.TapeGraph | None = None
        self._reduced: dict[tuple[Any, ...], ir.TapeGraph] = {}
        self._together: dict[checkpoints.Frames, ir.TapeGraph] = {}

    def state(self, handover: Handover) -> Ambient:
        """The ambient state; of a tape with several unpack hooks, also which of them belong to one checkpointed call.
        The engine's key does not say that."""
        state = ambient()
        if self.unpacks:
            frames = checkpoints.numbered([frame_of(handover.objects[index]) for index in self.unpacks])
            state = (*state, (CHECKPOINTED, frames))
        if self.traced:
            state = (*state, (TRACED, tuple(described(handover.objects[index]) for index in self.traced)))
        return (*state, (REDUCED, handover.reduced)) if handover.reduced else state

    def reduced(self, tensors: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor]) -> tuple[Groups, list[Any]]:
        """Of leaves with hooks of DDP's reducer those that this tape writes to, among its lifted tensors in groups; and
        the others, which an undefined gradient reaches."""
        rest = {id(leaf): leaf for leaf in leaves}
        runs = [
            [(number, tensors[number]) for number in run if rest.pop(id(tensors[number]), None) is not None]
            for run in reduced.runs_of_leaves(self._tape)
        ]
        return grouped(runs), list(rest.values())

    def under(self, state: Ambient) -> ir.TapeGraph:
        """The tape graph for a state."""
        parts = dict(state)
        groups: Groups = parts.get(REDUCED, ())
        form = self._without_reducer(state)
        if not groups:
            return form
        with _MAKING:
            key = (parts["check_nan"], parts.get(CHECKPOINTED, ()), groups)
            if key not in self._reduced:
                self._reduced[key] = reduced.with_reducer_hooks(form, groups)
            found = self._reduced[key]
            while len(self._reduced) > _MAX_KEPT:
                del self._reduced[next(iter(self._reduced))]
            return found

    def _without_reducer(self, state: Ambient) -> ir.TapeGraph:
        """The tape graph, with NaN checks where anomaly mode asks for them; else with the tensors of checkpointed calls
        unpacked together."""
        parts = dict(state)
        frames: checkpoints.Frames = parts.get(CHECKPOINTED, ())
        if not parts["check_nan"] and all(number < 0 for number, _ in frames):
            return self._tape
        with _MAKING:  # whoever asks twice gets the same nodes
            if parts["check_nan"]:
                self._checked = self._checked or nan_checks.with_nan_checks(self._tape)
                return self._checked
            if frames not in self._together:
                self._together[frames] = checkpoints.unpacked_together(self._tape, frames)
            found = self._together[frames]
            while len(self._together) > _MAX_KEPT:
                del self._together[next(iter(self._together))]
            return found
