"""The forms in which the tape graph of a structure runs, and what decides between them beside the ambient state."""

from __future__ import annotations

import threading
from collections.abc import Container, Iterable, Sequence
from typing import Any

import torch

from .. import ir
from ..diagnostics.node_names import node_name
from ..guards.ambient import CHECKPOINTED, REDUCED, TRACED, Ambient, ambient
from ..ir import checkpoints, marked_hooks, nan_checks, reduced
from ..process_state import free_in_child
from ..runtime.program import CALLED
from ..shadow_cache import Failure
from ..torch_api.checkpointing import frame_of
from ..user_code.reducers import Groups, grouped
from .variants import Handover

_MAX_KEPT = 32
_MAX_PASSING = 8
"""Maximum number of unused values of a marked call's dependencies."""
_MAKING = free_in_child(threading.RLock())  # milliseconds


def with_marked(state: Ambient, parts: Sequence[Any]) -> Ambient:
    """A state with what marked calls depend on: None for those that are not traced; as it is where none is."""
    return (*state, (TRACED, tuple(parts))) if any(part is not None for part in parts) else state


class Forms:
    """The forms of one tape graph.

    Attributes:
        marked: calls that may be of functions or hooks that their author has marked as traceable, and which of the
            lifted objects are their ``ctx``s and hooks. Which hooks are is found at each run.
        unpacks: which of the lifted objects are unpack hooks that it calls, in its order, if there are several.
    """

    def __init__(self, tape: ir.TapeGraph) -> None:
        unpacks = checkpoints.unpacks(tape)
        self.unpacks = unpacks if len(unpacks) > 1 else ()
        self._hooks = marked_hooks.candidates(tape)
        functions = [node for node in tape.graph.nodes if isinstance(node.target, ir.Marked)]
        self.marked: tuple[tuple[ir.Marked, int], ...] = (
            *((node.target, node.args[0].meta["lifted"].index) for node in functions),
            *((hook, node.args[0].meta["lifted"].index) for node, hook in self._hooks.items()),  # type: ignore[union-attr]
        )
        self._tape = tape
        self._runs: list[list[int]] | None = None
        self._reduced: dict[tuple[Any, ...], ir.TapeGraph] = {}
        self._together: dict[tuple[Any, ...], ir.TapeGraph] = {}

    def state(self, handover: Handover, bitwise: bool) -> Ambient:
        """The ambient state; of a tape with several unpack hooks, also which of them belong to one checkpointed call.
        The engine's key does not say that. Nor which hooks are marked as traceable, and what such depend on; a bitwise
        backend calls them, and is not concerned."""
        state = ambient()
        if self.unpacks:
            frames = checkpoints.numbered([frame_of(handover.objects[index]) for index in self.unpacks])
            state = (*state, (CHECKPOINTED, frames))
        if self.marked and not bitwise:
            state = with_marked(state, self._depended_on(handover.objects))
        return (*state, (REDUCED, handover.reduced)) if handover.reduced else state

    def reduced(self, tensors: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor]) -> tuple[Groups, list[Any]]:
        """Return the leaves with hooks of DDP's reducer: those that this tape writes, as lifted tensors in groups, and
        those whose gradient is undefined."""
        if self._runs is None:  # two threads find the same; no lock that a forked child could find taken
            self._runs = reduced.runs_of_leaves(self._tape)
        rest = {id(leaf): leaf for leaf in leaves}
        runs = [
            [(number, tensors[number]) for number in run if rest.pop(id(tensors[number]), None) is not None]
            for run in self._runs
        ]
        return grouped(runs), list(rest.values())

    def _depended_on(self, objects: Sequence[Any]) -> list[Any]:
        """Return the dependencies of each call that may be traced. Several tensors may share one hook."""
        known: dict[int, Any] = {}
        found: list[Any] = []
        for call, index in self.marked:
            owner = objects[index]
            if call.called:
                found.append(None)
                continue
            if id(owner) not in known:
                known[id(owner)] = call.described(owner)
            found.append(known[id(owner)])
        return found

    def called(self) -> frozenset[ir.Marked]:
        """Return the marked calls that could not be traced."""
        return frozenset(call for call, _ in self.marked if call.called)

    def described_in(self, state: Ambient) -> dict[ir.Marked, Any]:
        """Return a state's part for each marked call that is traced."""
        parts = dict(state).get(TRACED, ())
        return {call: part for (call, _), part in zip(self.marked, parts, strict=False) if part is not None}

    def call_what_passes(self, state: Ambient, unused: Iterable[Ambient]) -> tuple[Ambient, list[Failure]]:
        """Marked calls that depend on something new at each backward, as on a counter, are called from now on.

        Args:
            state: for which there is no variant.
            unused: those of variants that were made, and have not served since.

        Returns:
            The state in which they are called.
        """
        passed = [self.described_in(each) for each in unused]
        calls: set[ir.Marked] = set()
        for call, part in self.described_in(state).items():
            if len({each[call] for each in passed if each.get(call, part) != part}) >= _MAX_PASSING:
                call.called = f"traceable: its dependencies were new in more than {_MAX_PASSING} backwards"
                calls.add(call)
        of = {node: self._hooks.get(node, node.target) for node in self._tape.graph.nodes}
        told = [
            Failure("untraceable", node_name(self._tape, node), call.called, CALLED)
            for node, call in of.items()
            if call in calls
        ]
        return self.without(state, calls), told

    def without(self, state: Ambient, calls: Container[ir.Marked]) -> Ambient:
        """Return a state in which some marked calls are not traced."""
        parts = dict(state)
        if TRACED not in parts:
            return state
        rest = [None if call in calls else part for (call, _), part in zip(self.marked, parts[TRACED], strict=True)]
        before = tuple(part for part in state if part[0] not in (TRACED, REDUCED))
        return (*with_marked(before, rest), *((REDUCED, parts[REDUCED]) for _ in range(REDUCED in parts)))

    def under(self, state: Ambient) -> ir.TapeGraph:
        """The tape graph for a state."""
        parts = dict(state)
        groups: Groups = parts.get(REDUCED, ())
        form = self._without_reducer(state)
        if not groups:
            return form
        with _MAKING:
            key = (*self._key(state), groups)
            if (found := self._reduced.get(key)) is not None:
                return found
            return _keep(self._reduced, key, reduced.with_reducer_hooks(form, groups))

    def _key(self, state: Ambient) -> tuple[tuple[ir.TracedHook, ...], bool, checkpoints.Frames]:
        """Return the hooks that are traced, whether NaNs are looked for, and which unpack hooks belong together."""
        parts, traced = dict(state), self.described_in(state)
        hooks = tuple(hook for hook in self._hooks.values() if hook in traced)
        checked = bool(parts["check_nan"])
        return hooks, checked, () if checked else parts.get(CHECKPOINTED, ())

    def _without_reducer(self, state: Ambient) -> ir.TapeGraph:
        """The tape graph, with marked hooks traced, and with NaN checks where anomaly mode asks for them; else with the
        tensors of checkpointed calls unpacked together."""
        key = hooks, checked, frames = self._key(state)
        if not checked and not hooks and all(number < 0 for number, _ in frames):
            return self._tape
        with _MAKING:  # whoever asks twice gets the same nodes
            if (found := self._together.get(key)) is not None:
                return found
            tape = marked_hooks.with_traced(self._tape, self._hooks, hooks) if hooks else self._tape
            if checked:
                tape = nan_checks.with_nan_checks(tape)
            elif frames:
                tape = checkpoints.unpacked_together(tape, frames)
            return _keep(self._together, key, tape)


def _keep(kept: dict[Any, ir.TapeGraph], key: Any, tape: ir.TapeGraph) -> ir.TapeGraph:
    """Keep a tape graph, unless another thread was quicker, and give the one that is kept. The oldest goes."""
    found = kept.setdefault(key, tape)
    for oldest in [*kept][:-_MAX_KEPT]:
        kept.pop(oldest, None)
    return found
