"""The report of a session: its totals and backwards, and the content of each graph."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from ..cache.graphs import CompiledGraph
from ..cache.metadata import structure_of
from ..cache.variants import Variant
from ..diagnostics.node_names import title
from ..diagnostics.reporting import what_follows
from ..guards.shapes import size_in
from ..outcomes import HIT, Stats
from ..settings import Settings
from ..shadow_cache import Bypass, Failure, Miss
from ..shadow_cache.amounts import date, plural, seconds
from ..shadow_cache.miss_kinds import NO_MISSES
from ..shadow_cache.report import data
from ..shadow_cache.report.from_store import nodes_of, reason_of, trie_of
from ..shadow_cache.report.texts import defined
from ..versions import VERSION
from .memory import memory_of, run_without_memory
from .stages import stages_of, step_of_calls, steps_of, tape_stage_of
from .step_log import Hit, StepEvent
from .summary import Summary

_NOTHING = "This structure is not compiled: it has no later stages."


def session_report(
    summary: Summary,
    events: Sequence[StepEvent],
    left_out: int,
    hits: Sequence[Hit],
    graphs: Sequence[CompiledGraph],
    settings: Settings,
) -> data.Report:
    """Return the report of a session.

    Args:
        summary: the session's counts and answers.
        events: the backwards that were no plain hits, oldest first; ``left_out`` more were not kept.
        hits: the hits whose times are kept, oldest first.
        graphs: the session's structures.
    """
    variants = [variant for graph in graphs for variant in graph.variants]
    titles = {graph.number: title(graph.tape) for graph in graphs}
    structures = [structure_of(graph.tape, _id(graph.number)) for graph in graphs]
    answer = f"{summary.worth}; {summary.stats!r}" if summary.stats.backwards else repr(summary.stats)
    outermost = next((call.module for graph in graphs for call in graph.tape.calls if call.module), None)
    return data.Report(
        of="session",
        title=outermost or "a session",
        made=date(time.time()),
        totals=_totals(summary.stats, graphs),
        timeline=data.Timeline(
            tuple(_event(each, titles) for each in events),
            summary.stats.backwards,
            hits_between=True,
            left_out=left_out,
            took=_took(events, hits),
            eager=_eager(variants),
        ),
        trie=trie_of(structures, {_id(number): name for number, name in titles.items()}),
        graphs=tuple(_graph(graph, each.calls) for graph, each in zip(graphs, structures, strict=True)),
        facts=(
            ("torch", str(torch.__version__)),
            ("compiled_autograd", VERSION),
            *((name, _shown(value)) for name, value in settings.key),
        ),
        verdict=data.Verdict(f"{answer[:1].upper()}{answer[1:]}.", f"{summary.next}."),
    )


def _took(events: Sequence[StepEvent], hits: Sequence[Hit]) -> tuple[data.Took, ...]:
    took = [data.Took(each.number, 1, 1e3 * (each.capture + each.run), HIT) for each in hits]
    for each in events:
        spent = each.seconds.get("capture", 0.0) + each.seconds.get("run", 0.0)
        if each.timed and spent:
            took.append(data.Took(each.number, each.count, 1e3 * spent / each.timed, each.outcome))
    return tuple(sorted(took, key=lambda each: each.number))


def _eager(variants: Iterable[Variant]) -> float | None:
    timed = [each for each in variants if each.timing is not None]
    most = max(timed, key=lambda each: each.hits, default=None)
    return None if most is None or most.timing is None else most.timing.eager


def _id(number: int) -> str:
    return f"g{number}"


def _shown(value: object) -> str:
    return value if isinstance(value, str) else repr(value)


def _totals(stats: Stats, graphs: Sequence[CompiledGraph]) -> tuple[data.Figure, ...]:
    backwards, bypassed = stats.backwards, sum(stats.bypasses.values())
    part = f"{stats.hits / backwards:.1%} of all" if backwards else ""
    misses = stats.shape_misses + stats.structure_misses
    of = f"{stats.structure_misses:,} of structure, {stats.shape_misses:,} of shape" if misses else ""
    labels = ", ".join(f"{label} {count:,}" for label, count in sorted(stats.bypasses.items(), key=_most_first))
    return (
        data.Figure("backwards", f"{backwards:,}", plural(len(graphs), "structure")),
        data.Figure("hits", f"{stats.hits:,}", part),
        data.Figure("misses", f"{misses:,}", of),
        data.Figure("bypasses", f"{bypassed:,}", labels),
        *([data.Figure("timed", f"{stats.tuning:,}", "on eager, for tune")] if stats.tuning else ()),
        data.Figure("compiling", seconds(stats.compile_seconds), plural(stats.compiles, "region")),
        data.Figure("from disk", f"{stats.loads:,}", "regions loaded" if stats.loads else ""),
        data.Figure("failures", f"{stats.failures:,}", _instead(stats.failures), bad=stats.failures > 0),
    )


def _instead(failures: int) -> str:
    return "a slower way was taken" if failures else ""


def _most_first(item: tuple[str, int]) -> tuple[int, str]:
    return -item[1], item[0]


def _event(event: StepEvent, titles: Mapping[int, str]) -> data.Event:
    known = event.graph if event.graph in titles else None
    first = event.reasons[0] if event.reasons else None
    name = titles[known] if known is not None else first.label if isinstance(first, Bypass) else event.outcome
    stages = ("capture", "lower", "compile", "load", "prove") if event.outcome != "bypass" else ("run",)
    return data.Event(
        number=event.number,
        count=event.count,
        outcome=event.outcome,
        title=name,
        graph=None if known is None else _id(known),
        cost=sum(event.seconds.get(stage, 0.0) for stage in stages),
        seconds=event.seconds,
        compiles=event.compiles,
        loads=event.loads,
        when=event.when,
        reasons=tuple(map(_reason, event.reasons)),
    )


def _reason(reason: Bypass | Miss | Failure) -> data.Reason:
    if isinstance(reason, Miss):
        return reason_of(reason)
    if isinstance(reason, Bypass):
        kind = NO_MISSES.get(reason.kind)
        return data.Reason(
            reason.label, str(reason), "" if kind is None else kind.means, "" if kind is None else kind.do
        )
    return data.Reason(f"failure: {reason.kind}", str(reason), what_follows(reason), failed=True)


def _graph(graph: CompiledGraph, calls: Sequence[Any]) -> data.Graph:
    variants = list(graph.variants)
    facts: list[tuple[str, str]] = [
        ("nodes", f"{len(graph.tape.calls):,}"),
        ("input tensors", f"{len(graph.tape.inputs):,}"),
        ("seen again", plural(graph.met, "time")),
    ]
    if not variants:
        return data.Graph(
            id=_id(graph.number),
            title=title(graph.tape),
            facts=tuple(facts),
            nodes=nodes_of(calls),
            stages=(tape_stage_of(graph.tape, {})[0],),
            note=_NOTHING,
        )
    variant = variants[-1]
    sizes = run_without_memory(variant)
    stages = stages_of(variant, sizes)
    if len(variants) > 1:
        facts.append(("stages shown", "of the newest variant"))
    return data.Graph(
        id=_id(graph.number),
        title=title(graph.tape),
        facts=tuple(facts),
        nodes=nodes_of(calls, step_of_calls(variant)),
        steps=tuple(steps_of(variant)),
        stages=stages,
        memory=memory_of(variant, sizes, _definitions(stages[1])),
        variants=tuple(_variant(number, each) for number, each in enumerate(variants)),
    )


def _definitions(stage: data.Stage) -> dict[tuple[int, str], int]:
    found = {}
    for block in stage.blocks:
        for number in range(block.first, block.first + block.count):
            name = defined(stage.lines[number].text)
            if name is not None:
                found[block.step, name] = number
    return found


def _variant(number: int, variant: Variant) -> data.Variant:
    settings = dict(variant.key.settings)
    facts = [
        ("hits timed or counted", f"{variant.hits:,}"),
        *((name, _shown(value)) for name, value in variant.key.settings),
        *((name, _shown(value)) for name, value in variant.key.ambient),
        ("stored as", variant.entry or variant.not_stored or "not stored"),
    ]
    words = ["dynamic" if variant.shapes.dynamic else "static", _shown(settings.get("backend", ""))]
    timing = variant.timing
    times = {} if timing is None else {"eager": timing.eager, "compiled": timing.compiled, "samples": timing.samples}
    shapes = _some_shapes(variant.shapes.tensors)
    return data.Variant(
        f"variant {number}: {', '.join(filter(None, words))}",
        tuple([("shapes", shapes), *facts]),
        **times,  # type: ignore[arg-type]
    )


def _some_shapes(specs: Iterable[Sequence[Any]]) -> str:
    shapes = [
        [str(size) if isinstance(size, int) else f"{size[0]} or {size[1]}" for size in map(size_in, spec)]
        for spec in specs
    ]
    sizes = [f"[{', '.join(shape)}]" for shape in shapes]
    more = f" and {len(sizes) - 12} more" if len(sizes) > 12 else ""
    return " ".join(sizes[:12]) + more
