"""Backwards whose tape was learnt: walked in C++ (:mod:`compiled_autograd.native`) instead of by the engine.

A tape is learnt when the engine hands it over without a report. From then on an equal tape is found without the engine,
and is a hit of the structure that the engine would have found: the nodes' own bytes have all parts of the engine's key.
Unknown tapes go through the engine (:mod:`seam`).
"""

from __future__ import annotations

import functools
import operator
import weakref
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ..backends import get_backend
from ..cache.graphs import CompiledGraph
from ..cache.variants import Handover
from ..diagnostics.progress import Wait
from ..native.interface import Found, Module, Plan, Taken
from ..native.library import Library
from ..policies.decision import waits
from ..process_state import PROCESS, WeaklyReferred
from ..settings import Settings
from ..shadow_cache import default_dir
from ..steps.memory import memory_of
from ..threads.gate import GATE
from ..torch_api.op_registry import captures_of_others, others_are_on
from ..user_code.reducers import REDUCERS
from .call import Call, HandedOver, KnownShapes
from .fast_path.arming import FAST_PATH
from .handles import KEPT

_MAX_PLANS = 64
"""The largest number of plans; then the one that was used least recently goes."""
_MAX_TRIED = 8
"""Maximum number of plans that a tape is compared with before the engine is called, unless the tape must be learnt."""
_MAX_WANTED = 8
"""Maximum number of the engine's hits that wait for a try to learn their tape at its next backward."""
_MAX_REFUSED = 3
"""Number of failed tries after which the tapes of a structure are no longer learnt."""


@dataclass(slots=True, eq=False)
class _Learnt(WeaklyReferred):
    """A plan, and what the engine would give for its tape: the structure depends on whether the backend is bitwise.

    It keeps neither a structure nor a variant: others say how many of these there are.
    """

    plan: Plan
    module: Module
    bitwise: bool
    graph: weakref.ref[CompiledGraph]
    shapes: dict[int, KnownShapes] = field(default_factory=dict)
    next: weakref.ref[_Learnt] | None = None
    """The plan that matched next last time; tried first."""


class NativeHits:
    """The plans of a process, the one that served last first.

    Attributes:
        hits: the number of tapes found.
    """

    def __init__(self) -> None:
        self.hits = 0
        self._learnt: list[_Learnt] = []
        self._last: _Learnt | None = None
        self._refused: weakref.WeakKeyDictionary[CompiledGraph, int] = weakref.WeakKeyDictionary()
        self._wanted = 0

    @property
    def library(self) -> Library | None:
        """The library of the extension; None before the first request."""
        return Library.LATEST

    @library.setter
    def library(self, library: Library | None) -> None:
        Library.LATEST = library

    def forget(self) -> None:
        """Forget all plans."""
        self._learnt.clear()
        FAST_PATH.forget()
        self._last = None
        self._refused.clear()
        self._wanted = 0

    def hand_over(self, call: Call, settings: Settings) -> HandedOver | None:
        """Hand over a tape that was learnt, as the engine would. None: the tape is whole, and unknown."""
        if not self._learnt or not _may_be_known(call, settings) or others_walk():
            return None
        bitwise = get_backend(settings.backend_in_mode).bitwise
        for each in self._likely():
            graph = each.graph()
            if each.bitwise != bitwise or graph is None or graph.evicted:
                continue
            found = each.plan.take(call.outputs, call.grads, call.keep_graph, call.inputs, not call.accumulate_grad)
            if isinstance(found, str):
                continue
            return self._handed_over(each, graph, found)
        return None

    def _handed_over(self, learnt: _Learnt, graph: CompiledGraph, found: Taken) -> HandedOver:
        """Make the result for a tape that was taken with this plan."""
        self._served(learnt)
        self.hits += 1
        graph.met += 1
        number = found.variant
        known = learnt.shapes.get(number)
        if known is None and number >= 0:
            known = KnownShapes(learnt.module, learnt.plan, number, functools.partial(self._resumed, learnt), self)
            learnt.shapes[number] = known
        return HandedOver(graph, _with_reducer(graph, found) if found.reduced else found, None, False, known)

    def _resumed(self, learnt: _Learnt, found: Taken) -> HandedOver:
        graph = learnt.graph()
        assert graph is not None, "whoever took the tape holds its structure"
        return self._handed_over(learnt, graph, found)

    def _likely(self) -> list[_Learnt]:
        """Return the plans to compare a tape with: the one that came next last time, and those that served last. All
        plans if the tape would be learnt otherwise."""
        likely = self._learnt[: _MAX_PLANS if self._wanted else _MAX_TRIED]
        last = self._last
        follows = None if last is None or last.next is None else last.next()
        if follows is None or (likely and likely[0] is follows):
            return likely
        return [follows, *(each for each in likely if each is not follows)]

    def _served(self, learnt: _Learnt) -> None:
        """Move a plan to the front. Another thread may have removed it meanwhile, or put another one first."""
        last, self._last = self._last, learnt
        if last is not None and (last.next is None or last.next() is not learnt):
            last.next = weakref.ref(learnt)
        if self._learnt and self._learnt[0] is learnt:
            return
        try:
            self._learnt.remove(learnt)
        except ValueError:
            return
        self._learnt.insert(0, learnt)

    def learn(self, call: Call, settings: Settings) -> tuple[Plan, Found] | str | None:
        """Learn a tape before the engine walks it, if a try is due. Return the plan and the tape's values, or the
        reason why not; None without a try."""
        if not self._wanted or not _may_be_known(call, settings) or others_walk():
            return None
        module = self.module(settings)
        if module is None:
            return None
        self._wanted -= 1
        asked = (call.inputs, not call.accumulate_grad)
        plan = module.learn(call.outputs, call.grads, True, *asked)
        if isinstance(plan, str):
            return plan
        found = plan.compare(call.outputs, call.grads, *asked)
        return None if isinstance(found, str) else (plan, found)

    def keep(self, learnt: tuple[Plan, Found] | str | None, call: Call, settings: Settings, given: object) -> None:
        """Keep a learnt plan, after the engine has handed over the tape."""
        if not isinstance(given, HandedOver) or given.captured or given.miss is not None:
            return
        if isinstance(learnt, str):
            self._refused[given.graph] = self._refused.get(given.graph, 0) + 1
            return
        if learnt is None or not _is_what_was_given(learnt[1], given.handover):
            if self._refused.get(given.graph, 0) < _MAX_REFUSED:
                self._wanted = min(self._wanted + 1, _MAX_WANTED)
            return
        module = self.module(settings)
        if module is None or given.graph.tape.needs_engine or given.handover.packed:
            return
        bitwise = get_backend(settings.backend_in_mode).bitwise
        kept = [each for each in self._learnt if each.graph() is not None]
        new = _Learnt(learnt[0], module, bitwise, weakref.ref(given.graph))
        self._learnt = [new, *kept[: _MAX_PLANS - 1]]
        self._served(new)

    def get_ready(self, settings: Settings) -> None:
        """Load and check the extension, or begin to build it. It takes as long as some steps of a small model, so it is
        done in a step that has compiled something. No lock is waited for, and the engine is not asked."""
        if settings.native is not False:
            self.module(settings)

    def skip_looks(self, settings: Settings) -> None:
        """Have C++ run on eager what skips a look, if the extension is there."""
        module = None if settings.native is False else self.module(settings, build=False)
        if module is not None:
            FAST_PATH.come_first(module)

    def module(self, settings: Settings, build: bool = True) -> Module | None:
        """Return the extension; None where it is not there, or not yet.

        Args:
            build: begin to build it where it is not there, unless ``cache_dir`` is False and ``native`` is None.
        """
        build = bool(settings.native or (build and settings.cache_dir is not False))
        return self._found(settings).module(build=build)

    def built(self, settings: Settings) -> Module | None:
        """Return the extension as :meth:`module` does, but wait until it is built where it would begin to build it."""
        if not (settings.compiles and waits(settings)) or not (settings.native or settings.cache_dir is not False):
            return self.module(settings)
        with Wait(settings.progress).shown(lambda: ("building the extension in C++", "once for this PyTorch")):
            return self._found(settings).built()

    def _found(self, settings: Settings) -> Library:
        where = settings.cache_dir
        if self.library is None:
            folder = default_dir() if where is None or isinstance(where, bool) else Path(where).expanduser()
            self.library = Library(folder / "native")
        return self.library


def _with_reducer(graph: CompiledGraph, taken: Taken) -> Handover:
    """Return the values of a tape whose leaves have hooks of DDP's reducer; steps of Python call these hooks."""
    leaves = taken.reduced
    handover = Handover(*taken.lists(), ())
    handover.reduced, handover.unwritten = graph.forms.reduced(handover.tensors, leaves)
    return handover


def others_walk() -> bool:
    """Return whether the engine walks a tape for another thread. During a capture, nodes below an edge have symbols for
    sizes (``SwapSavedVariables::before``, ``torch/csrc/dynamo/compiled_autograd.h``, 2.13). Leaves' nodes are among
    them, and tapes of other threads have them too."""
    return GATE.others_in_line()


def _is_what_was_given(found: Found, given: Handover) -> bool:
    """Return whether a plan was made of the same tape that the engine found: meanwhile another thread or ``gc`` may
    have changed the ``.grad`` of a leaf."""
    _, tensors, sizes, scalars, objects = found
    if (len(tensors), len(scalars), len(objects)) != (len(given.tensors), len(given.scalars), len(given.objects)):
        return False
    if sizes != given.sizes or not all(map(operator.is_, objects, given.objects)):
        return False
    return all(map(_are_one, tensors, given.tensors))


def _are_one(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors are one, by memory and shape: a node's saved value is a new tensor at each access."""
    return one is other or (memory_of(one) == memory_of(other) and one.shape == other.shape)


def _may_be_known(call: Call, settings: Settings) -> bool:
    """Return, in microseconds, whether a plan may serve a backward."""
    return (
        settings.native is not False
        and not call.create_graph
        and not KEPT.must_forget
        and not others_are_on()
        and captures_of_others() == KEPT.captures_of_others
    )


NATIVE_HITS = PROCESS.register(NativeHits())


def may_move_aside(call: Call, settings: Settings) -> bool:
    """Return whether hooks of DDP's reducer may be silenced for a walk: all leaves with such hooks are written then."""
    return settings.native is not False and call.accumulate_grad and not call.inputs


def learns_of_reducers(call: Call, settings: Settings) -> bool:
    """Return whether the next walk can move aside what the engine refused now, for the first time.

    The extension is waited for like a compiler, since these tapes are not compiled without it: beside ranks that keep
    all cores busy, a build of low priority takes thousands of backwards.
    """
    on_cpu = all(each.device.type == "cpu" for each in call.outputs if isinstance(each, torch.Tensor))
    if REDUCERS.module is not None or not may_move_aside(call, settings) or not on_cpu:
        return False
    REDUCERS.module = NATIVE_HITS.built(settings)
    return REDUCERS.module is not None
