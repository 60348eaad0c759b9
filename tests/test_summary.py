"""What a session, its records and a tape show of themselves: a few lines for a person, and numbers for a log."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

import compiled_autograd as ca
from compiled_autograd.cache.variants import Variant
from compiled_autograd.report.step_log import StepLog
from compiled_autograd.report.verdict import Worth, what_next
from compiled_autograd.settings import Settings
from compiled_autograd.shadow_cache import Miss

from .helpers import in_subprocess, mlp


def _run(session: ca.Session, steps: int, model: torch.nn.Module | None = None, **given: Any) -> None:
    model = mlp() if model is None else model
    for _ in range(steps):
        model.zero_grad()
        loss = model(torch.randn(3, 8)).sum()
        with session:
            torch.autograd.grad(loss, [*model.parameters()], **given) if given else loss.backward()


def _timed(session: ca.Session, model: torch.nn.Module) -> Variant:
    """Run until a variant is timed: on a busy machine its trials begin anew."""
    for _ in range(100):
        _run(session, 20, model)
        (variant,) = (variant for graph in session.graphs() for variant in graph.variants)
        if variant.timing is not None:
            return variant
    raise AssertionError("no trial was decided")


def _session(**settings: Any) -> ca.Session:
    return ca.enable(**{"backend": "eager", "cache_dir": False, "tune": False, **settings})


def test_the_summary_of_a_session() -> None:
    session, model = _session(), mlp()
    _run(session, 3, model)
    _run(session, 1, torch.nn.Sequential(torch.nn.Linear(8, 2), torch.nn.ReLU()))
    _run(session, 1, model, create_graph=True)
    _run(session, 1, model)
    found = session.summary()
    assert found.stats == session.stats() and (found.timed, found.variants) == (0, 2)
    assert found.seconds_saved is None and found.seconds_spent >= found.stats.compile_seconds > 0
    assert found.left_to_eager == {"create_graph": 1} and found.hints.keys() == {"create_graph"}
    assert found.compiled_since == 6
    first, compiled, time, on_eager, what_next = str(found).splitlines()
    assert first == "compiled_autograd: 6 backwards: 3 hits, 2 misses, 1 left to eager"
    assert compiled == "  compiled  2 regions; all hits since backward 6"
    assert time.startswith("  time      eager's time is not known (tune=False does not time it); steps waited ")
    assert on_eager.startswith("  on eager  1 create_graph: ") and what_next == (
        "  next      look up 'create_graph' in docs/bypasses.md"
    )
    assert found.line.startswith(
        "compiled_autograd: 6 backwards: 3 hits, 2 misses, 1 left to eager (create_graph); 2 reg"
    )
    assert found.line.endswith(found.worth) and found.worth in time


def test_nothing_is_steady_while_the_last_backward_missed() -> None:
    session = _session()
    _run(session, 1)
    assert session.summary().compiled_since is None
    _run(session, 1)
    assert session.summary().compiled_since == 2


def test_seconds_saved_are_those_that_were_timed() -> None:
    session = _session(tune=True)
    variant = _timed(session, mlp())
    assert variant.timing is not None
    found = session.summary()
    saved = variant.hits * (variant.timing.eager - variant.timing.compiled) / 1e3
    assert found.timed == 1 and found.seconds_saved == pytest.approx(saved)
    assert f"s {'saved' if saved >= 0 else 'lost'}" in found.worth
    assert session.metrics()["compiled_autograd/seconds_saved"] == found.seconds_saved


def test_until_that_is_decided_they_are_those_of_backwards_on_eager() -> None:
    """In the middle of a trial, and while it is compiled in the background."""
    session, model = _session(tune=True), mlp()
    for _ in range(100):
        _run(session, 1, model)
        if session.stats().tuning:
            break
    (variant,) = (variant for graph in session.graphs() for variant in graph.variants)
    found = session.summary()
    assert variant.timing is None and found.timed == 1 and found.seconds_saved is not None
    (event,) = (event for event in session._steps.events() if event.timed and event.outcome == "bypass")
    each = event.seconds["run"] / event.timed
    assert found.seconds_saved == pytest.approx(variant.hits * each - variant.ran)


def test_they_are_unknown_where_eagers_backwards_may_be_of_another_tape() -> None:
    session = _session(tune=True)
    for model in (mlp(), torch.nn.Linear(8, 2)):
        for _ in range(3):
            _run(session, 1, model)
    found = session.summary()
    assert found.variants == 2 and found.seconds_saved is None and "seconds_saved" not in str(session.metrics())


def test_of_hits_of_several_sessions_each_has_its_part() -> None:
    session, other, model = _session(tune=True), _session(tune=True), mlp()
    variant = _timed(session, model)
    before = session.summary()
    assert before.seconds_saved is not None and variant.timing is not None
    if not variant.timing.on_eager:
        hits = variant.hits
        _run(other, 100, model)
        alone, both = other.summary().seconds_saved, session.summary().seconds_saved
        assert alone is not None and both is not None and variant.hits > hits
        assert alone == pytest.approx(before.seconds_saved * other.stats().hits / hits)
        assert both == pytest.approx(before.seconds_saved)


def test_what_is_timed_is_counted_apart() -> None:
    session = _session(tune=True)
    _run(session, 60)
    stats = session.stats()
    assert stats.tuning and stats.bypasses.keys() <= {"not_worth_it"}
    others = stats.hits + stats.shape_misses + stats.structure_misses + sum(stats.bypasses.values())
    assert stats.backwards == stats.tuning + others
    assert session.metrics()["compiled_autograd/tuning"] == stats.tuning


def test_metrics_are_numbers_by_name() -> None:
    session = _session()
    _run(session, 4)
    found = session.metrics()
    assert all(name.startswith("compiled_autograd/") for name in found)
    assert all(type(value) in (int, float) for value in found.values())
    short = {name.partition("/")[2]: value for name, value in found.items()}
    assert (short["backwards"], short["hits"], short["misses"], short["left_to_eager"]) == (4, 3, 1, 0)


def test_what_is_compiled_beside_the_steps_is_not_waited_for() -> None:
    session, model = _session(on_miss="background"), mlp()
    for _ in range(3):
        _run(session, 1, model)
        assert session.wait(60)
    found = session.summary()
    assert found.stats.compiles and 0 < found.seconds_spent < found.stats.compile_seconds


def test_variants_that_another_session_left_to_eager_were_timed() -> None:
    assert Worth(0.0, 0.0, 2, 2, 2).text(Settings()) == "eager is faster, and is used from now on"
    assert Worth(0.0, 0.0, 0, 0, 0).text(Settings()).startswith("eager's time is not known")


def test_each_next_step_has_its_cause() -> None:
    unknown, lost, saved, much = (Worth(eager, 2.0, int(eager > 0), 0, 1) for eager in (0.0, 1.0, 3.0, 5.0))
    shape, new = (tuple([Miss(kind)] * 7) for kind in ("shape", "new_node"))
    cases: list[tuple[ca.Stats, Worth, tuple[Miss, ...], str]] = [
        (ca.Stats(), unknown, (), "call backward()"),
        (ca.Stats(10, hits=10, failures=1), unknown, (), "report what failed"),
        (ca.Stats(10, hits=1, bypasses={"not_worth_it": 9}), saved, (), "timed again from time to time"),
        (ca.Stats(10, hits=1, bypasses={"create_graph": 9}), saved, (), "look up 'create_graph'"),
        (ca.Stats(10, structure_misses=1, bypasses={"compiling": 9}), unknown, (), "compiling has not ended"),
        (ca.Stats(10, bypasses={"create_graph": 9, "compiling": 1}), unknown, (), "look up 'create_graph'"),
        (ca.Stats(10, bypasses={"not_yet": 10}), unknown, (), 'long enough; `on_miss="compile"` compiles it at once'),
        (ca.Stats(10, structure_misses=1, bypasses={"not_yet": 6, "compiling": 3}), unknown, (), "has not ended yet"),
        (ca.Stats(10, hits=2, bypasses={"not_yet": 8}), much, (), "nothing"),
        (ca.Stats(10, hits=5, structure_misses=1, bypasses={"not_yet": 4}), much, (), "nothing"),
        (ca.Stats(10, hits=4, structure_misses=1, bypasses={"compiling": 5}), much, (), "nothing"),
        (ca.Stats(10, hits=3, shape_misses=7), saved, shape, "7 misses are of the kind shape. Pad to a few"),
        (ca.Stats(10, hits=3, structure_misses=7), saved, new, "7 misses are of the kind new_node."),
        (ca.Stats(10, hits=10), lost, (), "leave this model to eager"),
        (ca.Stats(10, hits=10), unknown, (), "run on"),
        (ca.Stats(10, hits=10), saved, (), "a second run"),
        (ca.Stats(10, hits=10), much, (), "nothing"),
    ]
    for stats, worth, reasons, text in cases:
        events = StepLog()
        events.add(10, "shape_miss", None, reasons, {}, 0, 0)
        assert text in what_next(stats, worth, 2.0, events.events(), Settings()), text
    for backend, is_advised in (("eager", True), ("inductor", False)):
        advice = what_next(ca.Stats(10, hits=10), lost, 2.0, (), Settings(backend=backend))
        assert ("backend='inductor'" in advice) is is_advised


# ---- at a prompt and in a notebook -----------------------------------------------------------------------------------


def test_everything_shows_itself_in_a_few_lines() -> None:
    session, model = _session(), torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(50)))
    _run(session, 2, model)
    loss = model(torch.randn(3, 8)).sum()
    tape = ca.inspect(loss)
    shown = [session, session.summary(), session.stats(), session.last, session.graphs()[0], tape, tape.memory()]
    for each in shown:
        text = repr(each)
        assert len(text) < 4000 and text.count("\n") < 50, type(each)
        if each is not tape:
            assert each._repr_html_().startswith("<pre ") and "<Session" not in each._repr_html_()  # type: ignore[union-attr]
    assert str(session) == str(session.summary())
    assert repr(session) == "<session with 'eager': 2 backwards: 1 hit, 1 miss>"
    assert repr(session.stats()).startswith("2 backwards: 1 hit, 1 miss; 1 region compiled in ")
    assert repr(session.last).startswith("hit in ") and "of Sequential" in repr(session.last)
    assert repr(tape).startswith("<tape of Sequential: ") and str(tape) != repr(tape)
    assert len(tape.nodes) > 100 and tape.memory().bytes > 0


def test_an_outcome_has_its_reasons() -> None:
    session = _session()
    assert repr(session.last) == "None"
    _run(session, 1, create_graph=True)
    assert repr(session.last).splitlines()[1].startswith("  create_graph")


# ---- at the end of a process -----------------------------------------------------------------------------------------

_PROGRAM = """
import compiled_autograd as ca, torch, os
settings = dict(backend="eager", cache_dir=False)
with ca.enable(**settings, summary=True):
    for _ in range(3):
        torch.ones(3, requires_grad=True).exp().sum().backward()
ca.enable(**settings, summary=True)
with ca.enable(**settings):
    torch.ones(3, requires_grad=True).exp().sum().backward()
child = os.fork()
if not child:
    raise SystemExit
os.waitpid(child, 0)
print("ended")
"""


def test_it_is_printed_once_when_the_process_ends() -> None:
    ended = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True, timeout=300)
    assert ended.stdout == "ended\n" and ended.stderr.count("compiled_autograd: 3 backwards: 2 hits, 1 miss") == 1
    assert ended.stderr.count("compiled_autograd:") == 1 and ended.stderr.endswith("\n")


def test_a_variable_asks_for_it_and_a_closed_stderr_hinders_nothing() -> None:
    code = (
        "import os; os.environ['COMPILED_AUTOGRAD_SUMMARY'] = '1'; import compiled_autograd as ca, torch, sys\n"
        "with ca.enable(backend='eager', on_miss='compile', cache_dir=False) as session:\n"
        "    torch.ones(3, requires_grad=True).exp().sum().backward()\n"
        "assert session.settings.summary\n"
    )
    assert "1 backward: 0 hits, 1 miss" in in_subprocess(code).stderr
    assert in_subprocess(code + "sys.stderr.close()").returncode == 0
