"""Tested releases of PyTorch, the table of their differences, and releases that were never tested."""

from __future__ import annotations

import os
import re
import site
import subprocess
import sys
import sysconfig
import venv
from importlib import metadata
from pathlib import Path

import pytest
import torch

import compiled_autograd as ca
from backends import torch_versions
from backends.torch_versions import DIFFERENCES, described, has, is_tested, release

from .helpers import ROOT, in_subprocess

_SEEN = {
    "clamp_at_bounds": "tests/test_proving.py",
    "input_grad_buffers": "compiled_autograd/torch_api/input_buffers.py",
    "intrusive_nodes": "compiled_autograd/native/contract.h",
    "kernels_with_scratch": "backends/inductor/cuda/kernels.py",
    "own_loop": "backends/torch_versions.py",
    "node_creation_hook": "tests/test_node_creation_hook.py",
    "output_grad_dtype": "compiled_autograd/torch_api/grad_dtypes.py",
}
"""Rows that no code asks for, since it sees what PyTorch has, with the file that does."""


@pytest.mark.parametrize(
    "version", ["2.11.0+cu130", "2.12.1", "2.13.0", "2.13.5+cpu", "2.15.0", "2.15.1a0+git123", torch.__version__]
)
def test_tested_releases(version: str) -> None:
    assert is_tested(version)


@pytest.mark.parametrize("version", ["1.13.1", "2.10.0", "2.16.0", "2.16.0.dev20270101", "3.0", "13.2", "unknown", ""])
def test_releases_that_were_not_tested(version: str) -> None:
    assert not is_tested(version)


def test_the_range_for_people_is_that_of_the_code() -> None:
    low, beyond = re.findall(r"\d+\.\d+", ca.TESTED_TORCH)
    assert is_tested(low) and not is_tested(beyond)


def test_pip_never_replaces_a_newer_torch() -> None:
    """The dependency has no upper bound."""
    (needed,) = (each for each in (ROOT / "pyproject.toml").read_text().splitlines() if each.startswith('    "torch>'))
    assert needed.strip(' ",') == f"torch>={'.'.join(map(str, torch_versions.LOWEST))}"


# ---- the table ---------------------------------------------------------------------------------------------------


def test_each_row_is_asked_for_once_in_the_code_and_has_a_test() -> None:
    sources = [
        path.read_text() for folder in ("backends", "compiled_autograd") for path in (ROOT / folder).rglob("*.py")
    ]
    for name, row in DIFFERENCES.items():
        asked = any(f'has("{name}")' in source for source in sources)
        assert asked != (name in _SEEN), f"nothing asks for {name}: the row can go"
        assert (ROOT / row.test).exists() and torch_versions.LOWEST < row.since <= torch_versions.LAST, name
    assert set(_SEEN) <= set(DIFFERENCES) and all((ROOT / file).exists() for file in _SEEN.values())


def test_no_file_beside_the_table_asks_for_a_version() -> None:
    """Numbers of releases stand in the table alone."""
    allowed = {ROOT / "backends" / "torch_versions.py"}
    for folder in ("backends", "compiled_autograd", "shadow_cache"):
        for path in set((ROOT / folder).rglob("*.py")) - allowed:
            found = re.search(r"[<>]=? \(2, 1\d\)|__version__\.(split|startswith)", path.read_text())
            assert found is None, f"{path}: {found}"


def test_the_table_is_in_order_and_in_the_docs() -> None:
    assert [row.since for row in DIFFERENCES.values()] == sorted(row.since for row in DIFFERENCES.values())
    page = (ROOT / "docs" / "internals" / "torch_api.md").read_text()
    for name, row in DIFFERENCES.items():
        line = f"| `{name}` | {'.'.join(map(str, row.since))} | {row.what} | {row.where} | `{row.test}` |"
        assert line in page, f"docs/internals/torch_api.md lacks this line:\n{line}"


def test_a_row_says_on_which_side_a_version_is() -> None:
    assert release("2.13.1+cpu") == (2, 13) and not has("own_loop", "2.11.0") and has("own_loop", "2.13.0")
    here, there = (dict(described(version))["own_loop"] for version in ("2.12.0", "2.11.0"))
    assert here.startswith("since 2.12: ") and there.startswith("since 2.12 (not here): ")


# ---- a release that was never tested -----------------------------------------------------------------------------

_TRAINS = """
import warnings, torch
torch.__version__ = torch.torch_version.TorchVersion({version!r})
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    import compiled_autograd as ca
    x = torch.ones(3, requires_grad=True)
    calls = []
    for step in range(5):
        x.grad = None
        with ca.enable(backend="eager", cache_dir=False, **{settings!r}) as session:
            y = x.exp()
            y.register_hook(lambda grad: calls.append(step))
            y.sum().backward()
        last = session.last
    assert torch.equal(x.grad, x.detach().exp()) and calls == [0, 1, 2, 3, 4]
    told = [str(each.message) for each in told if "compiled_autograd" in str(each.message)]
"""


def _trains(code: str, version: str = "2.99.0", **settings: object) -> None:
    done = in_subprocess(_TRAINS.format(version=version, settings=settings) + code)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("version", ["2.99.0", pytest.param("2.10.0+cpu", marks=pytest.mark.slow)])
def test_an_untested_release_trains_on_eager_and_warns_once(version: str) -> None:
    _trains(
        """
assert last.outcome == "bypass" and last.reasons[0].kind == "untested_torch" and "selftest" in last.reasons[0].hint
(text,) = told
for part in (torch.__version__, ca.TESTED_TORCH, "PyTorch's own engine", "untested_torch='try'"):
    assert part in text, (part, text)
assert session.stats().bypasses == {"untested_torch": 1} and session.stats().backwards == 1
assert session.settings.untested_torch == "eager"
assert session.own_loop == "off: this PyTorch was not tested"
""",
        version,
    )


def test_no_setting_makes_an_error_of_it() -> None:
    _trains(
        "assert session.stats().bypasses == {'untested_torch': 1}\n"
        "assert session.own_loop == 'off: this PyTorch was not tested'",
        on_unsupported="raise",
        on_miss="raise",
        extension="all",
    )


def test_nothing_but_the_engine_is_replaced() -> None:
    done = in_subprocess("""
import torch
torch.__version__ = "2.99.0"
asked = torch._C._current_graph_task_id
import compiled_autograd as ca
assert type(torch.autograd.Variable._execution_engine) is torch._C._ImperativeEngine
ca.enable()
assert torch._C._current_graph_task_id is asked
assert isinstance(torch.autograd.Variable._execution_engine, torch._C._ImperativeEngine)
""")
    assert done.returncode == 0, done.stderr


_PLANTED = """
import compiled_autograd.selftest as selftest
asked = []
def run(only=None):
    asked.append(only)
    return [selftest.PartResult("planted", {result!r}, 0.0, "a reason")]
selftest.run = run
"""


def _tries(result: str, code: str) -> None:
    start = "import torch\ntorch.__version__ = torch.torch_version.TorchVersion('2.99.0')\n"
    code = (
        start
        + _PLANTED.format(result=result)
        + _TRAINS.format(version="2.99.0", settings={"untested_torch": "try"})
        + code
    )
    done = in_subprocess(code)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(
    not has("leaf_takes_result", torch.__version__), reason="a later version than this one is called otherwise"
)
def test_it_is_tried_where_the_selftest_passes() -> None:
    """A session that asks for eager stays on eager beside it."""
    _tries(
        "ok",
        """
assert not told and asked == [None] and last.outcome == "hit" and session.settings.untested_torch == "try"
with ca.enable(backend="eager", cache_dir=False) as other:
    for _ in range(3):
        x.exp().sum().backward()
assert other.stats().bypasses == {"untested_torch": 3} and other.last.outcome == "bypass"
""",
    )


def test_it_is_not_tried_where_the_selftest_fails() -> None:
    _tries(
        "wrong",
        """
assert asked == [None] and last.outcome == "bypass" and last.reasons[0].kind == "untested_torch"
(text,) = told
assert "the selftest failed on it" in text and "planted" in text, text
""",
    )


def test_a_line_says_once_that_the_selftest_runs() -> None:
    code = (
        _PLANTED.format(result="ok")
        + """
import time, torch
from compiled_autograd.diagnostics import progress
progress.PATIENCE = 0.0
planted = selftest.run
selftest.run = lambda: time.sleep(0.3) or planted()
for _ in range(2):
    ca.enable(untested_torch="try", progress=True)
assert asked == [None]
"""
    )
    start = "import torch\ntorch.__version__ = torch.torch_version.TorchVersion('2.99.0')\n"
    done = in_subprocess(f"{start}import compiled_autograd as ca\n{code}")
    assert done.returncode == 0, done.stderr
    assert done.stderr == "| compiled_autograd: running the selftest, 0 s: torch 2.99.0 was not tested\n"


@pytest.mark.slow
def test_the_real_selftest_passes_on_the_installed_torch_by_another_name() -> None:
    """The engine is the installed one: every part that runs in this process passes, so the session compiles."""
    _trains("assert not told and last.outcome == 'hit', (told, last)", untested_torch="try")


_FAILS = """
import sys, warnings, torch
torch.__version__ = "2.99.0"
sys.modules["compiled_autograd.{module}"] = None
import compiled_autograd as ca
"""
"""As where something private of PyTorch's has moved."""
_MODULES = [
    "engine.session",
    *(pytest.param(each, marks=pytest.mark.slow) for each in ("capture.forward_lines", "cache.graphs")),
]


@pytest.mark.parametrize("module", _MODULES)
def test_an_import_that_fails_ends_nothing(module: str, tmp_path: Path) -> None:
    code = """
x = torch.ones(3, requires_grad=True)
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    @ca.compile_step(backend="eager")
    def step(factor):
        with ca.enable() as session, ca.disable(), ca.trace_sources():
            (factor * x.exp()).sum().backward()
        return session.stats().backwards, session.last.outcome, session.graphs(), session.wait()
    assert step(2) == step(factor=0) == (0, "bypass", [], True) and step.session.stats().hits == 0
assert torch.equal(x.grad, 2 * x.detach().exp())
(text,) = [str(each.message) for each in told]
assert "2.99.0" in text and ca.TESTED_TORCH in text and module in text, text
(reason,) = step.session.last.reasons
assert reason.kind == "untested_torch" and module in str(reason)
assert step.session.settings.backend == "eager" and "not tested" in step.session.own_loop
assert module in step.session.report(page).read_text()
assert ca.traceable(step) is step and ca.reset() is None
try:
    ca.inspect(x)
except NotImplementedError as error:
    assert "tested torch" in str(error)
else:
    raise AssertionError
assert set(ca.__all__) - {"load"} <= set(vars(ca)), set(ca.__all__) - set(vars(ca))
try:
    ca.enable(on_mis="raise")
except ca.UnknownSettingError:
    pass
else:
    raise AssertionError
"""
    given = f"module, page = {module!r}, {str(tmp_path / 'report.html')!r}\n"
    done = in_subprocess(_FAILS.format(module=module) + given + code)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("module", _MODULES)
def test_where_an_import_fails_callbacks_do_nothing(module: str) -> None:
    """The trainers' libraries are played."""
    code = """
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock
class Base: pass
for name in ("lightning", "lightning.pytorch", "lightning.pytorch.utilities", "transformers"):
    sys.modules[name] = MagicMock(Callback=Base, TrainerCallback=Base)
from compiled_autograd.integrations import lightning, transformers
x = torch.ones(3, requires_grad=True)
warnings.simplefilter("ignore")
callback = lightning.CompiledAutogradCallback(backend="eager")
module = MagicMock()
callback.on_fit_start(None, module)
callback.on_before_backward(None, module, None)
x.exp().sum().backward()
callback.on_after_backward(None, module)
callback.on_train_batch_end(MagicMock(log_every_n_steps=1, global_step=1), module, None, None, 0)
callback.on_fit_end(None, module)
assert not module.log.called and not module.log_dict.called and not lightning.rank_zero_info.called
callback, state, logs = transformers.CompiledAutogradCallback(), MagicMock(log_history=[]), {}
callback.on_train_begin(None, state, None)
x.exp().sum().backward()
callback.on_log(None, state, None, logs)
callback.on_train_end(None, state, None)
assert logs == {transformers.MISSES: 0} and torch.equal(x.grad, 2 * x.detach().exp())
"""
    done = in_subprocess(_FAILS.format(module=module) + code)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


@pytest.mark.parametrize(("program", "status"), [("__main__", 1), pytest.param("load", 2, marks=pytest.mark.slow)])
def test_where_an_import_fails_a_program_says_so(program: str, status: int) -> None:
    code = f"""
import runpy
sys.argv[1:] = ["selftest"]
runpy.run_module("compiled_autograd.{program}", run_name="__main__")
"""
    done = in_subprocess(_FAILS.format(module="cache.graphs") + code)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (status, "", 1), done.stderr
    assert done.stderr.startswith("compiled_autograd does not work with this PyTorch: ")
    assert "cache.graphs" in done.stderr


def test_on_a_tested_release_a_failed_import_is_an_error() -> None:
    done = in_subprocess(
        "import sys, compiled_autograd as ca; sys.modules['compiled_autograd.engine.session'] = None; ca.enable"
    )
    assert done.returncode == 1 and "engine.session" in done.stderr


def test_pip_keeps_an_untested_torch_and_env_says_why(tmp_path: Path) -> None:
    """The wheel beside a torch that calls itself 2.99."""
    venv.create(tmp_path / "venv", with_pip=False)
    (packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    outer = [sysconfig.get_path("purelib"), *site.getsitepackages()]
    (packages / "outer.pth").write_text("\n".join(dict.fromkeys(outer)))
    info = packages / "torch-2.99.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.99.0\n")
    (info / "INSTALLER").write_text("pip\n")
    (info / "RECORD").write_text("")
    builds = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(builds, check=True, capture_output=True, timeout=300)
    (wheel,) = tmp_path.glob("*.whl")
    python = str(tmp_path / "venv" / "bin" / "python")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-index", "--ignore-installed", "--no-deps"]
    plain = [*pip[:6], "--no-index", "--dry-run", str(wheel)]
    apart = {**os.environ, "PIP_CONFIG_FILE": os.devnull}  # a machine may have constraints of its own
    asked = subprocess.run(plain, check=False, capture_output=True, text=True, timeout=300, env=apart)
    assert asked.returncode == 0 and "torch-" not in asked.stdout.partition("Would install")[2], (
        asked.stdout + asked.stderr
    )
    subprocess.run([*pip, str(wheel)], check=True, capture_output=True, timeout=300)
    said = subprocess.run(
        [python, "-m", "shadow_cache", "env"], check=True, capture_output=True, text=True, timeout=100
    )
    assert re.search(r"torch +2\.99\.0", said.stdout) and "every backward runs on eager" in " ".join(
        said.stdout.split()
    )


def test_import_alone_changes_nothing_in_torch() -> None:
    code = """
from torch.autograd import Variable
before = Variable._execution_engine
import compiled_autograd
assert Variable._execution_engine is before
"""
    done = in_subprocess(code)
    assert done.returncode == 0, done.stderr


def test_the_table_is_read_without_torch() -> None:
    done = in_subprocess("import sys, backends.torch_versions, backends.modes; assert 'torch' not in sys.modules")
    assert done.returncode == 0, done.stderr
    assert metadata.version("torch").split("+")[0] == torch.__version__.split("+")[0]
