"""What ``TORCH_TRACE`` has of compiled backwards, and what the real tlparse makes of it."""

from __future__ import annotations

import json
import logging
import re
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._logging._internal import LazyTraceHandler, TorchLogsFormatter, trace_log

import compiled_autograd as ca
from compiled_autograd.diagnostics import structured_trace
from compiled_autograd.engine import traced

from .helpers import in_subprocess, mlp

_PREFIX = "compiled_autograd_"


@pytest.fixture
def handlers() -> Iterator[list[logging.Handler]]:
    """Those of the trace, of which a test may add some: none at first."""
    before, trace_log.handlers = trace_log.handlers, []
    yield trace_log.handlers
    for handler in trace_log.handlers:
        handler.close()
    trace_log.handlers = before


@pytest.fixture
def folder(handlers: list[logging.Handler], tmp_path: Path) -> Path:
    """Where the trace is written to."""
    handler = LazyTraceHandler(str(tmp_path))
    handler.setFormatter(TorchLogsFormatter(trace=True))
    handlers.append(handler)
    return tmp_path


def _artifacts(folder: Path) -> dict[Any, dict[str, str]]:
    """Ours, by the number of the compiled backward and their name."""
    found: dict[Any, dict[str, str]] = defaultdict(dict)
    for file in folder.glob("*.log"):
        for head, payload in re.findall(r"^\S.*?\] (\{.*\})\n((?:\t.*\n)*)", file.read_text(), re.MULTILINE):
            record = json.loads(head)
            name = record.get("artifact", {}).get("name", "")
            if name.startswith(_PREFIX):
                text = "\n".join(line[1:] for line in payload.splitlines())
                assert found[record["compiled_autograd_id"]].setdefault(name.removeprefix(_PREFIX), text) is text
    return found


def _backward(rows: int = 2, depth: int = 1, **settings: Any) -> ca.Session:
    with ca.enable(**{"backend": "eager", "cache_dir": False, **settings}) as session:
        mlp(depth=depth)(torch.randn(rows, 8)).sum().backward()
    return session


def test_a_miss_has_its_reasons_and_graphs(folder: Path) -> None:
    session = _backward()
    ((_, artifacts),) = _artifacts(folder).items()
    assert artifacts.keys() == {"outcome", "tape_graph", "region_1_aten", "region_1_code"}
    assert session.last is not None and session.last.graph is not None
    assert artifacts["tape_graph"] == session.last.graph.readable()[:-1] + "\n" * artifacts["tape_graph"].endswith("\n")
    assert "torch.ops.aten.mm.default" in artifacts["region_1_aten"]
    assert "aten.mm" in artifacts["region_1_code"]
    outcome = json.loads(artifacts["outcome"])
    assert (outcome["outcome"], outcome["compiled"], outcome["loaded"]) == ("structure_miss", 1, 0)
    assert outcome["reasons"][0] | {"record": "Miss", "kind": "first_seen"} == outcome["reasons"][0]
    assert outcome["seconds"].keys() == session.last.seconds.keys()


def test_names_that_are_no_text(folder: Path) -> None:
    model = nn.Module()
    model.register_parameter("\udcff\n[{}]", nn.Parameter(torch.ones(3)))
    with ca.enable(backend="eager", cache_dir=False):
        for _ in range(2):
            (getattr(model, "\udcff\n[{}]") * 2).sum().backward()
    first, _ = _artifacts(folder).values()
    assert first.keys() == {"outcome", "tape_graph", "region_1_aten", "region_1_code"}
    assert "\\udcff" in first["tape_graph"]


def test_a_hit_has_nothing_and_another_miss_its_own(folder: Path) -> None:
    for rows, depth in ((2, 1), (2, 1), (3, 1), (2, 2)):
        assert _backward(rows, depth).stats().captures <= 1
    outcomes = [json.loads(artifacts["outcome"]) for artifacts in _artifacts(folder).values()]
    assert [each["outcome"] for each in outcomes] == ["structure_miss", "shape_miss", "structure_miss"]
    assert [each["reasons"][0]["kind"] for each in outcomes] == ["first_seen", "shape", "node_attribute"]


def test_a_bypass_is_traced_once(folder: Path) -> None:
    x = torch.randn(3, requires_grad=True)
    with ca.enable(backend="eager", cache_dir=False) as session:
        for _ in range(3):
            torch.autograd.grad(x.exp().sum(), x, create_graph=True)
    assert session.stats().bypasses == {"create_graph": 3}
    ((_, artifacts),) = _artifacts(folder).items()
    outcome = json.loads(artifacts["outcome"])
    assert artifacts.keys() == {"outcome"} and (outcome["outcome"], outcome["tape"]) == ("bypass", None)
    assert outcome["reasons"][0]["kind"] == "create_graph"


def test_what_was_compiled_in_the_background_is_traced(folder: Path) -> None:
    assert _backward(on_miss="background").wait()
    _backward(on_miss="background")
    (first, then) = _artifacts(folder).values()
    assert "region_1_aten" not in first and {"region_1_aten", "region_1_code"} <= then.keys()


def test_regions_are_numbered(folder: Path) -> None:
    with ca.enable(backend="eager", cache_dir=False):
        x = torch.randn(3, requires_grad=True)
        y = x.exp()
        y.register_hook(lambda grad: grad * 2)
        y.sin().sum().backward()
    ((_, artifacts),) = _artifacts(folder).items()
    assert "cos" in artifacts["region_1_aten"] and "mul" in artifacts["region_2_aten"]


@pytest.mark.parametrize("handlers", ["PyTorch's", "one for all loggers"])
def test_nothing_is_made_where_nothing_reads_it(monkeypatch: pytest.MonkeyPatch, handlers: str) -> None:
    """PyTorch's is there until the first event; pytest puts its own wherever the root's does not reach."""
    every = logging.NullHandler()
    monkeypatch.setattr(logging.getLogger(), "handlers", [every])
    monkeypatch.setattr(trace_log, "handlers", [LazyTraceHandler(None) if handlers == "PyTorch's" else every])
    assert not structured_trace.is_on()
    monkeypatch.setattr(structured_trace, "trace_structured_artifact", lambda *arguments: pytest.fail("traced"))
    assert _backward().stats().compiles == 1


def test_a_trace_that_cannot_be_written_costs_a_warning(handlers: list[logging.Handler], tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    handlers.append(LazyTraceHandler(str(file / "folder")))
    with pytest.warns(UserWarning, match="the structured trace could not be written .NotADirectoryError"):
        session = _backward()
    assert session.stats().compiles == 1 and session.stats().failures == 0


def test_code_that_cannot_be_looked_for_costs_a_warning(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(compiled: Any) -> None:
        raise SystemError("of the backend's")

    monkeypatch.setattr(traced, "source_of", fail)
    with pytest.warns(UserWarning, match="the structured trace could not be written .SystemError: of the backend's"):
        session = _backward()
    assert session.stats().compiles == 1 and session.stats().failures == 0


@pytest.mark.slow
def test_tlparse_lists_what_we_traced(tmp_path: Path) -> None:
    tlparse = shutil.which("tlparse")
    if tlparse is None:
        pytest.skip("needs tlparse (pip install -e '.[dev]')")
    code = """
import torch, compiled_autograd as ca
from torch import nn
plain = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
compiled = torch.compile(nn.Sequential(nn.Linear(4, 3), nn.ReLU()))
with ca.enable(cache_dir=False) as session:
    for _ in range(2):
        plain(torch.randn(5, 4)).mean().backward()
        plain.zero_grad()
    compiled(torch.randn(5, 4)).sum().backward()
assert (session.stats().compiles, session.stats().hits) == (2, 1), session.stats()
"""
    ran = in_subprocess(code, timeout=600, TORCH_TRACE=str(tmp_path / "trace"))
    assert ran.returncode == 0, ran.stderr
    (log,) = (tmp_path / "trace").iterdir()
    page = tmp_path / "page"
    command = [tlparse, "--no-browser", "-o", str(page), str(log)]
    parsed = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert parsed.returncode == 0, parsed.stderr
    links = re.findall(r'<a href="([^"]+)"', (page / "index.html").read_text())
    ours = {number: each for number, each in _artifacts(tmp_path / "trace").items() if "tape_graph" in each}
    assert len(ours) == 2  # besides, there is the bypass of what torch.compile traces itself
    for number, artifacts in ours.items():
        assert artifacts.keys() == {"outcome", "tape_graph", "region_1_aten", "region_1_code"}
        for name, text in artifacts.items():
            (link,) = [each for each in links if re.match(rf"{number}_-_-_\d+/{_PREFIX}{name}_\d+\.", each)]
            shown = (page / link).read_text()
            if name == "outcome":  # tlparse writes it anew, with other last digits of numbers
                assert json.loads(shown).keys() == json.loads(text).keys()
            else:
                assert shown.strip() == text.strip()
        assert any(re.match(rf"{number}_-_-_\d+/inductor_output_code", each) for each in links)
    assert any(re.match(r"-_0_0_0/aot_backward_graph", each) for each in links)
