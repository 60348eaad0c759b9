"""The registry of backends, lazy loading, functions as backends, and backends that fail."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn

import backends
import compiled_autograd as ca
from backends import registry
from backends.torch_versions import release
from shadow_cache import Failure

from .helpers import assert_grads, assert_same, compare, expect, in_subprocess, mlp

BATCH = torch.linspace(-1, 1, 32).view(4, 8)


def _loss(model: nn.Module) -> torch.Tensor:
    return model(BATCH).square().mean()


# ---- names -------------------------------------------------------------------------------------------------------


def test_our_names_and_those_of_torch_compile_are_listed() -> None:
    names = backends.list_backends()
    assert names == sorted(names)
    assert {"eager", "inductor", "cudagraphs"} <= set(names)


def test_those_for_debugging_and_for_pytorchs_tests_work_and_are_not_listed() -> None:
    for name in ("aot_eager", "relu_compile_error_TESTING_ONLY"):
        assert name not in backends.list_backends() and backends.get_backend(name).name == name
    with pytest.raises(backends.UnknownBackendError) as caught:
        backends.get_backend("zzzz")
    assert "TESTING_ONLY" not in str(caught.value)


@pytest.mark.parametrize(("wrong", "right"), [("inducter", "inductor"), ("eagr", "eager")])
def test_an_unknown_name_suggests_the_nearest(wrong: str, right: str) -> None:
    with pytest.raises(backends.UnknownBackendError, match=f"no backend '{wrong}'.*Did you mean '{right}'"):
        ca.enable(backend=wrong)


def test_a_name_like_no_other_lists_the_known() -> None:
    with pytest.raises(backends.UnknownBackendError, match=r"'zzzz'\. Known: .*eager.*inductor"):
        backends.get_backend("zzzz")


def test_a_name_is_loaded_once() -> None:
    assert backends.get_backend("eager") is backends.get_backend("eager")
    assert backends.get_backend("eager").bitwise and not backends.get_backend("inductor").bitwise


class _EntryPoint:
    def __init__(self, name: str, loaded: Any) -> None:
        self.name = name
        self.load: Callable[[], Any] = lambda: loaded


def _plant(monkeypatch: pytest.MonkeyPatch, *points: _EntryPoint) -> None:
    def found(group: str, name: str | None = None) -> list[_EntryPoint]:
        assert group == "compiled_autograd.backends" == backends.ENTRY_POINT_GROUP
        return [point for point in points if name is None or point.name == name]

    monkeypatch.setattr(registry, "entry_points", found)
    monkeypatch.setattr(registry, "_loaded", {})


def test_an_entry_point_can_be_a_class(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(backends.get_backend("eager").__class__):  # type: ignore[misc]
        name = "mine"

    _plant(monkeypatch, _EntryPoint("mine", Mine))
    assert isinstance(backends.get_backend("mine"), Mine)
    assert "mine" in backends.list_backends()
    compare(mlp, _loss, "mine", steps=2, bitwise=True)


def test_a_class_of_an_entry_point_has_defaults_for_what_it_does_not_say(monkeypatch: pytest.MonkeyPatch) -> None:
    class Plain:
        name = "plain"

        def decompositions(self) -> None:
            return None

        def compile(self, graph_module: Any, example_inputs: Any) -> Any:
            return lambda arguments: graph_module(*arguments)

    _plant(monkeypatch, _EntryPoint("plain", Plain))
    made = backends.get_backend("plain")
    assert isinstance(made, Plain) and (made.bitwise, made.slow, made.allocates) == (False, False, False)
    compare(mlp, _loss, "plain", steps=2)


def test_an_entry_point_can_be_a_function(monkeypatch: pytest.MonkeyPatch) -> None:
    _plant(monkeypatch, _EntryPoint("unboxed", _recording([])))
    made = backends.get_backend("unboxed")
    assert isinstance(made, backends.FunctionBackend) and made.name == "unboxed"
    compare(mlp, _loss, "unboxed", steps=2, bitwise=True)


def test_a_misspelt_entry_point_is_suggested(monkeypatch: pytest.MonkeyPatch) -> None:
    _plant(monkeypatch, _EntryPoint("turbo", print))
    with pytest.raises(backends.UnknownBackendError, match="Did you mean 'turbo'"):
        backends.get_backend("turbbo")


def test_this_package_declares_its_own_entry_points() -> None:
    from importlib.metadata import entry_points

    found = {point.name: point.value for point in entry_points(group=backends.ENTRY_POINT_GROUP)}
    ours = "compiled_autograd.backends"
    assert found == {"eager": f"{ours}.eager:EagerBackend", "inductor": f"{ours}.inductor.backend:InductorBackend"}


# ---- lazy loading ------------------------------------------------------------------------------------------------

_TRAINS_ON_EAGER = """
import sys
import torch
import compiled_autograd as ca
assert "torch._dynamo" not in sys.modules and "torch._inductor" not in sys.modules, "import loads a compiler"
x = torch.randn(4, 4, requires_grad=True)
with ca.enable(backend="eager") as session:
    for _ in range(2):
        (x * x).sum().backward()
assert session.stats().structure_misses, session.stats()
assert not session.stats().failures
"""
_SAYS_WHAT_IS_LOADED = """
import sys
import torch._dynamo
heavy = {f"torch._inductor.{name}" for name in ("compile_fx", "codegen", "graph", "lowering")} & set(sys.modules)
print(*sorted(heavy))
"""


def test_importing_and_running_eager_does_not_load_inductor() -> None:
    """No more of it than Dynamo does: since 2.15 that imports ``torch._inductor.codegen``."""
    found = in_subprocess(_TRAINS_ON_EAGER + _SAYS_WHAT_IS_LOADED)
    assert found.returncode == 0, found.stderr
    if release(torch.__version__) < (2, 15):
        assert found.stdout == "\n"
    else:
        wanted = in_subprocess(_SAYS_WHAT_IS_LOADED)
        assert wanted.returncode == 0, wanted.stderr
        assert found.stdout == wanted.stdout


# ---- functions ---------------------------------------------------------------------------------------------------


def _recording(seen: list[tuple[fx.GraphModule, Sequence[Any]]]) -> Callable[..., Any]:
    def backend(graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        seen.append((graph_module, example_inputs))
        return graph_module.forward

    return backend


def test_an_unboxed_function() -> None:
    seen: list[tuple[fx.GraphModule, Sequence[Any]]] = []
    result = compare(mlp, _loss, _recording(seen), steps=3, bitwise=True)
    ((graph_module, examples),) = seen
    assert len(graph_module.graph.find_nodes(op="placeholder")) == len(examples) > 0
    assert all(isinstance(each, torch.Tensor) for each in examples)
    assert result.stats.compiles == 1


def test_a_boxed_function_gets_a_list_to_empty() -> None:
    given: list[int] = []

    def backend(graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        def run(arguments: list[Any]) -> Any:
            assert type(arguments) is list
            taken = tuple(arguments)
            given.append(len(arguments))
            arguments.clear()
            return graph_module.forward(*taken)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    compare(mlp, _loss, backend, steps=3, bitwise=True)
    assert len(given) == 3 and len(set(given)) == 1


def test_two_functions_do_not_share_graphs() -> None:
    one: list[Any] = []
    other: list[Any] = []
    session = compare(mlp, _loss, _recording(one), steps=1, bitwise=True).session
    again = compare(mlp, _loss, _recording(other), steps=1, bitwise=True, counts=False).session
    expect(session.stats(), structure_misses=1, captures=1, compiles=1)
    expect(again.stats(), shape_misses=1, captures=0, compiles=1)
    assert len(one) == len(other) == 1
    assert again.last is not None and again.last.reasons[0].kind == "backend_or_settings"


def test_a_function_that_gives_one_tensor_instead_of_a_list() -> None:
    def backend(graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            outputs = graph_module.forward(*arguments)
            return outputs[0] if len(outputs) == 1 else outputs

        return run

    x = torch.randn(3, requires_grad=True)
    with ca.enable(backend=backend) as session:
        (found,) = torch.autograd.grad((x * x).sum(), x)
    assert_same([found], torch.autograd.grad((x * x).sum(), x))
    expect(session.stats(), structure_misses=1)


def test_decompositions_that_a_function_asks_for() -> None:
    seen: list[Any] = []
    backend = _recording(seen)
    from torch._decomp import core_aten_decompositions

    backend.decompositions = core_aten_decompositions()  # type: ignore[attr-defined]
    compare(mlp, _loss, backend, steps=1, bitwise=False)
    targets = {str(node.target) for node in seen[0][0].graph.nodes}
    assert "aten.gelu_backward.default" not in targets


def test_aot_eager_by_its_name() -> None:
    result = compare(mlp, _loss, "aot_eager", steps=3, bitwise=True)
    assert result.stats.failures == 0


def test_a_backend_made_with_aot_autograd() -> None:
    from torch._dynamo.backends.debugging import aot_eager

    result = compare(mlp, _loss, aot_eager, steps=3, bitwise=True)
    assert result.stats.compiles == 1


# ---- backends that fail ------------------------------------------------------------------------------------------


def _fails_to_compile(graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
    raise RuntimeError("no kernel today")


def _gives_no_callable(graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
    return 7


def _fails_to_run(graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
    def run(*arguments: Any) -> Any:
        raise RuntimeError("no run today")

    return run


@pytest.mark.parametrize(
    ("backend", "says"),
    [
        (_fails_to_compile, "no kernel today"),
        (_gives_no_callable, "cannot be called"),
        (_fails_to_run, "no run today"),
    ],
)
def test_a_failing_backend_costs_no_step(backend: Any, says: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = compare(mlp, _loss, backend, steps=3, bitwise=True, counts=False)
    ours = [str(each.message) for each in caught if "compiled_autograd" in str(each.message)]
    assert len(ours) == 1 and says in ours[0]
    expect(result.stats, structure_misses=1, hits=2, failures=1, compiles=0)
    with result.session:
        _loss(result.model).backward()
    assert result.session.last is not None and result.session.last.outcome == "hit"


def test_the_failure_is_kept_as_a_reason() -> None:
    model = mlp()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with ca.enable(backend=_fails_to_compile) as session:
            _loss(model).backward()
    assert session.last is not None
    (failure,) = [reason for reason in session.last.reasons if isinstance(reason, Failure)]
    assert failure.kind == "compile" and "no kernel today" in failure.error and "_fails_to_compile" in failure.where
    assert str(failure).startswith("compile in backend '_fails_to_compile'")
    assert session.stats().failures == 1


def test_one_warning_for_one_failure_however_often_it_happens() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            ca.reset()
            compare(mlp, _loss, _fails_to_compile, steps=1, bitwise=True, counts=False)
    assert len([each for each in caught if "no kernel today" in str(each.message)]) == 1


def test_a_backend_that_fails_on_a_later_run_is_the_same_step_in_eager() -> None:
    """Whatever a backend throws, and whenever, the step goes on."""
    runs: list[int] = []

    def backend(graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        def run(*arguments: Any) -> Any:
            runs.append(1)
            if len(runs) == 2:
                raise RuntimeError("only the first time")
            return graph_module.forward(*arguments)

        return run

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = compare(mlp, _loss, backend, steps=3, bitwise=True, counts=False)
    assert result.stats.failures == 1


def test_a_backend_that_cannot_be_prepared_costs_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unprepared(backends.get_backend("eager").__class__):  # type: ignore[misc]
        name = "unprepared"

        def prepare(self) -> None:
            raise RuntimeError("nothing is at hand")

    _plant(monkeypatch, _EntryPoint("unprepared", Unprepared))
    with pytest.warns(UserWarning, match="nothing is at hand"):
        result = compare(mlp, _loss, "unprepared", steps=2, bitwise=True, counts=False)
    expect(result.stats, structure_misses=1, hits=1, compiles=0, failures=1)


def test_a_backend_may_give_outputs_that_share_memory() -> None:
    """With inputs, or with each other: in ``.grad`` each leaf still has memory of its own."""

    def backend(graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        def run(*arguments: Any) -> Any:
            outputs = list(graph_module.forward(*arguments))
            memory, start = torch.empty(sum(output.numel() for output in outputs)), 0
            for index, output in enumerate(outputs):
                outputs[index] = memory[start : start + output.numel()].view(output.shape).copy_(output)
                start += output.numel()
            return outputs

        return run

    a = torch.randn(4, requires_grad=True)
    b = torch.randn(4, requires_grad=True)
    with ca.enable(backend=backend):
        for _ in range(2):
            a.grad = b.grad = None
            (a * b).sum().backward()
            assert a.grad is not None and b.grad is not None
            assert_same([a.grad, b.grad], [b.detach(), a.detach()])
            assert a.grad.untyped_storage().data_ptr() != b.grad.untyped_storage().data_ptr()


@pytest.mark.parametrize("passes_by", ["first", "second"])
def test_a_backend_may_give_an_input_back(passes_by: str) -> None:
    """``(a * 1.0)``: a backend that drops the multiplication gives the caller's own gradient back."""

    def backend(graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        return lambda *arguments: [arguments[0] for _ in graph_module.forward(*arguments)]

    a = torch.randn(4, requires_grad=True)
    given = torch.randn(4)
    with ca.enable(backend=backend):
        for _ in range(1 if passes_by == "first" else 2):
            a.grad = None
            (a * 1.0).backward(given)
    assert a.grad is not None and torch.equal(a.grad, given)
    assert a.grad.data_ptr() != given.data_ptr()


def test_a_missing_compiler_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from backends.inductor import backend as inductor

    monkeypatch.setattr(inductor.shutil, "which", lambda name: None)
    reference, model = mlp(), mlp()
    model.load_state_dict(reference.state_dict())
    _loss(reference).backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with ca.enable(backend="inductor") as session:
            _loss(model).backward()
    assert_grads(model, reference)
    assert session.stats().failures == 1
    assert any("no C++ compiler found" in str(each.message) for each in caught)


_PICKED = """
import os
from pathlib import Path
from backends.inductor import instruction_sets
from torch._inductor.cpu_vec_isa import pick_vec_isa
if {asked}:
    instruction_sets.ask()
print(pick_vec_isa(), pick_vec_isa().build_arch_flags())
print(*sorted(path.name for path in Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).rglob("*.so")))
"""


@pytest.mark.slow
def test_instruction_sets_are_found_as_without_asking_early(tmp_path: Path) -> None:
    """The same one is picked, and nothing is compiled that Inductor would not compile: no more than the widest."""
    answers = []
    for asked in (False, True):
        folder = tmp_path / str(asked)
        folder.mkdir()
        done = in_subprocess(_PICKED.format(asked=asked), TORCHINDUCTOR_CACHE_DIR=str(folder))
        assert done.returncode == 0, done.stderr
        answers.append(done.stdout.splitlines()[-2:])
    (picked, compiled), (picked_early, compiled_early) = answers
    assert picked_early == picked
    assert compiled_early and set(compiled_early.split()) <= set(compiled.split())


def test_an_error_that_has_no_text_costs_no_backward() -> None:
    class _WithoutTextError(Exception):
        def __str__(self) -> str:
            raise ValueError("no text")

    def backend(graph: Any, examples: Any) -> Any:
        raise _WithoutTextError

    leaf = torch.ones(3, requires_grad=True)
    session = ca.enable(backend=backend, cache_dir=False, tune=False)
    with pytest.warns(UserWarning, match="_WithoutTextError: .its message raised ValueError"), session:
        leaf.exp().sum().backward()
    assert leaf.grad is not None and torch.equal(leaf.grad, leaf.detach().exp())
    expect(session.stats(), structure_misses=1, captures=1, failures=1)


def test_no_later_step_reports_what_was_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor does so when its code runs, which takes some milliseconds: the first hit took three times as long."""
    from torch._dynamo import metrics_context

    reported: list[dict[str, Any]] = []
    context = metrics_context.RuntimeMetricsContext(lambda start, end, metrics, *_: reported.append(dict(metrics)))
    monkeypatch.setattr("torch._dynamo.utils.get_runtime_metrics_context", lambda: context)
    monkeypatch.setattr("torch._inductor.output_code.get_runtime_metrics_context", lambda: context)
    session, model = ca.enable(backend="inductor", cache_dir=False, tune=False), mlp()
    for step in range(4):
        model.zero_grad()
        with session:
            _loss(model).backward()
        assert len(reported) == 1 and "inductor_cumulative_compile_time_us" in reported[0], step
    expect(session.stats(), structure_misses=1, hits=3, compiles=1)
