"""The structured trace of one backward: the reasons why it was no hit, its tape graph, and for each region the ATen
graph and the backend's code."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from ..backends.protocol import source_of
from ..cache.variants import Variant
from ..diagnostics.node_names import title
from ..diagnostics.structured_trace import JSON, TEXT, Artifact, add, is_on
from ..process_state import PROCESS
from ..steps.run_context import RunReport
from .session import Outcome

_MAX_TRACED = 1000
"""The largest number of reasons kept that were traced without anything having been compiled."""
_traced: dict[Any, None] = {}
PROCESS.register(_traced, reset=_traced.clear)


def trace(outcome: Outcome, report: RunReport | None = None, variant: Variant | None = None) -> None:
    """Trace a backward that was more than a hit. One for the same reasons as an earlier one, for which nothing was
    compiled, is left out: a bypass comes at each step."""
    if not is_on():
        return
    report = RunReport() if report is None else report
    made = bool(report.compiles or report.loads)
    key = (outcome.outcome, *((each.kind, getattr(each, "where", "")) for each in outcome.reasons))
    if not made and key in _traced:
        return
    _traced[key] = None
    while len(_traced) > _MAX_TRACED:
        _traced.pop(next(iter(_traced)), None)
    add(report, _artifacts(outcome, report, variant, made))


def _artifacts(outcome: Outcome, report: RunReport, variant: Variant | None, made: bool) -> Iterator[Artifact]:
    yield "outcome", JSON, lambda: _record(outcome, report)
    if outcome.graph is not None and (made or variant is None):
        yield "tape_graph", TEXT, outcome.graph.tape.readable
    if variant is not None and made:
        yield from _of_regions(variant)


def _record(outcome: Outcome, report: RunReport) -> dict[str, Any]:
    return {
        "outcome": outcome.outcome,
        "tape": None if outcome.graph is None else title(outcome.graph.tape),
        "reasons": [{"record": type(each).__name__, **msgspec.to_builtins(each)} for each in outcome.reasons],
        "compiled": report.compiles,
        "loaded": report.loads,
        "seconds": outcome.seconds,
    }


def _of_regions(variant: Variant) -> Iterator[Artifact]:
    for number, step in enumerate(variant.regions, 1):
        for count, compiled in enumerate(step.compiled_regions(), 1):
            name = f"region_{number}" if count == 1 else f"region_{number}_version_{count}"
            yield f"{name}_aten", TEXT, compiled.aten.text
            code = source_of(compiled.call)
            if code is not None:
                yield f"{name}_code", TEXT, code.__str__
