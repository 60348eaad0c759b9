"""Most of what is left to eager is not looked at, nor is its root read: what comes then is found all the same."""

from __future__ import annotations

import contextlib
import itertools
import math
import sys
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import pytest
import torch
from torch import fx, nn

import compiled_autograd as ca
from compiled_autograd.diagnostics import reporting
from compiled_autograd.engine import engine
from compiled_autograd.engine import session as sessions
from compiled_autograd.engine.session import Session
from compiled_autograd.policies import autotune, sketches
from compiled_autograd.policies.autotune import AUTOTUNE, Trial
from shadow_cache import Bypass

from .helpers import assert_same, in_threads, switching_every, total
from .tuned import count_looks, leave, run_small, slow, soon  # noqa: F401


def _long(weight: torch.Tensor) -> torch.Tensor:
    return weight.cos().exp().tanh().exp().sin().exp().sum()


def _slow_but_for_long(graph_module: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
    return graph_module.forward if "tanh" in graph_module.code else slow(graph_module, examples)


def _count_roots(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One number for each tape whose root was read."""
    read: list[int] = []
    sketch = engine.sketch
    monkeypatch.setattr(engine, "sketch", lambda *ends: read.append(1) or sketch(*ends))
    return read


def _never_left(session: Session, weight: torch.Tensor) -> None:
    """The longer tape is a hit, and stays one; the shorter one is left to eager. The thread has seen nothing before."""
    here = sessions.thread.here
    here.streak, here.dice, here.doubts = 0, 0, sketches.Doubts()
    with session:
        torch.autograd.grad(_long(weight), weight)
    ((variant,),) = [graph.variants for graph in session.graphs()]
    variant.next_trial = sys.maxsize
    assert run_small(session, weight, 10)[-1] == "not_worth_it"
    leave(session, weight, 200)


def test_what_is_not_looked_at_is_counted_all_the_same(looks: list[int]) -> None:
    session, weight = ca.enable(backend=slow, tune=True), nn.Parameter(torch.randn(8))
    assert run_small(session, weight, 10)[-1] == "not_worth_it"
    before, seen = session.stats(), len(looks)
    leave(session, weight, 500)
    assert len(looks) - seen <= 6
    assert session.last is not None and session.last.outcome == "bypass"
    assert [each.kind for each in session.last.reasons] == ["not_worth_it"]  # type: ignore[union-attr]
    after = session.stats()
    assert after.backwards == before.backwards + 500
    assert after.bypasses["not_worth_it"] == before.bypasses["not_worth_it"] + 500
    assert sum(each.count for each in session._steps.events()) == after.backwards - after.hits


def test_threads_that_share_a_session_lose_no_count(looks: list[int]) -> None:
    session, weight = ca.enable(backend=slow, tune=True), nn.Parameter(torch.randn(8))
    assert run_small(session, weight, 10)[-1] == "not_worth_it"
    before = session.stats().backwards
    with switching_every(1e-6):
        in_threads(*[lambda: leave(session, weight, 400)] * 4)
    stats = session.stats()
    assert stats.backwards == before + 1600
    assert stats.hits + stats.tuning + stats.structure_misses + sum(stats.bypasses.values()) == stats.backwards
    assert stats.bypasses["not_worth_it"] > 1500


def test_roots_are_not_read_each_time_and_what_comes_then_is_found(
    looks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After many that were left to eager one after the other, one that is a hit is taken for one of them some times."""
    monkeypatch.setattr(sketches, "LOOKS_AWAY_FOR", 1.0)  # on a busy machine fewer would be let go
    read = _count_roots(monkeypatch)
    session, weight = ca.enable(backend=slow, tune=True), nn.Parameter(torch.randn(8))

    def longer() -> torch.Tensor:
        return (weight.sin().cos() * weight.tanh()).sum()

    wanted = torch.autograd.grad(longer(), weight)
    with session:
        torch.autograd.grad(longer(), weight)
    assert run_small(session, weight, 10)[-1] == "not_worth_it"
    most = sketches.LOOKS_AWAY[1]
    leave(session, weight, sketches.LEFT_BEFORE_LOOKING_AWAY + sketches.LOOKS_AWAY_OF * most)
    read.clear()
    looks.clear()
    leave(session, weight, 10 * (1 + most))
    assert len(read) <= 40 and len(looks) <= 3
    outcomes = []
    for _ in range(2 * (most + 1) + 40):
        with session:
            assert_same(torch.autograd.grad(longer(), weight), wanted)
        assert session.last is not None
        outcomes.append(session.last.outcome)
    first = outcomes.index("hit")
    assert first <= 2 * (most + 1) and {*outcomes[first:]} <= {"hit", "bypass"} and outcomes[first:].count("hit") >= 5


@pytest.mark.parametrize("what", ["another session", "forgotten", "another thread", "other settings in turn"])
def test_what_is_taken_for_others_without_a_look_is_of_the_same_thread_and_settings(
    what: str, looks: list[int]
) -> None:
    session, weight = ca.enable(backend=slow, tune=True), nn.Parameter(torch.randn(8))
    plain = ca.enable(backend=slow, tune=False)
    run_small(plain, weight, 2)
    assert run_small(session, weight, 10)[-1] == "not_worth_it"
    here = sessions.thread.here
    while here.unseen <= 10:
        leave(session, weight, 1)
    if what == "another session":
        assert run_small(plain, weight, 3) == ["hit"] * 3
    elif what == "forgotten":
        AUTOTUNE.clear()
        assert run_small(session, weight, 3) == ["hit", "tuning", "hit"]
    elif what == "another thread":
        in_threads(lambda: (run_small(plain, weight, 3), leave(session, weight, 3)))
        assert plain.stats().hits == 4 and here.unseen > 10
    else:
        for _ in range(100):
            assert run_small(plain, weight, 1) == ["hit"]
            assert run_small(session, weight, 1) == ["not_worth_it"]
        assert not here.unseen
    assert plain.stats().backwards == plain.stats().hits + 1


@pytest.mark.parametrize("leaf", [False, True])
def test_one_alone_is_taken_for_others_after_those_without_a_look(leaf: bool, looks: list[int]) -> None:
    """Its sketch is of all of them. A leaf has none."""
    session, weight, here = ca.enable(backend=slow, tune=True), nn.Parameter(torch.randn(8)), sessions.thread.here

    def loss() -> torch.Tensor:
        return weight if leaf else weight.cos().exp().sin().sum()

    with session:
        torch.autograd.grad(loss(), weight, torch.ones(8) if leaf else None)
    assert run_small(session, weight, 10)[-1] == "not_worth_it"
    while not here.unseen:
        leave(session, weight, 1)
    leave(session, weight, here.unseen)
    labels = []
    for _ in range(3):
        with session:
            torch.autograd.grad(loss(), weight, torch.ones(8) if leaf else None)
        assert session.last is not None
        labels.append(session.last.outcome)
    assert labels == (["hit"] * 3 if leaf else ["bypass", "hit", "hit"]) and not here.away


def test_what_was_not_taken_is_given_back() -> None:
    """Else a verdict would end too soon where sessions take turns."""
    looks, verdict = sketches.Looks(), Bypass("not_worth_it")
    known = sketches.Known(Trial((0, None, False), lambda: None, verdict=verdict, left=1000))  # type: ignore[arg-type]
    known.left = known.given = 1000
    for _ in range(sketches.LEFT_BEFORE_LOOKING_AWAY):
        assert looks.took_for(known, 1) is verdict
    assert looks.unseen == 16 and known.used == sketches.LEFT_BEFORE_LOOKING_AWAY + 16
    looks.unseen -= 3
    assert looks.took_for(sketches.UNKNOWN, 2) is None
    assert not looks.unseen and known.used == sketches.LEFT_BEFORE_LOOKING_AWAY + 3
    for spare in (0, 1, 2, 5):
        known.left = 1 + spare
        assert looks.took_for(known, 1) is verdict
        assert looks.unseen == max(0, spare - 1) and known.left == min(1, spare)
        known.left = 0  # it was forgotten
        assert looks.took_for(known, 1) is None and known.left == 0 and not looks.unseen


def test_the_log_has_a_line_for_each(caplog: pytest.LogCaptureFixture, looks: list[int]) -> None:
    session, weight = ca.enable(backend=slow, tune=True), nn.Parameter(torch.randn(8))
    assert run_small(session, weight, 10)[-1] == "not_worth_it"
    level = reporting._log.level
    reporting._log.setLevel("INFO")
    try:
        with caplog.at_level("INFO", logger=reporting._log.name):
            leave(session, weight, 5)
    finally:
        reporting._log.setLevel(level)
    assert len([each for each in caplog.messages if "not_worth_it" in each]) == 5


@pytest.mark.parametrize("policy", ["on_miss", "on_unsupported"])
def test_who_wants_an_error_is_not_taken_for_others(policy: str, looks: list[int]) -> None:
    """What is left to eager under other settings says nothing, and no tape goes by without a look."""

    def loss() -> torch.Tensor:
        y = weight * (1 + 1j)
        if policy == "on_unsupported":
            torch.view_as_real(y).mul_(2)  # a view that sizes and strides do not describe
        return y.abs().square().mean()

    options: dict[str, Any] = {"backend": slow, "tune": True, "cache_dir": False}
    session, weight = ca.enable(**options), nn.Parameter(torch.randn(8))
    strict, other = ca.enable(**options, **{policy: "raise"}), ca.enable(**options, on_miss="eager")
    assert run_small(session, weight, 10)[-1] == "not_worth_it"
    for before in (other, strict):
        leave(before, weight, 100)
        while before is other and sessions.thread.here.unseen < 5:
            leave(before, weight, 1)
        with pytest.raises((ca.CacheMissError, ca.UnsupportedBackwardError)), strict:
            torch.autograd.grad(loss(), weight)


def test_what_came_before_many_others_is_forgotten_too() -> None:
    looks, kept = sketches.Looks(), sketches.Sketches()
    kept.keep("one", Trial((0, None, False), lambda: None, verdict=Bypass("not_worth_it"), left=1000))
    looks.took_for(known := kept.known["one"], 1)
    for each in range(sketches._MAX_KEPT):
        kept.keep(each, None)
    kept.forget()
    assert known.left == 0


def test_what_runs_in_the_midst_of_a_sketch_changes_nothing_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """``gc`` and signals run backwards of other sessions at any call."""
    looks, verdict = sketches.Looks(), Bypass("not_worth_it")
    known, other = (
        sketches.Known(Trial((0, None, False), lambda: None, verdict=each, left=1000)) for each in (verdict, None)
    )
    for each in (known, other):
        each.left = each.given = 1000

    def least(*numbers: int) -> int:
        monkeypatch.undo()
        assert looks.took_for(other, 2) is None
        return min(numbers)

    looks.streak = sketches.LEFT_BEFORE_LOOKING_AWAY
    monkeypatch.setattr(sketches, "min", least, raising=False)
    assert looks.took_for(known, 1) is verdict
    assert (looks.known, looks.number, looks.verdict) == (known, 1, verdict)
    assert looks.unseen and known.used == 1 + looks.unseen and not other.used


def test_what_is_left_in_the_midst_of_counting_is_counted(looks: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    session, weight = ca.enable(backend=slow, tune=True), nn.Parameter(torch.randn(8))
    assert run_small(session, weight, 10)[-1] == "not_worth_it"
    leave(session, weight, 20)
    before, real = session.stats().backwards, sessions.LeftToEager

    def left(verdict: Bypass) -> Any:
        monkeypatch.setattr(sessions, "LeftToEager", real)
        leave(session, weight, 5)  # as ``gc`` or a signal may
        return real(verdict)

    monkeypatch.setattr(sessions, "LeftToEager", left)
    leave(session, weight, 1)
    assert session.stats().backwards == before + 6


def test_where_two_kinds_come_in_phases_the_second_is_soon_found(
    looks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sketches, "LOOKS_AWAY_FOR", 0.0)  # as if eager took long
    session, weight = ca.enable(backend=_slow_but_for_long, tune=True), nn.Parameter(torch.randn(8))
    _never_left(session, weight)
    found = 0
    for _ in range(10):
        leave(session, weight, 400)
        before = session.stats().hits
        with session:
            for _ in range(50):
                torch.autograd.grad(_long(weight), weight)
        found += session.stats().hits - before
    assert found >= 10 * 30


def test_one_on_trial_is_not_taken_for_those_that_are_left(looks: list[int]) -> None:
    """Else its trial would take thousands of steps, in which it runs on eager."""
    session, weight = ca.enable(backend=slow, tune=True), nn.Parameter(torch.randn(8))
    assert run_small(session, weight, 10)[-1] == "not_worth_it"
    leave(session, weight, 100)
    labels = []
    for _ in range(150):
        with session:
            torch.autograd.grad(weight.cos().exp().sin().sum(), weight)
        assert session.last is not None
        first = session.last.reasons[0] if session.last.reasons else None
        labels.append(first.label if isinstance(first, Bypass) else session.last.outcome)
        leave(session, weight, 5)
    assert labels.count("tuning") >= 3


def test_a_sketch_of_one_on_trial_that_another_has_too_is_not_believed_for_long() -> None:
    """Else those on trial were hits for a thousand backwards, however slow these are, and their trial did not end."""
    kept, trial = sketches.Sketches(), Trial((0, None, False), lambda: None)
    kept.keep_on_trial("one", trial, 5)
    known = kept.known["one"]
    assert known.left == 5
    known.left = 0
    kept.keep("one", None)  # another tape, which is on no trial
    assert not known.left and known.found is None
    kept.keep_on_trial("one", trial, 5)
    kept.keep("one", None)
    assert not known.left


def _one_in(
    number: int, session: Session, weight: torch.Tensor, rounds: int, wait: Callable[[], None] | None = None
) -> int:
    """How many of the longer ones are hits."""
    before, hits = session.stats().backwards, 0
    expected = torch.autograd.grad(_long(weight), weight)
    for _ in range(rounds):
        if wait is not None:
            wait()
        with session:
            assert_same(torch.autograd.grad(_long(weight), weight), expected)
        assert session.last is not None
        hits += session.last.outcome == "hit"
        leave(session, weight, number - 1)
    assert session.stats().backwards - before == number * rounds
    return hits


@pytest.mark.parametrize("takes", ["short", "long"])
@pytest.mark.parametrize("number", [17, *(pytest.param(each, marks=pytest.mark.slow) for each in (2, 24, 31))])
def test_one_that_comes_alone_among_many_is_found(
    number: int, takes: str, looks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was not: what was read after it was the average of all, which no tape had, and the next one was read."""
    monkeypatch.setattr(sketches, "LOOKS_AWAY_FOR", 0.0 if takes == "long" else 1.0)
    monkeypatch.setattr(sketches, "SECONDS_FOR_A_ROOT", math.inf)
    session, weight = ca.enable(backend=_slow_but_for_long, tune=True), nn.Parameter(torch.randn(8))
    _never_left(session, weight)
    rounds = 1200 // number
    assert _one_in(number, session, weight, rounds) >= 0.9 * rounds - 5


@pytest.mark.parametrize("by_clock", [True, False])
@pytest.mark.parametrize("takes", [1e-4, 0.1])
def test_the_longer_it_takes_the_more_roots_are_read_to_find_it(
    takes: float, by_clock: bool, looks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where rounding must not depend on the clock the number of roots does not."""
    monkeypatch.setattr(sketches, "LOOKS_AWAY_FOR", 0.0)
    ticks = itertools.count()
    waited = 0.0

    def wait() -> None:
        nonlocal waited
        waited += takes

    monkeypatch.setattr(sketches, "perf_counter", lambda: 1e-6 * next(ticks) + waited)
    session, weight = ca.enable(backend=_slow_but_for_long, tune=True), nn.Parameter(torch.randn(8))
    _never_left(session, weight)
    monkeypatch.setattr(sketches, "by_clock", lambda: by_clock)
    hits = _one_in(100, session, weight, 20, wait)
    if takes < 0.1 or not by_clock:
        assert hits <= 10 and sessions.thread.here.doubts.first == 0
    else:
        assert hits >= 12


def test_two_kinds_that_are_left_are_soon_not_told_apart(looks: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each batch whose roots are not read has another kind among it, and no hit is ever found."""
    monkeypatch.setattr(sketches, "LOOKS_AWAY_FOR", 0.0)
    read = _count_roots(monkeypatch)
    session, weight = ca.enable(backend=slow, tune=True), nn.Parameter(torch.randn(8))
    assert run_small(session, weight, 10)[-1] == "not_worth_it"
    with session:
        for _ in range(100):
            torch.autograd.grad(_long(weight), weight)
    assert session.stats().bypasses["not_worth_it"] > 50
    _one_in(20, session, weight, 100)
    read.clear()
    assert _one_in(20, session, weight, 100) == 0
    assert len(read) <= 2000 / 14 * 2 + 2 * sketches.LEFT_BEFORE_LOOKING_AWAY


@pytest.mark.parametrize("where", ["outside", "another session"])
def test_tapes_of_others_are_none_among_those_whose_roots_are_not_read(
    where: str, looks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    doubts: list[int] = []
    seen = sketches.Looks.were_not_alike

    def were_not_alike(here: sketches.Looks) -> None:
        doubts.extend([1] * bool(here.length))
        seen(here)

    monkeypatch.setattr(sketches.Looks, "were_not_alike", were_not_alike)
    session, weight = ca.enable(backend=slow, tune=True), nn.Parameter(torch.randn(8))
    other = ca.enable(backend="eager", tune=False) if where == "another session" else contextlib.nullcontext()
    assert run_small(session, weight, 10)[-1] == "not_worth_it"
    leave(session, weight, 200)
    for _ in range(30):
        with other:
            torch.autograd.grad(_long(weight), weight)
        leave(session, weight, 30)
    assert not doubts


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(each, marks=pytest.mark.slow) for each in range(2, 8))])
def test_tapes_in_any_order_lose_nothing(seed: int, looks: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Kinds that are hits, that are left, that nobody has seen, of other sessions and threads: alone, in turn and in
    rows of random lengths. Gradients are eager's, and each backward is counted once."""
    random = Random(seed)
    monkeypatch.setattr(sketches, "LOOKS_AWAY_FOR", random.choice([0.0, 6e-3, 1.0]))
    monkeypatch.setattr(sketches, "SECONDS_FOR_A_ROOT", random.choice([1e-7, 1e-5, math.inf]))
    monkeypatch.setattr(autotune, "BACKWARDS_BEFORE_RETRIAL", random.choice([5, 100, 10_000]))
    session, weight = ca.enable(backend=_slow_but_for_long, tune=True), nn.Parameter(torch.randn(8))
    other = ca.enable(backend="eager", tune=False)
    losses: list[Callable[[], torch.Tensor]] = [
        lambda: (weight.exp() * weight).sum(),
        lambda: _long(weight),
        lambda: (weight.exp() * weight * weight).sum(),
        lambda: (weight.exp() * weight).sum() * (weight.sum() if random.random() < 0.5 else 2.0),
        lambda: weight,
    ]
    wanted = 0

    def backward(kind: int, inside: Any) -> None:
        loss = losses[kind]()
        retain, ones = random.random() < 0.1, None if loss is not weight else torch.ones(8)
        with inside:
            found = torch.autograd.grad(loss, weight, ones, retain_graph=True)
            if retain:
                assert_same(torch.autograd.grad(loss, weight, ones, retain_graph=True), found)
        assert_same(found, torch.autograd.grad(loss, weight, ones))
        nonlocal wanted
        wanted += (1 + retain) * (inside is session)

    def run(row: list[tuple[int, Any]]) -> None:
        for each in row:
            backward(*each)

    run_small(session, weight, 10)
    counted = session.stats().backwards
    for _ in range(40):
        often, seldom = random.sample(range(len(losses)), 2)
        inside = random.choice([session, session, session, other, contextlib.nullcontext()])
        row = [*[(often, session)] * random.choice([1, 3, 16, 17, 40, 80]), (seldom, inside)]
        repeated = row * random.choice([1, 1, 2])
        if random.random() < 0.1:
            in_threads(lambda: run(repeated))  # noqa: B023
        else:
            run(repeated)
    stats = session.stats()
    assert stats.backwards - counted == wanted
    assert total(stats) == stats.backwards
    assert stats.bypasses["not_worth_it"] > 100


def test_one_pause_does_not_have_all_roots_read_for_ever(looks: list[int]) -> None:
    """Data was waited for where another tape was among those whose roots were not read: it was taken for the one that
    took long, and as long as any hit came all roots were read."""
    session, weight = ca.enable(backend=_slow_but_for_long, tune=True), nn.Parameter(torch.randn(8))
    _never_left(session, weight)
    here = sessions.thread.here
    here.doubts.first = here.streak = sketches.LEFT_BEFORE_LOOKING_AWAY - sketches.MOST_ROOTS
    assert _one_in(40, session, weight, 30) >= 10
    assert here.doubts.first > -40


def test_a_miss_is_no_hit_that_was_looked_for(looks: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sketches, "LOOKS_AWAY_FOR", 0.0)
    monkeypatch.setattr(sketches, "SECONDS_FOR_A_ROOT", math.inf)
    session, weight = ca.enable(backend=slow, tune=True), nn.Parameter(torch.randn(8))
    assert run_small(session, weight, 10)[-1] == "not_worth_it"
    same = ca.enable(backend=slow, tune=True, on_miss="eager")
    leave(same, weight, 200)
    here = sessions.thread.here
    here.doubts = sketches.Doubts()
    assert _one_in(20, same, weight, 80) == 0
    assert same.stats().bypasses["on_miss"] >= 2 and here.doubts.let_go >= 7


def test_what_is_no_tape_of_theirs_is_not_looked_for(looks: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """With ``create_graph`` none is a hit, and nobody looks at it."""
    session, weight = ca.enable(backend=slow, tune=True), nn.Parameter(torch.randn(8))
    assert run_small(session, weight, 10)[-1] == "not_worth_it"
    leave(session, weight, 200)
    here = sessions.thread.here
    here.doubts = sketches.Doubts()
    for _ in range(20):
        with session:
            torch.autograd.grad(_long(weight), weight, create_graph=True)
        leave(session, weight, 39)
    assert here.doubts.let_go == 0 and session.stats().bypasses["create_graph"] == 20


def test_what_is_usual_is_of_whole_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(sketches, "perf_counter", lambda: now)
    looks, verdict = sketches.Looks(), Bypass("not_worth_it")
    known, other = (
        sketches.Known(Trial((0, None, False), lambda: None, verdict=verdict, left=1000))  # type: ignore[arg-type]
        for _ in range(2)
    )
    known.left = other.left = 10**6
    for _ in range(sketches.LEFT_BEFORE_LOOKING_AWAY):
        looks.took_for(known, 1)
    for left, which, usual in ((0, known, 1.0), (5, known, 1.0), (0, other, 1.0), (0, other, 2.0)):
        length = looks.length
        assert length >= 14
        now += usual * length if not left else 1e6
        looks.unseen = left
        looks.took_for(which, 1)
        assert looks.doubts.usual == usual
