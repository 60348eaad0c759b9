"""The account of one backward that was handed over: entered into its session once, however the backward ended."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from ..backends.signal_handlers import raise_what_a_handler_raised
from ..cache.disk import Disk, made_in_memory
from ..cache.selection import Selection
from ..cache.stores import disk_for
from ..cache.variants import Variant
from ..capture.unnamed import name_the_unnamed
from ..diagnostics.bypass import ALL_ZERO_GRADIENTS, CALL_BY_CALL, INTERRUPTED, NOT_YET, OVER_BUDGET
from ..diagnostics.reporting import tell_of_own_error
from ..diagnostics.structure_misses import with_title
from ..guards.ambient import Ambient
from ..policies.decision import Action
from ..policies.ledger import LEDGER
from ..policies.own_loop import OWN_LOOPS
from ..runtime.interpret import ONE_BY_ONE
from ..settings import Settings
from ..shadow_cache import Bypass, Failure, Miss
from ..steps.run_context import RunReport
from ..threads.compile_thread import why_not_compile
from .call import Call, HandedOver
from .records import decided, missed, record_of
from .session import BYPASS, HIT, SHAPE_MISS, STRUCTURE_MISS, Outcome, Session
from .traced import trace

_REAL_CALLS = "the results of the real calls"


@dataclass(slots=True)
class Account:
    """Record one backward exactly once; ``started`` is the time of its call, and ``served`` the variant of a hit whose
    time counts."""

    session: Session
    settings: Settings
    started: float = field(default_factory=time.perf_counter)
    told: bool = False
    served: Variant | None = None

    def bypass(self, reason: Bypass, misses: Sequence[Miss] = (), since: float | None = None) -> None:
        """Record that the eager engine has run the backward, from the time ``since`` on, or will. No-op if already
        recorded."""
        if not self.told:
            seconds = {} if since is None else {"run": time.perf_counter() - since}
            outcome = Outcome(BYPASS, reasons=(reason, *misses), seconds=seconds)
            self.tell(outcome)
            trace(outcome)

    def tell(self, outcome: Outcome, captured: bool = False, compiles: int = 0, loads: int = 0) -> None:
        """Record the outcome."""
        self.told = True
        self.session.record(outcome, captured, compiles, loads)


@dataclass(slots=True)
class RunAccount:
    """Facts about a backward that was handed over, while it runs. ``ambient_state`` is the ambient state once it was
    read."""

    account: Account
    call: Call
    handed: HandedOver
    report: RunReport
    ambient_state: Ambient = ()
    selection: Selection = field(default_factory=Selection)
    _started: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        if self.handed.miss is not None:
            self.selection.reasons, self.selection.new_structure = [self.handed.miss], True

    def refuse(self) -> Bypass | None:
        """Return why nothing may be compiled for this backward; None if something may."""
        if (why := why_not_compile()) is not None:
            return why
        decision = decided(self.call, self.account.settings)
        return None if decision.action is Action.COMPILE else decision.reason

    def left(self) -> float:
        """Return the seconds that tracing may still take; 0 if nothing may be compiled."""
        decision = decided(self.call, self.account.settings)
        if decision.action is not Action.COMPILE:
            return 0.0
        taken = self.report.seconds["capture"] if self.handed.captured else 0.0
        return decision.seconds - taken - self.report.seconds.get("lower", 0.0)

    def close_after(self, error: BaseException) -> None:
        """Close the account after ``error``, which is the user's. An error of this package must not replace it."""
        try:
            self.close(failed=True)
        except Exception as own:  # noqa: BLE001  it is logged
            tell_of_own_error(own, error)

    def close(self, failed: bool = False) -> None:
        """Keep what was compiled, and tell the session."""
        if self.account.told:
            return
        try:
            if self.selection.reasons:
                self._name_parameters()
            outcome = self._settle(failed)
        except BaseException:
            outcome = self._outcome()
            raise
        finally:
            self.account.tell(outcome, self.handed.captured, self.report.compiles, self.report.loads)
            decided_now = self.call.decision is not None
            if decided_now or self.handed.captured or len(self.report.seconds) > 2:  # than walk and run of a hit
                self._charge()
        if outcome.reasons or self.report.compiles or self.report.loads:
            trace(outcome, self.report, self.selection.variant)
        if self.report.compiles and self.account.settings.tune and not failed:
            OWN_LOOPS.find(self.account.settings)  # to check it takes as long as some steps: in this one, of seconds

    def _name_parameters(self) -> None:
        """Names may not have been looked for while something was compiled; reasons are shown with them."""
        started = time.perf_counter()
        name_the_unnamed()
        self.report.add("capture", time.perf_counter() - started)
        tape, reasons = self.handed.graph.tape, self.selection.reasons
        reasons[:] = [with_title(each, tape) if isinstance(each, Miss) else each for each in reasons]

    def _outcome(self) -> Outcome:
        selection, report = self.selection, self.report
        if selection.variant is None and not selection.reasons:  # it has not come to anything
            selection.bypassed, selection.reasons = True, [INTERRUPTED]
        missed = SHAPE_MISS if selection.reasons or report.compiles > report.background else HIT
        kind = BYPASS if selection.bypassed else STRUCTURE_MISS if selection.new_structure else missed
        return Outcome(kind, self.handed.graph, tuple(selection.reasons), report.seconds)

    def _settle(self, failed: bool) -> Outcome:
        report, reasons, variant = self.report, self.selection.reasons, self.selection.variant
        settings = self.account.settings
        report.seconds["run"] = time.perf_counter() - self._started
        if report.misses:
            reasons.extend(report.misses)
        if report.uncompiled:
            refused = why_not_compile()
            not_yet = self.call.decision is not None and self.call.decision.reason is NOT_YET
            if (report.over_budget and not not_yet) or refused is not None:
                waits = "compile_budget is spent" if refused is None else refused.kind
            elif settings.on_miss == "background":
                waits = "they are compiled in the background"
            else:
                waits = "on_miss does not compile"
            reasons.append(Miss("guard", f"{report.uncompiled} regions", hint=f"{waits}; their calls ran one by one"))
        if report.failures:
            reasons.extend(failure for failure in report.failures if failure not in reasons)
        outcome = self._outcome()
        reasons = self.selection.reasons
        if outcome.outcome == HIT and not (failed or report.compared) and variant is not None:
            seconds = report.seconds["capture"] + report.seconds["run"]
            variant.hits += 1
            proved = report.seconds.get("prove", 0.0)
            variant.ran += seconds - proved
            if not proved:  # beside the real calls it takes longer than any later one
                self.account.served = variant
        leaves = settings.tune and settings.on_unsupported == "eager"
        if leaves and report.zeros and not report.compared and self._gave_zeros_alone(variant):
            LEDGER.refused(record_of(self.call), ALL_ZERO_GRADIENTS, is_costly=True)
        if leaves and variant is not None and any(each.instead is ONE_BY_ONE for each in report.failures):
            if variant.cut_short == variant.hits and not report.compared:
                LEDGER.refused(record_of(self.call), CALL_BY_CALL, is_costly=True)
            variant.cut_short = variant.hits
        if self._is_left(reasons):
            missed(self.call, OVER_BUDGET, report.seconds["run"])
        if not reasons and not report.compiles:
            return outcome
        cost = sum(report.seconds.get(stage, 0.0) for stage in ("lower", "compile"))
        if reasons and isinstance(reasons[0], Miss):
            walk = report.seconds.get("capture", 0.0) if self.handed.captured else 0.0
            reasons[0] = msgspec.structs.replace(reasons[0], seconds=cost + walk)
        if variant is not None and (report.compiles or report.mismatches or self._shares_all_code(variant)):
            self._store(variant, cost)
        outcome.reasons = tuple(reasons)
        return outcome

    def _is_left(self, reasons: Sequence[object]) -> bool:
        """Return whether the ledger left the backward, or some of its regions, without code."""
        over = self.report.uncompiled and self.report.over_budget
        return bool(over or OVER_BUDGET in reasons or NOT_YET in reasons)

    def _shares_all_code(self, variant: Variant) -> bool:
        """Return True if a variant that was not tried to be stored runs code that was compiled for other variants."""
        is_new = variant.entry is None and not variant.not_stored
        return is_new and bool(variant.regions) and not self.report.uncompiled

    def _gave_zeros_alone(self, variant: Variant | None) -> bool:
        """Return whether each region that was compared with its real calls gave only zeros, which prove nothing."""
        return variant is not None and self.report.zeros == len(variant.regions)

    def _charge(self) -> None:
        """Tell the ledger of the seconds of making or loading the code, and of a variant that it did not know."""
        report, variant, settings = self.report, self.selection.variant, self.account.settings
        stages = ["load"]
        stages += [] if report.background else ["lower", "compile"]  # what was compiled there was charged there
        stages += [] if settings.check_every else ["prove"]
        stages += ["capture"] if self.handed.captured else []
        spent = sum(report.seconds.get(stage, 0.0) for stage in stages)
        if variant is None:
            return
        record = record_of(self.call)
        has_begun = "lower" in report.seconds and not report.background
        if report.over_budget and (has_begun or (self.handed.captured and not report.loads)):
            LEDGER.spent(record, spent)
        elif has_begun:
            LEDGER.compiled(record, variant, spent, settings)
        elif report.loads or variant not in record.living():
            LEDGER.loaded(record, variant, spent, settings)
        elif spent:
            LEDGER.spent_more(record, spent)
        closing = LEDGER.closing(settings) if settings.compiles else None
        disk = None if closing is None else disk_for(settings)
        if disk is not None and closing is not None:
            disk.record(self.handed.graph, None, [closing])

    def _store(self, variant: Variant, seconds: float) -> None:
        """Keep what was compiled for other processes, and what was found to be wrong of it."""
        disk = disk_for(self.account.settings)
        try:
            if disk is not None:
                self._store_in(disk, variant, seconds)
        finally:
            for made in made_in_memory(variant):
                made.artifact = None  # hundreds of kilobytes, of which nobody has any use from now on

    def _store_in(self, disk: Disk, variant: Variant, seconds: float) -> None:
        settings, graph, reasons = self.account.settings, self.handed.graph, self.selection.reasons
        misses = [reason for reason in reasons if isinstance(reason, Miss)]
        found = self.report.mismatches
        misses += [Miss("mismatch", each.where, _REAL_CALLS, each.error, each.instead) for each in found]
        try:
            variant.not_stored = disk.save(graph, variant, settings, self.ambient_state, misses, seconds)
            disk.record(graph, None if variant.not_stored else variant.entry, misses)
        except Exception as error:  # noqa: BLE001  the step is done: what cannot be stored is compiled again elsewhere
            raise_what_a_handler_raised(error)
            variant.not_stored = f"{type(error).__name__}: {error}"
            reasons.append(Failure("store", repr(graph), variant.not_stored, "it is kept only in memory"))
