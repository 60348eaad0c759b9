"""What every test starts from: nothing captured, nothing warned of, one seed, and a watchdog against deadlocks."""

from __future__ import annotations

import faulthandler
import gc
import math
import os
import sys
from collections.abc import Iterator

if "PYTEST_XDIST_WORKER" in os.environ:  # one process for each core: with more threads, each would wait for the others
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import pytest
import torch

from compiled_autograd.capture import parameter_names
from compiled_autograd.engine import session
from compiled_autograd.engine.native_hits import NATIVE_HITS
from compiled_autograd.lowering.tracing import modes_on
from compiled_autograd.process_state import PROCESS

from . import both_walks
from .helpers import exact_convolutions
from .pair import Pair

WATCHDOG_SECONDS = 300
hypothesis.settings.register_profile("busy", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("busy")  # a test that compares nothing with a clock passes on any machine
os.environ["COMPILED_AUTOGRAD_TUNE"] = "false"  # else counts would depend on the clock
os.environ["COMPILED_AUTOGRAD_ON_MISS"] = "compile"  # for the same reason
os.environ["COMPILED_AUTOGRAD_COMPILE_BUDGET"] = "inf"  # for the same reason
parameter_names._SLOW_SEARCH_SECONDS = math.inf  # else names of parameters would depend on it too
os.environ["COMPILED_AUTOGRAD_CACHE_DIR"] = "false"  # tests of the store name a folder of their own
if not hasattr(sys.modules["__main__"], "__file__"):  # in a worker of pytest-xdist: first misses name the program
    sys.modules["__main__"].__file__ = pytest.__file__
os.environ["COMPILED_AUTOGRAD_EXTENSION"] = "off" if both_walks.MODE == "off" else "auto"


@pytest.fixture(autouse=True, scope="session")
def native_mode(request: pytest.FixtureRequest) -> Iterator[None]:
    """See :mod:`tests.both_walks`."""
    if both_walks.MODE != "off":  # else the one of the user's own folder would be built
        NATIVE_HITS.library = both_walks.library_of(request.config)
    if both_walks.MODE == "both":
        both_walks.compare_everywhere(both_walks.library_of(request.config))
    yield
    if both_walks.MODE == "both":
        both_walks.tell()


_TESTS_PER_SEARCH = 300
_tests = 0


@pytest.fixture(autouse=True)
def little_to_search() -> None:
    """Python's search for garbage looks at what this test makes, not at all that lives in a process that has run many.
    Tests search, and so does whoever has compiled something: together that was a third of the time of some files. What
    is garbage among the rest goes every few hundred tests: a search there takes two seconds."""
    global _tests
    if _tests % _TESTS_PER_SEARCH == 0:
        gc.unfreeze()
        gc.collect()
    _tests += 1
    gc.freeze()


@pytest.fixture(autouse=True)
def clean_start(request: pytest.FixtureRequest) -> Iterator[None]:
    """Forget all graphs and warnings, set the seed; a test that hangs ends the run with every thread's stack."""
    _in_no_mode("garbage of earlier tests")
    PROCESS.restart()
    torch.manual_seed(0)
    if not any(map(request.node.get_closest_marker, ("slow", "as_users"))):
        faulthandler.dump_traceback_later(WATCHDOG_SECONDS, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()
    assert not session.thread.here.stack, "a session was left on the stack"
    _in_no_mode("this test")


def _in_no_mode(who: str) -> None:
    """What is left on would have tests fail that come much later."""
    assert torch._C._is_torch_function_enabled(), f"{who} has left torch functions off"
    assert modes_on() == (0, 0), f"{who} has left the thread in modes of PyTorch's"


def _require_cuda() -> None:
    if not torch.cuda.is_available():
        pytest.skip(f"needs a CUDA device, and torch {torch.__version__} finds none")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where a test computes. What it asserts holds on both, so that its logic is tried on the CPU by default."""
    if request.param == "cuda":
        _require_cuda()
        with exact_convolutions():
            yield "cuda"
    else:
        yield "cpu"


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Two processes for all files: each pair takes ten seconds to start and to import what trainings need."""
    started = Pair(tmp_path_factory.mktemp("pair"))
    yield started
    started.close()


@pytest.fixture
def cuda() -> str:
    """For what only a CUDA device has; such a test is marked ``gpu``."""
    _require_cuda()
    return "cuda"
