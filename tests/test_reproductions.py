"""A backward as a file: written, read where nothing is known of its model, run on its operators and compiled."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import compiled_autograd as ca
from benchmarks.models import FACTORIES, build
from compiled_autograd.cache.graphs import CompiledGraph
from compiled_autograd.reproduction import recording
from compiled_autograd.reproduction.functions import NotRecordedError
from compiled_autograd.reproduction.tensors import SMALL, records_of, stored_bytes, tensors
from compiled_autograd.steps.memory import memory_of

from .helpers import ROOT, assert_same, expect, mlp, same_bits

pytestmark = pytest.mark.filterwarnings("ignore:.*sparse", "ignore:.*Anomaly")

_BATCH = torch.linspace(-1, 1, 32).view(4, 8)
_TIMEOUT = 600

_ALONE = """
import builtins, sys
real = builtins.__import__
def only(name, *rest, **more):
    if name.partition(".")[0] in ("benchmarks", "examples", "tests", "pickle_of_the_user"):
        raise ImportError(name)
    return real(name, *rest, **more)
builtins.__import__ = only
import compiled_autograd as ca
for path, backend in zip(sys.argv[1::2], sys.argv[2::2]):
    reproduction = ca.load(path)
    found = reproduction.compare(backend)
    assert found.compiles and not found.reasons, (path, backend, found.reasons)
    assert found.is_rounding, [each for each in found.differences if not each.is_rounding]
    assert all(each.eager == each.eager for each in found.differences)
    print(len(found.differences), max(each.error for each in found.differences))
"""


def _alone(*arguments: object) -> str:
    """Run files in a process that can import neither the models nor these tests."""
    command = [sys.executable, "-c", _ALONE, *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=_TIMEOUT)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def _graph(make_loss: Callable[[], torch.Tensor], backend: Any = "eager", **settings: Any) -> CompiledGraph:
    with ca.enable(backend=backend, cache_dir=False, tune=False, **settings) as session:
        make_loss().backward()
    assert session.last is not None and session.last.graph is not None, session.last
    return session.last.graph


def _saved(graph: CompiledGraph, folder: Path) -> Path:
    path = folder / "backward.zip"
    graph.save(path)
    return path


# ---- in another process ------------------------------------------------------------------------------------------


def test_a_process_that_never_saw_the_model_runs_it(tmp_path: Path) -> None:
    model = mlp()
    path = _saved(_graph(lambda: model(_BATCH).square().mean()), tmp_path)
    assert _alone(path, "eager") == "6 0.0\n"


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FACTORIES if name != "gpt-100m"])
def test_each_model_of_the_benchmarks(name: str, tmp_path: Path) -> None:
    model, make_loss = build(name, 0, "cpu")
    graph = _graph(lambda: make_loss(model))
    path = _saved(graph, tmp_path)
    lines = _alone(path, "eager", path, "inductor").splitlines()
    leaves = sum(parameter.requires_grad for parameter in model.parameters())
    leaves += name == "force-matching"  # the positions
    assert [int(line.split()[0]) for line in lines] == [leaves, leaves]
    assert lines[0].split()[1] == "0.0", "the eager backend runs the same operators"
    assert _aten(ca.load(path).graph("eager")) == _aten(graph), "what is compiled is what was compiled"


def _aten(graph: CompiledGraph) -> list[list[str]]:
    """The operators of its regions, without arguments that are what they would be anyway."""
    return [[str(node.target) for node in each.graph.nodes] for each in graph.aten]


@pytest.mark.slow
def test_the_program_compares_and_times(tmp_path: Path) -> None:
    model = mlp()
    path = _saved(_graph(lambda: model(_BATCH).square().mean()), tmp_path)
    command = [sys.executable, "-m", "compiled_autograd.load", str(path)]
    shown = subprocess.run([*command, "--rounds", "2"], cwd=ROOT, capture_output=True, text=True, timeout=_TIMEOUT)
    assert shown.returncode == 0, shown.stderr
    assert "all differences are within rounding" in shown.stdout and "ratio" in shown.stdout
    damaged = tmp_path / "other.zip"
    damaged.write_bytes(b"no archive")
    refused = subprocess.run([*command[:3], str(damaged)], cwd=ROOT, capture_output=True, text=True, timeout=_TIMEOUT)
    assert refused.returncode == 2 and "is no reproduction" in refused.stderr


# ---- what it finds ---------------------------------------------------------------------------------------------------


def test_a_backend_that_is_wrong_shows_where() -> None:
    model = mlp()

    def wrong(graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        def compiled(*arguments: Any) -> Any:
            results = list(graph_module(*arguments))
            results[1] = results[1].clone()
            results[1].view(-1)[3] += 0.5
            return results

        return compiled

    graph = _graph(lambda: model(_BATCH).square().mean())
    reproduction = _through_a_file(graph)
    found = reproduction.compare(wrong)
    (difference,) = [each for each in found.differences if not each.is_rounding]
    assert not found.is_rounding and difference.name in dict(model.named_parameters())
    assert difference.error == pytest.approx(0.5) and difference.compiled - difference.eager == pytest.approx(0.5)
    assert reproduction.compare("eager").is_rounding


def test_what_is_compared_is_compiled_by_default_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp()
    reproduction = _through_a_file(_graph(lambda: model(_BATCH).square().mean()))
    for name in ("ON_MISS", "COMPILE_BUDGET"):
        monkeypatch.delenv(f"COMPILED_AUTOGRAD_{name}")
    assert reproduction.compare("eager").compiles == 1


def test_a_backend_that_fails_is_told_of() -> None:
    model = mlp()

    def fails(graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        raise NotImplementedError("not today")

    found = _through_a_file(_graph(lambda: model(_BATCH).square().mean())).compare(fails)
    assert found.compiles == 0 and any("not today" in reason for reason in found.reasons)


def _through_a_file(graph: CompiledGraph, **about: Any) -> Any:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        return ca.load(_saved(graph, Path(folder)))


# ---- what is in it ---------------------------------------------------------------------------------------------------


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float, bias: torch.Tensor) -> Any:
        ctx.save_for_backward(x)
        return x * factor, x + bias

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return grads[0] * 2 + x, None, grads[1].sum()


def _with_users_code() -> torch.Tensor:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
    model[1].register_full_backward_hook(lambda module, entering, leaving: None)
    embedding, bias = nn.Embedding(10, 4), nn.Parameter(torch.ones(()))
    bias.register_hook(lambda grad: grad * 2)
    bias.register_post_accumulate_grad_hook(lambda leaf: None)
    one, other = _Scaled.apply(embedding(torch.tensor([1, 2, 3])), 2, bias)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: (tensor,), lambda packed: packed[0]):
        one = one.exp()
    hidden = model(one + other)
    hidden.retain_grad()
    written = torch.zeros(3, 2)
    written[:, 0:1] = hidden
    _with_users_code.alive = (model, embedding, bias)  # type: ignore[attr-defined]  names of living modules
    return written.mean()


def test_steps_stand_in_for_users_code(tmp_path: Path) -> None:
    graph = _graph(_with_users_code)
    reproduction = _through_a_file(graph)
    kinds = [each.rpartition(": ")[2] for each in reproduction.stand_ins]
    hooks = ["call_backward", "post_hook"]
    assert kinds == [
        *("cpp_hook", *hooks, *hooks, "unpack_hook"),
        *("call_backward", "tensor_hook", "post_accumulate_hook"),
    ]
    found = reproduction.compare("eager")
    assert found.is_rounding and not found.reasons
    again = reproduction.graph("eager")
    assert _aten(again) == _aten(graph) and len(again.regions) == len(graph.regions)


def test_users_code_is_nowhere_in_the_file(tmp_path: Path) -> None:
    path = _saved(_graph(_with_users_code), tmp_path)
    with zipfile.ZipFile(path) as archive:
        assert sorted(archive.namelist()) == ["README.txt", "reproduction.json"]
        text = archive.read("reproduction.json").decode()
    assert "lambda" not in text and str(Path.home()) not in text
    assert "_Scaled" in text, "names of nodes are"


def test_gradients_that_are_there_and_gradients_that_are_asked_for() -> None:
    model = mlp()
    with ca.enable(backend="eager", cache_dir=False) as session:
        for _ in range(2):
            model(_BATCH).square().mean().backward()
    assert session.last is not None and session.last.graph is not None
    reproduction = _through_a_file(session.last.graph)
    assert set(reproduction.eager()) == {name for name, _ in model.named_parameters()}
    assert reproduction.compare("eager").is_rounding
    leaf = _BATCH.clone().requires_grad_()
    with session:
        torch.autograd.grad(model(leaf).square().mean(), [leaf, model[0].weight])
    assert session.last.graph is not None
    reproduction = _through_a_file(session.last.graph)
    assert [value.shape for value in reproduction.eager().values()] == [leaf.shape, model[0].weight.shape]
    assert reproduction.compare("eager").is_rounding


def test_sizes_that_change_are_those_of_the_newest_variant() -> None:
    model = mlp()
    with ca.enable(backend="eager", cache_dir=False, dynamic=True) as session:
        for rows in (4, 6):
            model(torch.ones(rows, 8)).square().mean().backward()
            model.zero_grad()
    assert session.last is not None and session.last.graph is not None
    reproduction = _through_a_file(session.last.graph)
    assert reproduction.about.dynamic is True and reproduction.compare().is_rounding


def test_with_the_real_values(tmp_path: Path) -> None:
    model, path = mlp(), tmp_path / "real.zip"
    with ca.enable(backend="eager", cache_dir=False, tune=False) as session:
        for step in range(4):
            model.zero_grad()
            model(_BATCH + step).square().mean().backward()
            assert session.last is not None and session.last.graph is not None
            if step == 1:
                session.last.graph.save(path, values=True)
                assert not path.exists(), "of the next backward"
            if step == 2:
                assert path.exists()
                wanted = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}  # type: ignore[union-attr]
    expect(session.stats(), structure_misses=1, hits=3)
    reproduction = ca.load(path)
    found = reproduction.eager()
    assert reproduction.real and found.keys() == wanted.keys()
    assert_same([found[name] for name in wanted], wanted.values())


def test_real_values_that_cannot_be_written_cost_no_step(tmp_path: Path) -> None:
    model = mlp()
    graph = _graph(lambda: model(_BATCH).square().mean())
    graph.save(tmp_path / "no such folder" / "real.zip", values=True)
    model.zero_grad()
    with pytest.warns(UserWarning, match="a reproduction could not be written"):
        _graph(lambda: model(_BATCH).square().mean())
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_what_cannot_be_made_up_is_said(tmp_path: Path) -> None:
    dense = torch.ones(3, 4, requires_grad=True)
    sparse = torch.eye(3).to_sparse()
    graph = _graph(lambda: torch.sparse.mm(sparse, dense).sum())
    with pytest.raises(ca.ReproductionError, match="sparse"):
        graph.save(tmp_path / "backward.zip")
    assert not list(tmp_path.iterdir())


def test_gradients_that_are_sparse() -> None:
    embedding = nn.Embedding(10, 4, sparse=True)
    reproduction = _through_a_file(_graph(lambda: embedding(torch.tensor([1, 2])).sum()))
    assert reproduction.eager()["weight"].layout is torch.sparse_coo
    assert reproduction.compare("eager").is_rounding and not reproduction.stand_ins


def test_a_function_that_cannot_be_recorded_is_stood_in_for(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp()
    graph, real = _graph(lambda: model(_BATCH).square().mean()), recording.recorded

    def refuses(function: Any, arguments: Any) -> Any:
        if "Gelu" in str(function):
            raise NotRecordedError("not this one")
        return real(function, arguments)

    monkeypatch.setattr(recording, "recorded", refuses)
    reproduction = _through_a_file(graph)
    gelu = "GeluBackward0: GeluBackward0, not this one"
    assert [each.partition(" ")[2] for each in reproduction.stand_ins] == [gelu] * 2
    found = reproduction.compare("eager")
    assert found.is_rounding and found.compiles == 3, "the stand-ins lie between regions"


def test_as_many_of_a_mask_are_set() -> None:
    """Else there is not a gradient for each of them."""
    mask = torch.zeros(20, 5, dtype=torch.bool)
    mask[3:9, ::2] = True
    leaf = torch.linspace(0, 1, 5, requires_grad=True)
    reproduction = _through_a_file(_graph(lambda: leaf.expand(20, 5).masked_select(mask).square().sum()))
    assert reproduction.compare("eager").is_rounding


# ---- made-up values --------------------------------------------------------------------------------------------------


def test_made_up_tensors_are_of_the_same_kinds() -> None:
    base = torch.arange(100, dtype=torch.int64)
    whole = nn.Parameter(torch.randn(6, 4))
    given = [
        base[10:90],
        base[5:20:3].view(5, 1).expand(5, 4),
        torch.randn(3, 4)[:, 1:3].t(),
        torch.rand(4, 4) > 0.5,
        whole,
        whole.detach().t(),
        whole.t(),
        torch.view_as_complex(torch.randn(4, 2)).conj(),
        torch.randn(2, 3, dtype=torch.bfloat16),
        torch.tensor([3, 5, 8]),
        torch.empty(0, 4),
        torch.tensor(2.5, dtype=torch.float64),
        torch.randint(-3, 4, (1000,), dtype=torch.int8),
    ]
    made = tensors(_records(given))
    for one, other in zip(given, made, strict=True):
        kind = (one.dtype, one.shape, one.stride(), one.requires_grad, one.is_conj(), type(one))
        assert kind == (other.dtype, other.shape, other.stride(), other.requires_grad, other.is_conj(), type(other))
        if one.dtype in (torch.int64, torch.int8):
            assert other.min() >= one.min() and other.max() <= one.max()
    assert torch.equal(made[9], given[9]) and made[9].numel() <= SMALL
    assert [memory_of(made[0]) == memory_of(made[1]), memory_of(made[0]) == memory_of(made[9])] == [True, False]
    assert made[0].data_ptr() - made[1].data_ptr() == given[0].data_ptr() - given[1].data_ptr()
    assert memory_of(made[4]) == memory_of(made[5]) == memory_of(made[6])
    assert isinstance(made[6]._base, nn.Parameter) and made[3].any() and not made[3].all()
    again = tensors(_records(given))
    assert_same([each.detach() for each in again], [each.detach() for each in made])


def test_real_tensors_come_back_as_they_were() -> None:
    base = torch.randn(40)
    given = [base[30:38].view(2, 4).t(), base[28:36], torch.randn(3).to(torch.float16), torch.tensor([True, False])]
    records = _records(given)
    data = stored_bytes(given, records)
    assert sum(map(len, data.values())) < base.nbytes, "of their memory nothing beside them is kept"
    made = tensors(records, stored=data)
    assert all(map(same_bits, made, given)) and made[0].data_ptr() - made[1].data_ptr() == 8


def _records(given: Sequence[torch.Tensor]) -> list[Any]:
    return records_of(given)


# ---- files of anybody ------------------------------------------------------------------------------------------------


def _changed(path: Path, change: Callable[[Any], Any]) -> Path:
    with zipfile.ZipFile(path) as archive:
        record = json.loads(archive.read("reproduction.json"))
    changed = path.with_name("changed.zip")
    with zipfile.ZipFile(changed, "w") as archive:
        archive.writestr("reproduction.json", json.dumps(change(record) or record))
    return changed


def _operators(record: Any) -> list[Any]:
    return [each for function in record["functions"] for each in function["operators"]]


def _first_call(record: Any, target: str) -> Any:
    return next(each for each in record["calls"] if each["target"] == target)


_HOSTILE: dict[str, tuple[Callable[[Any], Any], str]] = {
    "an operator on files": (lambda r: _operators(r)[0].update(name="aten.from_file.default"), "on files"),
    "no operator": (lambda r: _operators(r)[0].update(name="os.system"), "is no operator"),
    "an attribute of torch.ops": (lambda r: _operators(r)[0].update(name="aten.__class__.mro"), "is no operator"),
    "another namespace": (lambda r: _operators(r)[0].update(name="mine.run.default"), "is no operator"),
    "a call that is none": (lambda r: _first_call(r, "function").update(target="call_backward"), "no call of a tape"),
    "a function that is not there": (lambda r: _first_call(r, "function").update(function=10**6), "does not exist"),
    "an argument that is not there": (
        lambda r: _operators(r)[0].update(args=[{"of": "argument", "index": 99}]),
        "too few arguments",
    ),
    "a result of later": (lambda r: _operators(r)[0].update(args=[{"of": "operator", "number": 7}]), "does not exist"),
    "a value of later": (lambda r: r["calls"][0].update(args=[{"of": "call", "number": 5}]), "does not exist"),
    "a node that is not there": (lambda r: r["calls"][0].update(call=10**6), "does not exist"),
    "an edge below zero": (lambda r: r["nodes"][0].update(edges=[-1]), "does not exist"),
    "a dtype that is none": (lambda r: r["tensors"][0].update(dtype="torch.load"), "is unknown here"),
    "a device that is none": (lambda r: r["tensors"][0].update(device="cpu; import os"), "no device"),
    "a stride below zero": (lambda r: r["tensors"][0].update(shape=[2], stride=[-1]), "strides"),
    "a long text": (lambda r: _operators(r)[0].update(args=["x" * 1000]), "does not exist"),
    "another format": (lambda r: r.update(format=2), "has format 2"),
    "no record": (lambda r: {"format": 1, "about": 3}, "no valid record"),
    "numbers as text": (lambda r: r.update(sizes=["1"]), "no valid record"),
}


@pytest.mark.parametrize("name", _HOSTILE)
def test_a_file_that_is_wrong_is_refused(name: str, tmp_path: Path) -> None:
    model = mlp()
    path = _saved(_graph(lambda: F.softmax(model(_BATCH), -1).square().mean()), tmp_path)
    change, said = _HOSTILE[name]
    with pytest.raises(ca.ReproductionError, match=said):
        ca.load(_changed(path, change))


def test_names_in_a_file_become_no_code(tmp_path: Path) -> None:
    model = mlp()
    path = _saved(_graph(lambda: model(_BATCH).square().mean()), tmp_path)
    text = "x'); raise SystemExit('ran'); ('\n#"

    def renamed(record: Any) -> None:
        for each in (*record["calls"], *record["nodes"]):
            each["name"] = text
        record["about"].update(where=text, difference=text)

    reproduction = ca.load(_changed(path, renamed))
    assert reproduction.compare("eager").is_rounding


def test_a_file_that_is_packed_too_well_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bomb.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("reproduction.json", b" " * (1 << 24))
    with pytest.raises(ca.ReproductionError, match="packed into"):
        ca.load(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("reproduction.json", "[" * 100_000)
    with pytest.raises(ca.ReproductionError, match="no valid record"):
        ca.load(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data.pkl", b"cos\nsystem\n(S'exit 1'\ntR.")
    with pytest.raises(ca.ReproductionError, match=r"no reproduction\.json"):
        ca.load(path)


# ---- stages as text --------------------------------------------------------------------------------------------------


def test_each_stage_says_where_it_comes_from(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        loss = model(torch.ones(5, 4)).mean()
    graph = _graph(lambda: loss)
    assert re.search(r"#6 AddmmBackward0 at .*:\d+ in \w+\n  # of 0\.weight\n", graph.readable("tape"))
    assert "  # of 0.weight\n" in graph.readable() and graph.readable() == graph.readable("tape")
    aten = graph.readable("aten")
    assert re.search(r"\n    # #6 AddmmBackward0 of 0\.weight, .*:\d+ in \w+\n    \w+ = torch", aten)
    assert "# region 0 of 1: " in aten and "of 2.weight" in aten
    assert "accumulate into 2.weight" in graph.readable("regions").replace("2.bias, ", "")
    assert "args_list.clear()" in graph.readable("code"), "what the backend has made of it"
    with pytest.raises(ValueError, match="'tape', 'aten', 'regions', 'code'"):
        graph.readable("forward")


def test_the_stages_of_what_was_stored(tmp_path: Path) -> None:
    model = mlp()

    def graph() -> CompiledGraph:
        with ca.enable(backend="eager", cache_dir=tmp_path) as session:
            model(_BATCH).square().mean().backward()
        assert session.last is not None and session.last.graph is not None
        return session.last.graph

    made = graph().readable("code")
    ca.reset()
    model.zero_grad()
    loaded = graph()
    assert "from the cache on disk" in loaded.readable("aten")
    assert loaded.readable("code") == made
    assert _through_a_file(loaded).compare("eager").is_rounding


def test_nothing_is_compiled_of_it(tmp_path: Path) -> None:
    graph = CompiledGraph(_graph(lambda: mlp()(_BATCH).sum()).tape)
    assert graph.readable("aten") == "# nothing is compiled of it\n"
    with pytest.raises(ca.ReproductionError, match="was not compiled"):
        graph.save(tmp_path / "backward.zip")
