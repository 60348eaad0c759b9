"""A pytest plugin that runs each test inside one of the engines, and writes what became of its backwards.

``CONFORMANCE_ENGINE`` names the engine: ``eager``, ``torch`` (PyTorch's own compiled autograd) or ``ours:<backend>``.
``CONFORMANCE_RESULT`` names the file to which lines of JSON are added, one when a test starts and one when it ends; a
test that is in it already is not run again, so that after a crash the rest can be run.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

_records = pytest.StashKey[dict[str, Any]]()


@contextlib.contextmanager
def _torch() -> Iterator[None]:
    """As PyTorch's own tests turn it on: Dynamo with the eager backend, graph breaks allowed."""
    from torch._dynamo import compiled_autograd

    compiler = torch.compile(backend="eager")  # type: ignore[call-overload]
    with compiled_autograd._enable(compiler, dynamic=False):
        yield None


@contextlib.contextmanager
def _ours(backend: str) -> Iterator[Any]:
    import compiled_autograd as ca

    with ca.enable(backend=backend, cache_dir=False) as session:
        yield session


def _engine() -> contextlib.AbstractContextManager[Any]:
    name, _, backend = os.environ["CONFORMANCE_ENGINE"].partition(":")
    if name == "ours":
        return _ours(backend)
    return _torch() if name == "torch" else contextlib.nullcontext()


def _write(record: dict[str, Any]) -> None:
    with Path(os.environ["CONFORMANCE_RESULT"]).open("a") as file:
        file.write(json.dumps(record) + "\n")


def _name(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[2]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out what was run before a crash."""
    result = Path(os.environ["CONFORMANCE_RESULT"])
    done = {json.loads(line)["test"] for line in result.read_text().splitlines()} if result.exists() else set()
    items[:] = [item for item in items if _name(item) not in done]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Run one test inside the engine."""
    record = item.stash[_records] = {"test": _name(item)}
    _write({**record, "outcome": "crashed"})
    started = time.perf_counter()
    with _engine() as session:
        try:
            return (yield)
        finally:
            record["seconds"] = round(time.perf_counter() - started, 3)
            if session is not None:
                stats = session.stats()
                record |= {"backwards": stats.backwards, "bypasses": stats.bypasses, "failures": stats.failures}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """Write down how it ended."""
    report = yield
    if call.when == "call":
        error = "" if call.excinfo is None else call.excinfo.exconly()[:600]
        _write({**item.stash[_records], "outcome": report.outcome, "error": error})
    return report
