"""``mode``: Inductor's modes as a setting, and results of CUDA graphs that are nobody else's memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

import backends
import compiled_autograd as ca
import shadow_cache
from backends.inductor import cuda_graphs
from backends.inductor.backend import InductorBackend
from backends.inductor.cuda_graphs import CopiedOut, copies, cuda_device
from backends.modes import MODES, name_in
from compiled_autograd.guards.ambient import ambient
from compiled_autograd.policies import worker_main, worker_process
from compiled_autograd.settings import Settings, resolve

from .helpers import GradientsDifferError, Squares, assert_same, compare, expect, in_subprocess, mlp, same_bits
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
    assert "leave it out, or set backend='inductor'" in text
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
        monkeypatch.setattr("backends.inductor.backend.running_backward", lambda device: ("boxed", device))

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
    assert (asked.tunes, asked.cuda_graphs) == (mode in TUNED, replays)
    assert asked.given["is_backward"] and "static_input_idxs" not in asked.given
    assert isinstance(compiled, CopiedOut) == replays
    if replays:
        assert compiled.device == 0 and asked.given["boxed_forward_device_index"] == ("boxed", 0)
    assert not config.max_autotune and not config.triton.cudagraphs


def test_cuda_graphs_that_the_user_has_set_are_copied_out_of_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import config

    _Asked(monkeypatch)
    with config.patch({"triton.cudagraphs": True}):
        assert isinstance(InductorBackend().compile(*_graph("cuda")), CopiedOut)
        assert not isinstance(InductorBackend().compile(*_graph("cpu")), CopiedOut)


def test_inductor_finds_the_manager_that_it_tells_of_the_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one, compiling a backward for which Inductor decides against CUDA graphs fails."""
    from torch._inductor import cudagraph_trees
    from torch._inductor.output_code import maybe_handle_backward_generation

    managers: dict[int, Any] = {}
    told: list[int] = []

    def get_manager(device: int, create_if_none_exists: bool = True) -> Any:
        if create_if_none_exists:
            managers[device] = SimpleNamespace(set_to_running_backward=lambda: told.append(device))
        return managers.get(device)

    monkeypatch.setattr(cudagraph_trees, "get_manager", get_manager)
    graph: Any = SimpleNamespace(current_callable=lambda inputs: inputs, fx_kwargs={"is_backward": True})
    maybe_handle_backward_generation(graph, cuda_graphs.running_backward(1))
    assert graph.current_callable(["input"]) == ["input"] and told == [1]


def test_the_device_of_a_graph() -> None:
    assert cuda_device(_graph("cpu")[0]) is None
    assert cuda_device(_graph("cuda:0")[0]) == 0


def test_why_a_region_with_cuda_graphs_is_not_stored() -> None:
    from torch._inductor.output_code import CompiledFxGraph

    made = object.__new__(CompiledFxGraph)
    made.device_types, made.compiled_fn_runner = {"cuda"}, None  # type: ignore[assignment]
    backend = InductorBackend("reduce-overhead")
    assert backend.why_not_saved(CopiedOut(made, 0)) == "it has code for cuda, and only code for the CPU is stored"
    assert backend.save(CopiedOut(made, 0)) is None


# ---- results of CUDA graphs --------------------------------------------------------------------------------------


class _Graphs:
    """As CUDA graphs do: results in memory of its own, which the next call overwrites."""

    _boxed_call = True

    def __init__(self, graph_module: fx.GraphModule, examples: Sequence[Any]) -> None:
        self.graph_module = graph_module
        self.memory: list[Any] = []
        self.calls = 0

    def __call__(self, arguments: list[Any]) -> list[Any]:
        results = self.graph_module.forward(*arguments)
        arguments.clear()
        self.memory = self.memory or [each if each is None else torch.empty_like(each) for each in results]
        for place, value in zip(self.memory, results, strict=True):
            if value is not None:
                place.copy_(value)
        self.calls += 1
        return list(self.memory)


class _Copied(CopiedOut):
    _boxed_call = True


def _overwriting(copied: bool) -> Callable[..., Any]:
    def backend(graph_module: fx.GraphModule, examples: Sequence[Any]) -> Any:
        graphs = _Graphs(graph_module, examples)
        return _Copied(graphs, None) if copied else graphs

    return backend


def _kept(backend: Any) -> tuple[list[Any], ca.Stats]:
    """What a hook saw, leaves kept and ``autograd.grad`` gave in three steps, all looked at after the last."""
    torch.manual_seed(0)
    models, kept, session = [mlp() for _ in range(3)], [], ca.enable(backend=backend, check=False)
    for step, model in enumerate(models):
        hidden = Squares.apply(model[:2](BATCH * (step + 1)))
        hidden.register_hook(kept.append)
        with session:
            model[2:](hidden).square().mean().backward()
            kept += torch.autograd.grad(_loss(model), list(model.parameters()))
        kept += [each.grad for each in model.parameters()]
    return kept, session.stats()


def test_what_was_given_out_is_not_overwritten_by_later_calls() -> None:
    wanted, _ = _kept("eager")
    found, stats = _kept(_overwriting(copied=True))
    assert_same(found, wanted)
    expect(stats, shape_misses=2, hits=4)  # the structures are known from eager


def test_without_the_copies_it_would_be() -> None:
    wanted, _ = _kept("eager")
    found, stats = _kept(_overwriting(copied=False))
    assert stats.hits == 4
    with pytest.raises(GradientsDifferError):
        assert_same(found, wanted)


def test_a_grad_that_is_kept_is_added_to_in_memory_of_its_own() -> None:
    compare(mlp, _loss, _overwriting(copied=True), steps=4, keep_grads=True, bitwise=True)


def test_arguments_are_emptied_and_the_graph_runs_once_a_call() -> None:
    graph_module, _ = _graph("cpu")
    graphs = _Graphs(graph_module, ())
    arguments = [torch.ones(3, 4)]
    (found,) = CopiedOut(graphs, None)(arguments)
    assert not arguments and graphs.calls == 1
    assert same_bits(found, torch.full((3, 4), 2.0))


def test_copies_have_the_strides_and_nobodys_memory() -> None:
    base = torch.arange(24.0)
    results = [
        base.view(4, 6),
        base.view(4, 6).t(),
        base.view(2, 3, 4).permute(1, 2, 0)[:, 1:],
        base[:6].view(6, 1).expand(6, 5),
        base[0].expand(3, 4),
        base[3],
        base[:0].view(0, 7),
        base.as_strided((3, 4), (2, 1)),  # neighbours overlap, without a stride of 0
        base.view(4, 6),
        base > 7,
        base.to(torch.complex64)[::2],
        None,
    ]
    found = copies(results)
    assert found[-1] is None
    for one, other in zip(found[:-1], results[:-1], strict=True):
        assert same_bits(one, other)
    places = [each.untyped_storage().data_ptr() for each in found[:-1] if each.numel()]
    assert len(set(places)) == len(places) and base.untyped_storage().data_ptr() not in places
    wanted = [None if each is None else each.clone() for each in results]
    base.fill_(-1)
    for one, other in zip(found[:-1], wanted[:-1], strict=True):
        assert torch.equal(one, other)
    assert copies([]) == [] and copies((None,)) == [None]


class _Stream:
    def __init__(self) -> None:
        self.after: list[Any] = []

    def wait_stream(self, other: Any) -> None:
        self.after.append(other)


def test_a_region_on_another_stream_begins_after_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, other_device = _Stream(), _Stream(), _Stream()
    current = {0: first, 1: other_device}
    monkeypatch.setattr(torch.cuda, "current_stream", current.__getitem__)
    monkeypatch.setattr(cuda_graphs, "_thread", cuda_graphs._Thread())
    regions = [CopiedOut(lambda arguments: [], device) for device in (0, 0, 1)]
    regions[0]([])
    regions[1]([])
    assert first.after == []
    current[0] = second
    regions[2]([])
    regions[1]([])
    regions[0]([])
    assert second.after == [first] and other_device.after == [] and first.after == []


# ---- on the CPU --------------------------------------------------------------------------------------------------


def test_reduce_overhead_on_the_cpu() -> None:
    result = compare(mlp, _loss, "inductor", mode="reduce-overhead")
    (region,) = result.graph.variants[0].regions
    assert not isinstance(region.compiled_regions()[0].call, CopiedOut)


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
