"""Export the backwards of a session as a trace for Perfetto: Chrome's trace-event format, as JSON."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ..cache.graphs import CompiledGraph
from ..diagnostics.node_names import title
from ..outcomes import BYPASS, HIT
from ..versions import VERSION
from .step_log import Compile, Hit, StepEvent

_BACKWARDS, _COMPILING = 1, 2
_TRACKS = {_BACKWARDS: "backward", _COMPILING: "compiling in the background"}
_INSIDE = ("lower", "compile", "load", "prove")
"""Stages of a run. Only their durations are known: they are drawn in sequence, from the start of the run."""
_TRACE = {"lower": "trace"}


def trace_of(
    events: Sequence[StepEvent], hits: Sequence[Hit], beside: Sequence[Compile], graphs: Sequence[CompiledGraph]
) -> str:
    """Return the trace as JSON.

    Args:
        events: the backwards that were no plain hits.
        hits: the hits whose times are kept.
        beside: the compiles in the background.
        graphs: the structures, for their names.
    """
    titles = {graph.number: title(graph.tape) for graph in graphs}
    elsewhere = {each.graph for each in beside}
    from_epoch = time.time() - time.perf_counter()
    slices: list[dict[str, Any]] = []
    for hit in hits:
        seconds = {"capture": hit.capture, "run": hit.run}
        slices += _backward(HIT, from_epoch + hit.began, seconds, {"backward": hit.number})
    for event in events:
        slices += _event(event, titles, event.graph in elsewhere)
    for made in beside:
        name = titles.get(made.graph, "a structure")
        slices.append(_slice(_COMPILING, f"compile {name}", made.when - made.seconds, made.seconds, {}))
    began = min((each["ts"] for each in slices), default=0.0)
    for each in slices:
        each["ts"] = round(each["ts"] - began, 3)
    names = [_name("process_name", 0, f"compiled_autograd {VERSION}")]
    names += [_name("thread_name", track, name) for track, name in _TRACKS.items()]
    found = {"traceEvents": names + slices, "displayTimeUnit": "ms", "otherData": {"began": began / 1e6}}
    return json.dumps(found, separators=(",", ":"))


def _event(event: StepEvent, titles: Mapping[int, str], compiled_beside: bool) -> list[dict[str, Any]]:
    facts: dict[str, Any] = {"backward": event.number, "reasons": [str(each) for each in event.reasons]}
    if event.graph is not None and event.graph in titles:
        facts["structure"] = titles[event.graph]
    facts |= {"compiled": event.compiles} if event.compiles else {}
    facts |= {"loaded": event.loads} if event.loads else {}
    if event.count > 1:  # the forwards between them are inside the slice
        facts |= {"count": event.count, "seconds": event.seconds.get("run", 0.0), "timed": event.timed}
        name = f"{event.count:,} {_words(event)}"
        return [_slice(_BACKWARDS, name, event.began, event.when - event.began, facts)]
    seconds = dict(event.seconds)
    if compiled_beside:  # their seconds were spent on the other track
        for stage in ("lower", "compile"):
            if stage in seconds:
                facts[f"{stage} in background"] = seconds.pop(stage)
    return _backward(_words(event), event.began, seconds, facts)


def _words(event: StepEvent) -> str:
    words = event.outcome.replace("_", " ")
    if event.outcome != BYPASS or not event.reasons:
        return words
    return f"{words}: {getattr(event.reasons[0], 'label', '')}"


def _backward(name: str, began: float, seconds: Mapping[str, float], facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the slice of one backward, and the slices of its stages inside it."""
    capture, run = seconds.get("capture", 0.0), seconds.get("run", 0.0)
    found = [_slice(_BACKWARDS, name, began, capture + run, facts)]
    if capture:
        found.append(_slice(_BACKWARDS, "capture", began, capture, {}))
    if capture and run:
        found.append(_slice(_BACKWARDS, "run", began + capture, run, {}))
    at, end = began + capture, began + capture + run
    for stage in _INSIDE:
        spent = min(seconds.get(stage, 0.0), end - at)
        if spent > 0:
            found.append(_slice(_BACKWARDS, _TRACE.get(stage, stage), at, spent, {}))
            at += spent
    return found


def _slice(track: int, name: str, began: float, seconds: float, facts: Mapping[str, Any]) -> dict[str, Any]:
    found = {
        "ph": "X",
        "pid": os.getpid(),
        "tid": track,
        "name": name,
        "ts": 1e6 * began,
        "dur": round(1e6 * seconds, 3),
    }
    return {**found, "args": dict(facts)} if facts else found


def _name(kind: str, track: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": os.getpid(), "tid": track, "name": kind, "args": {"name": name}}
