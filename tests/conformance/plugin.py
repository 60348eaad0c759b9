"""A pytest plugin that runs each test inside one of the engines, and writes what became of its backwards.

``CONFORMANCE_ENGINE`` names the engine: ``eager``, ``torch`` (PyTorch's own compiled autograd), ``ours:<backend>``, or
``ours:<backend>:tune``, which leaves to eager what is not worth it, ``ours:<backend>:native``, where each tape that is
known is walked by the engine and in C++ (:mod:`tests.both_walks`), or ``ours:<backend>:own_loop``, where all is left to
eager, without the engine's queue.
``CONFORMANCE_RESULT`` names the file to which lines of JSON are added, one when a test starts and one when it ends; a
test that is in it already is not run again, so that after a crash the rest can be run. One that began and never ended
is tried a second time: it may have been the run that was ended. ``CONFORMANCE_ONLY`` may name a file with the names of
the tests to run.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from compiled_autograd.engine.native_hits import NATIVE_HITS
from compiled_autograd.engine.own_loop import running
from tests import both_walks
from tests.conformance import names, redirect

_redirect: redirect.Redirect | None = None
_records = pytest.StashKey[dict[str, Any]]()


@contextlib.contextmanager
def _torch() -> Iterator[None]:
    """As PyTorch's own tests turn it on: Dynamo with the eager backend, graph breaks allowed."""
    from torch._dynamo import compiled_autograd

    compiler = torch.compile(backend="eager")  # type: ignore[call-overload]
    with compiled_autograd._enable(compiler, dynamic=False):
        yield None


@contextlib.contextmanager
def _ours(backend: str, *settings: str) -> Iterator[Any]:
    import compiled_autograd as ca

    tune, native = "tune" in settings, "native" in settings
    if "own_loop" in settings:
        more = {"extension": "all", "on_miss": "eager"}
    else:
        more = {"extension": "auto" if native else "off"}
    with ca.enable(backend=backend, cache_dir=False, tune=tune, **more) as session:
        yield session


def _named() -> list[str]:
    return os.environ["CONFORMANCE_ENGINE"].split(":")


def _engine() -> contextlib.AbstractContextManager[Any]:
    name, *settings = _named()
    if name == "ours":
        return _ours(*settings)
    return _torch() if name == "torch" else contextlib.nullcontext()


def pytest_configure(config: pytest.Config) -> None:
    """Before any test is imported."""
    global _redirect
    names.supply()
    if "own_loop" in _named():
        running.LEAST_NODES = 0
        NATIVE_HITS.library = both_walks.library_in(_records_file().parent / "native")
    if "native" in _named():
        both_walks.compare_everywhere(both_walks.library_in(_records_file().parent / "native"))
    if any(str(each).partition("::")[0].endswith(redirect.FILE) for each in config.args):
        _redirect = redirect.Redirect(_engine)


def pytest_unconfigure() -> None:
    """After all tests."""
    if "native" in _named():
        both_walks.tell()


def _around_test() -> contextlib.AbstractContextManager[Any]:
    """What a test runs in: the engine, unless the test itself turns it on."""
    return _engine() if _redirect is None else contextlib.nullcontext(_redirect)


def _leave_to_rest() -> None:
    """What a test left, graphs above all, is not looked at again in every later collection of garbage."""
    gc.collect()
    gc.freeze()


def _records_file() -> Path:
    return Path(os.environ["CONFORMANCE_RESULT"])


def _write(record: dict[str, Any]) -> None:
    with _records_file().open("a") as file:
        file.write(json.dumps(record) + "\n")


def _name(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[2]


def read(records: Path) -> dict[str, dict[str, Any]]:
    """For each test its last record; ``started`` in it says how often the test was begun."""
    tests: dict[str, dict[str, Any]] = {}
    for line in records.read_text().splitlines():
        record = json.loads(line)
        started = tests.get(record["test"], {}).get("started", 0) + (record["outcome"] == "crashed")
        tests[record["test"]] = {**record, "started": started}
    return tests


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out what has its record."""
    if _redirect is not None:
        for tests in {item.cls for item in items if getattr(item, "cls", None) is not None}:
            _redirect.compare_results_only(tests)
    tests = read(Path(os.environ["CONFORMANCE_RESULT"]))
    done = {name for name, record in tests.items() if record["outcome"] != "crashed" or record["started"] > 1}
    items[:] = [item for item in items if _name(item) not in done]
    only = os.environ.get("CONFORMANCE_ONLY")
    if only is not None:
        wanted = set(Path(only).read_text().splitlines())
        items[:] = [item for item in items if _name(item) in wanted]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Run one test inside the engine."""
    record = item.stash[_records] = {"test": _name(item)}
    _write({**record, "outcome": "crashed"})
    started = time.perf_counter()
    with _around_test() as session:
        try:
            return (yield)
        finally:
            record["seconds"] = round(time.perf_counter() - started, 3)
            if session is not None:
                stats = session.stats()
                record |= {"backwards": stats.backwards, "bypasses": stats.bypasses, "failures": stats.failures}
                record["own_loop"] = stats.own_loop
            _leave_to_rest()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """Write down how it ended."""
    report = yield
    if call.when == "call":
        error = "" if call.excinfo is None else call.excinfo.exconly()[:600]
        _write({**item.stash[_records], "outcome": report.outcome, "error": error})
    return report
