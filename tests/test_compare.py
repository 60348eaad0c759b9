"""``ca.compare`` and ``--compare``: the answer is right, and the training is what it would have been."""

from __future__ import annotations

import itertools
import random
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import compiled_autograd as ca
from compiled_autograd.comparing import backward_times, hints
from compiled_autograd.comparing import step as step_module
from compiled_autograd.comparing import whole_program as program_module
from compiled_autograd.comparing.answer import Watch
from compiled_autograd.comparing.result import Comparison
from compiled_autograd.comparing.turns import Turns, interval
from compiled_autograd.comparing.whole_program import AnsweredExit, ProgramComparison
from compiled_autograd.diagnostics.bypass import COMPILING
from compiled_autograd.engine.session import current
from compiled_autograd.outcomes import BYPASS, Outcome
from compiled_autograd.policies.ledger import TIMED

from .helpers import mlp
from .test_runner import _python

_SETTINGS: dict[str, Any] = {"backend": "eager", "on_miss": "compile"}


class Clock:
    """A clock that goes by what it is given, so that a busy machine decides nothing."""

    def __init__(self) -> None:
        self.now, self._chance = 1.0, random.Random(0)

    def pass_by(self, seconds: float) -> None:
        self.now += seconds * self._chance.lognormvariate(0, 0.02)


CLOCK = Clock()


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    CLOCK.__init__()  # type: ignore[misc]
    for module in (backward_times, program_module, step_module):
        monkeypatch.setattr(module, "perf_counter", lambda: CLOCK.now)


class Training:
    """A small model and its steps of 0.1 s or, where it is ``slow``, 0.15 s."""

    def __init__(self, slow: str = "", seed: int = 0, **backward: Any) -> None:
        torch.manual_seed(seed)
        self.model, self.slow, self.count, self.backward = mlp(), slow, 0, backward
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def step(self) -> None:
        self.count += 1
        torch.manual_seed(self.count)
        self.optimizer.zero_grad()
        loss = self.model(torch.randn(4, 8)).square().mean()
        is_slow = self.slow == ("eager" if current() is None else "ours")
        loss.register_hook(lambda gradient: CLOCK.pass_by(0.1 if is_slow else 0.05))
        loss.backward(**self.backward)
        CLOCK.pass_by(0.05)
        self.optimizer.step()

    def is_that_of_eager(self) -> bool:
        plain = Training(**self.backward)
        with ca.disable():
            for _ in range(self.count):
                plain.step()
        pairs = zip(self.model.parameters(), plain.model.parameters(), strict=True)
        return all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize(("count", "level"), [(7, 0.98), (8, 0.98), (21, 0.95), (40, 0.99)])
def test_an_interval_holds_the_median_as_often_as_it_says(count: int, level: float) -> None:
    chance = random.Random(0)
    inside = 0
    for _ in range(2000):
        low, high = interval([chance.lognormvariate(0, 1) for _ in range(count)], level)
        inside += low <= 1 <= high
    assert inside / 2000 >= level - 0.01


def test_few_pairs_are_never_sure() -> None:
    assert interval([], 0.95) == interval([0.5] * 5, 0.98) == (0.0, float("inf"))
    assert interval([0.5, 0.6, 0.4, 0.5, 0.6, 0.5, 0.7, 0.5], 0.98) == (0.4, 0.7)


def _simulated(ratio: float, limit: float = 100.0, noise: float = 0.05, calm: bool = True) -> tuple[Turns, list[bool]]:
    chance, turns, sides = random.Random(0), Turns(lambda: calm, limit), []
    while not turns.is_over:
        sides.append(turns.ours)
        backward = chance.lognormvariate(-2, noise) * (ratio if turns.ours else 1)
        turns.add(0.1 + backward, backward)
    return turns, sides


def test_turns_are_a_b_b_a_and_end_when_it_is_sure() -> None:
    turns, sides = _simulated(0.5)
    low, high = turns.step_interval()
    assert turns.spent < 30 and low < high < 0.9 and turns.backward_ratio() == pytest.approx(0.5, abs=0.05)
    blocks = [(ours, len(list(steps))) for ours, steps in itertools.groupby(sides)]
    assert [ours for ours, _ in blocks] == [index % 2 == 0 for index in range(len(blocks))]
    first, *middle, _ = (count for _, count in blocks[1:])
    assert set(middle) == {2 * first}


def test_turns_end_where_there_is_nothing_to_gain() -> None:
    turns, _ = _simulated(1.0, noise=0.01)
    assert turns.spent < 60 and turns.step_interval()[1] >= 0.97
    assert not _simulated(1.0, calm=False)[0].pairs


def test_turns_wait_for_what_is_compiled_later() -> None:
    """The last batch of an epoch is smaller: while its code is compiled in the background, eager runs both sides."""
    chance, compiling = random.Random(0), False
    turns = Turns(lambda: not compiling, 100.0, lambda: compiling)
    while not turns.is_over:
        compiling = 20 <= turns.count < 200
        ratio = 0.5 if turns.ours and not compiling else 1
        backward = chance.lognormvariate(-2, 0.05) * ratio
        turns.add(0.1 + backward, backward)
        assert turns.is_settling or not compiling
    assert turns.count > 200 and turns.spent < 100
    assert turns.backward_ratio() == pytest.approx(0.5, abs=0.05)


def test_turns_without_an_end_of_compiling_have_their_limit() -> None:
    """What was measured before stands."""
    turns = Turns(lambda: turns.count < 40, 30.0, lambda: turns.count >= 40)
    while not turns.is_over:
        turns.add(0.1, 0.05)
    assert turns.is_settling and turns.pairs and turns.spent == pytest.approx(30.0, abs=0.2)


def test_steps_that_tune_times_on_eager_are_not_like_the_ones_to_come() -> None:
    session = ca.enable(**_SETTINGS)
    watch = Watch(session)
    assert watch.is_calm()
    session.record(Outcome(BYPASS, reasons=(TIMED,)))
    assert not watch.is_calm() and watch.is_calm()


def test_what_was_counted_goes_back_to_the_first_turn() -> None:
    """Also where the turns begin again, since something was compiled later."""
    with ca.enable(**_SETTINGS) as session:
        watch = Watch(session)
        assert watch.is_calm() and not watch.is_compiling()
        session.record(Outcome(BYPASS, reasons=(COMPILING,)))
        assert not watch.is_calm()
    assert watch.since_settled() == (0, 0, Counter({COMPILING.label: 1}))


def test_it_is_worth_it() -> None:
    training = Training(slow="eager")
    found = ca.compare(training.step, seconds=100, **_SETTINGS)
    assert found.worth_it and found.step_ratio is not None and found.step_ratio < 0.9
    assert found.backward_ratio is not None and found.paid_back_after is not None and not found.reason
    assert str(found).startswith(f"worth it: yes. Steps {found.step_ratio:.2f} of eager's (")
    assert "of compiling while steps waited, paid back after" in str(found) and "second run" not in str(found)
    assert training.is_that_of_eager()


def test_it_is_not_worth_it() -> None:
    training = Training(slow="ours")
    found = ca.compare(training.step, seconds=100, **_SETTINGS)
    assert not found.worth_it and found.reason and found.paid_back_after is None
    assert found.step_interval is not None and found.step_interval[1] > 1
    assert training.is_that_of_eager()


def _in_another_thread() -> None:
    thread = threading.Thread(target=Training().step)
    thread.start()
    thread.join()


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (lambda: CLOCK.pass_by(0.1), "no backward ran"),
        (Training(create_graph=True).step, "1.00 of the backwards were left to eager (create_graph)"),
        (
            ca.compile_step(backend="eager", cache_dir=False)(Training().step),
            "in an enable() or disable() of the program's own",
        ),
        (_in_another_thread, "backwards run in other threads than the steps"),
    ],
    ids=["no backward", "left to eager", "own session", "another thread"],
)
@pytest.mark.filterwarnings("ignore:Using backward")
def test_why_not(step: Callable[[], None], reason: str) -> None:
    found = ca.compare(step, seconds=20, **_SETTINGS)
    assert not found.worth_it and (reason in str(found)), str(found)


def test_a_yes_has_no_interval_up_to_eager() -> None:
    found = Comparison(True, 0.9, (0.88, 0.92), compile_seconds=20.0, paid_back_after=4000)
    assert "20 s of compiling on another core, paid back after 4,000 steps or 3 min 0 s of training" in str(found)
    found = Comparison(True, step_ratio=0.95, step_interval=(0.88, 0.997))
    assert str(found).startswith("worth it: yes. Steps 0.95 of eager's (0.88 to just below 1);")
    assert "(0.88 to 1.00)" in str(replace(found, worth_it=False, reason="noise"))


def test_it_takes_a_function(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match="one step, not int"):
        ca.compare(3)  # type: ignore[arg-type]
    with pytest.raises(ca.UnknownSettingError, match="on_miss"):
        ca.compare(lambda: None, on_mis="raise")
    with pytest.raises(ca.UnknownSettingError, match=r"compare\(lambda: step\(name=value\)\)"):
        ca.compare(lambda lr: None, lr=3)
    monkeypatch.setenv("COMPILED_AUTOGRAD_TUEN", "1")
    with pytest.raises(ca.UnknownSettingError, match=r"Did you mean 'COMPILED_AUTOGRAD_TUNE'\?$"):
        ca.compare(lambda: None, tune=False)


# ---- whole programs ----------------------------------------------------------------------------------------------


@pytest.fixture
def program() -> Iterator[Callable[..., tuple[ProgramComparison, list[str]]]]:
    """Begins a comparison of the process, as the runner does."""
    with ca.enable(**_SETTINGS) as session:
        begun: list[ProgramComparison] = []

        def begin(seconds: float = 100.0, go_on: bool = False) -> tuple[ProgramComparison, list[str]]:
            said: list[str] = []
            begun.append(ProgramComparison(session, seconds, go_on, lambda found: said.append(str(found))))
            return begun[-1], said

        yield begin
        for each in begun:
            each.conclude()
        assert current() is session
    assert torch.autograd._engine_run_backward is torch.autograd.graph._engine_run_backward


Begin = Callable[..., tuple[ProgramComparison, list[str]]]


@pytest.mark.parametrize(("slow", "answer"), [("eager", "yes"), ("ours", "no")])
def test_a_program_is_stopped_at_the_answer(slow: str, answer: str, program: Begin) -> None:
    comparison, said = program()
    training, ended = Training(slow=slow), False
    with pytest.raises(AnsweredExit) as stopped:
        try:
            for _ in range(100_000):
                training.step()
        finally:
            ended = True
    assert ended and stopped.value.code is None and comparison.result is not None
    assert len(said) == 1 and said[0].startswith(f"worth it: {answer}.")
    assert training.is_that_of_eager()


def test_a_program_goes_on(program: Begin) -> None:
    comparison, said = program(go_on=True)
    training = Training(slow="eager")
    while not said or training.count % 100:
        training.step()
    assert comparison.result is not None and comparison.result.worth_it


def test_steps_end_where_the_same_optimizer_steps_again(program: Begin) -> None:
    comparison, said = program(go_on=True)
    critic, generator = Training(slow="eager"), Training(slow="eager", seed=1)
    while not said:
        for _ in range(3):
            critic.step()
        generator.step()
    assert comparison.result is not None and comparison.result.worth_it
    assert comparison._turns.count < generator.count + 10  # but for the first steps, where the critic's ended one


@pytest.mark.parametrize(
    ("steps", "reason"),
    [(0, "no backward ran in this process"), (3, "after 2 steps there was still something new to compile")],
)
def test_a_program_that_ends_first_has_no_answer(steps: int, reason: str, program: Begin) -> None:
    comparison, said = program()
    training = Training()
    for _ in range(steps):
        training.step()
    comparison.conclude()
    assert said == [f"worth it: no answer: {reason}."]


def test_a_program_without_an_optimizer_says_so(program: Begin) -> None:
    comparison, said = program()
    mlp()(torch.randn(4, 8)).sum().backward()
    comparison.conclude()
    why = "1 backward ran, but the steps were not found: no optimizer of torch.optim stepped"
    assert said == [f"worth it: no answer: {why}."]


def test_hints_are_measured_on_copies(program: Begin) -> None:
    comparison, _ = program(go_on=True)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 6 * 6, 2))
    optimizer = torch.optim.Adam(model.parameters())
    while comparison.result is None:
        optimizer.zero_grad()
        model(torch.randn(2, 3, 8, 8)).square().mean().backward()
        CLOCK.pass_by(0.1 if current() is None else 0.08)
        optimizer.step()
    assert "channels_last" in " ".join(comparison.result.hints) and optimizer.param_groups[0]["fused"] is None
    assert model[0].weight.is_contiguous()


@pytest.mark.parametrize("kind", hints._FUSED)
def test_each_fused_optimizer_is_tried(kind: Callable[..., torch.optim.Optimizer]) -> None:
    model = mlp()
    model(torch.randn(4, 8)).sum().backward()
    parameters = list(model.parameters())
    assert hints._fused_ratio(kind(parameters, lr=0.1), parameters) is not None
    assert hints._fused_ratio(kind(parameters, lr=0.1, fused=True), parameters) is None
    assert hints._fused_ratio(kind(parameters, lr=0.1), []) is None  # no parameter has a gradient


def test_copies_call_no_hook_of_the_programs_own() -> None:
    """Neither those of all optimizers, nor a profiler's."""
    seen: list[object] = []
    handles = [
        register(lambda *given: seen.append(given[0]))
        for register in (register_optimizer_step_pre_hook, register_optimizer_step_post_hook)
    ]
    model = mlp()
    model(torch.randn(4, 8)).sum().backward()
    parameters = list(model.parameters())
    try:
        with torch.profiler.profile() as profiled:
            assert hints._fused_ratio(torch.optim.AdamW(parameters), parameters) is not None
    finally:
        for handle in handles:
            handle.remove()
    assert not seen and not [each.name for each in profiled.events() if "Optimizer.step" in each.name]


_SCRIPT = """
import atexit, sys, time, torch
from compiled_autograd.engine.session import current
from compiled_autograd.outcomes import BYPASS, Outcome
from compiled_autograd.policies.ledger import TIMED
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
atexit.register(print, "atexit")
for _ in range(int(sys.argv[1])):
    optimizer.zero_grad()
    model(torch.ones(3, 4)).sum().backward()
    time.sleep(0.02 if current() is None else 0)
    optimizer.step()
print("end")
if sys.argv[2] != "0":
    raise SystemExit(int(sys.argv[2]))
"""


@pytest.mark.parametrize(
    ("arguments", "status", "out", "words"),
    [
        (["100000", "0"], 0, "atexit\n", "worth it: yes. Steps"),
        pytest.param(["3", "0"], 1, "end\natexit\n", "worth it: no answer: after 2 steps", marks=pytest.mark.slow),
        pytest.param(["3", "5"], 5, "end\natexit\n", "worth it: no answer: after 2 steps", marks=pytest.mark.slow),
    ],
)
def test_the_exit_status_is_the_answer(arguments: list[str], status: int, out: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text(_SCRIPT)
    ended = _python("-m", "compiled_autograd", "--compare", "s.py", *arguments, cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (status, out), ended.stderr
    assert ended.stderr.startswith(f"compiled_autograd: {words}")


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
def test_a_program_that_is_killed_ends_as_that(number: int, tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text(f"import os\nos.kill(os.getpid(), {int(number)})\n")
    ended = _python("-m", "compiled_autograd", "--compare", "s.py", cwd=tmp_path)
    assert ended.returncode == -number and "Traceback" not in ended.stderr, ended.stderr
