"""The selftest finds what is wrong, says what runs instead, and leaves the process as it was."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from click.testing import CliRunner

import compiled_autograd as ca
from backends.eager import EagerBackend
from compiled_autograd import selftest
from compiled_autograd.__main__ import main
from compiled_autograd.cache.graphs import GRAPHS, CompiledGraph
from compiled_autograd.diagnostics import reporting
from compiled_autograd.diagnostics.bypass import OTHER_THREAD
from compiled_autograd.engine import decide, session
from compiled_autograd.native.library import why_unsupported
from compiled_autograd.selftest import apart, checks, running
from compiled_autograd.selftest.tapes import HERE, STEPS, TapeCase, TapeStep
from compiled_autograd.steps import accumulate
from compiled_autograd.torch_api.version_differences import why_own_loop_is_unchecked

from .helpers import ROOT, in_subprocess, mlp

_SECONDS_OF_CPU = 110.0
"""A minute on two cores."""
_HERE = "existing .grad"

needs_extension = pytest.mark.skipif(bool(why_unsupported()), reason=why_unsupported())


def _by_name(found: Sequence[selftest.PartResult]) -> dict[str, selftest.PartResult]:
    return {each.name: each for each in found}


def _environment(folder: Path, **more: str) -> dict[str, str]:
    """An environment with empty caches, and none of the settings that tests have."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("COMPILED_AUTOGRAD_")}
    for name in ("cache", "temporary"):
        folder.joinpath(name).mkdir(exist_ok=True)
    places = {"XDG_CACHE_HOME": str(folder / "cache"), "TMPDIR": str(folder / "temporary")}
    return {**kept, "PYTHONPATH": str(ROOT), **places, **more}


def _command(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "compiled_autograd", *arguments]
    return subprocess.run(
        command, env=_environment(folder, **environment), cwd=folder, capture_output=True, text=True, check=False
    )


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


# The whole command


@pytest.mark.slow  # minutes on a busy machine: it compiles the extension
def test_the_whole_command(tmp_path: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    ended = _command(tmp_path, "selftest", "--json")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = json.loads(ended.stdout)
    assert found["fine"] and found["sentence"].startswith("This machine is fine")
    assert sorted(each["name"] for each in found["results"]) == sorted(selftest.NAMES)
    wrong = {each["name"]: each["reason"] for each in found["results"] if each["result"] != "ok"}
    lacking = {apart.CUDA} if not torch.cuda.is_available() else set()
    lacking |= {apart.EXTENSION, apart.OWN_LOOP} if why_unsupported() else set()
    lacking |= {apart.OWN_LOOP} if why_own_loop_is_unchecked() else set()
    assert set(wrong) == lacking, wrong
    assert not ended.stderr
    assert not _files(tmp_path)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < _SECONDS_OF_CPU


def test_without_a_compiler(tmp_path: Path) -> None:
    parts = (apart.INDUCTOR, apart.STORE, apart.EXTENSION, apart.OWN_LOOP)
    only = [each for part in parts for each in ("--only", part)]
    ended = _command(tmp_path, "selftest", *only, PATH=str(tmp_path), CXX="")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    lines = ended.stdout.splitlines()
    assert lines[-1] == (
        "What was run is fine. There is no C++ compiler: the extension is off, and backend inductor runs the calls of "
        "a backward one by one, with the same gradients."
    )
    results = {part: line for part in parts for line in lines if line.startswith(part)}
    assert [part for part in parts if " not here " in results[part]] == [part for part in parts if part != apart.STORE]
    assert " ok " in results[apart.STORE]


@needs_extension
def test_an_extension_that_is_refused(tmp_path: Path) -> None:
    """Of the user's own folder."""
    environment = _environment(tmp_path)
    folder = tmp_path / "cache" / "compiled_autograd" / "native"
    folder.mkdir(mode=0o700, parents=True)
    asks = "from compiled_autograd.native.library import name_of_build; print(name_of_build())"
    name = subprocess.run([sys.executable, "-c", asks], env=environment, capture_output=True, text=True, check=True)
    folder.joinpath(f"{name.stdout.strip()}.so").write_text("no library")
    ended = _command(tmp_path, "selftest", "--only", apart.EXTENSION, **environment)
    assert ended.returncode == 1
    *_, line, sentence = ended.stdout.splitlines()
    assert line.startswith(apart.EXTENSION) and " off " in line and "file too short" in line
    assert "backwards are walked by PyTorch's engine, with the same gradients" in sentence


@pytest.mark.slow
def test_what_it_does_not_know(tmp_path: Path) -> None:
    ended = _command(tmp_path, "nothing")
    assert ended.returncode == 2
    assert "Usage: python -m compiled_autograd" in ended.stderr and "nothing" in ended.stderr
    ended = _command(tmp_path, "selftest", "--only", "nothing")
    assert ended.returncode == 2
    ended = _command(tmp_path, "selftest", COMPILED_AUTOGRAD_BACKENDS="eager")
    assert ended.returncode == 2
    assert "COMPILED_AUTOGRAD_BACKENDS" in ended.stderr and "Traceback" not in ended.stderr
    ended = _command(tmp_path, "selftest", "--only", _HERE, COMPILED_AUTOGRAD_BACKEND="inducto")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("there is no backend 'inducto'. Did you mean 'inductor'?")


@pytest.mark.parametrize(
    ("asked", "said"),
    [("eager", " torch 2.99.0 was not tested: set untested_torch='try' to compile on it."), ("try", "")],
)
def test_on_a_torch_that_was_not_tested(asked: str, said: str) -> None:
    code = """
import torch
torch.__version__ = torch.torch_version.TorchVersion("2.99.0")
from compiled_autograd import selftest
print(selftest.sentence([selftest.PartResult(name, "ok", 0.0) for name in selftest.NAMES]))
"""
    done = in_subprocess(code, COMPILED_AUTOGRAD_UNTESTED_TORCH=asked)
    assert done.stdout == f"This machine is fine.{said}\n", done.stderr


def test_the_last_line_of_a_part() -> None:
    status, output = _run_command(_HERE)
    assert status == 0 and output.splitlines()[-1] == "What was run is fine."
    left_out = selftest.PartResult(apart.EXTENSION, "not here", 0.0, "extension='off' is set")
    assert selftest.sentence([left_out]) == (
        "What was run is fine. The extension is off: backwards are walked by PyTorch's engine, with the same gradients."
    )


@pytest.mark.slow  # it compiles the extension beside it
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="processes are looked for in /proc")
def test_ctrl_c_ends_it_at_once(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "compiled_autograd", "selftest"]
    process = subprocess.Popen(command, env=_environment(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    while not process.stdout.readline().startswith(b"threads"):  # now other processes compile
        assert process.poll() is None
    assert _processes_with(str(tmp_path))
    process.send_signal(signal.SIGINT)
    rest, said = process.communicate(timeout=600)  # seconds where cores are free
    assert len(rest.splitlines()) <= 1, "other parts ran"
    assert process.returncode == 130
    assert b"Traceback" not in said
    assert not _processes_with(str(tmp_path))
    assert not [*tmp_path.joinpath("temporary").glob("compiled_autograd_*")]


def _processes_with(text: str) -> list[str]:
    """The command lines in which a text stands."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            found += [line] if text in line else []
    return found


# What is wrong is found


def _run_command(*only: str) -> tuple[int, str]:
    arguments = ["selftest", *(word for part in only for word in ("--only", part))]
    ended = CliRunner().invoke(main, arguments)
    return ended.exit_code, ended.output


def test_a_wrong_gradient_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = accumulate._kept
    monkeypatch.setattr(accumulate, "_kept", lambda grad: right(grad) * 1.001)
    status, output = _run_command("custom functions", _HERE)
    assert status == 1
    _, line, other, sentence = output.splitlines()
    assert " wrong " in line and "gradient 1 is torch.float32 (3, 4)" in line and "eager gives" in line
    assert "custom functions is wrong: do not use this package with this PyTorch." in sentence
    assert other.startswith(_HERE)


def test_wrong_compiled_code_is_found_although_it_was_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    right = EagerBackend.compile

    def wrong(self: Any, graph_module: Any, examples: Any) -> Any:
        compiled = right(self, graph_module, examples)
        return lambda values: [None if each is None else each * 2 for each in compiled(values)]

    wrong._boxed_call = True  # type: ignore[attr-defined]
    monkeypatch.setattr(EagerBackend, "compile", wrong)
    status, output = _run_command(_HERE)
    assert status == 1
    assert " wrong " in output and "mismatch" in output


def test_a_bypass_where_a_hit_is_expected_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_SETTINGS", {**checks._SETTINGS, "on_miss": "eager"})
    status, output = _run_command(_HERE)
    assert status == 1
    assert "on_miss" in output


def test_a_hook_that_is_not_called_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0

    def hooked(step: TapeStep) -> list[Any]:
        nonlocal calls
        calls += 1
        x = step.leaf(2)
        if calls != 4:
            x.register_hook(step.hook("x"))
        with step:
            x.sin().sum().backward()
        return [x.grad]

    monkeypatch.setitem(HERE, _HERE, TapeCase(hooked))
    (result,) = selftest.run([_HERE])
    assert result.result == "wrong"
    assert result.reason.startswith("step 2: hooks and functions saw []")


def test_an_error_in_one_part_does_not_end_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(step: TapeStep) -> list[Any]:
        raise RuntimeError(f"of step\n{step.number}")

    monkeypatch.setitem(HERE, "tensor hooks", TapeCase(fails))
    found = _by_name(selftest.run(selftest.QUICK))
    assert found["tensor hooks"].result == "wrong"
    assert found["tensor hooks"].reason == "RuntimeError: of step 0"
    assert {each.result for name, each in found.items() if name != "tensor hooks"} == {"ok"}
    assert len(found) == len(selftest.QUICK)


def test_a_process_that_dies_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import os, sys; sys.stderr.write('words of its end'); sys.stderr.flush(); os.kill(os.getpid(), 11)"
    monkeypatch.setattr(apart, "command", lambda _: [sys.executable, "-c", code])
    found = _by_name(selftest.run([_HERE, apart.INDUCTOR, apart.STORE]))
    assert found[_HERE].result == "ok"
    for name in (apart.INDUCTOR, apart.STORE):
        assert found[name].result == "wrong"
        assert found[name].reason == "its process ended with status -11: words of its end"


def test_a_process_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apart, "command", lambda _: [sys.executable, "-c", "import time; time.sleep(600)"])
    monkeypatch.setattr(running, "_SECONDS_FOR_A_PROCESS", 0.5)
    (found,) = selftest.run([apart.STORE])
    assert (found.result, found.reason) == ("wrong", "its process took too long")


def test_a_tape_that_met_another_thread_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    right, met = decide.before_capture, []

    def first_meets(*arguments: Any) -> Any:
        met.append(1)
        return OTHER_THREAD if len(met) == 2 else right(*arguments)

    monkeypatch.setattr(decide, "before_capture", first_meets)
    (found,) = selftest.run([_HERE])
    assert found.result == "ok", found
    assert len(met) == 2 + STEPS


def test_names_that_are_unknown() -> None:
    with pytest.raises(ValueError, match="the part 'nothing' does not exist; the parts are tensor hooks"):
        selftest.run(["nothing"])


# The process is as it was


def _state() -> dict[str, Any]:
    """What a process has, and the selftest could change."""
    return {
        "numbers": torch.get_rng_state().tolist(),
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "filters": [*warnings.filters],
        "warned": dict(reporting._warned),
        "threads": threading.active_count(),
        "graphs": len(GRAPHS),
        "sessions": [*session.thread.here.stack],
        "variables": dict(os.environ),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "anomaly": torch.is_anomaly_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "modules": [*torch.nn.modules.module._global_forward_hooks],
    }


def _alive() -> list[Any]:
    gc.collect()
    return [each for each in gc.get_objects() if type(each) is CompiledGraph]


@contextlib.contextmanager
def _default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def _global_hooks() -> Iterator[None]:
    def hook(module: Any, given: Any, result: Any) -> Any:
        raise AssertionError("a module of the selftest was called")

    handle = torch.nn.modules.module.register_module_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def _node_creation_hook() -> Iterator[None]:
    made: list[Any] = []
    hook = getattr(torch.autograd.graph, "node_creation_hook", None)  # since 2.14
    with contextlib.nullcontext() if hook is None else hook(made.append):
        yield
    assert not made


@contextlib.contextmanager
def _in_environment() -> Iterator[None]:
    given = {"COMPILED_AUTOGRAD_ON_MISS": "eager", "COMPILED_AUTOGRAD_BACKEND": "inductor"}
    with patch.dict(os.environ, given):
        yield


def _refuse(value: torch.Tensor) -> torch.Tensor:
    raise AssertionError("a hook of the user's saw a tape of the selftest")


_STATES: dict[str, Callable[[], Any]] = {
    "default dtype": _default_dtype,
    "default device": lambda: torch.device("meta"),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "no grad": torch.no_grad,
    "inference mode": torch.inference_mode,
    "saved-tensor hooks": lambda: torch.autograd.graph.saved_tensors_hooks(_refuse, _refuse),
    "global hooks of modules": _global_hooks,
    "deterministic algorithms": _deterministic,
    "anomaly mode": lambda: torch.autograd.set_detect_anomaly(True),
    "a session": lambda: ca.enable(backend="eager", on_miss="raise"),
    "node creation hooks": _node_creation_hook,
    "environment variables": _in_environment,
}


@pytest.mark.filterwarnings("error")
@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.parametrize("name", _STATES)
def test_it_runs_in_any_state_and_changes_none(name: str) -> None:
    with _STATES[name]():
        before = _state()
        found = selftest.run(selftest.QUICK)
        assert _state() == before
    assert [each for each in found if each.result != "ok"] == []
    assert not _alive()


def test_the_tapes_warn_of_nothing() -> None:
    """PyTorch warns once in a process of some things: the user would not be warned."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for tape in HERE.values():
            assert checks.check_tape(tape) == ("ok", "")
    assert [str(each.message) for each in caught] == []


def test_a_training_is_the_same_after_it() -> None:
    def train(first: Callable[[], object]) -> tuple[Any, ca.Stats]:
        ca.reset()
        torch.manual_seed(0)
        first()
        model, used = mlp(), ca.enable(backend="eager")
        for _ in range(3):
            model.zero_grad()
            with used:
                model(torch.randn(4, 8)).square().mean().backward()
        stats = used.stats()
        stats.compile_seconds = 0.0
        return [each.grad for each in model.parameters()], stats

    (grads, stats), (wanted, wanted_stats) = train(lambda: selftest.run(selftest.QUICK)), train(lambda: None)
    assert checks.same(grads, wanted, True)
    assert stats == wanted_stats


def test_graphs_of_the_process_stay() -> None:
    """The tapes run elsewhere where something is captured already."""
    used = ca.enable(backend="eager")
    x = torch.randn(3, requires_grad=True)
    for _ in range(2):
        with used:
            (x.sin() * x).sum().backward()
        x.grad = None
    before = used.graphs()
    (found,) = selftest.run([_HERE])
    assert found.result == "ok", found
    assert used.graphs() == before and len(GRAPHS) == 1
    with used:
        (x.sin() * x).sum().backward()
    assert used.last is not None and used.last.outcome == "hit"


def test_it_stops_where_nobody_waits_for_it() -> None:
    found = selftest.as_they_come([*selftest.QUICK, apart.STORE])
    assert next(found).result == "ok"
    found.close()
    assert not [each for each in threading.enumerate() if "selftest" in each.name]
    assert not len(GRAPHS)
