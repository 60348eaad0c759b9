"""What a backend compiled, as bytes and back: the same bits, in this process and in one that could compile nothing."""

from __future__ import annotations

import ast
import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import backends
import compiled_autograd as ca
from backends import ArtifactError, artifacts
from backends.inductor import kernels
from backends.inductor.environment import environment
from backends.parsing import parsed

from .helpers import in_subprocess, mlp, same_bits

TABLE = torch.linspace(-2, 2, 15).view(3, 5)
Tensors = list[Any]


def _arithmetic(x: torch.Tensor, y: torch.Tensor) -> Sequence[torch.Tensor | None]:
    """Two kernels of the same source, one of another, matmuls, a constant; None and an input among the outputs."""
    product = torch.mm(x, y)
    table = torch.mm(torch.tanh(product), TABLE)
    return [torch.sin(x) * 2 + 1, None, table, x, torch.sin(product.t()), (table * table).sum(0), torch.exp(y) - y]


def _only_matmul(x: torch.Tensor, y: torch.Tensor) -> Sequence[torch.Tensor]:
    return [torch.mm(x, y), torch.mm(y, x)]


def _sized(n: int, x: torch.Tensor, y: torch.Tensor) -> Sequence[torch.Tensor]:
    """Sizes as arguments, in a view and in arithmetic."""
    return [torch.sin(x).view(n * 3) / n, torch.mm(x.t(), y), y.sum(0, keepdim=True).expand(x.shape[0], 2)]


def _compile(name: str, function: Callable[..., Any], examples: Sequence[Any]) -> Any:
    backend = backends.get_backend(name)
    table = backend.decompositions()
    graph_module = make_fx(
        function,
        decomposition_table=None if table is None else dict(table),
        tracing_mode="real",
        _allow_non_fake_inputs=True,
    )(*examples)
    mode = next(each.fake_mode for each in examples if isinstance(each, torch.Tensor))
    for node in graph_module.graph.find_nodes(op="get_attr"):
        node.meta["val"] = mode.from_tensor(getattr(graph_module, node.target))
    return backend.compile(graph_module, examples)


def _static(*shapes: tuple[int, ...]) -> Tensors:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    return [mode.from_tensor(torch.empty(shape), static_shapes=True) for shape in shapes]


def _symbolic() -> Tensors:
    """Examples for ``_sized``, whose first size may change."""
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic

    env = ShapeEnv()
    source = ConstantSource("s0")
    symbol = env.create_symbol(7, source, DimDynamic.DYNAMIC)
    size = env.create_symintnode(symbol, hint=7, source=source)
    with FakeTensorMode(allow_non_fake_inputs=True, shape_env=env):
        return [size, torch.empty(size, 3), torch.empty(size, 2)]


def _sized_inputs(n: int) -> Tensors:
    return [n, torch.randn(n, 3), torch.randn(n, 2)]


CASES: dict[str, tuple[Callable[..., Any], Callable[[], Tensors], list[Callable[[], Tensors]]]] = {
    "arithmetic": (
        _arithmetic,
        lambda: _static((4, 6), (6, 3)),
        [lambda: [torch.randn(4, 6), torch.randn(6, 3)]],
    ),
    "only_matmul": (
        _only_matmul,
        lambda: _static((4, 4), (4, 4)),
        [lambda: [torch.randn(4, 4), torch.randn(4, 4)]],
    ),
    "sized": (_sized, _symbolic, [lambda: _sized_inputs(7), lambda: _sized_inputs(12)]),
}
_compiled: dict[tuple[str, str], Any] = {}


def _case(backend: str, case: str) -> Any:
    """What a backend makes of a case, once for all tests."""
    if (backend, case) not in _compiled:
        function, examples, _ = CASES[case]
        _compiled[backend, case] = _compile(backend, function, examples())
    return _compiled[backend, case]


def _artifact(backend: str, case: str) -> bytes:
    data = backends.get_backend(backend).save(_case(backend, case))  # type: ignore[attr-defined]
    assert isinstance(data, bytes)
    return data


def _load(backend: str, data: bytes) -> Any:
    return backends.get_backend(backend).load(data)  # type: ignore[attr-defined]


def _assert_same(found: Sequence[Any], wanted: Sequence[Any]) -> None:
    assert len(found) == len(wanted)
    assert all(same_bits(one, other) for one, other in zip(found, wanted, strict=True)), (found, wanted)


def _inputs(case: str) -> Iterator[Tensors]:
    for make in CASES[case][2]:
        yield make()


@pytest.fixture
def nothing_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_loaded", {})


# ---- round trips -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_what_was_stored_gives_the_same_bits(backend: str, case: str, nothing_loaded: None) -> None:
    loaded = _load(backend, _artifact(backend, case))
    for inputs in _inputs(case):
        wanted = _case(backend, case)(list(inputs))
        arguments = list(inputs)
        found = loaded(arguments)
        assert arguments == [], "a compiled callable empties its list"
        _assert_same(found, wanted)
        assert [each is inputs[0] for each in found] == [each is inputs[0] for each in wanted]


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_inputs_are_freed_as_before(backend: str) -> None:
    for call in (_case(backend, "only_matmul"), _load(backend, _artifact(backend, "only_matmul"))):
        arguments = [torch.randn(4, 4), torch.randn(4, 4)]
        seen = [weakref.ref(each) for each in arguments]
        call(arguments)
        assert [each() for each in seen] == [None, None]


_IN_A_BARE_PROCESS = """
import os, subprocess, sys
from pathlib import Path
import torch
import backends

def refuse(*arguments, **settings):
    raise AssertionError(f"a process was started: {arguments}")

subprocess.Popen.__init__ = refuse
for path in sorted(Path(sys.argv[1]).glob("*.artifact")):
    backend = backends.get_backend(path.name.partition("-")[0])
    call = backend.load(path.read_bytes())
    given = torch.load(path.with_suffix(".inputs"))
    torch.save([call(list(each)) for each in given], path.with_suffix(".outputs"))
assert not {"torch._inductor", "torch._dynamo", "sympy"} & set(sys.modules), "loading has imported a compiler"
assert os.listdir(os.environ["TORCHINDUCTOR_CACHE_DIR"]) == []
assert os.listdir(os.environ["TMPDIR"]) == [], "libraries were left behind"
try:
    backends.get_backend("eager").load((Path(sys.argv[1]) / "own-operator").read_bytes())
except backends.ArtifactError as error:
    print(error)
print(backends.get_backend("inductor").environment())
"""


def test_a_new_process_needs_no_compiler_and_no_cache(tmp_path: Path) -> None:
    wanted = {}
    for backend in ("eager", "inductor"):
        for case in CASES:
            path = tmp_path / f"{backend}-{case}"
            path.with_suffix(".artifact").write_bytes(_artifact(backend, case))
            inputs = list(_inputs(case))
            torch.save(inputs, path.with_suffix(".inputs"))
            wanted[path] = [_case(backend, case)(list(each)) for each in inputs]
    (tmp_path / "own-operator").write_bytes(_of_an_operator_of_ours())
    empty = [tmp_path / "inductor", tmp_path / "temporary"]
    for folder in empty:
        folder.mkdir()
    code = _IN_A_BARE_PROCESS.replace("sys.argv[1]", repr(str(tmp_path)))
    done = in_subprocess(
        code, CXX="/nonexistent", PATH="/nonexistent", TORCHINDUCTOR_CACHE_DIR=str(empty[0]), TMPDIR=str(empty[1])
    )
    assert done.returncode == 0, done.stderr
    for path, outputs in wanted.items():
        for found, expected in zip(torch.load(path.with_suffix(".outputs")), outputs, strict=True):
            _assert_same(found, expected)
    lines = done.stdout.splitlines()
    assert "compiled_autograd_tests" in lines[0] and "compile its graph again" in lines[0]
    assert lines[1] == str(environment()), "the key of an artifact is not found again in a new process"


def _of_an_operator_of_ours() -> bytes:
    """An artifact that only a process with our operator can run."""

    @torch.library.custom_op("compiled_autograd_tests::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @twice.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    backend = backends.get_backend("eager")
    compiled = _compile("eager", lambda x: [torch.ops.compiled_autograd_tests.twice(x)], _static((2,)))
    data = backend.save(compiled)  # type: ignore[attr-defined]
    assert torch.equal(backend.load(data)([torch.ones(2)])[0], torch.full((2,), 2.0))  # type: ignore[attr-defined]
    return data  # type: ignore[no-any-return]


def test_every_region_of_a_model_can_be_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Any, Tensors]] = []
    backend = backends.get_backend("eager")
    compile_region = type(backend).compile

    def spy(self: Any, graph_module: fx.GraphModule, examples: Sequence[Any]) -> Any:
        compiled = compile_region(self, graph_module, examples)

        def call(arguments: Tensors) -> Any:
            seen.append((compiled, list(arguments)))
            return compiled(arguments)

        return call

    monkeypatch.setattr(type(backend), "compile", spy)
    model = torch.nn.Sequential(torch.nn.Conv1d(2, 4, 3), torch.nn.BatchNorm1d(4), torch.nn.Flatten(), mlp(24))
    with ca.enable(backend="eager", cache_dir=False):
        (model(torch.randn(5, 2, 8)).softmax(-1)[:, 1:].log().std() * 2).backward()
    assert seen
    for compiled, arguments in seen:
        data = backend.save(compiled)  # type: ignore[attr-defined]
        assert data is not None, backend.why_not_saved(compiled)  # type: ignore[attr-defined]
        with torch.no_grad():
            _assert_same(_load("eager", data)(list(arguments)), compiled(list(arguments)))


# ---- kernels -----------------------------------------------------------------------------------------------------


def test_a_library_is_loaded_once_by_many_threads(nothing_loaded: None, monkeypatch: pytest.MonkeyPatch) -> None:
    data = _artifact("inductor", "arithmetic")
    stored = artifacts.from_bytes(data, "inductor")
    assert len(stored.kernels) > 1 and stored.constants
    loads: list[kernels.KernelId] = []
    load = kernels._load

    def spy(folder: Path, digest: str, entry: str) -> Any:
        loads.append((digest, entry))
        assert folder.stat().st_mode & 0o777 == 0o700
        return load(folder, digest, entry)

    monkeypatch.setattr(kernels, "_load", spy)
    threads = [threading.Thread(target=_load, args=("inductor", data)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(loads) == sorted(set(stored.kernels.values()))
    assert {digest for digest, _ in loads} == stored.libraries.keys()


def test_a_graph_without_kernels_brings_what_makes_programs_alone() -> None:
    stored = artifacts.from_bytes(_artifact("inductor", "only_matmul"), "inductor")
    assert stored.names == {"extern_kernels.mm": "torch:mm"}
    ((name, (digest, _)),) = stored.kernels.items()
    assert not name.isidentifier() and stored.libraries.keys() == {digest}


# ---- what cannot be used -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_damaged_bytes_are_refused(backend: str) -> None:
    data = _artifact(backend, "arithmetic")
    for position in (0, 5, 30, len(data) // 2, len(data) - 1):
        with pytest.raises(ArtifactError, match=r"begins with|damaged"):
            _load(backend, data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :])
    for length in (0, 10, 60, len(data) // 2, len(data) - 1):
        with pytest.raises(ArtifactError, match=r"no artifact|damaged"):
            _load(backend, data[:length])
    with pytest.raises(ArtifactError, match="damaged"):
        _load(backend, data + b"\0")


def test_an_artifact_of_another_backend_is_refused() -> None:
    for backend, other in (("eager", "inductor"), ("inductor", "eager")):
        with pytest.raises(ArtifactError, match=f"backend {other}.*, not .*backend {backend}"):
            _load(backend, _artifact(other, "only_matmul"))


def test_a_library_that_does_not_fit_is_refused(nothing_loaded: None) -> None:
    stored = artifacts.from_bytes(_artifact("inductor", "arithmetic"), "inductor")
    digest = next(iter(stored.libraries))
    stored.libraries[digest] = b"other"
    with pytest.raises(ArtifactError, match="other content than its name says"):
        _load("inductor", artifacts.to_bytes(stored, "inductor"))
    with pytest.raises(ArtifactError, match=r"cannot be loaded.*TMPDIR"):
        digest = kernels.hashlib.sha256(b"other").hexdigest()
        kernels.load_kernels({digest: b"other"}, [(digest, kernels.ENTRY)])
    assert not kernels._loaded


def test_what_is_not_here_is_named() -> None:
    stored = artifacts.from_bytes(_artifact("eager", "only_matmul"), "eager")
    for change in ({"needs": ["torch.ops.aten.no_such"]}, {"names": {"torch": "no_such:"}}, {"source": "def f(:"}):
        changed = artifacts.Stored(**{"source": stored.source, "names": stored.names, "needs": stored.needs, **change})
        with pytest.raises(ArtifactError, match=r"no_such|SyntaxError"):
            _load("eager", artifacts.to_bytes(changed, "eager"))


# ---- what cannot be stored ---------------------------------------------------------------------------------------


def _why_not(backend: Any, compiled: Any) -> str:
    assert backend.save(compiled) is None
    reason = backend.why_not_saved(compiled)
    assert isinstance(reason, str)
    return reason


def test_what_a_function_made_cannot_be_stored() -> None:
    backend = backends.get_backend(lambda graph_module, examples: graph_module.forward)
    assert not isinstance(backend, backends.Storing)


def test_what_has_other_parts_than_generated_code_cannot_be_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    backend: Any = backends.get_backend("inductor")
    compiled = _case("inductor", "only_matmul")
    assert backend.why_not_saved(compiled) is None
    assert "loaded itself" in _why_not(backend, _load("inductor", _artifact("inductor", "only_matmul")))
    for attribute, value, reason in (
        ("device_types", {"cpu", "xpu"}, "code for xpu"),
        ("source_code", "from torch._inductor.codecache import Cpp\ncall = Cpp.load()", "codecache, which may compile"),
        ("source_code", "call = 1\ncall = 2", "binds call twice"),
        ("frozen_param_names", {"weight": "weight"}, "frozen_param_names: weight"),
        ("current_callable", lambda arguments: arguments, "around its generated code"),
        ("source_code", "k = async_compile.triton('')\ncall = k", "not a kernel that Triton compiled"),
        ("source_code", "k = async_compile.pallas('')\ncall = k", "made by pallas"),
        ("source_code", "torch.ops.load_library('x')\ncall = 1", "not known: torch.ops.load_library"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(compiled.compiled, attribute, value)
            with pytest.raises(AssertionError, match=reason):
                raise AssertionError(_why_not(backend, compiled))


def test_a_graph_with_modules_or_unnamed_functions_cannot_be_stored() -> None:
    backend: Any = backends.get_backend("eager")
    assert "loaded itself" in _why_not(backend, _load("eager", _artifact("eager", "only_matmul")))
    inner = fx.symbolic_trace(torch.nn.Sequential(torch.nn.ReLU()))
    assert "calls a module" in _why_not(backend, backend.compile(inner, []))

    def unnamed(x: torch.Tensor) -> torch.Tensor:
        return x

    graph = fx.Graph()
    graph.output([graph.call_function(unnamed, (graph.placeholder("x"),))])
    assert "neither torch nor Python has" in _why_not(backend, backend.compile(fx.GraphModule({}, graph), []))


# ---- what an artifact depends on ---------------------------------------------------------------------------------


def test_settings_of_inductor_are_part_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import config

    before = environment()
    assert all(type(value) is str and value for value in before.values())
    with config.patch({"cpp.simdlen": 0}):
        changed = environment()
    assert {name for name, value in changed.items() if value != before[name]} == {"inductor_settings"}
    assert environment() == before, "a setting that is put back is no change"
    with config.patch({"cpp.cxx": ("/nonexistent",), "compile_threads": 1}):
        assert environment() == before
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/elsewhere")
    assert environment() == before
    monkeypatch.setenv("TORCHINDUCTOR_CPP_SIMDLEN", "0")
    assert environment() != before


def test_the_number_of_threads_is_part_of_the_environment() -> None:
    before, threads = environment(), torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        assert environment() == {**before, "threads": str(threads + 1)}
    finally:
        torch.set_num_threads(threads)


def test_operators_depend_on_no_machine() -> None:
    backend: Any = backends.get_backend("eager")
    assert isinstance(backend, backends.Storing) and backend.environment() == {}


def test_inductor_stores_a_graph_without_calls() -> None:
    """Inductor makes a plain function of one, which could not be stored, and with it not what is around it."""

    def swap(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        return [y, x]

    backend = backends.get_backend("inductor")
    assert isinstance(backend, backends.Storing)
    x, y = torch.randn(2), torch.randn(3)
    compiled = backend.compile(torch.fx.symbolic_trace(swap), [x, y])
    data = backend.save(compiled)
    assert data is not None
    for call in (compiled, backend.load(data)):
        given = [x, y]
        assert [each.shape for each in call(given)] == [(3,), (2,)] and given == []


def test_code_is_parsed_while_something_else_is() -> None:
    """Some versions of Python count how deep they are in a tree for the whole process: a finalizer that parses too, as
    a thread that comes in there, made ``ast.parse`` raise ``SystemError``. From 3.12 on nothing comes in there."""
    source = "x = [torch.sin(1), {'a': (2, 3)}]\n" * 200
    disturbed = []

    def disturb(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and len(disturbed) < 5:
            disturbed.append(ast.parse("y = 1"))

    before = gc.get_threshold()
    gc.callbacks.append(disturb)
    gc.set_threshold(10)
    try:
        tree = parsed(source)
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(disturb)
    assert len(tree.body) == 200 and (len(disturbed) == 5 or sys.version_info >= (3, 12))


def test_code_that_cannot_be_parsed_is_not_tried_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def fail(source: str) -> None:
        tried.append(source)
        raise SystemError("AST constructor recursion depth mismatch")

    monkeypatch.setattr(ast, "parse", fail)
    with pytest.raises(SystemError, match="recursion depth"):
        parsed("x = 1")
    assert 1 < len(tried) < 100
