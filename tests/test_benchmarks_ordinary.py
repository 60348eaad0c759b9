"""Ordinary models, step by step beside eager: the trainings, the turns, and the tables. No time is asserted."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.ordinary import __main__ as program
from benchmarks.ordinary import figures, turns
from benchmarks.ordinary.steps import Steps
from benchmarks.ordinary.trainings import DRAWS_INSIDE, TINY, TRAININGS
from benchmarks.runners import RUNNERS, Runner, of_session
from compiled_autograd import enable

ARGUMENTS = Namespace(steps=3, seconds=0.0, starts=1, seed=0, tiny=True, json=None)


class Here:
    """In place of the other process: the same steps, here, with random draws of their own."""

    def __init__(self, runner: str, model: str, folder: Path, args: Namespace) -> None:
        self._steps = Steps(runner, model, args.seed, "tiny" if args.tiny else "full")
        self.ready = {"setup_seconds": self._steps.setup_seconds, "torch": torch.__version__, "threads": 1}
        self._draws = torch.get_rng_state()

    def __enter__(self) -> Here:
        return self

    def do(self, what: str, *given: object) -> Any:
        torch.set_rng_state(self._draws)
        answer = json.dumps(getattr(self._steps, what)(*map(str, given)))
        self._draws = torch.get_rng_state()
        return json.loads(answer)

    def __exit__(self, *error: object) -> None:
        """Nothing to end."""


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """All in this process, on the backend that compiles nothing."""
    monkeypatch.setattr(turns, "Stepping", Here)
    monkeypatch.setitem(
        RUNNERS, "default", lambda: of_session(enable(backend="eager", cache_dir=False, extension="off"))
    )


# ---- the trainings ---------------------------------------------------------------------------------------------------


def test_the_models_are_named_alike() -> None:
    assert set(program.MODELS) == set(TRAININGS) == set(TINY)
    assert set(turns.DRAWS_INSIDE) == set(DRAWS_INSIDE)
    assert {runner for runner, _ in turns.RUNNERS.values()} <= set(RUNNERS)


_LIKE_OTHERS = [pytest.param(each, marks=pytest.mark.slow) for each in ("bert", "gpt2", "unet")]


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("model", ["vit", "gan", "actor-critic", *_LIKE_OTHERS])
def test_a_row_of_each_model(model: str, tmp_path: Path) -> None:
    """With eager's own gradients, a hit from the second step on."""
    result = turns.measure(model, "ours", tmp_path, ARGUMENTS)
    assert "failed" not in result
    assert result["differences"]["largest"] < 1e-5 and result["differences"]["moved"] < 1e-2
    assert result["counts"]["hits"] > 0 and "bypasses" not in result["counts"]
    assert {"first_ratio", "step_ratio", "backward_ratio", "pays_after", "later"} <= set(result)
    assert 0 < result["backward_ms"] < result["step_ms"]
    assert "-" not in figures.cells(result)


@pytest.mark.parametrize("model", TRAININGS)
def test_eager_trains(model: str) -> None:
    """All parameters move, the GAN's both networks among them."""
    side = Steps("eager", model, 0, "tiny")
    side.steps("1")
    assert side._first is not None
    assert all(moved.any() for moved in side._first["moved"].values())


# ---- wrong work ------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("here")
def test_wrong_work_has_no_figures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Forgetful(torch.autograd.graph.saved_tensors_hooks):
        def __init__(self) -> None:
            super().__init__(lambda saved: saved, lambda saved: saved * 2)

    monkeypatch.setitem(RUNNERS, "default", lambda: Runner(Forgetful, prepare=lambda model: lambda x: 2 * model(x)))
    result = turns.measure("vit", "ours", tmp_path, ARGUMENTS)
    assert result["failed"].startswith("the first step is another than eager's: largest ")
    assert "step_ms" not in result and set(figures.cells(result)[2:-1]) == {"-"}


def test_how_much_is_wrong() -> None:
    right = {"largest": 1e-6, "gradients": 0.5, "moved": 1e-3}
    assert turns.wrong_work(right, other_draws=False) == turns.wrong_work(right, other_draws=True) == ""
    none = {"largest": float("inf"), "gradients": 1.0, "moved": 1.0}
    assert turns.wrong_work(none, other_draws=True).endswith("gradients 1.0e+00")
    assert turns.wrong_work(none, other_draws=False).endswith("largest inf, moved 1.0e+00")
    assert turns.wrong_work({"largest": float("nan"), "moved": 0.0}, other_draws=False)


# ---- turns -----------------------------------------------------------------------------------------------------------


def test_a_process_is_stopped_with_all_that_it_started(tmp_path: Path) -> None:
    """Those that have a session of their own, and no parent, too."""
    if not Path("/proc/self/environ").exists():
        pytest.skip("the environment of other processes cannot be read")
    side = turns.Stepping("eager", "vit", tmp_path, ARGUMENTS)
    beside = "import time\nfor _ in range(6000): time.sleep(0.01)"
    side._command = [
        sys.executable,
        "-c",
        "import subprocess, sys\n"
        f"found = subprocess.Popen([sys.executable, '-c', {beside!r}], start_new_session=True)\n"
        "print(found.pid, flush=True)\nfor line in sys.stdin: print(found.pid, flush=True)",
    ]

    def state() -> str:
        return Path(f"/proc/{side.ready}/stat").read_text().rpartition(")")[2].split()[0]

    def is_stopped() -> bool:
        ends = time.monotonic() + 60
        while state() != "T" and time.monotonic() < ends:
            time.sleep(0.01)
        return state() == "T"

    with side:
        assert is_stopped()
        assert side.do("anything") == side.ready
        assert is_stopped()
        os.kill(side._process.pid, signal.SIGCONT)
    assert side._process.returncode == 0
    ends = time.monotonic() + 60
    while Path(f"/proc/{side.ready}").exists() and state() != "Z" and time.monotonic() < ends:
        time.sleep(0.01)
    assert not Path(f"/proc/{side.ready}").exists() or state() == "Z"


def test_a_process_that_fails_is_a_row(tmp_path: Path) -> None:
    side = turns.Stepping("eager", "vit", tmp_path, ARGUMENTS)
    side._command = [sys.executable, "-c", "raise SystemExit('no such thing')"]
    with pytest.raises(RuntimeError, match=r"ended with status 1.*: no such thing"):
        side.__enter__()


@pytest.mark.slow
def test_in_processes_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second process finds what the first has kept."""
    monkeypatch.setenv("COMPILED_AUTOGRAD_EXTENSION", "off")  # its build takes longer than all the rest
    cold, warm = (turns.measure("vit", runner, tmp_path, ARGUMENTS) for runner in ("ours", "ours-warm"))
    assert cold["counts"]["compiles"] > 0 and "loads" not in cold["counts"]
    assert warm["counts"]["loads"] > 0 and "compiles" not in warm["counts"]


# ---- figures ---------------------------------------------------------------------------------------------------------


def test_the_figures_of_rounds() -> None:
    """Ratios are of neighbouring blocks."""
    rounds = [[[(0.01, 0.005)], [(0.005, 0.005)]], [[(0.03, 0.01)], [(0.03, 0.005)]], [[(0.02, 0.01)], [(0.01, 0.01)]]]
    found = turns.steady(rounds)
    assert found["step_ratio"] == 0.5 and found["backward_ratio"] == 1.0
    assert (found["eager_step_ms"], found["step_ms"]) == (20.0, 10.0)
    times = found | {"first_seconds": 5.0, "eager_first_seconds": 2.0}
    assert turns.pays_after(times, 100) == pytest.approx(100 + 3.0 / 0.01)
    assert turns.pays_after(times | {"step_ratio": 1.0}, 100) is None
    assert turns.pays_after(times | {"first_seconds": 0.5}, 100) == 0.0


@pytest.mark.usefixtures("here")
def test_the_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Measured and written; then read again, as Markdown."""
    written = tmp_path / "results.json"
    given = [
        "--models",
        "actor-critic",
        "--runners",
        "ours",
        "eager",
        "--tiny",
        "--steps",
        "2",
        "--seconds",
        "0",
        "--starts",
        "1",
    ]
    monkeypatch.setattr(sys, "argv", ["ordinary", *given, "--json", str(written)])
    assert program.main() == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "hits 1, captures 1" in printed
    assert "one round: ratios are chance" in printed
    assert "(actor-critic under eager, actor-critic under ours)" in printed
    eager, ours = json.loads(written.read_text())["results"]
    assert (eager["runner"], ours["runner"]) == ("eager", "ours")
    eager["rounds"]["step"] *= 2
    assert figures.has_one_round(ours) and not figures.has_one_round(eager)
    monkeypatch.setattr(sys, "argv", ["ordinary", "--read", str(written), "--markdown"])
    assert program.main() == 0
    helps, everything = capsys.readouterr().out.split("\n\n")
    assert helps.splitlines()[0].startswith(
        "| model | eager's step, ms | its backward, ms | step | backward | first 2 steps |"
    )
    assert helps.splitlines()[2].startswith("| actor-critic |") and helps.splitlines()[2].endswith("| - | - | - |")
    assert [line.split(" | ")[1] for line in everything.splitlines()[2:]] == ["eager", "ours"]


def test_a_warm_process_needs_a_cold_one(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["ordinary", "--runners", "ours-warm"])
    with pytest.raises(SystemExit):
        program.main()
    assert "name ours too" in capsys.readouterr().err
