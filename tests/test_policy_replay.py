"""The replay of policies: its arithmetic, its lower bound, its recorder, the stored sequences. No time is asserted."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from benchmarks.policy import __main__ as command
from benchmarks.policy import programs, recorder, sequence
from benchmarks.policy.ledger import Replayed
from benchmarks.policy.oracle import bound
from benchmarks.policy.plain import Always, EagerOnly
from benchmarks.policy.sequence import FOLDER, Event, Recording, Tape
from benchmarks.policy.simulator import Action, Happened, Machine, Way, replay

QUIET = Machine(slows=1.0, switch=0.0, by_calls=1.0)
STORED = sorted(FOLDER.glob("*.json"))


def _tape(structure: int = 0, shape: int = 0, **changes: Any) -> Tape:
    given = {"eager": 1.0, "hit": 0.5, "capture": 1.0, "lower": 2.0, "compile": 4.0, "beside": 6.0, **changes}
    return Tape(structure, shape, structure, 10, "Root", **given)


def _events(*tapes: Tape, gap: float = 0.0) -> list[Event]:
    return [Event(tape, gap, 1.0, 1.0) for tape in tapes]


class _Plan(EagerOnly):
    """One way after the other; then served."""

    def __init__(self, *ways: Way, limit: float = float("inf")) -> None:
        self._ways, self._limit = list(ways), limit
        self.happened: list[Happened] = []
        self.arrivals: list[tuple[Tape, float]] = []

    def action(self, tape: Tape, now: float) -> Action:
        return Action(self._ways.pop(0) if self._ways else Way.SERVE, limit=self._limit)

    def told(self, tape: Tape, happened: Happened) -> None:
        self.happened.append(happened)

    def arrived(self, tape: Tape, seconds: float) -> None:
        self.arrivals.append((tape, seconds))


# ---- the simulator ---------------------------------------------------------------------------------------------------


def test_eager_takes_what_eager_takes() -> None:
    result = replay(EagerOnly(), _events(*[_tape()] * 4, gap=0.25))
    assert (result.total, result.eager, result.backward, result.longest) == (5.0, 5.0, 4.0, 0.0)
    assert (result.compiles, result.hits) == (0, 0)


def test_a_compile_that_is_waited_for() -> None:
    result = replay(Always(), _events(*[_tape()] * 21), start=3.0, machine=QUIET)
    assert result.total == 3.0 + 7.0 + 1.0 + 20 * 0.5
    assert (result.longest, result.hits, result.compiles, result.unpaid) == (10.0, 20, 1, 1)
    assert replay(Always(), _events(*[_tape()] * 22), start=3.0, machine=QUIET).unpaid == 0, "saved a half more"


def test_a_compile_beside_arrives_later() -> None:
    plan = _Plan(Way.BESIDE, Way.BESIDE)
    result = replay(plan, _events(*[_tape()] * 10), machine=QUIET)
    assert [each.ran for each in plan.happened[:2]] == [Way.BESIDE, Way.EAGER]
    assert plan.happened[0].compiling == 1.0, "the capture is waited for"
    assert plan.arrivals == [(_tape(), 6.0)]
    # capture and five backwards are over when it comes, in the sixth, which had begun on eager
    assert [each.ran for each in plan.happened].index(Way.SERVE) == 5
    assert result.total == 1.0 + 5 * 1.0 + 5 * 0.5


def test_with_one_core_a_compile_beside_takes_half_of_it() -> None:
    result = replay(_Plan(Way.BESIDE), _events(*[_tape()] * 20), machine=Machine(1, 1.0, 0.0, 1.0))
    assert result.total == 2 * (1.0 + 5 * 1.0) + 15 * 0.5


def test_steps_are_slower_beside_a_compile() -> None:
    events = _events(*[_tape(beside=100.0)] * 11)
    assert replay(_Plan(Way.BESIDE), events, machine=Machine(2, 1.5, 0.0, 1.0)).total == pytest.approx(1.5 * 12)


def test_jobs_are_done_one_after_the_other() -> None:
    plan = _Plan(Way.BESIDE, Way.BESIDE)
    replay(plan, _events(_tape(0), _tape(1), *[_tape(0), _tape(1)] * 10), machine=QUIET)
    ran = [each.ran is Way.SERVE for each in plan.happened]
    assert ran[0::2].index(True) < ran[1::2].index(True)
    assert [tape.structure for tape, _ in plan.arrivals] == [0, 1]


def test_the_second_variant_of_a_structure_that_widens_serves_all() -> None:
    tapes = [_tape(shape=shape) for shape in range(6)]
    assert replay(Always(), _events(*tapes), widens=[0], machine=QUIET).hits == 4
    assert replay(Always(), _events(*tapes), machine=QUIET).hits == 0
    again = replay(Always(), _events(*tapes), machine=QUIET)
    assert again.total == 1.0 + 6 * (6.0 + 1.0), "the structure is captured once"


def test_a_tape_that_is_refused() -> None:
    plan = _Plan(Way.COMPILE)
    result = replay(plan, _events(_tape(refused="unsupported")), machine=QUIET)
    assert plan.happened == [Happened(Way.EAGER, 1.0, 1.0, "unsupported")] and result.total == 2.0


def test_a_limit_ends_a_capture() -> None:
    plan = _Plan(Way.COMPILE, limit=2.5)
    assert replay(plan, _events(_tape(), _tape()), machine=QUIET).total == 2.5 + 1.0 + 1.0
    assert plan.happened[0].failed == "limit"


def test_the_way_that_changes_costs_some_more() -> None:
    machine = Machine(slows=1.0, switch=0.125, by_calls=1.0)
    plan = _Plan(Way.COMPILE, Way.SERVE, Way.EAGER, Way.EAGER)
    assert replay(plan, _events(*[_tape()] * 4), machine=machine).total == 7.0 + 1.0 + 0.625 + 1.125 + 1.0


# ---- the lower bound -------------------------------------------------------------------------------------------------


def test_the_bound_of_simple_sequences() -> None:
    def least(*tapes: Tape, **given: Any) -> float:
        return bound(_events(*tapes), **given).total

    alone = Machine(cores=1)
    assert least(*[_tape()] * 5, machine=alone) == 5.0
    assert least(*[_tape()] * 40, machine=alone) == 7.0 + 20.0
    assert least(*[_tape()] * 40, machine=alone, start=20.0) == 40.0
    assert least(*[_tape(hit=2.0)] * 40) == 40.0
    assert least(*[_tape(refused="unsupported")] * 40) == 40.0
    waits = least(*[_tape()] * 40, machine=alone)
    assert least(*[_tape()] * 40) < waits, "it need not wait"
    shapes = [_tape(shape=shape) for shape in range(40)]
    assert least(*shapes) == 40.0 and least(*shapes, widens=[0]) < 40.0


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.stem)
def test_no_policy_is_better_than_the_bound(path: Path) -> None:
    recording = msgspec.structs.replace(sequence.load(path), times=2)
    for scatter in (0.0, 0.3):
        events = sequence.events(recording, scatter)[:600]
        least = bound(events, recording.widens, recording.start)
        for name in ("eager only", "always compile", "always beside", "background", "compile"):
            with command.POLICIES[name]() as policy:
                result = replay(policy, events, recording.widens, recording.start)
            assert result.eager == pytest.approx(least.eager)
            assert least.total <= result.total + 1e-9, (name, scatter)


# ---- sequences -------------------------------------------------------------------------------------------------------


def test_there_are_at_least_thirty() -> None:
    assert len(STORED) >= 30 and {path.stem for path in STORED} <= set(programs.PROGRAMS)


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.stem)
def test_a_stored_sequence_is_valid_and_small(path: Path) -> None:
    recording = sequence.load(path)
    assert recording.name == path.stem and path.stat().st_size < 40_000


def test_orders_are_folded_and_unfolded() -> None:
    order: list[Any] = [0, 1] * 50 + [2] + [0, 0, 1] * 20 + [(3, 1.5)] + [0, 1, 2, 3, 4]
    folded = sequence.encode(order)
    assert len(json.dumps(folded)) < 140
    assert [index if gap is None else (index, gap) for index, gap in sequence.decode(folded)] == order


def test_repetitions_have_new_tapes_for_those_that_came_once() -> None:
    recording = Recording("some", "made up", [_tape(0), _tape(1), _tape(0, 1)], [0, 0, 1, 2], times=3)
    tapes = [event.tape for event in sequence.events(recording)]
    assert len({(tape.structure, tape.shape) for tape in tapes}) == 1 + 3 + 3
    assert len({tape.structure for tape in tapes}) == 1 + 3, "the third has another shape alone"


def test_noise_depends_on_the_seed_alone() -> None:
    recording = Recording("some", "made up", [_tape(spread=0.1)], [0] * 500)
    first, again, other = (sequence.events(recording, 0.3, seed) for seed in (0, 0, 1))
    assert first == again != other
    assert 0.2 < sum(event.of_eager > 1.3 for event in first) / 500 * 2 < 0.6


@pytest.mark.parametrize("change", [{"eager": 0.0}, {"hit": -1.0}, {"hit": 0.0}, {"beside": 0.0}])
def test_impossible_numbers_are_refused(change: dict[str, float], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="some: "):
        sequence.save(Recording("some", "made up", [_tape(**change)], [0]), tmp_path)


def test_a_program_is_recorded_and_replayed(tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), torch.randn(4, 3)

    def run(here: Any) -> None:
        for step in range(30):
            model.zero_grad()
            model(x[: 4 - step % 3]).sum().backward()
            if step == 20:
                here.pause(7.0)
        y = torch.ones(3, requires_grad=True)
        torch.autograd.grad(y.square().sum(), y, create_graph=True)
        y.exp().sum().backward()

    program = programs.Program(run, times=2, compiles=2)
    seen = recorder.in_session(program, backend="eager")
    made = recorder.recording("some", program, recorder.on_eager(program), seen, start=0.5)
    read = sequence.load(sequence.save(made, tmp_path))
    assert read.times == 2 and read.start == 0.5 and "31 backwards" in read.source
    events = sequence.events(read)
    assert len(events) == 2 * 31, "what no policy decides about is left out"
    assert [event.tape.shape for event in events[:6]] == [0, 1, 2, 0, 1, 2] and read.widens == [0]
    assert len({event.tape.structure for event in events}) == 3 and events[21].gap >= 7.0
    assert all(tape.cost > 0 and tape.hit > 0 and tape.look > 0 and tape.nodes for tape in read.tapes)
    assert sequence.load(sequence.save(read, tmp_path)) == read
    assert replay(Always(), events, read.widens).hits == 2 * 31 - 2 - 2


# ---- the ledger ------------------------------------------------------------------------------------------------------


def test_the_ledger_compiles_what_comes_back() -> None:
    result = replay(Replayed(), _events(*[_tape()] * 100), machine=QUIET)
    assert result.compiles == 1 and result.hits > 50
    never = replay(Replayed(), _events(*(_tape(number) for number in range(100))), machine=QUIET)
    assert never.compiles == 0 and never.total == pytest.approx(100.0, abs=1e-3)


def test_the_ledger_leaves_what_is_slower_to_eager() -> None:
    result = replay(Replayed(), _events(*[_tape(hit=2.0)] * 1000), machine=QUIET)
    assert result.compiles == 1 and 10 < result.hits < 120


def test_the_ledger_spends_its_budget() -> None:
    """Seven seconds each: a fifth would exceed thirty."""
    events = _events(*(_tape(number, eager=1e-3, hit=5e-4) for number in range(100)))
    assert replay(Replayed("compile"), events, machine=QUIET).compiles == 4
    assert replay(Replayed("compile", compile_budget=float("inf")), events, machine=QUIET).compiles == 100
    ended = _events(*(_tape(number, eager=1e-3, capture=60.0) for number in range(100)))
    assert replay(Replayed("compile"), ended, machine=QUIET).compiles == 0


# ---- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("markdown", [[], ["--markdown"]])
def test_the_command_prints_its_tables(markdown: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    name = min(STORED, key=lambda path: len(sequence.events(sequence.load(path)))).stem
    given = ["--only", name, "--sequences", "--no-scatter", *markdown]
    monkeypatch.setattr(sys, "argv", ["policy", *given])
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert command.main() == 0
    assert all(each in printed.getvalue() for each in ("oracle", "eager only", "background", name))
