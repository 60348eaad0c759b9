"""The ledger alone: its decisions, its states, its balance. No backward is run."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch

from compiled_autograd.diagnostics.bypass import COMPILING, NOT_YET, OVER_BUDGET
from compiled_autograd.policies import clock as clock_of_trials
from compiled_autograd.policies import ledger
from compiled_autograd.policies.clock import row_of
from compiled_autograd.policies.decision import Action, Backoff, Balance, Decision, Record, State, next_action, skips
from compiled_autograd.policies.ledger import MOST_SAMPLES, REST, ROWS, SAMPLES, TIMED, Ledger
from compiled_autograd.settings import Settings, resolve
from shadow_cache import Bypass

BESIDE, WAITS = Balance(0.0, 2.0, 10.0, waits=False), Balance(0.0, 2.0, 10.0, waits=True)
SPENT = {"lost": 9.0}
REFUSED = Bypass("unsupported")


class _Variant:
    """What is asked of a variant."""

    timing = store_timing = None
    devices = frozenset({"cpu"})

    def __init__(self) -> None:
        self.hits, self.ran = 0, 0.0
        self.program: Any = self
        self.tape = None


def _variant() -> Any:
    return _Variant()


class _Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(name="clock")
def make_clock() -> _Clock:
    return _Clock()


@pytest.fixture(name="book")
def make_ledger(clock: _Clock) -> Ledger:
    book = Ledger()
    book.clock = clock
    book.clear()
    return book


def _settings(on_miss: str = "compile", **given: Any) -> Settings:
    return resolve({"on_miss": on_miss, "tune": True, "compile_budget": None, "backend": "eager", **given}, {})


# ---- next_action -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reason", "action"),
    [(None, Action.SERVE), (TIMED, Action.EAGER), (REFUSED, Action.EAGER), (NOT_YET, Action.EAGER)],
)
def test_before_the_walk_the_reason_decides(reason: Bypass | None, action: Action) -> None:
    assert next_action(Record(0, reason=reason), None) == Decision(action, reason)


@pytest.mark.parametrize(
    ("balance", "record", "has_store", "wanted"),
    [
        # steps wait: at once, within the budget
        (WAITS, {}, False, Decision(Action.COMPILE, seconds=10.0)),
        (WAITS, {"misses": 7, "rent": 9.0}, True, Decision(Action.COMPILE, seconds=10.0)),
        # over the budget: once it has run on eager for as long as the compile is likely to take
        (WAITS._replace(**SPENT), {}, False, Decision(Action.EAGER, OVER_BUDGET, 2.0)),
        (WAITS._replace(**SPENT), {"misses": 3, "rent": 2.0}, False, Decision(Action.COMPILE)),
        (WAITS._replace(**SPENT), {}, True, Decision(Action.ASK, OVER_BUDGET)),
        (WAITS._replace(**SPENT), {"asked": True}, True, Decision(Action.EAGER, OVER_BUDGET, 2.0)),
        (WAITS._replace(lost=11.0), {}, True, Decision(Action.EAGER, OVER_BUDGET, 2.0)),
        # beside the training: only what has paid, and only within the budget
        (BESIDE, {}, False, Decision(Action.EAGER, NOT_YET, 2.0)),
        (BESIDE, {}, True, Decision(Action.EAGER, NOT_YET, 0.2)),
        (BESIDE, {"misses": 1, "rent": 0.1}, True, Decision(Action.EAGER, NOT_YET, 0.2)),
        (BESIDE, {"misses": 1, "rent": 0.2}, True, Decision(Action.ASK, NOT_YET)),
        (BESIDE, {"misses": 1, "rent": 0.1, "asked": True}, True, Decision(Action.EAGER, NOT_YET, 2.0)),
        (BESIDE, {"misses": 9, "rent": 2.0}, True, Decision(Action.COMPILE)),
        (BESIDE._replace(**SPENT), {"misses": 9, "rent": 2.0}, False, Decision(Action.EAGER, OVER_BUDGET, 4.0)),
        (BESIDE, {"state": State.COMPILING}, False, Decision(Action.EAGER, COMPILING)),
        # everything
        (BESIDE._replace(allowed=math.inf), {}, True, Decision(Action.COMPILE)),
        (WAITS._replace(allowed=math.inf, lost=1e9), {}, True, Decision(Action.COMPILE)),
        # nothing
        (WAITS._replace(allowed=0.0), {}, False, Decision(Action.EAGER, OVER_BUDGET, 2.0)),
    ],
)
def test_without_code_the_balance_decides(
    balance: Balance, record: dict[str, Any], has_store: bool, wanted: Decision
) -> None:
    assert next_action(Record(0, **record), balance, has_store) == wanted


def test_the_back_off_doubles_and_its_first_time_is_free() -> None:
    backoff, waited = Backoff(), []
    for _ in range(5):
        backoff.fail()
        waited.append(backoff.left)
        while not backoff.is_over():
            pass
    assert waited == [0, 1, 2, 4, 8]
    backoff.fail(least=100)
    assert backoff.left == 100 and not backoff.is_over(99) and backoff.is_over(5)
    backoff.fail()
    assert backoff.left == 200
    backoff.succeed()
    backoff.fail()
    assert backoff.left == 0


# ---- states ----------------------------------------------------------------------------------------------------------


def _trial(book: Ledger, record: Record, variant: Any, eager: float, compiled: float) -> int:
    """Run a trial to its end; gives the number of its backwards."""
    count = 0
    while record.state is State.TIMING:
        count += 1
        if record.reason is None:
            book.hit(record, compiled)
        else:
            assert record.reason is TIMED
            book.ran_on_eager(record, TIMED, eager)
    return count


def test_compiled_code_is_timed_and_serves_if_it_is_faster(book: Ledger) -> None:
    record, variant = book.of(1), _variant()
    assert record.state is State.NEW and not book.watched
    book.compiled(record, variant, 1.0, _settings())
    assert record.state is State.TIMING and book.watched == {1: record}
    count = _trial(book, record, variant, eager=2.0, compiled=1.0)
    assert SAMPLES <= min(len(record.eager), len(record.compiled)) < SAMPLES + max(ROWS) and count < 3 * SAMPLES
    assert record.state is State.COMPILED and not book.watched
    assert (variant.timing.eager, variant.timing.compiled) == pytest.approx((2000, 1000))
    assert not variant.timing.on_eager


def test_slower_code_is_left_to_eager_and_tried_again_ever_more_seldom(book: Ledger) -> None:
    record, variant = book.of(1), _variant()
    book.compiled(record, variant, 1.0, _settings())
    for rest in (REST, 2 * REST, 4 * REST):
        _trial(book, record, variant, eager=1.0, compiled=1.1)
        assert record.state is State.EAGER and variant.timing.on_eager
        assert record.reason is not None and record.reason.kind == "not_worth_it"
        for _ in range(rest - 1):
            book.ran_on_eager(record, record.reason, 1.0)
        assert record.state is State.EAGER
        book.ran_on_eager(record, record.reason, 1.0)
        assert record.state is State.TIMING
    _trial(book, record, variant, eager=1.0, compiled=0.9)
    assert record.state is State.COMPILED


def test_the_first_backward_of_a_row_does_not_count(book: Ledger) -> None:
    """It finds the other way's data in the caches."""
    record, variant = book.of(1), _variant()
    book.compiled(record, variant, 1.0, _settings())
    while record.state is State.TIMING:
        seconds = 100.0 if row_of(record.turn, ROWS)[1] else 1.0
        if record.reason is None:
            book.hit(record, seconds)
        else:
            book.ran_on_eager(record, TIMED, seconds)
    assert variant.timing.eager == variant.timing.compiled == pytest.approx(1000)


_SIZES: dict[str, Callable[[int], float]] = {
    "in turn": lambda number: (1.0, 10.0)[number % 2],
    "five and five": lambda number: (1.0, 10.0)[number // 5 % 2],
    "four and six": lambda number: 1.0 if number % 10 < 4 else 10.0,
    "at random": lambda number: random.Random(number).choice((1.0, 10.0)),
    "lengths": lambda number: random.Random(number).uniform(1.0, 10.0),
}


@pytest.mark.parametrize("ratio", [0.6, 1.7])
@pytest.mark.parametrize("sizes", _SIZES)
def test_a_trial_of_backwards_of_several_sizes(book: Ledger, sizes: str, ratio: float) -> None:
    record, variant = book.of(1), _variant()
    book.compiled(record, variant, 1.0, _settings())
    for number in range(10_000):
        if record.state is not State.TIMING:
            break
        seconds = _SIZES[sizes](number)
        if record.reason is None:
            book.hit(record, ratio * seconds)
        else:
            book.ran_on_eager(record, TIMED, seconds)
    assert record.state is (State.COMPILED if ratio < 1.0 else State.EAGER)
    assert len(record.eager) <= MOST_SAMPLES + max(ROWS)


@pytest.mark.parametrize("why", ["tune", "device", "deterministic"])
def test_what_is_not_timed_serves(book: Ledger, why: str) -> None:
    record, variant = book.of(1), _variant()
    variant.devices = frozenset({"cpu", "mps"} if why == "device" else {"cpu"})
    torch.use_deterministic_algorithms(why == "deterministic")
    try:
        book.compiled(record, variant, 1.0, _settings(tune=why != "tune"))
    finally:
        torch.use_deterministic_algorithms(False)
    assert record.state is State.COMPILED and not book.watched


def test_a_compile_beside_the_training(book: Ledger) -> None:
    """Two regions: eager runs the tape until both are there, and the training has lost a part of the seconds."""
    record, variant, settings = book.of(1), _variant(), _settings("background")
    for job in "ab":
        book.begins(record, variant, job)
    assert record.reason is COMPILING
    for _ in range(2):  # the second call counts nothing
        book.ended(record, variant, "a", 4.0, settings)
    assert record.state is State.COMPILING
    book.ended(record, variant, "b", 4.0, settings)
    assert record.state is State.TIMING and record.spent == 8.0 * ledger.BESIDE


def test_in_a_forked_child_nothing_is_being_compiled(book: Ledger) -> None:
    record = book.of(1)
    book.begins(record, _variant(), "a")
    book.nothing_compiles()
    assert (record.state, record.reason, record.compiling) == (State.NEW, None, set()) and not book.watched


def test_what_is_refused_is_tried_again_ever_more_seldom(book: Ledger) -> None:
    record, waited = book.of(1), []
    for _ in range(5):
        book.refused(record, REFUSED)
        waited.append(0)
        while record.reason is not None:
            waited[-1] += 1
            book.ran_on_eager(record, REFUSED, 1.0)
    assert waited == [0, 1, 2, 4, 8] and record.state is State.NEW


def test_a_new_tape_runs_on_eager_until_it_has_paid(book: Ledger) -> None:
    record, settings = book.of(1), _settings("background")
    decision = book.decide(record, settings)
    assert decision == Decision(Action.EAGER, NOT_YET, ledger.FIRST_SECONDS)
    part = ledger.FIRST_SECONDS / 6
    book.missed(record, decision, part)
    assert record.reason is NOT_YET
    book.ran_on_eager(record, NOT_YET, part, times=4)
    assert record.reason is NOT_YET
    book.ran_on_eager(record, NOT_YET, 1.1 * part)
    assert (record.state, record.reason) == (State.NEW, None)
    assert book.decide(record, settings).action is Action.COMPILE


def test_misses_beside_hits_are_tried_soon_and_alone_ever_more_seldom(book: Ledger) -> None:
    """Other sizes may be hits."""
    record, variant = book.of(1), _variant()
    book.compiled(record, variant, 1.0, _settings(tune=False))
    over, waited = Decision(Action.EAGER, OVER_BUDGET, 1e9), []
    for hits in (0, 0, 0, 0, 1, 0, 0):
        variant.hits += hits
        book.missed(record, over, 0.1)
        waited.append(0)
        while record.reason is not None:
            waited[-1] += 1
            book.ran_on_eager(record, OVER_BUDGET, 0.1)
        assert record.state is State.COMPILED
    assert waited == [0, 1, 2, 4, 0, 1, 2]


# ---- the balance -----------------------------------------------------------------------------------------------------


def test_hits_make_up_for_their_own_compile_alone(book: Ledger) -> None:
    settings = _settings()
    assert book.balance(settings) == (0.0, ledger.FIRST_SECONDS, ledger.SECONDS, True)
    one, other = _variant(), _variant()
    book.compiled(book.of(1), one, 4.0, settings)
    book.compiled(book.of(2), other, 3.0, settings)
    assert book.balance(settings).lost == 7.0
    one.hits, one.ran = 100, 3.0  # not timed: as long as they ran
    assert book.balance(settings).lost == 4.0
    _trial(book, book.of(1), one, eager=0.05, compiled=0.04)
    assert book.balance(settings).lost == pytest.approx(3.0 + 3.0)
    one.hits = 1000
    assert book.balance(settings).lost == 3.0


def test_what_one_more_is_likely_to_cost_follows_the_latest(book: Ledger) -> None:
    for number in range(20):
        book.compiled(book.of(number), _variant(), 30.0 if number < 12 else 1.0 + number % 2, _settings())
    assert book.balance(_settings()).likely == 1.5


def test_a_part_of_the_time_is_allowed(book: Ledger, clock: _Clock) -> None:
    clock.now = 1000.0
    assert book.balance(_settings()).allowed == ledger.SECONDS + 1000 * ledger.SHARE
    assert book.balance(_settings(compile_budget=2.0)).allowed == 2.0


def test_records_that_are_forgotten_leave_what_they_lost(book: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "_MAX_RECORDS", 3)
    book.spent(book.of(0), 4.0)
    for number in range(1, 10):
        book.refused(book.of(number), REFUSED)
    assert book.balance(_settings()).lost == 4.0 and not book.knows(0)
    assert len(book._records) == 3


def test_tapes_with_code_are_forgotten_last(book: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest is most often the program's main one."""
    monkeypatch.setattr(ledger, "_MAX_RECORDS", 3)
    variant = _variant()
    book.compiled(book.of(0), variant, 4.0, _settings())
    for number in range(1, 10):
        book.missed(book.of(number), Decision(Action.EAGER, NOT_YET, 9.0), 0.1)
    assert book.of(0).living() == [variant] and book.of(0).state is State.TIMING


def test_a_search_in_the_store_is_made_once(book: Ledger) -> None:
    """Also where it found the structure, and no code for the shapes."""
    record = book.of(1)
    book.missed(record, Decision(Action.EAGER, NOT_YET), 0.3)
    decision = book.decide(record, _settings("background"), has_store=True)
    assert decision.action is Action.ASK
    book.missed(record, decision, 0.01)
    assert book.decide(record, _settings("background"), has_store=True).action is Action.EAGER


def test_a_job_that_ends_after_a_reset_changes_nothing(book: Ledger) -> None:
    record, variant = book.of(1), _variant()
    book.begins(record, variant, "a")
    book.clear()
    book.ended(record, variant, "a", 4.0, _settings("background"))
    assert not book.watched and book.balance(_settings()).lost == 0.0


def test_a_trial_ends_when_the_clock_must_not_decide(book: Ledger) -> None:
    record, variant = book.of(1), _variant()
    book.compiled(record, variant, 1.0, _settings())
    torch.use_deterministic_algorithms(True)
    try:
        book.hit(record, 1.0)
    finally:
        torch.use_deterministic_algorithms(False)
    assert record.state is State.COMPILED and not book.watched


def test_under_deterministic_algorithms_the_clock_decides_nothing(book: Ledger, clock: _Clock) -> None:
    settings, variant = _settings("background"), _variant()
    torch.use_deterministic_algorithms(True)
    try:
        clock.now = 1e6
        assert book.balance(settings) == (0.0, 1.0, ledger.SECONDS, True), "steps wait"
        book.compiled(book.of(1), variant, 1e3, settings)
        assert book.balance(settings).lost == 1.0
        variant.hits, variant.ran = 1, 1e-9
        assert book.balance(settings).lost == 0.0
        record = book.of(2)
        book.missed(record, Decision(Action.EAGER, OVER_BUDGET, 2.0), 1e3)
        assert record.rent == 1.0
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_budget_is_told_once(book: Ledger) -> None:
    settings = _settings(compile_budget=10.0)
    book.compiled(book.of(1), _variant(), 4.0, settings)
    assert book.closing(settings) is None
    book.compiled(book.of(2), _variant(), 4.0, settings)
    closing = book.closing(settings)
    assert closing is not None and closing.kind == "over_budget" and "8.0 s are lost" in closing.new
    assert "compiling lost 8.0 s on 2 tapes, 0 of which have made up for it" in closing.hint
    assert book.closing(settings) is None


def test_a_capture_that_was_ended_is_lost(book: Ledger) -> None:
    record = book.of(1)
    record.misses, record.rent = 3, 9.0
    book.spent(record, 5.0)
    assert book.balance(_settings()).lost == 5.0 and (record.misses, record.rent) == (0, 0.0)


# ---- keys ------------------------------------------------------------------------------------------------------------


def test_settings_that_decide_otherwise_have_other_numbers(book: Ledger) -> None:
    others: list[dict[str, Any]] = [{}, {"tune": False}, {"check": True}, {"compile_budget": 1.0}, {"dynamic": True}]
    others += [{"on_unsupported": "raise"}, {"extension": "off"}]
    numbers = [book.number(_settings(**each)) for each in others]
    assert len(set(numbers)) == len(others)
    assert numbers == [book.number(_settings(**each)) for each in others]


def test_a_record_moves_to_the_key_of_the_extension(book: Ledger) -> None:
    """Hits are faster with it: what was timed is timed again."""
    record, variant = book.of((3, "slow")), _variant()
    assert book.has_other_keys
    book.compiled(record, variant, 1.0, _settings())
    _trial(book, record, variant, eager=1.0, compiled=2.0)
    book.move((3, "slow"), 17)
    assert book.of(17) is record and record.key == 17 and record.state is State.TIMING
    assert book.watched == {17: record} and not book.knows((3, "slow"))
    book.move((3, "unknown"), 18)
    assert not book.knows(18)


def test_what_was_timed_is_timed_again_when_eager_is_faster(book: Ledger) -> None:
    records = [book.of(number) for number in range(3)]
    for record, compiled in zip(records[:2], (0.5, 2.0), strict=True):
        variant = cast(Any, _variant())
        book.compiled(record, variant, 1.0, _settings())
        _trial(book, record, variant, eager=1.0, compiled=compiled)
        record.variants.append(lambda kept=variant: kept)  # type: ignore[arg-type]
    book.time_again()
    assert [each.state for each in records] == [State.TIMING, State.TIMING, State.NEW]


@pytest.mark.parametrize(("threads", "cuda", "clock"), [(1, False, "thread_time"), (1, True, "perf_counter")])
def test_a_trial_that_waits_for_a_gpu_uses_wall_time(
    monkeypatch: pytest.MonkeyPatch, threads: int, cuda: bool, clock: str
) -> None:
    """The engine launches from a thread of its own, whose processor time is not the caller's."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: cuda)
    monkeypatch.setattr(clock_of_trials, "wait_for_devices", lambda: None)
    for name in ("thread_time", "perf_counter"):
        monkeypatch.setattr(clock_of_trials.time, name, lambda name=name: name)
    assert clock_of_trials.now() == clock


def test_looks_get_rare_where_they_cost_most() -> None:
    assert [skips(streak, 1e-4) for streak in (1, 15, 16, 18, 20, 63, 64, 72, 127)] == [0, 0, 0, 2, 14, 57, 64, 63, 57]
    assert [skips(64, seconds) for seconds in (0.0, 3e-4, 1e-3, 0.02, 0.03)] == [64, 64, 20, 1, 0]
    torch.use_deterministic_algorithms(True)
    try:
        assert skips(64, 0.03) == 64, "no clock decides"
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("backwards_in_a_step", range(2, 14))
@pytest.mark.parametrize("seconds", [1e-4, 4e-4, 1e-3])
def test_looks_keep_in_step_with_no_training(backwards_in_a_step: int, seconds: float) -> None:
    """A large backward after many small ones is looked at too."""
    position, seen = 0, set[int]()
    for streak in range(2000):
        if streak > 100:
            seen.add(position % backwards_in_a_step)
        position += 1 + skips(streak, seconds)
    assert len(seen) == backwards_in_a_step
