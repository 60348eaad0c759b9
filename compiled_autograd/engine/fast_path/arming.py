"""The fast path: C++ serves a whole hit, once Python has served such hits without Python in their middle.

Python decides about a hit that runs alone (:func:`execution.execute`) by questions that nearly always have the same
answers as before. C++ gets these questions and answers (``native/fast_path``), the hit's plan and its program. C++ then
comes first in each ``run_backward``. If all answers are unchanged and the tape matches the plan, C++ runs the program
and counts the hit. All other backwards go through Python, the reference: from the beginning if the tape is whole, else
from :func:`backward.resume` on. If policies have to look at the tape (during a trial, or for tapes left to eager), they
do it in Python, and C++ serves the backwards that they allow (:meth:`FastPaths.serve`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from ...cache.graphs import CompiledGraph
from ...cache.variants import Variant
from ...diagnostics import bypass
from ...diagnostics.reporting import questions_about_log
from ...guards import ambient
from ...native.interface import FastHit, FastPath, Module, Question
from ...policies.ledger import LEDGER
from ...process_state import PROCESS
from ...runtime.native_run import NativeRun
from ...settings import Settings
from ...threads.gate import GATE
from ...threads.leaf_writes import LEAF_WRITES
from ...torch_api.dynamo import questions_about_dynamo
from ...torch_api.op_registry import questions_about_others
from ..account import Account
from ..call import Call, HandedOver, KnownShapes, RanInside
from ..cuda.streams import STREAMS
from ..handles import KEPT
from ..session import thread

_MAX_HITS = 32
"""The largest number of hits that C++ knows; then the one that was handed to it first goes."""
_MAX_TIMES = 64
"""Maximum number of times that a program is handed to C++. If answers change all the time, Python serves it."""
_POLICIES = ("compile", "background")
"""The values of ``on_miss`` whose policies ask nothing of the tape itself."""


@dataclass(frozen=True, slots=True, eq=False)
class _Handed:
    """A hit that C++ knows, and the variant that served it, unless that went."""

    hit: FastHit
    settings: Settings
    variant: weakref.ref[Variant]


@dataclass(slots=True, eq=False)
class FastPaths:
    """The hits that C++ serves.

    Attributes:
        make: makes the callable of an extension.
        put: installs the callable as ``run_backward``.
    """

    make: Callable[[Module], FastPath] | None = None
    put: Callable[[FastPath], None] | None = None
    _made: dict[Module, FastPath] = field(default_factory=dict)
    _path: FastPath | None = None
    _handed: list[_Handed] = field(default_factory=list)
    _before: list[Question] = field(default_factory=list)

    @property
    def served(self) -> int:
        """Return how many backwards C++ has served."""
        return 0 if self._path is None else self._path.served

    @property
    def is_armed(self) -> bool:
        """True if it may serve some."""
        return bool(self._handed)

    def come_first(self, module: Module) -> None:
        """Have this extension called as ``run_backward`` from now on."""
        if self.make is None or self.put is None:
            return
        path = self._made.get(module) or self._made.setdefault(module, self.make(module))  # that of one thread alone
        if self._path is not path:
            self.put(path)
            self._path = path
            self._keep([])

    def forget(self) -> None:
        """Forget all hits."""
        self._keep([])

    def hand(
        self, variant: Variant, native: NativeRun, graph: CompiledGraph, shapes: KnownShapes, settings: Settings
    ) -> None:
        """A hit ran alone, in this thread and state: C++ may serve it the next time."""
        if native.times_handed == _MAX_TIMES or settings.check_every or settings.on_miss not in _POLICIES:
            return
        state = ambient.questions()
        if state is None or thread.here.depth or self.make is None:
            return
        proves = settings.check is not False
        asked = [*native.questions(proves), *_of_the_run(variant, native), *state]
        # Another thread may have changed something since it ran: then these are answers for something else.
        is_still = native.is_current() and native.is_usable(proves) and ambient.ambient() == variant.key.ambient
        if not is_still:
            return
        native.times_handed += 1
        self.come_first(shapes.module)
        reference = weakref.ref(variant, self._gone)
        hit = shapes.module.fast_hit(
            shapes.plan,
            native.made,
            shapes.number,
            settings,
            weakref.ref(graph),
            reference,
            LEDGER.watched,
            LEDGER.number(settings),
            (self._before_the_walk(), asked),
            shapes.hand_over,
            LEAF_WRITES.none_needed,
            native.write,
            shapes.counter,
        )
        others = [each for each in self._handed if each.settings is not settings or each.variant() is not variant]
        self._keep([_Handed(hit, settings, reference), *others[: _MAX_HITS - 1]])

    def serve(self, call: Call, account: Account) -> HandedOver | RanInside | None:
        """Have C++ serve a backward that policies have looked at. (C++ did not come first, for that reason.)

        Returns:
            The handed-over tape, if it has not run yet. None: the tape is whole.
        """
        path = self._path
        if path is None or not path.hits:
            return None
        if call.inputs or call.create_graph or not call.accumulate_grad:
            return None
        account.session.count_left()
        # It says in the account whether it has counted: an interrupt may come before anything here does.
        given = path.serve(call.outputs, call.grads, call.keep_graph, account)
        if not isinstance(given, tuple):
            return given
        account.served, _ = given
        return RanInside(())

    def _before_the_walk(self) -> list[Question]:
        """See :func:`_before_the_walk`: one list as long as it is the same, so that C++ asks once for all hits."""
        asked = _before_the_walk()
        if asked != self._before:
            self._before = asked
        return self._before

    def _gone(self, reference: weakref.ref[Variant]) -> None:
        self._keep([each for each in self._handed if each.variant is not reference])

    def _keep(self, handed: list[_Handed]) -> None:
        self._handed = handed
        if self._path is not None:
            self._path.hits = tuple([each.hit for each in handed])


def _before_the_walk() -> list[Question]:
    """Return the other conditions of :func:`backward.run` on a whole tape; C++ itself has more (``hit.cpp``)."""
    return [
        *questions_about_dynamo(),
        *bypass.questions(),
        (STREAMS, "in_use", False),
        (KEPT, "must_forget", False),
        (GATE.line.__len__, None, 0),
        *questions_about_others(),
    ]


def _of_the_run(variant: Variant, native: NativeRun) -> list[Question]:
    """Return the conditions of :func:`execution.execute` on a hit that may run alone."""
    return [
        (variant.native, "current", native),
        (torch.autograd._profiler_enabled, None, False),
        *questions_about_log(),
    ]


FAST_PATH = FastPaths()
PROCESS.register(FAST_PATH, reset=FAST_PATH.forget)
