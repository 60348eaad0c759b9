"""Backwards whose tape was learnt: walked in C++ (:mod:`compiled_autograd.native`) where the engine would walk it.

A tape is learnt when the engine hands it over and need not report it. From then on one that is the same is found
without the engine, and is a hit of the structure that the engine would have found: what nodes say of themselves has all
that its key has. What is not known here takes the way through the engine (:mod:`seam`).
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from pathlib import Path

from backends import get_backend
from shadow_cache import default_dir

from ..cache.graphs import CompiledGraph
from ..native.library import Library, Module, Plan
from ..process_state import PROCESS
from ..settings import Settings
from ..torch_api.op_registry import captures_of_others, others_are_on
from .call import Call, HandedOver, KnownShapes
from .handles import KEPT

_MAX_PLANS = 64
"""The largest number of plans; then the one that was used least recently goes."""
_MAX_TRIED = 4
"""A tape is compared with so many plans, those that served last, before the engine is asked."""
_MAX_WANTED = 8
"""Of hits of the engine's, so many are owed a try to learn their tape when it comes again."""


@dataclass(slots=True, eq=False)
class _Learnt:
    """A plan, and what the engine would give for its tape: the structure depends on whether the backend is bitwise.

    It keeps neither a structure nor a variant: others say how many of these there are.
    """

    plan: Plan
    module: Module
    bitwise: bool
    graph: weakref.ref[CompiledGraph]
    shapes: dict[int, KnownShapes] = field(default_factory=dict)


class NativeHits:
    """The plans of a process, the one that served last first.

    Attributes:
        library: where the extension is; None as long as nobody has asked.
        hits: how many tapes were found.
    """

    def __init__(self) -> None:
        self.library: Library | None = None
        self.hits = 0
        self._learnt: list[_Learnt] = []
        self._wanted = 0

    def forget(self) -> None:
        """Forget all plans."""
        self._learnt.clear()
        self._wanted = 0

    def hand_over(self, call: Call, settings: Settings) -> HandedOver | None:
        """What the engine would hand over, if the tape is one that was learnt. None: it is whole, and not known."""
        if not self._learnt or not _may_be_known(call, settings):
            return None
        bitwise = get_backend(settings.backend_in_mode).bitwise
        for index, each in enumerate(self._learnt[:_MAX_TRIED]):
            graph = each.graph()
            if each.bitwise != bitwise or graph is None or graph.evicted:
                continue
            found = each.plan.take(call.outputs, call.grads, call.keep_graph)
            if isinstance(found, str):
                continue
            if index:
                self._put_first(each)
            self.hits += 1
            graph.met += 1
            known = None if found.variant < 0 else each.shapes.setdefault(found.variant, KnownShapes(each.module))
            return HandedOver(graph, found, None, False, known)
        return None

    def _put_first(self, learnt: _Learnt) -> None:
        """It has served. Another thread may have forgotten it meanwhile, or have put another one first."""
        try:
            self._learnt.remove(learnt)
        except ValueError:
            return
        self._learnt.insert(0, learnt)

    def learn(self, call: Call, settings: Settings) -> Plan | None:
        """A plan of a tape that the engine is about to be asked about; None where that is not worth it."""
        if not self._wanted or not _may_be_known(call, settings):
            return None
        module = self.module()
        if module is None:
            return None
        self._wanted -= 1
        plan = module.learn(call.outputs, call.grads, True)
        return None if isinstance(plan, str) else plan

    def keep(self, plan: Plan | None, call: Call, settings: Settings, given: object) -> None:
        """The engine was asked, and gave this."""
        if not isinstance(given, HandedOver) or given.captured or given.miss is not None:
            return
        if plan is None:
            self._wanted = min(self._wanted + 1, _MAX_WANTED)
            return
        module = self.module()
        if module is None or given.graph.tape.needs_engine or given.handover.packed:
            return
        bitwise = get_backend(settings.backend_in_mode).bitwise
        kept = [each for each in self._learnt if each.graph() is not None]
        self._learnt = [_Learnt(plan, module, bitwise, weakref.ref(given.graph)), *kept[: _MAX_PLANS - 1]]

    def module(self) -> Module | None:
        """The extension; None where it is not there, or not yet."""
        if self.library is None:
            self.library = Library(Path(default_dir()) / "native")
        return self.library.module()


def _may_be_known(call: Call, settings: Settings) -> bool:
    """Whether a plan may serve a backward; microseconds."""
    return (
        settings.native is True
        and call.accumulate_grad
        and not call.inputs
        and not call.create_graph
        and not KEPT.must_forget
        and not others_are_on()
        and captures_of_others() == KEPT.captures_of_others
    )


NATIVE_HITS = PROCESS.register(NativeHits())
