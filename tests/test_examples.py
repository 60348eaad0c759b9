"""The list of the examples, their tutorials, and the main one. ``tests/test_as_users.py`` runs them as readers do."""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib.util
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from xml.etree import ElementTree

import pytest
import torch
from rich.console import Console

from compiled_autograd.outcomes import Stats
from docs import tutorial_pages, tutorial_pictures
from examples import _side_by_side, train_llama

from . import as_a_user
from .helpers import ROOT

_EXAMPLES = ROOT / "examples"


def test_every_example_is_listed() -> None:
    text = (_EXAMPLES / "README.md").read_text()
    assert [file.name for file in _EXAMPLES.glob("[!_]*.py") if f"`{file.name}`" not in text] == []


class _Bare(ast.NodeTransformer):
    """Code without what documents it."""

    def visit(self, node: ast.AST) -> ast.AST:
        super().visit(node)
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
        return node


@pytest.mark.parametrize("name", tutorial_pages.NAMES)
def test_a_tutorial_has_all_code_and_prose_of_its_example(name: str) -> None:
    page, text = tutorial_pages.page(name), (_EXAMPLES / f"{name}.py").read_text()
    blocks = re.findall(r"^````python\n(.*?)^````$", page, re.MULTILINE | re.DOTALL)
    whole, shown = (ast.dump(_Bare().visit(ast.parse(code))) for code in (text, "\n".join(blocks)))
    assert shown == whole
    said = re.sub(r"^````.*?^````$", "", page, flags=re.MULTILINE | re.DOTALL)
    first = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
    assert first and first in said and f"python examples/{name}.py" in page
    assert name == "train_llama" or "## What it prints" in page


def test_each_picture_is_on_the_page_of_its_example() -> None:
    kept = sorted(tutorial_pages.PICTURES.iterdir())
    assert len(kept) >= 6 and {file.stem for file in kept} <= set(tutorial_pages.NAMES)
    for file in kept:
        page, text = tutorial_pages.page(file.stem), file.read_text()
        if file.suffix == ".mmd":
            assert text.startswith("flowchart") and f"```mermaid\n{text}```" in page
            continue
        title = ElementTree.fromstring(text).findtext("{http://www.w3.org/2000/svg}title")
        assert title and f"![{title}](../tutorials/{file.stem}.svg)" in page
        assert file.stat().st_size < 60_000


def test_a_timeline_says_what_became_of_each_backward(tmp_path: Path) -> None:
    """The session with most backwards, of two. A session keeps no time of a hit that is its first backward."""
    pytest.importorskip("matplotlib")
    program = """
import torch
import compiled_autograd as ca

x = torch.ones(3, requires_grad=True)
for create_graph, steps in ((False, 2), (True, 3)):
    with ca.enable(backend="eager", cache_dir=False, tune=False) as session:
        for _ in range(steps):
            torch.autograd.grad(x.exp().sum(), x)
        for _ in range(steps if create_graph else 0):
            torch.autograd.grad(x.exp().sum(), x, create_graph=True)
"""
    (example := tmp_path / "two_sessions.py").write_text(program)
    drawn = tutorial_pictures.timeline(example, "Two sessions")
    title = ElementTree.fromstring(drawn).findtext("{http://www.w3.org/2000/svg}title") or ""
    assert (
        re.sub(r"[\d.]+ ms", "_", title) == "Milliseconds of each backward. Hits: 2, median _; on eager: 3, median _."
    )
    assert ">Two sessions</text>" in drawn and ">milliseconds</text>" in drawn


def test_a_tape_is_that_of_the_first_backward(tmp_path: Path) -> None:
    before = torch.autograd.backward, torch.autograd.grad
    (example := tmp_path / "one.py").write_text(
        "import torch\ntorch.nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()"
    )
    assert tutorial_pictures.tape(example).startswith('flowchart TD\n  n0["SumBackward0"]')
    assert before == (torch.autograd.backward, torch.autograd.grad)


def test_what_is_kept_agrees_but_for_numbers() -> None:
    said, printed = tutorial_pages.kept("hooks")
    assert said.startswith("Clipping hooks") and printed.startswith("clipping: 16 new hooks")
    assert tutorial_pages.is_as_kept("hooks", printed.replace("16", "17"))
    assert not tutorial_pages.is_as_kept("hooks", printed.replace("optimizer:", "optimiser:"))
    assert not tutorial_pages.is_as_kept("hooks", printed.partition("\n")[0])


def _main_job(*options: str) -> list[str]:
    small = [*as_a_user.SMALL_LLAMA, "--backend", "eager", "--on-miss", "compile", "--picture", "a.svg"]
    return [str(_EXAMPLES / "train_llama.py"), *small, *options]


def test_the_main_job_trains_both_ways(tmp_path: Path) -> None:
    """Also in a session around the whole program: in it eager is eager, else there were more backwards."""
    program = _main_job("--steps", "12")
    exact = {"OMP_NUM_THREADS": "1", "COMPILED_AUTOGRAD_TUNE": "false"}
    printed = as_a_user.run(program, tmp_path, COMPILED_AUTOGRAD="1", **exact)
    assert printed.startswith("All trainings use 1 of ")
    assert "13 backwards: 12 hits, 1 miss" in printed
    assert "step 1, after " in printed and ": compiled code takes over, compiled in " in printed
    assert re.search(r"steps +│ 12 +│ 1 +│ 11 ", printed), printed
    assert re.search(r"┃ +┃ eager +┃ before compiled +┃ compiled +┃", printed), printed
    last = printed.splitlines()[-1]
    assert re.match(r"Compiled steps took \d+\.\d\d of eager's \(backward \d+\.\d\d\); compiling took \d", last), last
    drawn = (tmp_path / "work" / "a.svg").exists()
    assert drawn == (importlib.util.find_spec("matplotlib") is not None)


@pytest.mark.slow
def test_the_main_job_ends_when_its_time_is_up(tmp_path: Path) -> None:
    """Nothing is compiled in that time, and the last line and the exit status say so."""
    program = _main_job("--on-miss", "background", "--backend", "inductor", "--seconds", "0.01")
    ended = _started(program, tmp_path).communicate(timeout=as_a_user.SECONDS)
    says = "FAILED: no step ran compiled, since the training ended before compiling did (1 step, "
    assert ended[0].splitlines()[-1].startswith(says), ended


def _started(program: list[str], folder: Path, **variables: str) -> subprocess.Popen[str]:
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    environment = as_a_user.environment(folder) | {"OMP_NUM_THREADS": "1"} | variables
    return subprocess.Popen([sys.executable, *program], cwd=folder, env=environment, text=True, **pipes)


@pytest.mark.slow
def test_ctrl_c_ends_the_main_job_with_its_results(tmp_path: Path) -> None:
    process = _started(_main_job("--seconds", "900"), tmp_path, PYTHONUNBUFFERED="1")
    assert process.stdout is not None
    before = []
    for line in process.stdout:
        before.append(line)
        if "compiled code takes over" in line:
            process.send_signal(signal.SIGINT)
            break
    printed, errors = process.communicate(timeout=as_a_user.SECONDS)
    last = printed.splitlines()[-1]
    assert re.match(r"Stopped by Ctrl-C after \d+ steps: compiled steps took ", last), (before, printed, errors)
    assert process.returncode == 130 and "before compiled" in printed and "Traceback" not in errors


def test_ctrl_c_while_pytorch_is_imported_prints_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGINT)")
    process = _started(_main_job(), tmp_path, PYTHONPATH=str(tmp_path))
    assert process.communicate(timeout=as_a_user.SECONDS) == ("", "")
    assert process.returncode == -signal.SIGINT


def _arguments(monkeypatch: pytest.MonkeyPatch, *options: str) -> argparse.Namespace:
    monkeypatch.setattr(sys, "argv", ["train_llama.py", *options])
    return train_llama.parse_arguments()


def _runs(outcomes: list[str], whole: list[float]) -> list[Any]:
    """Trainings of which eager's steps took 2 s each, 1 s of it the backward; and the other's ``whole`` seconds."""
    eager = [train_llama.Step(1.0, 1.0, 2.0)] * len(whole)
    steps = [train_llama.Step(1.0, each / 2, each) for each in whole]
    return [
        SimpleNamespace(name="eager", steps=eager, outcomes=[], waited=0.0),
        SimpleNamespace(name="compiled", steps=steps, outcomes=outcomes, waited=0.0),
    ]


def _session(compiles: int = 1, loads: int = 0) -> Any:
    stats = Stats(backwards=9, compiles=compiles, compile_seconds=41.2 * compiles, loads=loads)
    return SimpleNamespace(stats=lambda: stats, settings=SimpleNamespace(on_miss="background"))


def test_options_of_length_exclude_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _arguments(monkeypatch).seconds == 60 and _arguments(monkeypatch, "--steps", "3").steps == 3
    for options in (["--steps", "3", "--seconds", "3"], ["--steps", "0"], ["--seconds", "0"], ["--seconds", "nan"]):
        with pytest.raises(SystemExit, match="2"):
            _arguments(monkeypatch, *options)


_WAY = ["structure_miss", "compiling", "hit", "tuning", "hit"]
_LEFT = "not_worth_it"


@pytest.mark.parametrize(
    ("outcomes", "whole", "session", "says"),
    [
        (_WAY, [4, 2, 1, 2, 0.5], _session(), "compiling took 41 s beside the training; paid back after step 4; "),
        (_WAY, [4, 2, 1, 2, 1], _session(), "not paid back, 0.0 s behind eager after 5 steps: some 1 more"),
        (_WAY, [4, 2, 3, 2, 3], _session(), "4.0 s behind eager after 5 steps: compiled steps were no faster; "),
        ([*_WAY, _LEFT], [4, 2, 3, 2, 3, 2], _session(), "left 1 of 6 steps to eager; 4.0 s were lost in the others;"),
        ([*_WAY, _LEFT], [4, 2, 1, 2, 0.5, 2], _session(), "; paid back after step 4; "),
        ([*_WAY, *3 * [_LEFT]], [4, 2, 3, 2, 3, 1, 1, 1], _session(), "left 3 of 8 steps to eager; 4.0 s were lost"),
        (["structure_miss", "compiling", "hit"], [2, 1, 1], _session(), "; paid back after step 2; "),
        (["hit"] * 2, [1, 1], _session(0, 1), "the code was on disk, where an earlier run had left it; paid back"),
        (["structure_miss"], [9], _session(), "No step was left to be timed with compiled code; compiling took 41 s"),
        (["structure_miss", "compiling"], [9, 2], _session(0), "ended before compiling did (2 steps, 11 s; --seconds "),
        (["not_yet"] * 2, [2, 2], _session(0), "since the training ended before compiling did (2 steps, 4 s; "),
        (["capture"], [2], _session(0), "FAILED: no step ran compiled, 9 backwards: 0 hits: `next`"),
    ],
)
def test_the_last_sentence_of_the_main_job(
    outcomes: list[str], whole: list[float], session: Any, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sentence, good = _side_by_side.conclusion(_runs(outcomes, whole), session, _arguments(monkeypatch))
    assert says in sentence and sentence.endswith(".")
    assert good == (session.stats().compiles + session.stats().loads > 0) == (not sentence.startswith("FAILED: "))


def test_a_wait_for_the_compiler_is_a_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = _runs(_WAY, [4, 2, 1, 2, 0.5])
    runs[1].waited = 7.0
    sentence, good = _side_by_side.conclusion(runs, _session(), _arguments(monkeypatch))
    assert "and at last 7 s with all steps waiting; not paid back, 6.5 s behind eager" in sentence and good


@pytest.mark.parametrize("ends", [True, False])
def test_trainings_wait_once_for_a_compiler_that_has_not_ended(ends: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    args = _arguments(monkeypatch, *as_a_user.SMALL_LLAMA, "--seconds", "0.2")
    eager, compiled = (train_llama.Run(name, args, 5, contextlib.nullcontext()) for name in ("eager", "compiled"))
    waits: list[float] = []
    last = SimpleNamespace(outcome="bypass", reasons=[SimpleNamespace(label="compiling")])

    def wait(most: float) -> bool:
        waits.append(most)
        last.outcome = "hit" if ends else "bypass"
        return ends

    compiled.session = cast("Any", SimpleNamespace(last=last, wait=wait, stats=Stats))
    corpus = train_llama.Corpus(torch.zeros(100, dtype=torch.int64), list("abcde"))
    train_llama.take_turns([eager, compiled], args, corpus, Console(quiet=True))
    assert waits == [0.2] and compiled.waited > 0
    assert compiled.outcomes[0] == "compiling" and compiled.outcomes[-1] == ("hit" if ends else "compiling")


def test_the_main_job_says_once_that_compiling_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    args = _arguments(monkeypatch)
    run = cast("Any", SimpleNamespace(session=SimpleNamespace(stats=Stats), outcomes=[]))
    said = []
    for outcome in ("not_yet", "not_yet", "structure_miss", "compiling", "structure_miss", "compiling"):
        run.outcomes.append(outcome)
        said.append(train_llama.news_of_compiling(run, args))
    assert [text[:16] for text in said] == ["", "", "compiling begins", "", "", ""]
    run.outcomes += ["hit"] * train_llama.FEW_STEPS
    assert train_llama.is_compiling(run)
    run.outcomes.append("hit")
    assert not train_llama.is_compiling(run)


def test_the_first_step_of_torch_compile_is_no_training_time(monkeypatch: pytest.MonkeyPatch) -> None:
    args = _arguments(monkeypatch, *as_a_user.SMALL_LLAMA, "--seconds", "0.2")
    runs = [train_llama.Run(name, args, 5, contextlib.nullcontext()) for name in ("eager", "compiled", "a third")]
    runs[1].session = cast("Any", SimpleNamespace(last=SimpleNamespace(outcome="hit", reasons=[]), stats=Stats))
    times = iter([1.0])

    def step(*batch: object) -> train_llama.Step:
        return train_llama.Step(1.0, 1e-3, 1e-3)

    def compiled_step(*batch: object) -> train_llama.Step:
        time.sleep(whole := next(times, 0.0))
        return train_llama.Step(1.0, whole, whole)

    for run in runs:
        monkeypatch.setattr(run, "step", compiled_step if run is runs[2] else step)
    corpus = train_llama.Corpus(torch.zeros(100, dtype=torch.int64), list("abcde"))
    train_llama.take_turns(runs, args, corpus, Console(quiet=True))
    assert len(runs[0].steps) > 1


def test_the_last_sentence_says_that_curves_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    for loss, far in ((1.5, "5.0e-01"), (float("nan"), "inf")):
        runs = _runs(["hit"], [1])
        runs[1].steps[0] = runs[1].steps[0]._replace(loss=loss)
        sentence, good = _side_by_side.conclusion(runs, _session(), _arguments(monkeypatch))
        assert sentence == f"FAILED: the loss curves differ by {far}, more than --tolerance 0.01." and not good


def test_ctrl_c_in_the_first_step_leaves_nothing_to_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    """One training has ended its step, the other has not: neither keeps it."""

    def interrupted(*batch: object) -> None:
        raise KeyboardInterrupt

    args = _arguments(monkeypatch, *as_a_user.SMALL_LLAMA, "--steps", "3")
    runs = [train_llama.Run(name, args, 5, contextlib.nullcontext()) for name in ("eager", "compiled")]
    monkeypatch.setattr(runs[1], "step", interrupted)
    corpus = train_llama.Corpus(torch.zeros(100, dtype=torch.int64), list("abcde"))
    assert train_llama.train(runs, args, corpus, Console(quiet=True))
    assert [run.steps for run in runs] == [[], []]
    sentence, good = _side_by_side.conclusion(runs, _session(0), args, stopped=True)
    assert sentence.startswith("Stopped by Ctrl-C after 0 steps: the first step had not ended") and not good


def test_ctrl_c_while_a_turn_is_recorded_leaves_whole_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    args = _arguments(monkeypatch, *as_a_user.SMALL_LLAMA, "--steps", "3")
    runs = [train_llama.Run(name, args, 5, contextlib.nullcontext()) for name in ("eager", "compiled")]
    record = runs[1].record

    def interrupted(step: train_llama.Step) -> None:
        if len(runs[1].steps) == 1:
            runs[1].outcomes.append("hit")
            raise KeyboardInterrupt
        runs[1].outcomes.append("structure_miss")
        record(step)

    for run in runs:
        monkeypatch.setattr(run, "step", lambda *_: train_llama.Step(1.0, 1.0, 1.0))
    monkeypatch.setattr(runs[1], "record", interrupted)
    monkeypatch.setattr(train_llama, "news_of_compiling", lambda *_: "")
    corpus = train_llama.Corpus(torch.zeros(100, dtype=torch.int64), list("abcde"))
    assert train_llama.train(runs, args, corpus, Console(quiet=True))
    assert [len(run.steps) for run in runs] == [1, 1] and runs[1].outcomes == ["structure_miss"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--heads", "0"), "--heads: 0 is too small"),
        (("--batch-size", "-1"), "--batch-size: -1 is too small"),
        (("--steps", "0"), "--steps: 0 is too small"),
        (("--seconds", "nan"), "--seconds nan: some time is needed"),
        (("--tolerance", "nan"), "--tolerance nan: a number of 0 or more"),
        (("--width", "20", "--heads", "4"), "--width 20 is not a multiple of twice --heads 4"),
        *((("--lr", text), f"--lr {text}: a finite number of 0 or more") for text in ("nan", "-1", "inf")),
        *((("--seed", text), f"--seed {text}: PyTorch takes") for text in (str(2**64), str(-(2**63) - 1))),
        (("--block-size", "2000000"), "--block-size 2000000: at most 1999999 are possible"),
        (("--picture", "."), "--picture .: a file in a folder that exists is needed"),
        (("--picture", "missing/a.svg"), "--picture missing/a.svg: a file in a folder that exists is needed"),
        (("--picture", "a" * 300 + "/a.svg"), "a.svg: a file in a folder that exists is needed"),
        *(
            ((name, text), "GiB of memory are needed, and there are ")
            for name in ("--batch-size", "--layers", "--width")
            for text in ("400000000000", "4" + 400 * "0")
        ),
    ],
)
def test_the_main_job_refuses_options_in_a_sentence(
    options: tuple[str, ...], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        _arguments(monkeypatch, *options)
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "variables", "says"),
    [
        (("--backend", "nope"), {}, "error: there is no backend 'nope'. Known: "),
        ((), {"COMPILED_AUTOGRAD_TUNE": "perhaps"}, "error: COMPILED_AUTOGRAD_TUNE: tune='perhaps' is not possible"),
    ],
)
def test_the_main_job_refuses_settings_in_a_sentence(
    options: tuple[str, ...],
    variables: dict[str, str],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", _main_job(*options))
    monkeypatch.syspath_prepend(_EXAMPLES)
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    with pytest.raises(SystemExit, match=r"^2$"):
        train_llama.main()
    printed, errors = capsys.readouterr()
    assert not printed and says in errors and "Traceback" not in errors


@pytest.mark.skipif(not importlib.util.find_spec("matplotlib"), reason="nothing draws without matplotlib")
def test_a_picture_that_cannot_be_written_ends_nothing(tmp_path: Path) -> None:
    runs = _runs(["hit"], [1])
    for file in (tmp_path / "missing" / "a.svg", tmp_path / "a.unknown"):
        assert _side_by_side.draw(runs, file).startswith(f"No picture of the curves at {file}: ")


def test_ratios_of_speeds_are_of_the_same_turns() -> None:
    eager, compiled = _runs(_WAY, [4, 2, 1, 2, 0.5])
    columns = {
        name: (steps, _side_by_side.ratio(eager, run, steps, "whole"))
        for name, run, steps in _side_by_side.parts([eager, compiled])
    }
    assert columns == {"eager": ([0, 1, 2, 3, 4], 1.0), "before compiled": ([0, 1], 1.5), "compiled": ([2, 4], 0.375)}
