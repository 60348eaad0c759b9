"""What one backward that was handed over did, entered into the account of its session: once, however it ended."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from shadow_cache import Bypass, Failure, Miss

from ..cache.disk import disk_for
from ..cache.graphs import CompiledGraph
from ..cache.variants import Variant
from ..diagnostics.bypass import INTERRUPTED
from ..diagnostics.reporting import tell_of_own_error
from ..guards.ambient import Ambient
from ..policies.autotune import AUTOTUNE
from .session import BYPASS, HIT, SHAPE_MISS, STRUCTURE_MISS, Outcome, Session

if TYPE_CHECKING:
    from ..runtime.running_backward import Running


_REAL_CALLS = "what the real calls give"


@dataclass(slots=True)
class Account:
    """What is known of a backward while it runs.

    Attributes:
        session: who is told.
        state: the backward; its context says what it did.
        graph: its structure.
        miss: how that differs from those known before; None where it was known.
        captured: whether the engine had to report the tape.
        ambient_state: the ambient state, once it was asked for.
        variant: what serves; None before that is known, and where the tape graph's calls run one by one.
        bypassed: nothing serves, and nothing may be compiled.
        reasons: why it is no hit.
    """

    session: Session
    state: Running
    graph: CompiledGraph
    miss: Miss | None
    captured: bool
    ambient_state: Ambient = ()
    variant: Variant | None = None
    bypassed: bool = False
    reasons: list[Bypass | Miss | Failure] = field(default_factory=list)
    _started: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        if self.miss is not None:
            self.reasons.append(self.miss)

    def close_after(self, error: BaseException) -> None:
        """It has raised ``error``, which is the user's, and not to be replaced by one of ours."""
        try:
            self.close(failed=True)
        except Exception as own:  # noqa: BLE001  it is logged
            tell_of_own_error(own, error)

    def close(self, failed: bool = False) -> None:
        """Keep what was compiled, and tell the session."""
        if self.state.told:
            return
        try:
            outcome = self._settle(failed)
        except BaseException:
            outcome = self._outcome()
            raise
        finally:
            self.state.told = True
            context = self.state.context
            self.session.record(outcome, self.captured, context.report.compiles, context.report.loads)

    def _outcome(self) -> Outcome:
        context = self.state.context
        if self.variant is None and not self.reasons:  # it has not come to anything
            self.bypassed, self.reasons = True, [INTERRUPTED]
        missed = SHAPE_MISS if self.reasons or context.report.compiles > context.report.background else HIT
        kind = BYPASS if self.bypassed else missed if self.miss is None else STRUCTURE_MISS
        return Outcome(kind, self.graph, tuple(self.reasons), context.report.seconds)

    def _settle(self, failed: bool) -> Outcome:
        context, tune = self.state.context, self.session.settings.tune and not failed
        context.report.seconds["run"] = time.perf_counter() - self._started
        self.reasons.extend(context.report.misses)
        if context.report.uncompiled:
            waits = "they are compiled in the background" if context.submit is not None else "on_miss does not compile"
            self.reasons.append(
                Miss("guard", f"{context.report.uncompiled} regions", hint=f"{waits}; their calls ran one by one")
            )
        self.reasons.extend(failure for failure in context.report.failures if failure not in self.reasons)
        outcome = self._outcome()
        reasons = self.reasons
        if outcome.outcome == HIT and tune and self.variant is not None:
            AUTOTUNE.hit(
                self.variant,
                context.report.seconds["capture"] + context.report.seconds["run"],
                lambda: self.state.fingerprint,
            )
        if not reasons and not context.report.compiles:
            return outcome
        cost = sum(context.report.seconds.get(stage, 0.0) for stage in ("lower", "compile"))
        if reasons and isinstance(reasons[0], Miss):
            walk = context.report.seconds.get("capture", 0.0) if self.captured else 0.0
            reasons[0] = msgspec.structs.replace(reasons[0], seconds=cost + walk)
        if self.variant is not None and (context.report.compiles or context.report.mismatches):
            self._store(self.variant, cost)
        outcome.reasons = tuple(reasons)
        return outcome

    def _store(self, variant: Variant, seconds: float) -> None:
        """Keep what was compiled for other processes, and what was found to be wrong of it."""
        disk = disk_for(self.session.settings)
        if disk is None:
            return
        misses = [reason for reason in self.reasons if isinstance(reason, Miss)]
        found = self.state.context.report.mismatches
        misses += [Miss("mismatch", each.where, _REAL_CALLS, each.error, each.instead) for each in found]
        try:
            variant.not_stored = disk.save(
                self.graph, variant, self.session.settings, self.ambient_state, misses, seconds
            )
            disk.record(self.graph, None if variant.not_stored else variant.entry, misses)
        except Exception as error:  # noqa: BLE001  the step is done: what cannot be stored is compiled again elsewhere
            variant.not_stored = f"{type(error).__name__}: {error}"
            self.reasons.append(Failure("store", repr(self.graph), variant.not_stored, "it is kept in memory alone"))
