"""Generated code run as a straight-line program gives what it gives as Python, and lets go of memory where it does."""

from __future__ import annotations

import ctypes
import itertools
import random
import types
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import compiled_autograd as ca
from backends.inductor import backend as inductor
from backends.inductor.backend import InductorBackend
from backends.inductor.poison import poisoned
from backends.inductor.straight_line import products, program_library
from backends.inductor.straight_line.straight_line import GENERATED_CODE, PROGRAM, StraightLine
from backends.inductor.straight_line.translation import UnknownCodeError, translated
from compiled_autograd.steps.memory import is_out_of_memory

_empty = torch._C._dynamo.guards._empty_strided_cpu
_view = torch._C._dynamo.guards._reinterpret_tensor


@pytest.fixture(scope="module")
def make_program() -> Any:
    """The function of ``straight_line.cpp``."""
    library = program_library.begin().result()
    assert library is not None
    return library.make_program


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """A program computes small products with one thread, and torch with all: the bits are those of one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _namespace(**more: Any) -> dict[str, Any]:
    extern = types.SimpleNamespace(mm=torch.mm, addmm=torch.addmm, bmm=torch.bmm)
    names = {"torch": torch, "empty_strided_cpu": _empty, "reinterpret_tensor": _view, "extern_kernels": extern}
    return {**names, **more}


def _code(*lines: str, takes: str = "a, b") -> str:
    return "\n    ".join(["def call(args):", f"{takes} = args", "args.clear()", *lines]) + "\n"


def _both(make_program: Any, code: str, inputs: list[Any], **names: Any) -> tuple[Any, Any, Any]:
    """What the code gives as Python and as a program, each from its own copy of the inputs; and the translation."""
    namespace = _namespace(**names)
    exec(compile(code, "<test>", "exec"), namespace)

    expected = namespace["call"]([_clone(each) for each in inputs])
    given = [_clone(each) for each in inputs]
    translation = translated(code, namespace, given)
    program = translation.made_by(make_program)
    result = program(given)
    assert given == []
    for one, other in zip(expected, result, strict=True):
        if isinstance(one, torch.Tensor):
            assert (one.shape, one.stride()) == (other.shape, other.stride())
            assert one.storage_offset() == other.storage_offset()
            torch.testing.assert_close(other, one, rtol=0, atol=0, equal_nan=True)
        else:
            assert one == other
    return expected, result, translation


def _clone(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    copy = torch.empty(value.untyped_storage().nbytes() // value.element_size(), dtype=value.dtype)
    copy.copy_(torch.empty(0, dtype=value.dtype).set_(value.untyped_storage()))
    return copy.as_strided(value.shape, value.stride(), value.storage_offset())


def _kinds(translation: Any) -> list[str]:
    return [each[0] for each in translation.instructions]


def _matrix(rows: int, columns: int, layout: str, dtype: torch.dtype) -> torch.Tensor:
    if layout == "rows":
        return torch.randn(rows, columns, dtype=dtype)
    if layout == "columns":
        return torch.randn(columns, rows, dtype=dtype).t()
    if layout == "padded":
        return torch.randn(rows, columns + 3, dtype=dtype)[:, 1 : columns + 1]
    if layout == "padded columns":
        return torch.randn(columns, rows + 2, dtype=dtype)[:, 2:].t()
    if layout == "expanded":
        return torch.randn(1, columns, dtype=dtype).expand(rows, columns)
    return torch.randn(rows, columns, 2, dtype=dtype)[..., 0]  # "apart"


LAYOUTS = ("rows", "columns", "padded", "padded columns", "expanded", "apart")


@pytest.mark.skipif(not products.products(), reason="products are torch's own here")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_products_are_those_of_torch_bit_for_bit(make_program: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    direct = 0
    sizes = [(1, 1, 1), (1, 5, 3), (5, 1, 3), (5, 3, 1), (1, 1, 7), (16, 64, 33), (40, 7, 128)]
    for (m, n, k), one, other, out in itertools.product(sizes, LAYOUTS, LAYOUTS, ((1, 0), (0, 1))):
        a, b = _matrix(m, k, one, dtype), _matrix(k, n, other, dtype)
        strides = (n, 1) if out == (1, 0) else (1, m)
        code = _code(
            f"c = empty_strided_cpu(({m}, {n}), {strides}, {dtype})",
            "extern_kernels.mm(a, b, out=c)",
            "del a",
            "return (c, )",
        )
        direct += "product" in _kinds(_both(make_program, code, [a, b])[2])
    assert direct > 0.5 * len(sizes) * len(LAYOUTS) ** 2 * 2


@pytest.mark.skipif(not products.products(), reason="products are torch's own here")
@pytest.mark.parametrize(("alpha", "beta"), [(1, 1), (2.5, 0.5), (1, 0), (0, 1), (-1, 2)])
def test_a_sum_with_a_product_leaves_its_first_term_alone(make_program: Any, alpha: float, beta: float) -> None:
    code = _code(
        "d = empty_strided_cpu((4, 5), (5, 1), torch.float32)",
        f"extern_kernels.addmm(c, a, reinterpret_tensor(b, (3, 5), (1, 3), 0), alpha={alpha}, beta={beta}, out=d)",
        "return (d, c)",
        takes="a, b, c",
    )
    inputs = [torch.randn(4, 3), torch.randn(15), torch.randn(4, 5)]
    *_, translation = _both(make_program, code, inputs)
    assert _kinds(translation) == ["call", *(["copy"] if beta else []), "product"]


def test_a_bias_is_added_as_torch_does(make_program: Any) -> None:
    code = _code(
        "d = empty_strided_cpu((4, 5), (5, 1), torch.float32)",
        "extern_kernels.addmm(c, a, b, alpha=1, beta=1, out=d)",
        "return (d, )",
        takes="a, b, c",
    )
    *_, translation = _both(make_program, code, [torch.randn(4, 3), torch.randn(3, 5), torch.randn(5)])
    assert _kinds(translation) == ["call", "call"]


def _sums(*between: str, returned: str = "e, ") -> str:
    """Two sums one after the other, in two pieces of memory that take turns."""
    return _code(
        "c = empty_strided_cpu((4, 5), (5, 1), torch.float32)",
        "extern_kernels.mm(a, b, out=c)",
        "d = empty_strided_cpu((4, 5), (5, 1), torch.float32)",
        "extern_kernels.addmm(c, a, b, alpha=1, beta=1, out=d)",
        *between,
        "e = c; del c  # reuse",
        "extern_kernels.addmm(d, a, b, alpha=1, beta=1, out=e)",
        "del d",
        f"return ({returned})",
    )


@pytest.mark.skipif(not products.products(), reason="products are torch's own here")
def test_sums_are_computed_in_one_piece_of_memory(make_program: Any) -> None:
    inputs = [torch.randn(4, 3), torch.randn(3, 5)]
    *_, translation = _both(make_program, _sums(), inputs)
    assert _kinds(translation).count("copy") == 0
    for between in (["x = c + 1", "del x"], ["x = reinterpret_tensor(c, (20, ), (1, ), 0)", "y = x + 1", "del x"]):
        *_, translation = _both(make_program, _sums(*between), inputs)
        assert _kinds(translation).count("copy") >= 1
    *_, translation = _both(make_program, _sums(returned="e, reinterpret_tensor(e, (20, ), (1, ), 0)"), inputs)
    assert _kinds(translation).count("copy") == 0


def test_outputs_are_views_inputs_and_none(make_program: Any) -> None:
    code = _code(
        "c = empty_strided_cpu((2, 2), (2, 1), torch.float32)",
        "extern_kernels.mm(a, a, out=c)",
        "d = reinterpret_tensor(c, (4, ), (1, ), 0); del c  # reuse",
        "return (reinterpret_tensor(d, (2, ), (2, ), 1), b, None, d, reinterpret_tensor(d, (4, ), (1, ), 0), a)",
    )
    _, result, _ = _both(make_program, code, [torch.randn(2, 2), 7])
    assert result[0].untyped_storage().data_ptr() == result[3].untyped_storage().data_ptr()


def test_what_is_let_go_is_gone(make_program: Any) -> None:
    alive: list[bool] = []
    gone: list[weakref.ref[Any]] = []
    code = _code(
        "look()",
        "del a",
        "c = b + 1",
        "look()",
        "del b",
        "look()",
        "return (c, )",
    )
    namespace = _namespace(look=lambda: alive.append(gone[len(alive) // 2]() is not None))
    inputs = [torch.randn(2), torch.randn(2)]
    program = translated(code, namespace, inputs).made_by(make_program)
    gone[:] = [weakref.ref(inputs[0]), weakref.ref(inputs[1])]
    program(inputs)
    assert alive == [True, False, False]


def _allocations(code: str, make_program: Any, inputs: list[Any], **names: Any) -> tuple[int, int, int]:
    """How many pieces of plain memory a program allocates, how many outputs, and how many tensors for Python."""
    made: list[Any] = []

    def making(*of: Any) -> Any:
        made.extend(of[2])
        return make_program(*of)

    namespace = _namespace(**names)
    translated(code, namespace, inputs).made_by(making)
    calls = [each for each in made if each[0] == "call" and each[1] is namespace["empty_strided_cpu"]]
    kinds = [each[0] for each in made]
    return kinds.count("memory"), kinds.count("output"), len(calls)


@pytest.mark.skipif(not products.products(), reason="products are torch's own here")
@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["return (d, )"], (1, 1, 0)),
        (["return (c, d)"], (0, 2, 0)),
        (["return (d, d)"], (1, 1, 0)),
        (["return (reinterpret_tensor(c, (16, ), (1, ), 0), d)"], (0, 2, 0)),
        (["return (c, reinterpret_tensor(c, (16, ), (1, ), 0))"], (1, 0, 1)),
        (["e = d + 1", "return (e, )"], (1, 0, 1)),
        (["e = reinterpret_tensor(c, (16, ), (1, ), 0)", "f = e + 1", "return (d, f)"], (0, 1, 1)),
        (["return (a, )"], (2, 0, 0)),
    ],
)
def test_memory_that_python_never_sees_is_no_tensor(
    make_program: Any, lines: list[str], expected: tuple[int, int, int]
) -> None:
    code = _code(
        "c = empty_strided_cpu((4, 4), (4, 1), torch.float32)",
        "extern_kernels.mm(a, b, out=c)",
        "d = empty_strided_cpu((4, 4), (4, 1), torch.float32)",
        "extern_kernels.mm(c, b, out=d)",
        *lines,
    )
    inputs = [torch.randn(4, 4), torch.randn(4, 4)]
    _both(make_program, code, inputs)
    assert _allocations(code, make_program, inputs) == expected
    names = poisoned(_namespace())  # these functions do more than to allocate
    assert _allocations(code, make_program, inputs, **names) == (0, 0, 2)


@pytest.mark.skipif(not products.products(), reason="products are torch's own here")
def test_memory_that_cannot_be_had_is_said_as_torch_says_it(make_program: Any) -> None:
    code = _code(
        f"c = empty_strided_cpu((4, 4), ({2**58}, 1), torch.float32)",
        "extern_kernels.mm(a, b, out=c)",
        "return (b, )",
    )
    inputs = [torch.randn(4, 4), torch.randn(4, 4)]
    program = translated(code, _namespace(), inputs).made_by(make_program)
    with pytest.raises(RuntimeError, match="can't allocate memory") as raised:
        program(inputs)
    assert is_out_of_memory(raised.value)


def test_an_error_is_told_and_everything_let_go(make_program: Any) -> None:
    code = _code("c = fail(a)", "return (c, )")

    def fail(_: Any) -> None:
        raise KeyError("here")

    inputs = [torch.randn(2), torch.randn(2)]
    seen = [weakref.ref(each) for each in inputs]
    program = translated(code, _namespace(fail=fail), inputs).made_by(make_program)
    with pytest.raises(KeyError, match="here"):
        program(inputs)
    assert inputs == []
    assert [each() for each in seen] == [None, None]
    with pytest.raises(TypeError, match="list"):
        program(3)


@pytest.mark.parametrize(
    "lines",
    [
        ["for x in a: pass", "return (a, )"],
        ["c, d = b", "return (a, )"],
        ["c = [x for x in b]", "return (a, )"],
        ["return a"],
        ["c = a + 1"],
        ["del c", "return (a, )"],
    ],
)
def test_what_is_not_known_runs_as_python(make_program: Any, lines: list[str]) -> None:
    code = _code(*lines)
    with pytest.raises(UnknownCodeError):
        translated(code, _namespace(), [torch.randn(2), torch.randn(2)]).made_by(make_program)
    ran = []
    line = StraightLine(lambda arguments: ran.append(arguments.clear()) or [1], code, _namespace(), make_program)
    for _ in range(4):
        assert line([torch.randn(2), torch.randn(2)]) == [1]
    assert line.program is None
    assert line.why_not
    assert len(ran) == 4


def _region(rows: int = 6) -> tuple[Any, list[torch.Tensor]]:
    def region(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        g = torch.tanh(x) * 2
        h = g @ w
        return [g.t() @ y, h.sum(0), torch.relu(h) * 3]

    inputs = [torch.randn(rows, 4), torch.randn(4, 5), torch.randn(rows, 5)]
    decompositions = dict(InductorBackend().decompositions())
    return make_fx(region, decompositions, tracing_mode="fake")(*inputs), inputs


def _compiled_and_loaded(graph_module: Any, inputs: list[torch.Tensor]) -> tuple[Any, Any]:
    backend = InductorBackend()
    compiled = backend.compile(graph_module, inputs)
    data = backend.save(compiled)
    assert data is not None
    return compiled, backend.load(data)


def test_what_inductor_makes_of_a_region_is_a_program_from_the_second_run_on() -> None:
    graph_module, inputs = _region()
    expected = graph_module(*inputs)
    compiled, loaded = _compiled_and_loaded(graph_module, inputs)
    for each in (compiled, loaded):
        assert isinstance(each, StraightLine)
        for run in range(4):
            given = list(inputs)
            results = each(given)
            assert given == []
            assert (each.program is not None) == (run > 0), each.why_not
            torch.testing.assert_close(list(results), list(expected))
    other = [torch.randn_like(value) for value in inputs]  # other memory, the same program
    torch.testing.assert_close(list(compiled(list(other))), list(graph_module(*other)))
    with torch.profiler.profile() as profile:
        compiled(list(inputs))
    assert sum(event.count for event in profile.key_averages() if event.key == "aten::mm") == 2


def test_where_products_are_rounded_torch_computes_them() -> None:
    graph_module, inputs = _region()
    compiled = InductorBackend().compile(graph_module, inputs)
    for _ in range(2):
        compiled(list(inputs))
    calls = []
    program, compiled.program = compiled.program, lambda arguments: calls.append(1) or program(arguments)
    compiled(list(inputs))
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    try:
        compiled(list(inputs))
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = "none"
    compiled(list(inputs))
    assert len(calls) == 2


def test_random_programs(make_program: Any) -> None:
    """Statements in random order: allocations, sums, aliases, views and Python calls."""
    for seed in range(150):
        choose = random.Random(seed)
        torch.manual_seed(seed)
        lines, names = [], ["c0"]
        lines += ["c0 = empty_strided_cpu((4, 4), (4, 1), torch.float32)", "extern_kernels.mm(a, b, out=c0)"]
        for number in range(1, 14):
            new, old = f"c{number}", choose.choice(names)
            kind = choose.choice(("sum", "sum", "reuse", "into", "python", "view", "delete"))
            if kind == "sum":
                lines.append(f"{new} = empty_strided_cpu((4, 4), (4, 1), torch.float32)")
                lines.append(f"extern_kernels.addmm({old}, a, b, alpha=1, beta=1, out={new})")
            elif kind == "into" and len(names) > 1:
                other = choose.choice([name for name in names if name != old])
                lines.append(f"extern_kernels.addmm({old}, a, b, alpha=1, beta=1, out={other})")
                continue
            elif kind == "reuse":
                lines.append(f"{new} = {old}; del {old}  # reuse")
                names.remove(old)
            elif kind == "python":
                lines.append(f"{new} = {old} * 0.5")
            elif kind == "view":
                lines.append(f"{new} = reinterpret_tensor({old}, (4, 4), (1, 4), 0).clone()")
            else:
                if len(names) > 1:
                    lines.append(f"del {old}")
                    names.remove(old)
                continue
            names.append(new)
        code = _code(*lines, f"return ({', '.join(names)}, )")
        _both(make_program, code, [torch.randn(4, 4), torch.randn(4, 4)])


def test_blas_is_found_where_torch_has_it() -> None:
    if torch.backends.mkl.is_available() and ctypes.sizeof(ctypes.c_void_p) == 8:
        assert products.products() or not products.platform.machine().startswith("x86")


def test_without_a_library_generated_code_stays_python(monkeypatch: pytest.MonkeyPatch) -> None:
    for flag in ("-std=no-such-standard", "-std=no-text-\udcff"):  # what the compiler says of it need not be UTF-8
        monkeypatch.setattr(program_library, "_FLAGS", (flag,))
        assert program_library._compiled() is None
    nothing: Future[None] = Future()
    nothing.set_result(None)
    monkeypatch.setattr(inductor, "begin", lambda: nothing)
    graph_module, inputs = _region()
    expected = graph_module(*inputs)
    compiled, loaded = _compiled_and_loaded(graph_module, inputs)
    for each in (compiled, loaded):
        assert not isinstance(each, StraightLine)
        torch.testing.assert_close(list(each(list(inputs))), list(expected))


def test_what_is_wrong_with_instructions_is_said(make_program: Any) -> None:
    for instructions, error in (([("leap",)], ValueError), ([()], TypeError), (["drop"], TypeError), (3, TypeError)):
        with pytest.raises(error):
            make_program(1, (), instructions, ())
    with pytest.raises(TypeError, match="2 arguments were given to a program with 1 slots"):
        make_program(1, (), [], ())([1, 2])


_FACTOR_LINES = {
    "the first term": ("extern_kernels.addmm(c, c, b, alpha=1, beta=1, out=d)", 1),
    "its transposed": ("extern_kernels.addmm(c, reinterpret_tensor(c, (8, 8), (1, 8), 0), b, out=d)", 1),
    "the second factor": ("extern_kernels.addmm(c, b, c, alpha=1, beta=1, out=d)", 1),
    "both factors": ("extern_kernels.addmm(c, c, c, alpha=0.5, beta=2, out=d)", 1),
    "none": ("extern_kernels.addmm(c, b, b, alpha=1, beta=1, out=d)", 0),
}


@pytest.mark.skipif(not products.products(), reason="products are torch's own here")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("factor", _FACTOR_LINES)
def test_a_sum_is_not_computed_into_its_own_factor(make_program: Any, factor: str, dtype: torch.dtype) -> None:
    line, copies = _FACTOR_LINES[factor]
    code = _code(
        f"c = empty_strided_cpu((8, 8), (8, 1), {dtype})",
        "extern_kernels.mm(a, b, out=c)",
        f"d = empty_strided_cpu((8, 8), (8, 1), {dtype})",
        line,
        "del c",
        "return (d, )",
    )
    *_, translation = _both(make_program, code, [torch.randn(8, 8, dtype=dtype), torch.randn(8, 8, dtype=dtype)])
    assert _kinds(translation).count("copy") == copies
    assert _kinds(translation).count("product") == 2


@pytest.mark.parametrize(
    "line",
    [
        "extern_kernels.mm(c, b, out=c)",
        "extern_kernels.addmm(b, c, b, out=c)",
        "extern_kernels.addmm(c, b, reinterpret_tensor(c, (8, 8), (1, 8), 0), out=c)",
        "extern_kernels.mm(b, b, out=a)",
        "extern_kernels.addmm(a, b, b, out=a)",
        "x = reinterpret_tensor(e, (8, 8), (8, 1), 4); extern_kernels.addmm(x, b, b, "
        "out=reinterpret_tensor(e, (8, 8), (8, 1), 0))",
    ],
)
def test_a_product_into_what_it_reads_or_what_was_given_is_left_to_torch(make_program: Any, line: str) -> None:
    code = _code(
        "c = empty_strided_cpu((8, 8), (8, 1), torch.float32)",
        "e = empty_strided_cpu((80, ), (1, ), torch.float32)",
        line,
        "return (c, a, e)",
    )
    inputs = [torch.randn(8, 8), torch.randn(8, 8)]
    translation = translated(code, _namespace(), inputs)
    assert "product" not in _kinds(translation)


@pytest.mark.skipif(not products.products(), reason="products are torch's own here")
def test_a_name_that_stands_for_something_else_later_keeps_its_term(make_program: Any) -> None:
    code = _code(
        "c = empty_strided_cpu((4, 4), (4, 1), torch.float32)",
        "extern_kernels.mm(a, b, out=c)",
        "e = empty_strided_cpu((4, 4), (4, 1), torch.float32)",
        "extern_kernels.mm(b, b, out=e)",
        "d = empty_strided_cpu((4, 4), (4, 1), torch.float32)",
        "x = c",
        "extern_kernels.addmm(c, a, b, out=d)",
        "x = e",
        "extern_kernels.mm(b, a, out=x)",
        "return (c, d, e)",
    )
    _both(make_program, code, [torch.randn(4, 4), torch.randn(4, 4)])


@pytest.mark.skipif(not products.products(), reason="products are torch's own here")
def test_memory_that_has_another_form_too_keeps_its_place(make_program: Any) -> None:
    code = _code(
        "c = empty_strided_cpu((4, 4), (4, 1), torch.float32)",
        "extern_kernels.mm(a, b, out=c)",
        "t = reinterpret_tensor(c, (4, 4), (1, 4), 0)",
        "d = empty_strided_cpu((4, 4), (4, 1), torch.float32)",
        "extern_kernels.addmm(c, a, b, out=d)",
        "extern_kernels.mm(b, b, out=t)",
        "return (c, d, t)",
    )
    _both(make_program, code, [torch.randn(4, 4), torch.randn(4, 4)])


def test_residual_layers_that_are_not_trained_have_eagers_gradients() -> None:
    """Of ``h + h @ w`` the backward adds a product to its own factor."""
    torch.manual_seed(0)
    weights = [torch.randn(24, 24) / 5 for _ in range(3)]

    def gradient(x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        h = torch.tanh(x)
        for weight in weights:
            h = h + h @ weight
        h.sin().sum().backward()
        assert x.grad is not None
        return x.grad

    inputs = [torch.randn(6, 24) for _ in range(4)]
    expected = [gradient(each) for each in inputs]
    with ca.enable(cache_dir=False, tune=False, backend="inductor") as session:
        for given, want in zip(inputs, expected, strict=True):
            torch.testing.assert_close(gradient(given), want)
        graph = session.last.graph
    assert graph is not None
    assert [each.call.why_not for step in graph.regions for each in step.compiled_regions()] == [""]
    stats = session.stats()
    assert (stats.hits, stats.compiles, stats.bypasses, stats.failures) == (3, 1, {}, 0)


def test_the_form_of_the_next_call_is_known_and_can_be_dropped() -> None:
    graph_module, inputs = _region()
    compiled = InductorBackend().compile(graph_module, inputs)
    assert isinstance(compiled, StraightLine)
    expected = graph_module(*inputs)
    for form in (GENERATED_CODE, PROGRAM, PROGRAM):
        assert compiled.form_for(inputs) == form
        torch.testing.assert_close(list(compiled(list(inputs))), list(expected))
    with torch.profiler.profile():
        assert compiled.form_for(inputs) == GENERATED_CODE
    alike, other = compiled.another(), compiled.another()
    for each in (alike, other):
        assert each.form_for(inputs) == GENERATED_CODE
        each(list(inputs))
        assert each.form_for(inputs) == PROGRAM
        assert each.program is compiled.program

    assert compiled.drop(PROGRAM)
    late = compiled.another()
    for each in (compiled, alike, other, late):
        each(list(inputs))
        assert each.form_for(inputs) == GENERATED_CODE
        assert (each.program, each.why_not) == (None, "it was dropped")
        torch.testing.assert_close(list(each(list(inputs))), list(expected))
    assert not compiled.drop(GENERATED_CODE)


def test_a_form_that_never_ran_can_be_dropped() -> None:
    graph_module, inputs = _region()
    compiled = InductorBackend().compile(graph_module, inputs)
    assert compiled.drop(PROGRAM)
    for _ in range(3):
        assert compiled.form_for(inputs) == GENERATED_CODE
        compiled(list(inputs))


def test_a_program_belongs_to_the_strides_that_it_was_made_for(make_program: Any) -> None:
    """Generated code without kernels does not say of which strides its inputs are."""
    code = _code(
        "c = empty_strided_cpu((4, 4), (4, 1), torch.float32)",
        "extern_kernels.mm(a, b, out=c)",
        "return (c, )",
    )
    namespace = _namespace()
    exec(code, namespace)
    one = StraightLine(namespace["call"], code, namespace, make_program)
    other = one.another()
    a, b = torch.randn(4, 4), torch.randn(4, 4)
    for _ in range(3):
        assert torch.equal(one([a, b])[0], a @ b)
        assert torch.equal(other([a.t(), b])[0], a.t() @ b)
    assert one.program is not None and other.program is not None
    assert one.program is not other.program
