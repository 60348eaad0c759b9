"""Code that reads memory before it wrote it gives NaN in a poisoned run, in each of its forms; right code its bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from backends.eager import EagerBackend
from backends.inductor.backend import InductorBackend
from backends.inductor.poison import poison, run_poisoned
from backends.inductor.straight_line import straight_line
from backends.inductor.straight_line.straight_line import GENERATED_CODE, PROGRAM, StraightLine


def _region(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
    return [torch.tanh(x) * 2, (x.sin() @ w).relu()]


def _inputs() -> list[torch.Tensor]:
    return [torch.randn(6, 4), torch.randn(4, 5)]


def _compiled(inputs: list[torch.Tensor]) -> StraightLine:
    graph = make_fx(_region, dict(InductorBackend().decompositions()), tracing_mode="fake")(*inputs)
    compiled = InductorBackend().compile(graph, inputs)
    assert isinstance(compiled, StraightLine)
    return compiled


def _with_symbols(inputs: list[torch.Tensor]) -> Any:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    fakes = [mode.from_tensor(value, static_shapes=False) for value in inputs]
    with mode:
        graph = make_fx(_region, dict(InductorBackend().decompositions()), tracing_mode="real")(*fakes)
    for node in [node for node in graph.graph.nodes if node.op == "placeholder"]:
        symbols = [size for size in node.meta["val"].shape if isinstance(size, torch.SymInt)]
        assert symbols
    return graph, fakes


def _loaded(compiled: Any) -> Any:
    data = InductorBackend().save(compiled)
    assert data is not None
    return InductorBackend().load(data)


def _namespace(compiled: Any) -> dict[str, Any]:
    compiled = getattr(compiled, "compiled", compiled)
    call = getattr(compiled, "current_callable", compiled)
    return getattr(call, "__func__", call).__globals__


def _plant_a_kernel_that_writes_nothing(compiled: Any) -> None:
    namespace = _namespace(compiled)
    kernels = [name for name in namespace if name.startswith("cpp_fused")]
    assert kernels
    for name in kernels:
        namespace[name] = lambda *_: None


def _has_nan(results: Any) -> bool:
    return any(bool(each.isnan().any()) for each in results)


@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize("form", [GENERATED_CODE, PROGRAM])
def test_inductors_code(form: str, loaded: bool) -> None:
    inputs = _inputs()
    compiled = _compiled(inputs)
    for wrong in (False, True):
        tried = _loaded(compiled) if loaded else compiled.another()
        if wrong:
            tried._programs.clear()  # the namespace does not change under a program in real life
            _plant_a_kernel_that_writes_nothing(tried)
        before = dict(_namespace(tried))
        if form == PROGRAM:
            run_poisoned(tried, list(inputs))
        assert tried.form_for(inputs) == form
        given = list(inputs)
        results = run_poisoned(tried, given)
        assert given == []
        assert _has_nan(results) == wrong
        assert _namespace(tried) == before
        if not wrong:
            assert all(map(torch.equal, results, tried(list(inputs))))


def test_code_for_symbols() -> None:
    inputs = _inputs()
    graph, fakes = _with_symbols(inputs)
    compiled: Any = InductorBackend().compile(graph, fakes)
    assert not isinstance(compiled, StraightLine)
    assert InductorBackend().stored(compiled).source
    sizes = [int(size) for value in inputs for size in value.shape]
    arguments = [*inputs] if len(graph.graph.find_nodes(op="placeholder")) == len(inputs) else [*sizes, *inputs]
    plain = compiled(list(arguments))
    assert all(map(torch.equal, run_poisoned(compiled, list(arguments)), plain))
    _plant_a_kernel_that_writes_nothing(compiled)
    assert _has_nan(run_poisoned(compiled, list(arguments)))


def test_generated_text_in_both_forms() -> None:
    """Memory that only Python reads, or only part of which is written."""
    from backends.inductor.straight_line.program_library import begin

    programs = begin().result()
    assert programs is not None
    for line, wrong in (
        ("d = c + a", True),
        ("reinterpret_tensor(c, (2, 4), (4, 1), 0).fill_(1); d = c + a", True),
        ("c.fill_(1); d = c + a", False),
        ("extern_kernels.mm(a, a, out=c); d = c + a", False),
    ):
        code = "\n    ".join(
            [
                "def call(args):",
                "a, = args",
                "args.clear()",
                "c = empty_strided_cpu((4, 4), (4, 1), torch.float32)",
                *line.split("; "),
                "del c",
                "return (d, )",
            ]
        )
        namespace: dict[str, Any] = {
            "torch": torch,
            "empty_strided_cpu": torch._C._dynamo.guards._empty_strided_cpu,
            "reinterpret_tensor": torch._C._dynamo.guards._reinterpret_tensor,
            "extern_kernels": torch,
        }
        exec(code + "\n", namespace)
        compiled = StraightLine(namespace["call"], code + "\n", namespace, programs.make_program)
        a = torch.randn(4, 4)
        for form in (GENERATED_CODE, PROGRAM, PROGRAM):
            assert compiled.form_for([a]) == form
            assert _has_nan(run_poisoned(compiled, [a])) == wrong, (line, form)
        if not wrong:
            assert torch.equal(run_poisoned(compiled, [a])[0], compiled([a])[0])
        assert run_poisoned(compiled, [a], GENERATED_CODE)[0].isnan().any() == wrong


def test_a_poisoned_program_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And let go of when the program runs without poison; others have theirs."""
    inputs, made = _inputs(), []
    compiled = _compiled(inputs)
    wanted = compiled(list(inputs))
    assert compiled.form_for(inputs) == PROGRAM
    right = straight_line.translated
    monkeypatch.setattr(straight_line, "translated", lambda *args: made.append(args[2]) or right(*args))
    for _ in range(3):
        assert all(map(torch.equal, run_poisoned(compiled, list(inputs)), wanted))
    assert len(made) == 1
    assert all(map(torch.equal, compiled(list(inputs)), wanted))
    assert all(map(torch.equal, run_poisoned(compiled, list(inputs)), wanted))
    assert len(made) == 2
    assert all(map(torch.equal, compiled.run_form(PROGRAM, list(inputs), lambda names: names), wanted))
    assert len(made) == 3


@pytest.mark.parametrize("loaded", [False, True])
def test_a_graphs_own_code(loaded: bool) -> None:
    def wrong(x: torch.Tensor) -> list[torch.Tensor]:
        return [torch.ops.aten.new_empty.default(x, [3]) + 1, x * 2]

    def right(x: torch.Tensor) -> list[torch.Tensor]:
        return [torch.ops.aten.empty_like.default(x).fill_(2.5) * x]

    x = torch.randn(3)
    for function, expected in ((wrong, True), (right, False)):
        compiled: Any = EagerBackend().compile(make_fx(function)(x), [x])
        if loaded:
            data = EagerBackend().save(compiled)
            assert data is not None
            compiled = EagerBackend().load(data)
        given = [x]
        results = run_poisoned(compiled, given)
        assert given == []
        assert _has_nan(results) == expected
        if not expected:
            assert torch.equal(results[0], compiled([x])[0])


def test_what_cannot_be_poisoned_runs() -> None:
    class Foreign:
        def __call__(self, arguments: list[Any]) -> list[Any]:
            return [arguments.pop() * 2]

    assert run_poisoned(Foreign(), [torch.ones(2)])[0].tolist() == [2, 2]
    graph = fx.symbolic_trace(lambda x: [x * 2])
    assert run_poisoned(EagerBackend().compile(graph, []), [torch.ones(2)])[0].tolist() == [2, 2]


FLOATS = (torch.float32, torch.bfloat16, torch.complex64)
OTHERS = (torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2, torch.int4, torch.bits8)
INTEGERS = (torch.int64, torch.int8, torch.uint8, torch.uint16, torch.bool)


@pytest.mark.parametrize("dtype", [*FLOATS, *OTHERS, *INTEGERS])
def test_poison_of_each_type(dtype: torch.dtype) -> None:
    tensor = torch.empty_strided((2, 3), (8, 2), dtype=dtype)
    tensor.untyped_storage().fill_(0)
    assert poison(tensor) is tensor
    content = bytes(tensor.untyped_storage())
    assert 0 not in {any(content[at : at + dtype.itemsize]) for at in range(0, len(content), dtype.itemsize)}
    if dtype in FLOATS:
        assert tensor.isnan().all()
    elif dtype in INTEGERS and dtype is not torch.bool:
        assert set(tensor.flatten().tolist()) == {torch.iinfo(dtype).max}
