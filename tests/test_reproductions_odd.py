"""Reproductions of odd backwards, of files that are damaged or hostile, and written by several threads at a time."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import compiled_autograd as ca
from compiled_autograd.cache.graphs import CompiledGraph
from compiled_autograd.reproduction.tensors import records_of, tensors

from .helpers import ROOT, assert_same, expect, mlp

_BATCH = torch.linspace(-1, 1, 32).view(4, 8)


def _graph(make_loss: Callable[[], torch.Tensor]) -> CompiledGraph:
    with ca.enable(backend="eager", cache_dir=False, tune=False) as session:
        make_loss().backward()
    assert session.last is not None and session.last.graph is not None, session.last
    return session.last.graph


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file to be damaged."""
    model = mlp()
    _graph(lambda: model(_BATCH).square().mean()).save(tmp_path / "backward.zip")
    return tmp_path / "backward.zip"


# ---- what is written -------------------------------------------------------------------------------------------------


def _with_its_values(make_loss: Callable[[], torch.Tensor], leaves: list[torch.Tensor], path: Path) -> Any:
    """A reproduction of the second backward; and that gives what eager gives."""
    make_loss().backward()
    wanted = [leaf.grad for leaf in leaves]
    with ca.enable(backend="eager", cache_dir=False, tune=False) as session:
        for _ in range(2):
            for leaf in leaves:
                leaf.grad = None
            make_loss().backward()
            assert session.last is not None and session.last.graph is not None
            session.last.graph.save(path, values=True)
        assert_same([leaf.grad for leaf in leaves], wanted)
    expect(session.stats(), structure_misses=1, hits=1)
    return ca.load(path), wanted


def test_parameters_with_conjugate_and_negative_bits(tmp_path: Path) -> None:
    x, y = (nn.Parameter(torch.randn(3, dtype=torch.complex64)) for _ in range(2))
    reproduction, wanted = _with_its_values(
        lambda: (x.conj() * y + x.conj().imag * y).abs().sum(), [x, y], tmp_path / "real.zip"
    )
    found = list(reproduction.eager().values())
    assert all(any(torch.equal(one, other) for other in found) for one in wanted)
    assert reproduction.compare("eager").is_rounding


def test_made_up_values_of_what_has_a_negative_bit_are_as_large() -> None:
    negative = torch.complex(-torch.rand(100) - 1, -torch.rand(100) - 1).conj().imag
    assert negative.is_neg() and negative.min() >= 1
    (made,) = tensors(records_of([negative]))  # type: ignore[arg-type]
    assert made.is_neg() and made.min() >= 1 and made.max() <= 2


def test_the_real_values_around_users_code(tmp_path: Path) -> None:
    model = mlp()
    hooked = nn.Parameter(torch.ones(8))

    def loss() -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: (tensor,), lambda packed: packed[0]):
            return model(_BATCH * hooked.exp()).square().mean()

    reproduction, _ = _with_its_values(loss, [hooked, *model.parameters()], tmp_path / "real.zip")
    assert reproduction.real and all("unpack_hook" in each for each in reproduction.stand_ins)
    assert reproduction.compare("eager").is_rounding


@pytest.mark.parametrize("values", [False, True])
def test_what_torch_compile_made_of_the_forward(values: bool, tmp_path: Path) -> None:
    model, file = nn.Sequential(nn.Linear(4, 4), nn.GELU()), tmp_path / "compiled.zip"
    torch._dynamo.reset()  # to forget other lengths, which would make this one a symbol
    compiled = torch.compile(model, backend="aot_eager")
    x = torch.randn(2, 4)
    if values:
        reproduction, wanted = _with_its_values(lambda: compiled(x).square().sum(), list(model.parameters()), file)
        gradients = {name.rpartition(".")[2]: each for name, each in reproduction.eager().items()}
        assert_same([gradients["weight"], gradients["bias"]], wanted)
    else:
        _graph(lambda: compiled(x).square().sum()).save(file)
        reproduction = ca.load(file)
    found = reproduction.compare("eager")
    assert found.is_rounding and not found.reasons and not reproduction.stand_ins
    assert len(reproduction.eager()) == 2


# ---- where it is written ---------------------------------------------------------------------------------------------


def test_threads_write_one_file_at_a_time(tmp_path: Path) -> None:
    model, file, errors = mlp(), tmp_path / "backward.zip", list[BaseException]()
    graph = _graph(lambda: model(_BATCH).square().mean())

    def write() -> None:
        try:
            for _ in range(10):
                graph.save(file)
                ca.load(file)
        except BaseException as error:  # noqa: BLE001  shown below
            errors.append(error)

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and [each.name for each in tmp_path.iterdir()] == ["backward.zip"]


def test_any_path_that_a_file_may_have(path: Path, tmp_path: Path) -> None:
    graph = _graph(lambda: mlp()(_BATCH).sum())
    for name in (tmp_path / ("x" * 250), os.fsencode(tmp_path / "bytes.zip"), str(tmp_path / "text.zip")):
        graph.save(name)  # type: ignore[arg-type]
        assert ca.load(name).compare("eager").is_rounding  # type: ignore[arg-type]
    before = sorted(tmp_path.iterdir())
    for wrong in (tmp_path, path / "below a file", tmp_path / "no folder" / "backward.zip"):
        with pytest.raises(OSError, match=re.escape(str(tmp_path))):
            graph.save(wrong)
    assert sorted(tmp_path.iterdir()) == before


# ---- files that are damaged ------------------------------------------------------------------------------------------


def test_damaged_files_are_refused_or_read(path: Path) -> None:
    data, draw = path.read_bytes(), random.Random(0)
    refused = 0
    for _ in range(400):
        damaged = bytearray(data)
        at = draw.randrange(len(data))
        damaged[at : at + draw.randrange(4)] = bytes(draw.randrange(256) for _ in range(draw.randrange(1, 4)))
        path.write_bytes(damaged if draw.random() < 0.8 else damaged[:at])
        try:
            ca.load(path)
        except ca.ReproductionError:
            refused += 1
    assert refused > 200


def test_a_file_that_says_that_it_is_encrypted(path: Path) -> None:
    data = bytearray(path.read_bytes())
    for signature, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        for found in re.finditer(signature, bytes(data)):
            data[found.start() + flags] |= 1
    path.write_bytes(data)
    with pytest.raises(ca.ReproductionError, match="encrypted"):
        ca.load(path)


def _record(path: Path) -> Any:
    with zipfile.ZipFile(path) as archive:
        return json.loads(archive.read("reproduction.json"))


def _changed(path: Path, change: Callable[[Any], Any]) -> Path:
    record = _record(path)
    change(record)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("reproduction.json", json.dumps(record))
    return path


def test_lists_in_lists_without_end(path: Path) -> None:
    text = json.dumps(_record(path))
    place = text.index('"args": [') + len('"args": [')
    for depth in (100, 400, 1_000, 10_000, 100_000):
        nested = '{"of": "list", "items": [' * depth + "]}" * depth + ", "
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("reproduction.json", text[:place] + nested + text[place:])
        with pytest.raises(ca.ReproductionError):
            ca.load(path).eager()


def test_tensors_that_lie_in_one_another(path: Path) -> None:
    record = _record(path)
    record["real"] = True
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("reproduction.json", json.dumps(record))
        for storage in {each["storage"] for each in record["tensors"]}:
            archive.writestr(f"tensors/{storage}", b"\0" * (1 << 16))
    data = path.read_bytes()
    central = data.index(b"PK\x01\x02")
    offsets = [found.start() for found in re.finditer(rb"PK\x01\x02", data[central:])]
    entries = bytearray(data)
    first = data[central + offsets[1] + 42 : central + offsets[1] + 46]
    for at in offsets[2:]:
        entries[central + at + 42 : central + at + 46] = first
    path.write_bytes(entries)
    with pytest.raises(ca.ReproductionError):
        ca.load(path)


# ---- files that are hostile ------------------------------------------------------------------------------------------


def _tensor(**changes: Any) -> Callable[[Any], None]:
    return lambda record: record["tensors"][0].update(changes)


def _first_operator(**changes: Any) -> Callable[[Any], None]:
    return lambda record: next(each for each in record["functions"] if each["operators"])["operators"][0].update(
        changes
    )


def _leaves(change: Callable[[Any], Any]) -> Callable[[Any], None]:
    return lambda record: [change(each) for each in record["calls"] if each["target"] == "accumulate_grad"] and None


_HOSTILE: dict[str, tuple[Callable[[Any], Any], str]] = {
    "more memory than there is": (_tensor(shape=[1 << 47], stride=[1]), r"its tensors need [\d,]+ bytes"),
    "more than numbers can say": (_tensor(shape=[1 << 47] * 2, stride=[1 << 47, 1]), r"its tensors need [\d,]+ bytes"),
    "an offset far away": (_tensor(offset=1 << 45), r"its tensors need [\d,]+ bytes"),
    "a size of nothing": (_tensor(shape=[1 << 40], stride=[0]), "its operators cannot be run"),
    "a hundred dimensions": (_tensor(shape=[1] * 100, stride=[1] * 100), "cannot be"),
    "a conjugate real number": (_tensor(conj=True), "float32 with a conjugate bit"),
    "a dtype without kernels": (_tensor(dtype="torch.quint8"), "its tensors cannot be made here"),
    "a device that is not there": (_tensor(device="hpu:7"), "its tensors cannot be made here"),
    "whole numbers that no dtype has": (_tensor(dtype="torch.int64", low=10**400, high=10**401), "too large for any"),
    "values that no dtype has": (_tensor(dtype="torch.int64", values=[10**30]), "too large for any"),
    "an operator on text": (_first_operator(args=["abc"]), "its operators cannot be run"),
    "an argument that it has not": (_first_operator(kwargs={"nope": 1}), "its operators cannot be run"),
    "a number of any size": (
        _first_operator(args=[{"of": "scalar", "value": 1, "dtype": "torch.float32", "shape": [1 << 40]}]),
        "one number with the shape",
    ),
    "a gradient of no leaf": (_leaves(lambda each: each.update(args=each["args"][::-1])), "is no leaf"),
    "nodes that run twice": (lambda record: record.update(order=[0] * len(record["order"])), "each node exactly once"),
    "a node that does not run": (lambda record: record["order"].pop(), "each node exactly once"),
    "a number as a gradient": (lambda record: record.update(returned=[3]), "no gradient"),
    "an older format": (lambda record: record.update(format=0), "has format 0, and this version reads format 1"),
}


@pytest.mark.parametrize("name", _HOSTILE)
def test_a_file_that_cannot_run_says_why(name: str, path: Path) -> None:
    change, said = _HOSTILE[name]
    with pytest.raises(ca.ReproductionError, match=said) as caught:
        ca.load(_changed(path, change)).compare("eager")
    assert "damaged" not in str(caught.value)


def _program(path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "compiled_autograd.load", str(path), "--backend", "eager", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize(
    "options",
    [("--rounds", "0"), *(pytest.param(("--stage", each), marks=pytest.mark.slow) for each in ("tape", "regions"))],
    ids=" ".join,
)
def test_the_program_sends_a_terminal_nothing_of_the_file(options: tuple[str, ...], path: Path) -> None:
    def renamed(record: Any) -> None:
        for each in (*record["calls"], *record["nodes"]):
            each["name"] = "a\x1b]0;owned\x07\nb"
        for each in record["nodes"]:
            each["parameter"] = "p\x1b[31m[red]"
        record["about"].update(where="w\x1b[2J", difference="d\x1b[2J", torch="t\x1b[2J")

    _changed(path, renamed)
    shown = _program(path, *options)
    assert shown.returncode == 0 and "\x1b" not in shown.stdout + shown.stderr, shown.stderr


def test_it_sends_nothing_of_a_file_that_it_refuses(path: Path) -> None:
    _changed(path, lambda record: next(iter(record["functions"]))["operators"].append({"name": "\x1b[2J"}))
    refused = _program(path)
    assert refused.returncode == 2 and "is no operator" in refused.stderr and "\x1b" not in refused.stderr
