"""The answer at the top of a report, the milliseconds of each backward, and the trace for Perfetto."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import compiled_autograd as ca
from compiled_autograd.engine.native_hits import NativeHits
from compiled_autograd.report.step_log import MAX_HITS, hits_in, keep_hit
from shadow_cache.report.data import Verdict

from .both_walks import native_plans, walked  # noqa: F401  a fixture
from .helpers import trials_of_two_rows
from .report_pages import Page, trained


def _verdict(session: ca.Session, folder: Path) -> Verdict:
    found = Page.read(session.report(folder / "report.html")).report["verdict"]
    return Verdict(found["text"], found["next"])


def test_no_backward_is_said_to_be_none(tmp_path: Path) -> None:
    verdict = _verdict(ca.enable(backend="eager"), tmp_path)
    assert verdict.text == "No backward ran in this session." and "`with` block" in verdict.next


def test_a_time_that_is_not_known_is_said_to_be(tmp_path: Path) -> None:
    verdict = _verdict(trained(nn.Linear(4, 1), 5), tmp_path)
    assert "Eager's time is not known (tune=False does not time it)" in verdict.text
    assert "4 hits, 1 miss; 1 region compiled in" in verdict.text and "tune" in verdict.next
    assert "(not timed yet)" in _verdict(trained(nn.Linear(4, 1), 5, tune=True), tmp_path).text


def test_hits_alone_have_no_misses_to_explain(tmp_path: Path) -> None:
    model = nn.Linear(4, 1)
    trained(model, 1)
    session = trained(model, 3)
    assert session.stats().hits == 3
    verdict = _verdict(session, tmp_path)
    assert verdict.text.endswith("3 backwards: 3 hits.")
    notes = {each["label"]: each["note"] for each in Page.read(tmp_path / "report.html").report["totals"]}
    assert notes["misses"] == notes["from disk"] == notes["failures"] == notes["bypasses"] == ""


def test_what_hits_saved_is_that_of_the_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trials_of_two_rows(monkeypatch)
    session = trained(nn.Linear(4, 1), 60, tune=True)
    timing, hits = session.graphs()[0].variants[0].timing, session.graphs()[0].variants[0].hits
    assert timing is not None
    text = _verdict(session, tmp_path).text
    timeline = Page.read(tmp_path / "report.html").report["timeline"]
    assert timeline["eager"] == timing.eager
    if timing.on_eager:
        assert text.startswith("Eager is faster")
    else:
        milliseconds = abs(timing.eager - timing.compiled) * hits
        assert text.startswith(f"Backward {timing.compiled / timing.eager:.2f} of eager's, {milliseconds:.0f} ms ")


def test_a_reason_that_comes_again_is_what_to_look_into(tmp_path: Path) -> None:
    model = nn.Linear(4, 1)
    with ca.enable(backend="eager", cache_dir=False, tune=False, dynamic=False) as session:
        for rows in (2, 3, 4, 5):
            model(torch.randn(rows, 4)).sum().backward()
            model.zero_grad()
        assert _verdict(session, tmp_path).next.startswith("3 misses are of the kind shape. Pad to a few sizes")
        for _ in range(9):
            model(torch.randn(2, 4)).sum().backward(create_graph=True)
    verdict = _verdict(session, tmp_path)
    assert "9 left to eager (create_graph)" in verdict.text
    assert verdict.next == "look up 'create_graph' in docs/bypasses.md."


def test_each_backward_has_its_milliseconds(tmp_path: Path) -> None:
    model, before = nn.Linear(4, 1), time.perf_counter()
    session = trained(model, 12)
    with session:
        for _ in range(2):
            model(torch.randn(5, 4)).sum().backward(create_graph=True)
    most = 1e3 * (time.perf_counter() - before)
    took = Page.read(session.report(tmp_path / "report.html")).report["timeline"]["took"]
    assert [each[0] for each in took] == [*range(1, 13), 14] and took[-1][1] == 2
    assert [each[3] for each in took] == ["structure_miss", *["hit"] * 11, "bypass"]
    assert all(each[2] > 0 for each in took) and sum(each[1] * each[2] for each in took) < most


def test_the_last_hits_are_kept() -> None:
    kept = None
    for number in range(1, MAX_HITS + 3):
        kept = keep_hit(kept, number, {"capture": 1e-5, "run": number})
    hits = hits_in(kept)
    assert [each.number for each in hits] == [*range(3, MAX_HITS + 3)]
    assert all((each.capture, each.run) == (1e-5, each.number) for each in hits)
    assert hits_in(None) == [] and keep_hit(None, 1, {}) is None


def test_hits_of_the_fast_path_are_kept_too(native: NativeHits) -> None:
    model, began = nn.Linear(4, 1), time.perf_counter()
    with walked() as session:
        for _ in range(30):
            model.zero_grad()
            model(torch.randn(5, 4)).sum().backward()
    ended = time.perf_counter()
    hits = hits_in(session.hit_times)
    assert [each.number for each in hits] == [*range(2, 31)] and session.stats().hits == 29 and native.hits > 0
    at = [began, *(each.began for each in hits), ended]
    assert at == sorted(at)
    for one, other in itertools.pairwise(hits):
        assert one.began + one.capture + one.run <= other.began
    with walked() as session:  # all of them are C++'s
        for _ in range(3):
            model.zero_grad()
            model(torch.randn(5, 4)).sum().backward()
    assert [each.number for each in hits_in(session.hit_times)] == [2, 3]


# The trace


def _slices(path: Path) -> list[dict[str, Any]]:
    events = json.loads(path.read_text())["traceEvents"]
    names = {each["tid"]: each["args"]["name"] for each in events if each["name"] == "thread_name"}
    assert names == {1: "backward", 2: "compiling in the background"}
    return [each for each in events if each["ph"] == "X"]


def test_a_trace_has_a_slice_for_each_backward(tmp_path: Path) -> None:
    model = nn.Linear(4, 1)
    session = trained(model, 5)
    with session:
        model(torch.randn(5, 4)).sum().backward(create_graph=True)
    path = session.trace(tmp_path / "trace.json")
    assert path == tmp_path / "trace.json"
    slices = _slices(path)
    backwards = sorted((each for each in slices if "args" in each), key=lambda each: each["args"]["backward"])
    assert [each["name"] for each in backwards] == ["structure miss", *["hit"] * 4, "bypass: create_graph"]
    assert backwards[0]["args"]["reasons"][0].startswith("first_seen") and "Linear" in backwards[0]["args"]["structure"]
    inside = [each for each in slices if "args" not in each]
    stages = {each["name"] for each in inside if each["ts"] < backwards[1]["ts"]}
    assert {"capture", "trace", "compile", "run"} <= stages
    for part in inside:
        assert any(
            whole["ts"] - 1 <= part["ts"] and part["ts"] + part["dur"] <= whole["ts"] + whole["dur"] + 1
            for whole in backwards
        )
    for one, other in itertools.pairwise(backwards):
        assert one["ts"] + one["dur"] <= other["ts"] + 1000  # two clocks: that of the epoch may be set


def test_what_is_compiled_beside_has_a_track_of_its_own(tmp_path: Path) -> None:
    model, x = nn.Linear(4, 1), torch.randn(5, 4)
    with ca.enable(backend="eager", cache_dir=False, tune=False, on_miss="background") as session:
        for _ in range(3):
            model.zero_grad()
            model(x).sum().backward()
            assert session.wait(60)
    slices = _slices(session.trace(tmp_path / "trace.json"))
    (compiled,) = [each for each in slices if each["tid"] == 2]
    assert compiled["name"].startswith("compile ") and compiled["dur"] > 0
    assert not [each for each in slices if each["tid"] == 1 and each["name"] in ("trace", "compile")]


def test_an_empty_trace_can_be_read(tmp_path: Path) -> None:
    assert _slices(ca.enable(backend="eager").trace(tmp_path / "trace.json")) == []
