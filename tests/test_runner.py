"""``python -m compiled_autograd script.py``: the program is what ``python script.py`` would be, and its backwards are
compiled.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import rich_click as click
from click.testing import CliRunner

from compiled_autograd import enable
from compiled_autograd.__main__ import main
from compiled_autograd.errors import InvalidSettingError
from compiled_autograd.runner.launch import RUN, asked_of_this_process
from compiled_autograd.settings import FROM_ENVIRONMENT, allowed, resolve

from .helpers import ROOT

_HIT_COUNT = """
def hits():
    import sys
    session = sys.modules["compiled_autograd.engine.session"].current() if "compiled_autograd" in sys.modules else None
    return "eager" if session is None else session.stats().hits

def train(steps=4):
    import torch
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().sum().backward()
        optimizer.step()
    return [parameter.tolist() for parameter in model.parameters()]
"""

_ALL = (
    """
import inspect, multiprocessing, pickle, subprocess, sys, threading
import torch
"""
    + _HIT_COUNT
    + """
class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return torch.full((2,), float(index))

def child(queue):
    queue.put((train(), hits()))

def hits_of_children():
    loader = torch.utils.data.DataLoader(Rows(), num_workers=1, multiprocessing_context="spawn")
    print(list(loader))
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    parameters, in_child = queue.get()
    process.join()
    print(parameters)
    code = "import runpy, sys; names = runpy.run_path(sys.argv[1]); names['train'](); print(names['hits']())"
    in_other = subprocess.run([sys.executable, "-c", code, __file__], capture_output=True, text=True, check=True)
    return in_child, in_other.stdout.strip()

if __name__ == "__main__":
    print(sys.argv, sys.path[0], __name__, __file__, __spec__, sys.modules["__main__"].Rows is Rows)
    print(type(pickle.loads(pickle.dumps(Rows()))) is Rows, inspect.getsource(Rows.__len__), train())
    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    print("hits", hits(), *(hits_of_children() if "children" in sys.argv else ()), file=sys.stderr)
"""
)
_FEW = {
    f"COMPILED_AUTOGRAD_{name}": text
    for name, text in (("CACHE_DIR", "false"), ("EXTENSION", "off"), ("ON_MISS", "compile"), ("TUNE", "false"))
}
_FEW["COMPILED_AUTOGRAD_BACKEND"] = "eager"


def _python(*arguments: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("COMPILED_AUTOGRAD")}
    environ |= {"PYTHONPATH": str(ROOT), **_FEW, **variables}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=environ, cwd=cwd, timeout=240, check=False
    )


_NAME = ("-m", "compiled_autograd")
Launched = tuple[list[str], dict[str, str]]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Launched]:
    """What the runner would start, with which arguments and variables."""
    for name in list(os.environ):
        if name.startswith("COMPILED_AUTOGRAD"):
            monkeypatch.delenv(name)
    seen: list[Launched] = []
    monkeypatch.setattr(os, "execve", lambda path, arguments, environ: seen.append((list(arguments), environ)))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def launch(*arguments: str, before: Sequence[str] = (), name: Sequence[str] = _NAME) -> Launched:
        monkeypatch.setattr(sys, "argv", ["__main__.py", *arguments])
        monkeypatch.setattr(sys, "orig_argv", ["python", *before, *name, *arguments])
        result = CliRunner().invoke(main, list(arguments), prog_name="python -m compiled_autograd")
        assert not result.exit_code, result.output
        return seen.pop()

    return launch


@pytest.mark.parametrize(
    ("first", "hits"), [("a", "hits 7"), pytest.param("children", "hits 7 3 3", marks=pytest.mark.slow)]
)
def test_a_program_is_what_python_makes_of_it(first: str, hits: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(_ALL)
    plain = _python("script.py", first, "--backend", cwd=tmp_path)
    ours = _python("-m", "compiled_autograd", "--backend", "eager", "script.py", first, "--backend", cwd=tmp_path)
    assert plain.returncode == ours.returncode == 0, plain.stderr + ours.stderr
    assert ours.stdout == plain.stdout and "--backend" in ours.stdout
    assert re.sub(r"\d", "eager", hits) in plain.stderr
    *_, counts, line = ours.stderr.splitlines()
    assert counts == hits  # the thread's are among them
    assert line.startswith("compiled_autograd: 8 backwards: 7 hits, 1 miss;")


_ENDS = {
    "error": "def f():\n    raise ValueError('no')\ntry:\n    f()\nexcept ValueError as e:\n    raise KeyError from e",
    "text": "import sys; sys.exit('a text')",
    "status": "raise SystemExit(3)",
    "interrupt": "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(1)",
    "signal": "import os, signal, time\nos.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(1)",
    "syntax": "x = (",
    "hook": "import sys\nsys.excepthook = lambda *a: print(a[0], a[2].tb_next)\n1 / 0",
}


_LIKE_OTHERS = ("text", "signal", "hook")


@pytest.mark.parametrize(
    "end", [pytest.param(each, marks=pytest.mark.slow if each in _LIKE_OTHERS else ()) for each in _ENDS]
)
def test_a_program_ends_as_it_would(end: str, tmp_path: Path, launched: Callable[..., Launched]) -> None:
    (tmp_path / "s.py").write_text(f"import torch\n{_ENDS[end]}\n")
    arguments, environ = launched("--backend", "eager", "s.py") if end != "syntax" else launched("s.py")
    seen = []
    plain = {**os.environ, "COMPILED_AUTOGRAD": "", "PYTHONPATH": str(ROOT)}
    for each in (environ, plain):
        ended = subprocess.run(
            [sys.executable, *arguments[1:]], capture_output=True, text=True, env=each, cwd=tmp_path, check=False
        )
        errors = [line for line in ended.stderr.splitlines() if not line.startswith("compiled_autograd: ")]
        seen.append((ended.returncode, ended.stdout, errors))
    assert seen[0] == seen[1]
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN  # as in what a shell runs in the background
    interrupted = 0 if ignored else -signal.SIGINT
    assert seen[0][0] == {"status": 3, "interrupt": interrupted, "signal": -signal.SIGTERM, "hook": 1}.get(end, 1)


def test_modules_settings_and_flags_of_python(launched: Callable[..., Launched]) -> None:
    for module in (["-m", "json.tool"], ["-mjson.tool"]):
        arguments, environ = launched(
            *("--on-miss", "background", "--check=10", *module, "--help", "-mx"), before=["-u"]
        )
        assert arguments[1:] == ["-u", "-m", "json.tool", "--help", "-mx"]
        assert environ["COMPILED_AUTOGRAD_ON_MISS"] == "background" and environ["COMPILED_AUTOGRAD_CHECK"] == "10"
    assert launched("--check", "10", "-", "-mx")[0][1:] == ["-", "-mx"]
    assert environ["COMPILED_AUTOGRAD"] == "1" and environ["PYTHONPATH"].endswith(os.pathsep + str(ROOT))
    for name in (
        ["-um", "compiled_autograd"],
        ["-umcompiled_autograd"],
        ["-u", f"{ROOT}/compiled_autograd/__main__.py"],
    ):
        assert launched("s.py", "-m", name=name)[0][1:] == ["-u", "s.py", "-m"]
    assert launched("-m", "compileall", name=["-m", "coverage", "run", "-m", "compiled_autograd"])[0][1:] == [
        *("-m", "coverage", "run", "-m", "compileall")
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--backnd", "eager", "s.py"], "Did you mean '--backend'?"),
        (["--backend", "egr", "s.py"], "there is no backend 'egr'. Did you mean 'eager'?"),
        (["--check", "-3", "s.py"], "--check: check='-3' is not possible"),
        (["--mode", "max-autotune", "--backend", "eager", "s.py"], "--mode: mode='max-autotune' is not possible"),
        (["--native", "1", "--extension", "all", "s.py"], "--native: native=True is not possible; native is a former"),
        (["slftest"], "is neither a file nor a command. Did you mean 'selftest'?"),
        (["--backend", "eager", "selftest"], "--backend is an option for programs"),
        (["--seconds", "3", "s.py"], "options of --compare"),
        (["--compare", "--seconds", "nan", "s.py"], "--seconds nan is not possible"),
        (["--compare", "--seconds", "0", "s.py"], "--seconds 0 is not possible"),
        (["--report", "nofolder/page.html", "s.py"], "--report nofolder/page.html is not possible"),
        (["--report", ".", "s.py"], "--report . is not possible"),
        (["--compare"], "name a program"),
        (["-m"], "name a program"),
    ],
)
def test_a_wrong_option_says_so(arguments: list[str], words: str, launched: Callable[..., Launched]) -> None:
    result = CliRunner().invoke(main, arguments, env={"TERMINAL_WIDTH": "400", "COLUMNS": "400"})
    assert result.exit_code == 2 and words in " ".join(result.output.replace("│", "").split())


def test_nothing_is_compared_where_sessions_are_off(launched: Callable[..., Launched]) -> None:
    result = CliRunner().invoke(main, ["--compare", "s.py"], env={"COMPILED_AUTOGRAD": "0", "COLUMNS": "400"})
    assert result.exit_code == 2 and "COMPILED_AUTOGRAD=0" in result.output


def test_a_comparison_may_have_no_limit_and_an_empty_variable(
    launched: Callable[..., Launched], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fork", lambda: 0)
    monkeypatch.setenv("COMPILED_AUTOGRAD_ON_MISS", "")
    _, environ = launched("--compare", "--seconds", "inf", "--backend", "eager", "s.py")
    monkeypatch.setenv(RUN, environ[RUN])
    run = asked_of_this_process()
    assert run is not None and run.seconds > 1e300
    assert environ["COMPILED_AUTOGRAD_ON_MISS"] == "background"
    Path(run.answer).unlink()


def test_every_setting_that_text_can_name_is_an_option() -> None:
    options = {option for each in main.params for option in each.opts}
    assert {f"--{name.replace('_', '-')}" for name in FROM_ENVIRONMENT} < options
    assert isinstance(main, click.Group) and "selftest" in main.commands


def test_each_option_has_help() -> None:
    """A setting's is that of ``enable``, which begins with a whole sentence without a colon or markup."""
    documented = " ".join((enable.__doc__ or "").split())
    for option in main.params:
        assert isinstance(option, click.Option) and (option.hidden or re.match(r"[A-Z].*\.$", option.help or ""))
        if option.name not in FROM_ENVIRONMENT:
            continue
        found = re.fullmatch(r"([^:`]+\.) Takes (.+); default (.+)\.", option.help or "")
        assert found is not None and found[2] == allowed(option.name), option.help
        assert f" {option.name}: {found[1][:1].lower()}" in documented
        assert found[3] == repr(inspect.signature(enable).parameters[option.name].default)


def test_sessions_of_the_programs_own_win(tmp_path: Path, launched: Callable[..., Launched]) -> None:
    (tmp_path / "sitecustomize.py").write_text("import builtins\nbuiltins.theirs = True\n")
    code = (
        "import compiled_autograd as ca\nwith ca.enable() as own:\n    train()\nwith ca.disable():\n    train()\n"
        "print(own.stats().hits, hits(), theirs)"
    )
    (tmp_path / "s.py").write_text(_HIT_COUNT + code)
    ours = _python("-m", "compiled_autograd", "s.py", cwd=tmp_path, PYTHONPATH=f"{ROOT}{os.pathsep}{tmp_path}")
    assert ours.stdout.split() == ["3", "0", "True"], ours.stderr
    assert ours.stderr == "compiled_autograd: no backward ran in this session\n"


def test_the_switch(tmp_path: Path) -> None:
    seen = "session = ca.enable()\nwith session:\n    train()\nprint(session.stats().bypasses, ca.compile_step(hits)())"
    (tmp_path / "s.py").write_text(f"import compiled_autograd as ca\n{_HIT_COUNT}train()\nprint(hits())\n{seen}")
    on, off = (_python("s.py", cwd=tmp_path, COMPILED_AUTOGRAD=value) for value in ("1", "0"))
    assert on.stdout.split("\n") == ["3", "{} 0", ""], on.stderr
    assert on.stderr.startswith("compiled_autograd: 4 backwards: 3 hits")
    assert off.stdout.split("\n") == ["eager", "{'turned_off': 4} 0", ""], off.stderr
    assert off.stderr.count("COMPILED_AUTOGRAD=0 is set") == 1
    with pytest.raises(InvalidSettingError, match="COMPILED_AUTOGRAD='maybe' is not possible"):
        resolve({}, {"COMPILED_AUTOGRAD": "maybe"})


def test_a_report_takes_the_place_of_the_line(tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text(_HIT_COUNT + "import os\ntrain()\nos.chdir('/')")
    ours = _python("-m", "compiled_autograd", "--report", "page.html", "s.py", cwd=tmp_path)
    assert (ours.stdout, ours.stderr, ours.returncode) == ("", "", 0)
    assert "<html" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize("ends", ["", "; sys.argv.clear()"])
def test_a_program_without_torch_says_so(ends: str, tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text(f"import json, sys\nprint('torch' in sys.modules){ends}")
    ours = _python("-m", "compiled_autograd", "s.py", cwd=tmp_path)
    said = "" if ends else "compiled_autograd: the program did not import torch\n"
    assert ours.stdout == "False\n" and ours.stderr == said


@pytest.mark.parametrize("program", [["nosuch.py"], ["--compare", "nosuch.py"], ["-m", "nosuch"]])
def test_a_program_that_is_not_there_ends_as_it_would(program: list[str], tmp_path: Path) -> None:
    plain = _python(*[each for each in program if each != "--compare"], cwd=tmp_path)
    ours = _python("-m", "compiled_autograd", *program, cwd=tmp_path)
    assert (ours.stdout, ours.stderr, ours.returncode) == ("", plain.stderr, plain.returncode)


def test_a_program_from_standard_input(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "compiled_autograd", "-", "a"]
    text, environ = "import sys; print(sys.argv)", {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, input=text, capture_output=True, text=True, cwd=tmp_path, env=environ, check=False)
    assert (ended.stdout, ended.stderr) == ("['-', 'a']\n", "compiled_autograd: the program did not import torch\n")


_ADVERSARIES = """
import contextlib, hashlib, sys, torch
torch.manual_seed(0)
def net(before, after):
    layers = torch.nn.Linear(before, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.1), torch.nn.Linear(16, after)
    return torch.nn.Sequential(*layers)
made, judge = net(4, 8), net(8, 1)
optimizers = [torch.optim.Adam(each.parameters(), 1e-3) for each in (made, judge)]
own = contextlib.nullcontext()
if "own" in sys.argv:
    import compiled_autograd
    own = compiled_autograd.enable()
for step in range(200):
    optimizers[1].zero_grad()
    with own:
        (judge(made(torch.randn(8, 4)).detach()) - judge(torch.randn(8, 8))).mean().backward()
    optimizers[1].step()
    if step % 3 == 0:
        optimizers[0].zero_grad()
        with own:
            judge(made(torch.randn(8, 4))).mean().backward()
        optimizers[0].step()
state = [*made.state_dict().values(), *judge.state_dict().values(), torch.get_rng_state()]
print(hashlib.sha256(b"".join(each.numpy().tobytes() for each in state)).hexdigest())
"""


@pytest.mark.slow
@pytest.mark.parametrize("own", [(), ("own",)])
def test_comparing_changes_no_training(own: tuple[str, ...], tmp_path: Path) -> None:
    """Bit for bit: parameters, buffers, and random numbers, with two optimizers."""
    (tmp_path / "s.py").write_text(_ADVERSARIES)
    plain = _python("s.py", cwd=tmp_path)
    ours = _python("-m", "compiled_autograd", "--compare", "--go-on", "s.py", *own, cwd=tmp_path)
    assert plain.stdout == ours.stdout and len(plain.stdout) == 65 and "worth it: " in ours.stderr, ours.stderr


@pytest.mark.slow
def test_torchrun(tmp_path: Path) -> None:
    code = (
        "import json, os, torch.distributed as dist\ndist.init_process_group('gloo')\ntrain()\n"
        "open(f'{dist.get_rank()}.json', 'w').write(json.dumps([hits(), dist.get_world_size()]))\n"
        "dist.destroy_process_group()"
    )
    (tmp_path / "s.py").write_text(_HIT_COUNT + code)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    for arguments in ((*torchrun, "-m", "compiled_autograd", "s.py"), ("-m", "compiled_autograd", *torchrun, "s.py")):
        ended = _python(*arguments, cwd=tmp_path)
        assert ended.returncode == 0, ended.stderr
        for rank in "01":
            file = tmp_path / f"{rank}.json"
            assert json.loads(file.read_text()) == [3, 2]
            file.unlink()
        assert ended.stderr.count("4 backwards: 3 hits") == 1
