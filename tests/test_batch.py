"""Kernels that are compiled together, against those of eager and those that are compiled one by one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import compiled_autograd as ca
from backends.inductor import batch

from .helpers import in_subprocess

_TRAINING = """
import json, os
from pathlib import Path
import torch
import compiled_autograd as ca
from backends.inductor import batch
from torch._inductor import config

config.compile_threads = {threads}
{before}
weights = [torch.randn(rows, 40, requires_grad=True) for rows in (3, 5, 7, 11, 13)]
def loss():
    parts = [(weight.softmax(index % 2) * weight.tanh()).square() for index, weight in enumerate(weights)]
    return sum((part @ part.t()).exp().sum() for part in parts)
wanted = torch.autograd.grad(loss(), weights)
with ca.enable(backend="inductor") as session:
    for _ in range(2):
        found = torch.autograd.grad(loss(), weights)
stats = session.stats()
print(json.dumps(dict(
    close=all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found, wanted)),
    kernels=session.last.graph.variants[0].regions[0].compiled_regions()[0].call.compiled.source_code.count("cpp_pybinding("),
    files=len(list(Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).rglob("*.main.cpp"))),
    compiles=stats.compiles, hits=stats.hits, failures=stats.failures)))
"""


def _run(folder: Path, threads: int = 2, before: str = "") -> dict[str, int]:
    done = in_subprocess(_TRAINING.format(threads=threads, before=before), TORCHINDUCTOR_CACHE_DIR=str(folder))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_as_many_files_are_compiled_as_inductor_compiles_at_once(tmp_path: Path) -> None:
    result = _run(tmp_path)
    assert result["close"] and result["kernels"] >= 3
    assert result["files"] == 2
    assert (result["compiles"], result["hits"], result["failures"]) == (1, 1, 0)


@pytest.mark.slow
def test_what_cannot_be_compiled_together_is_compiled_one_by_one(tmp_path: Path) -> None:
    result = _run(tmp_path, before='batch._HEADERS = ("#error not together",)')
    assert result["close"] and result["kernels"] < result["files"] <= result["kernels"] + 2  # and those that failed
    assert (result["compiles"], result["hits"], result["failures"]) == (1, 1, 0)


@pytest.mark.slow
def test_with_one_thread_inductor_compiles_as_ever(tmp_path: Path) -> None:
    result = _run(tmp_path, threads=1)
    assert result["close"] and result["files"] == result["kernels"]
    assert (result["compiles"], result["hits"], result["failures"]) == (1, 1, 0)


def test_a_kernel_is_compiled_once_in_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    compile_all = batch._compile

    def counted(sources: list[batch._Source]) -> dict[batch._Source, batch.Kernel]:
        asked.append(len(sources))
        return compile_all(sources)

    monkeypatch.setattr(batch, "_compile", counted)
    weights = [torch.randn(rows, 23, requires_grad=True) for rows in (5, 7)]

    def grads() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(sum(weight.softmax(0).tanh().exp().sum() for weight in weights), weights)

    def compiled() -> int:
        ca.reset()
        asked.clear()
        with ca.enable(backend="inductor") as session:
            found = grads()
        assert session.stats().compiles == 1
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other)
        return sum(asked)

    wanted = grads()
    first = compiled()
    assert first > 0 and compiled() == 0
    with torch._inductor.config.patch({"cpp.enable_floating_point_contract_flag": "fast"}):  # another flag
        assert compiled() == first


def test_shares_are_about_as_long() -> None:
    sources = [batch._Source((), "x" * length) for length in (1, 2, 3, 50, 4, 41, 5)]
    shares = batch._shares(sources, 2)
    assert sorted(len(source.code) for share in shares for source in share) == [1, 2, 3, 4, 5, 41, 50]
    assert abs(sum(len(source.code) for source in shares[0]) - sum(len(source.code) for source in shares[1])) <= 2
    assert [len(share) for share in batch._shares(sources[:1], 8)] == [1]
