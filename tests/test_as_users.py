"""Nothing switched off: programs run as users run them, each in a process of its own and with every setting's default.

The other tests turn off ``tune``, the compile budget, the cache and the extension (``tests/conftest.py``), so that
counts are exact. Here no count is asserted, since the clock may decide: the programs assert results and hooks.

    python -m pytest -m "as_users and not slow"     what .ci/run runs: minutes on two cores
    python -m pytest -m "as_users and slow"         the heavy examples
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from docs import tutorial_pages

from . import as_a_user
from .both_walks import folder_of_builds
from .helpers import ROOT
from .pages import PAGES, blocks
from .users_programs import PROGRAMS

pytestmark = pytest.mark.as_users
_OPTIONS = {"train_llama": [*as_a_user.SMALL_LLAMA, "--steps", "40", "--on-miss", "compile"]}
"""In the background compiling would outlast so few and small steps, and the exit status says so."""
_HEAVY = (
    *("background_and_warm_start", "foreach", "forces", "hessian", "pinn"),
    *("compressed_gradients", "gradient_norms", "with_torch_compile", "settings", "cache"),
)
"""Examples and pages that compile much, which takes most of a minute."""
_HEAVY_TRAININGS = ("accumulation", "custom_function", "checkpoints", "frozen", "two_models", "autocast")
_ALWAYS = ("README", "quickstart", "first_miss", "troubleshooting")


@pytest.fixture(scope="session")
def shared_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The home of one user with several programs, which find each other's files in the caches."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="session")
def extension(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The extension, compiled once for all tests: in each home anew it would take most of their time."""
    folder = folder_of_builds(pytestconfig)
    program = (
        "from pathlib import Path; from compiled_autograd.native.library import build_here; build_here(Path({!r}))"
    )
    as_a_user.run(["-c", program.format(str(folder))], tmp_path_factory.mktemp("builds"))
    deadline = time.monotonic() + as_a_user.SECONDS
    while not any(folder.glob("*.so")):  # another worker builds it
        assert time.monotonic() < deadline, [*folder.iterdir()]
        time.sleep(0.5)
    return folder


@pytest.fixture
def home(tmp_path: Path, extension: Path) -> Path:
    """A home whose caches have nothing but the extension."""
    caches = tmp_path / ".cache" / "compiled_autograd"
    caches.mkdir(mode=0o700, parents=True)
    shutil.copytree(extension, caches / "native")
    return tmp_path


def _program(file: Path) -> object:
    return pytest.param(file, id=file.stem, marks=pytest.mark.slow if file.stem in _HEAVY else ())


@pytest.mark.parametrize("file", map(_program, sorted((ROOT / "examples").glob("[!_]*.py"))))
def test_an_example_runs(file: Path, home: Path) -> None:
    """Nothing is compiled before; the example asserts its own claims, and prints what its tutorial says."""
    printed = as_a_user.run([str(file), *_OPTIONS.get(file.stem, ())], home)
    assert printed.strip() and tutorial_pages.is_as_kept(file.stem, printed), printed


@pytest.mark.parametrize("page", [_program(page) for page in PAGES if blocks(page.read_text())])
def test_a_page_runs(page: Path, home: Path) -> None:
    """Nothing is compiled before; all blocks of the page run in one process."""
    as_a_user.run(["-m", "tests.pages", str(page)], home)


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=pytest.mark.slow if each in _HEAVY_TRAININGS else ()) for each in PROGRAMS]
)
def test_a_training_is_as_on_eager(name: str, shared_home: Path) -> None:
    as_a_user.run(["-m", "tests.users_programs", name], shared_home)


@pytest.mark.slow  # the extension is compiled at the lowest priority, which takes minutes on a busy machine
def test_a_long_training_is_as_on_eager_and_starts_warm_again(tmp_path: Path) -> None:
    """The first process has empty caches and builds the extension; the second one finds code and extension on disk."""
    command = ["-m", "tests.users_programs", "long", str(tmp_path)]
    assert as_a_user.run(command, tmp_path).startswith("structure_miss ")
    assert as_a_user.run(command, tmp_path).startswith("hit ")


def test_the_first_pages_of_a_reader_have_blocks() -> None:
    assert set(_ALWAYS) <= {page.stem for page in PAGES if blocks(page.read_text())}


def test_a_user_has_no_variable_of_this_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of ``tests/conftest.py`` are set here, and the settings of the user's process are the defaults."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("COMPILED_AUTOGRAD_TUNE", "false")
    program = """
import os, compiled_autograd as ca
print(sorted(name for name in os.environ if name.startswith(("COMPILED_AUTOGRAD", "OMP_", "TORCH", "XDG_"))))
settings = ca.enable().settings
print(settings.tune, settings.cache_dir, settings.extension, settings.compile_budget, settings.backend)
"""
    assert as_a_user.run(["-c", program], tmp_path) == "[]\nTrue None auto None inductor\n"
