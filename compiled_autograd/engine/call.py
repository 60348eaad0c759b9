"""One backward: its arguments, and the result of its handover."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch._C import _ImperativeEngine
from torch.autograd import Variable

from ..cache.graphs import CompiledGraph
from ..cache.variants import Handover, Variant
from ..capture import tape
from ..native.interface import Module, Plan, Taken
from ..policies.decision import Decision
from ..shadow_cache import Bypass, Miss

_MAX_VARIANTS = 4
Results = Sequence[torch.Tensor | None]


@dataclass(slots=True)
class Call:
    """The arguments of one ``run_backward``."""

    outputs: Sequence[Any]
    grads: Sequence[torch.Tensor | None]
    keep_graph: bool
    create_graph: bool
    inputs: Sequence[Any]
    allow_unreachable: bool
    accumulate_grad: bool
    number: int = 0
    """The session's number: see :meth:`Ledger.number`."""
    key: Hashable = None
    """The key of its record, once it was asked for."""
    decision: Decision | None = None
    """The decision if there is no code for it, once it was made."""

    def description(self) -> int:
        """Hash the properties of the tape that Python can read. Tapes of one structure have one hash, but other tapes
        may have it too."""
        return tape.description(self.outputs, self.inputs, self.accumulate_grad)


class CountsHits(Protocol):
    """Counts them."""

    hits: int


@dataclass(slots=True)
class KnownShapes:
    """Shapes, scalars and kinds of tensors that a tape had before.

    Attributes:
        module: the extension that found them.
        plan: the plan of the tape, which has this ``number`` for them.
        hand_over: makes the :class:`HandedOver` of a tape with them.
        counter: counts such hits.
        served_by: the variants that served them last, under alternating settings and states, as weak references.
    """

    module: Module
    plan: Plan
    number: int
    hand_over: Callable[[Taken], HandedOver]
    counter: CountsHits
    served_by: tuple[weakref.ref[Variant], ...] = ()

    def variants(self) -> Iterator[Variant]:
        """Yield the variants that still exist, the last one first."""
        return filter(None, (each() for each in self.served_by))

    def last(self) -> Variant | None:
        """The one that served last, under settings or a state that may have changed since."""
        return self.served_by[0]() if self.served_by else None

    def served(self, variant: Variant) -> None:
        """A variant has."""
        others = [each for each in self.served_by if each() not in (None, variant)]
        self.served_by = (weakref.ref(variant), *others[: _MAX_VARIANTS - 1])


@dataclass(slots=True)
class Whole:
    """A tape that was walked and not released, so that the eager engine can run it too.

    Attributes:
        call: the arguments of its backward.
        release: frees it as the engine would have; None if it must be kept.
    """

    call: Call
    release: Callable[[], object] | None = None

    def free(self) -> None:
        """The eager engine does not run it: free it, unless it is to be kept."""
        release, self.release = self.release, None
        if release is not None:
            release()


@dataclass(slots=True)
class HandedOver:
    """A tape was walked, and released.

    Attributes:
        graph: the structure.
        given: the handed-over values, from the engine, or from C++, where a program may take them unchanged.
        miss: the difference from the structures known before; None for a known structure.
        captured: whether the engine had to report the tape.
        shapes: the properties that select a variant, beside settings and state; None if not compared.
        whole: the tape, if it was not released, so that its gradients can be compared with eager's.
    """

    graph: CompiledGraph
    given: Handover | Taken
    miss: Miss | None
    captured: bool
    shapes: KnownShapes | None = None
    whole: Whole | None = None

    @property
    def is_reduced(self) -> bool:
        """Return whether leaves have hooks of DDP's reducer."""
        return isinstance(self.given, Handover) and bool(self.given.reduced or self.given.unwritten)

    @property
    def handover(self) -> Handover:
        """Return the handed-over values as Python objects."""
        if not isinstance(self.given, Handover):
            self.given = Handover(*self.given.lists(), ())
        return self.given


class Refused(NamedTuple):
    """The tape is whole, and stays with the eager engine.

    Attributes:
        reason: the reason.
        miss: the difference from the structures known before, if that is the reason.
        mistake: probably the user's mistake; let eager raise it.
        changed: another thread changed something while the tape was reported; the next try may hand it over.
    """

    reason: Bypass
    miss: Miss | None = None
    mistake: bool = False
    changed: bool = False


class RanInside(NamedTuple):
    """The result of a tape that was handed over and has run before the engine returned."""

    results: Results


def run_backward(call: Call, allow_unreachable: bool) -> Any:
    """The engine's own."""
    return _ImperativeEngine.run_backward(
        Variable._execution_engine,
        call.outputs,
        call.grads,
        call.keep_graph,
        call.create_graph,
        call.inputs,
        allow_unreachable=allow_unreachable,
        accumulate_grad=call.accumulate_grad,
    )
