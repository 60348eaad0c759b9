"""``mode``: Inductor's modes as a setting (CUDA graphs: ``tests/test_cuda_graphs.py``)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

import backends
import compiled_autograd as ca
import shadow_cache
from backends.artifacts import Stored
from backends.inductor.backend import InductorBackend
from backends.inductor.cuda.capture import Device, cuda_device
from backends.inductor.cuda.direct import Direct
from backends.inductor.cuda.graphs import Replayed
from backends.modes import MODES, name_in
from compiled_autograd.compiling import worker_main, worker_process
from compiled_autograd.guards.ambient import ambient
from compiled_autograd.settings import Settings, resolve

from .helpers import assert_same, compare, expect, in_subprocess, mlp, same_bits
from .stored import restart

BATCH = torch.linspace(-1, 1, 32).view(4, 8)
TUNED = ("max-autotune", "max-autotune-no-cudagraphs")
NAMED = [name_in(mode) for mode in MODES if mode != "default"]


def _loss(model: nn.Module) -> torch.Tensor:
    return model(BATCH).square().mean()


# ---- the setting -------------------------------------------------------------------------------------------------


def test_the_modes_are_those_of_torch_compile() -> None:
    from torch._inductor import list_mode_options

    assert set(MODES) == set(list_mode_options()) - {"lite"}  # which leaves most of a graph as it is
    assert list_mode_options("default") == {}
    assert list_mode_options("reduce-overhead") == {"triton.cudagraphs": True}
    assert all(list_mode_options(mode)["max_autotune"] for mode in TUNED)


@pytest.mark.parametrize("mode", MODES)
def test_each_mode_is_taken(mode: str) -> None:
    assert ca.enable(mode=mode).settings.mode == mode
    assert resolve({}, {"COMPILED_AUTOGRAD_MODE": mode}).mode == mode


@pytest.mark.parametrize("value", ["fastest", "lite", None, 3, ["default"]])
def test_another_value_says_what_is_possible(value: Any) -> None:
    with pytest.raises(ca.InvalidSettingError, match=r"enable\(\): mode=.*mode is one of 'default', 'reduce-overhead'"):
        ca.enable(mode=value)
    with pytest.raises(ca.InvalidSettingError, match="COMPILED_AUTOGRAD_MODE: mode='fastest'"):
        resolve({}, {"COMPILED_AUTOGRAD_MODE": "fastest"})


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor:max-autotune", compare])
def test_only_inductor_has_modes(backend: Any) -> None:
    assert ca.enable(backend=backend, mode="default").settings.backend == backend
    with pytest.raises(ca.InvalidSettingError) as raised:
        ca.enable(backend=backend, mode="max-autotune")
    text = str(raised.value)
    assert "enable(): mode='max-autotune' is not possible" in text and f"backend={backend!r}" in text
    assert "remove it, or set backend='inductor'" in text
    with pytest.raises(ca.InvalidSettingError, match="COMPILED_AUTOGRAD_MODE: mode='reduce-overhead'"):
        resolve({"backend": backend}, {"COMPILED_AUTOGRAD_MODE": "reduce-overhead"})


def test_compile_step_takes_it() -> None:
    assert ca.compile_step(mode="reduce-overhead")(lambda: None).session.settings.mode == "reduce-overhead"  # type: ignore[attr-defined]


def test_the_key_without_a_mode_is_what_it_was() -> None:
    assert Settings().key == (("backend", "inductor"), ("passes", ()), ("dynamic", None))
    assert resolve({"mode": "default"}, {}).key == Settings().key
    assert len({resolve({"mode": mode}, {}).key for mode in MODES}) == len(MODES)


@pytest.mark.parametrize("name", NAMED)
def test_a_backend_in_a_mode_has_a_name(name: str) -> None:
    assert name in backends.list_backends()
    backend = backends.get_backend(name)
    assert isinstance(backend, InductorBackend) and backend.name == name
    assert isinstance(backend, backends.Storing)
    by_name, by_mode = ca.enable(backend=name).settings, ca.enable(mode=name.partition(":")[2]).settings
    assert by_name.key == by_mode.key  # they share graphs


def test_a_misspelt_mode_in_a_name_suggests_the_nearest() -> None:
    with pytest.raises(backends.UnknownBackendError, match="Did you mean 'inductor:max-autotune'"):
        ca.enable(backend="inductor:max-autotun")


def test_inductor_is_not_imported_to_check_it() -> None:
    code = "import sys, compiled_autograd as ca; ca.enable(mode='max-autotune'); "
    done = in_subprocess(code + "sys.exit('torch._inductor.compile_fx' in sys.modules)")
    assert done.returncode == 0, done.stderr


# ---- what Inductor is asked --------------------------------------------------------------------------------------


def _graph(device: str) -> tuple[fx.GraphModule, list[torch.Tensor]]:
    def double(x: torch.Tensor) -> list[torch.Tensor]:
        return [torch.ops.aten.mul.Tensor(x, 2)]

    graph_module, mode = fx.symbolic_trace(double), FakeTensorMode()
    with mode:
        examples = [torch.empty(3, 4, device=device)]
    FakeTensorProp(graph_module, mode).propagate_dont_convert_inputs(*examples)
    return graph_module, examples


class _Asked:
    """Stands where Inductor's compiler does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from torch._inductor import compile_fx

        monkeypatch.setattr(compile_fx, "compile_fx_inner", self)

    def __call__(self, graph_module: fx.GraphModule, examples: Sequence[Any], **given: Any) -> Any:
        from torch._inductor import config

        self.given, self.tunes, self.cuda_graphs = given, config.max_autotune, config.triton.cudagraphs
        return self


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_inductor_is_asked_for_what_the_mode_says(monkeypatch: pytest.MonkeyPatch, mode: str, device: str) -> None:
    from torch._inductor import config

    asked = _Asked(monkeypatch)
    compiled = InductorBackend(mode).compile(*_graph(device))
    replays = device == "cuda" and mode in ("reduce-overhead", "max-autotune")
    assert (asked.tunes, asked.cuda_graphs) == (mode in TUNED, False)  # Inductor's own copy each input in
    assert asked.given["is_backward"] and "static_input_idxs" not in asked.given
    assert isinstance(compiled, Replayed) == replays
    if replays:
        assert compiled.device.index == 0
    if device == "cuda":
        direct: Any = compiled.compiled if replays else compiled
        assert isinstance(direct, Direct) and direct.compiled is asked
    assert not config.max_autotune and not config.triton.cudagraphs


def test_cuda_graphs_that_the_user_has_set_are_ours_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import config

    asked = _Asked(monkeypatch)
    with config.patch({"triton.cudagraphs": True}):
        assert isinstance(InductorBackend().compile(*_graph("cuda")), Replayed)
        assert not asked.cuda_graphs
        assert not isinstance(InductorBackend().compile(*_graph("cpu")), Replayed)


def test_what_draws_random_numbers_is_not_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    _Asked(monkeypatch)
    graph_module, mode = fx.symbolic_trace(lambda x: [torch.ops.aten.rand_like.default(x)]), FakeTensorMode()
    with mode:
        examples = [torch.empty(3, 4, device="cuda")]
    FakeTensorProp(graph_module, mode).propagate_dont_convert_inputs(*examples)
    assert not isinstance(InductorBackend("reduce-overhead").compile(graph_module, examples), Replayed)


def test_the_device_of_a_graph() -> None:
    assert cuda_device(_graph("cpu")[0]) is None
    assert cuda_device(_graph("cuda:0")[0]) == 0


def test_a_region_with_cuda_graphs_is_stored_as_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are captured anew by each process."""
    from torch._inductor.output_code import CompiledFxGraph

    backend, made = InductorBackend("reduce-overhead"), object.__new__(CompiledFxGraph)
    plain = Stored(source="def call(arguments):\n    return [arguments.pop() + 1]\n", names={}, needs=[])
    whole = InductorBackend.stored
    monkeypatch.setattr(InductorBackend, "stored", lambda self, each: plain if each is made else whole(self, each))
    data = backend.save(Replayed(made, Device(1)))
    assert data is not None
    loaded: Any = backend.load(data)
    assert isinstance(loaded, Replayed) and loaded.device.index == 1
    assert same_bits(loaded.run_code([torch.ones(2)])[0], torch.full((2,), 2.0))


# ---- on the CPU --------------------------------------------------------------------------------------------------


def test_reduce_overhead_on_the_cpu() -> None:
    result = compare(mlp, _loss, "inductor", mode="reduce-overhead")
    (region,) = result.graph.variants[0].regions
    assert not isinstance(region.compiled_regions()[0].call, Replayed)


def test_modes_share_no_graphs_in_memory_nor_on_disk(tmp_path: Path) -> None:
    leaf = torch.linspace(-1, 1, 12).view(3, 4).requires_grad_()
    (wanted,) = torch.autograd.grad(leaf.sin().sum(), [leaf])

    def grad(on_miss: str, **settings: Any) -> ca.Session:
        session = ca.enable(cache_dir=tmp_path, on_miss=on_miss, **settings)
        with session:
            (found,) = torch.autograd.grad(leaf.sin().sum(), [leaf])
        torch.testing.assert_close(found, wanted)
        return session

    expect(grad("compile", mode="reduce-overhead").stats(), structure_misses=1, compiles=1)
    for fresh in (False, True):
        expect(grad("raise", mode="reduce-overhead").stats(), hits=1, compiles=0)
        expect(grad("raise", backend="inductor:reduce-overhead").stats(), hits=1, compiles=0)
        for other, name in (({}, "inductor"), ({"mode": "max-autotune"}, "inductor:max-autotune")):
            with pytest.raises(ca.CacheMissError, match=f"backend: inductor:reduce-overhead -> {name}"):
                grad("raise", **other)
        if not fresh:
            restart()
    (entry,) = shadow_cache.open(tmp_path).summaries()
    assert entry.settings["backend"] == "inductor:reduce-overhead"


_TUNED = """
import json, sys
from pathlib import Path
import torch
from torch._inductor import select_algorithm
import compiled_autograd as ca
from backends.inductor import batch

select_algorithm.PRINT_AUTOTUNE = False
# The template is chosen, whichever is the faster one here and now.
select_algorithm.ExternKernelCaller.benchmark = lambda *_, **__: 1e6
{before}
started, files = batch._start, []
def start(sources):
    files.append(len(sources))
    return started(sources)
batch._start = start
torch.manual_seed(0)
shapes = (4, 48, 64), (4, 64, 80), (80, 96)
leaves = [torch.randn(shape, requires_grad=True) for shape in shapes]
def loss():
    a, b, weight = leaves
    return (((a.tanh() @ b).relu()) @ weight).sigmoid().square().sum()
wanted = torch.autograd.grad(loss(), leaves)
with ca.enable(mode="max-autotune", cache_dir={folder!r}) as session:
    for _ in range(3):
        found = torch.autograd.grad(loss(), leaves)
stats, variant = session.stats(), session.last.graph.variants[0]
call = variant.regions[0].compiled_regions()[0].call
source = getattr(getattr(call, "compiled", call), "source_code", "")
print(json.dumps(dict(
    close=all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found, wanted)),
    templates=source.count("_micro_gemm("), kernels=source.count("cpp_pybinding("), files=files,
    compiles=stats.compiles, hits=stats.hits, loads=stats.loads, failures=stats.failures,
    not_stored=variant.not_stored)))
"""


def _tuned(folder: Path, before: str = "") -> dict[str, Any]:
    code = _TUNED.format(before=before, folder=str(folder / "store"))
    done = in_subprocess(code, TORCHINDUCTOR_CACHE_DIR=str(folder / "inductor"), TORCHINDUCTOR_COMPILE_THREADS="2")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_max_autotuned_kernels_compile_together_and_are_found_by_another_process(tmp_path: Path) -> None:
    first = _tuned(tmp_path)
    assert first["close"] and first["templates"] > 0 and not first["not_stored"]
    assert (first["compiles"], first["hits"], first["failures"]) == (1, 2, 0)
    assert len(first["files"]) == 2 and sum(first["files"]) == first["kernels"] > 2
    again = _tuned(tmp_path)
    assert again["close"] and again["files"] == []
    assert (again["compiles"], again["loads"], again["hits"], again["failures"]) == (0, 1, 3, 0)


@pytest.mark.slow
def test_max_autotuned_kernels_that_cannot_be_compiled_together_are_compiled_one_by_one(tmp_path: Path) -> None:
    result = _tuned(tmp_path, before='batch._HEADERS = ("#error not together",)')
    assert result["close"] and result["templates"] > 0 and not result["not_stored"]
    assert (result["compiles"], result["hits"], result["failures"]) == (1, 2, 0)
    assert max(result["files"]) > 1 and result["files"].count(1) == result["kernels"]


@pytest.mark.slow
@pytest.mark.parametrize("mode", TUNED)
def test_a_model_under_max_autotune(mode: str) -> None:
    compare(mlp, _loss, "inductor", mode=mode)


# ---- in the background -------------------------------------------------------------------------------------------


def test_the_other_process_is_asked_for_the_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def compile(self: InductorBackend, graph_module: fx.GraphModule, examples: Sequence[Any]) -> Any:
        made.append(self.mode)
        return backends.get_backend("eager").compile(graph_module, examples)

    monkeypatch.setattr(InductorBackend, "compile", compile)
    backend = backends.get_backend("inductor:max-autotune")
    graph_module, examples = _graph("cpu")
    request = worker_process._request(ambient(), backend, graph_module, examples)
    assert request is not None and request.backend == "inductor:max-autotune"
    reply = worker_main.answer(request)
    assert made == ["max-autotune"] and reply.environment == backend.environment()  # type: ignore[attr-defined]
    assert reply.artifact is not None and isinstance(backend, backends.Storing)
    assert same_bits(backend.load(reply.artifact)([torch.ones(3, 4)])[0], torch.full((3, 4), 2.0))
    default = backends.get_backend("inductor")
    with pytest.raises(backends.ArtifactError, match="backend inductor:max-autotune"):
        assert isinstance(default, backends.Storing)
        default.load(reply.artifact)


@pytest.mark.slow
def test_a_mode_in_the_background() -> None:
    session, model = ca.enable(mode="max-autotune", on_miss="background"), mlp()
    parameters = list(model.parameters())
    wanted = torch.autograd.grad(_loss(model), parameters)
    for _ in range(2):
        with session:
            found = torch.autograd.grad(_loss(model), parameters)
        assert_same(found, wanted, bitwise=False)
        assert session.wait(300)
    assert worker_process.WORKER._process is not None and worker_process.WORKER._process.poll() is None
    expect(session.stats(), structure_misses=1, hits=1, compiles=1)
    worker_process.WORKER.stop()
