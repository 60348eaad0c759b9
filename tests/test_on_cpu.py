"""What is computed another way on the CPU than Inductor would: sums over rows by ATen, and GELU's backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor.fx_passes import joint_graph  # noqa: F401  the trace below is as the backend gets it
from torch.fx.experimental.proxy_tensor import make_fx

import compiled_autograd as ca
from backends.inductor import on_cpu
from backends.inductor.backend import InductorBackend
from backends.inductor.on_cpu import LEAST_SUMMED, sum_rows_with_aten

from .helpers import assert_same
from .stored import restart

_aten = torch.ops.aten
ROWS, WIDTH = 1024, 256
ONE_EXPONENTIAL = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")


class Session:
    """A session whose backwards are counted by the calls of ATen that they make."""

    def __init__(self, **settings: Any) -> None:
        self.session = ca.enable(backend="inductor", tune=False, **{"cache_dir": False, **settings})

    def gradients(self, loss: Callable[[], Tensor], inputs: list[Tensor]) -> tuple[tuple[Tensor, ...], Counter[str]]:
        made = loss()
        with torch.profiler.profile() as profile, self.session:
            found = torch.autograd.grad(made, inputs)
        return found, Counter(event.name for event in profile.events())


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
    ca.reset()


def _linear(rows: int = ROWS, width: int = WIDTH, dtype: torch.dtype = torch.float32) -> tuple[Any, list[Tensor]]:
    model, x = nn.Linear(width, width, dtype=dtype), torch.randn(rows, width, dtype=dtype)
    return lambda: model(x).sin().sum(), [*model.parameters()]


# ---- sums over rows


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.slow)])
def test_the_gradient_of_a_bias(dtype: torch.dtype) -> None:
    """One call of ATen's: of what a product needs in memory too."""
    loss, inputs = _linear(dtype=dtype)
    session = Session(check=False)
    for _ in range(2):
        found, calls = session.gradients(loss, inputs)
        assert_same(found, torch.autograd.grad(loss(), inputs), bitwise=False)
    assert calls["aten::sum"] == 1 and session.session.stats().compiles == 1


def test_a_sum_is_eagers_bit_for_bit() -> None:
    """Of a gradient that fused code has not rounded its own way."""
    _, inputs = _linear()
    gradient = torch.randn(ROWS, WIDTH)
    session = Session(check=False).session
    with session:
        found = torch.autograd.grad(F.linear(torch.randn(ROWS, WIDTH), *inputs), inputs, gradient)
    assert_same([found[1]], [gradient.sum(0)])
    assert session.stats().compiles == 1


def test_a_sum_of_few_rows_is_fused() -> None:
    loss, inputs = _linear(rows=LEAST_SUMMED // WIDTH - 1)
    session = Session()
    for _ in range(2):
        found, calls = session.gradients(loss, inputs)
    assert calls["aten::sum"] == 0 and session.session.stats().compiles == 1
    assert_same(found, torch.autograd.grad(loss(), inputs), bitwise=False)


def _called(function: Callable[..., Any], *inputs: Tensor) -> list[str]:
    """Of a graph that computes this, what is called."""
    graph_module = make_fx(function, tracing_mode="fake")(*inputs)
    sum_rows_with_aten(graph_module)
    return [node.name for node in graph_module.graph.nodes if "should_fallback" in node.meta]


X = torch.empty(ROWS, WIDTH)
SQUARE = torch.empty(WIDTH, WIDTH)


@pytest.mark.parametrize(
    ("function", "inputs", "called"),
    [
        (lambda x: x.sum(0), [X], 1),
        (lambda x: x.view(4, -1, WIDTH).sum((0, 1)), [X], 1),
        (lambda x, y: (x.mm(y).sum(0), x), [X, SQUARE], 1),
        (lambda x, y: (x.cos().mm(y), x.cos().sum(0)), [X, SQUARE], 0),
        (lambda x, y: ((c := x.cos()).mm(y), c.view(4, -1, WIDTH).sum((0, 1), keepdim=True)), [X, SQUARE], 1),
        (lambda x: x.cos().sum(0), [X], 0),  # fused code has it in passing
        (lambda x: x.sum(1), [X], 0),
        (lambda x: x.sum((0, 1)), [X], 0),
        (lambda x: x.sum(), [X], 0),
        (lambda x: x.sum(dim=None), [X], 0),
        (lambda x: x.t().sum(0), [X], 0),  # rows of what lies the other way
        (lambda x: x[:, ::2].sum(0), [torch.empty(ROWS, 2 * WIDTH)], 0),
        (lambda x: x.sum(0, dtype=torch.float64), [X], 0),
        (lambda x: x.sum(0), [X.bfloat16()], 0),
        (lambda x: x.sum(0), [torch.empty(ROWS, WIDTH, dtype=torch.int64)], 0),
        (lambda x: x.sum(0), [X.to("meta")], 0),
        (lambda x: x.sum(-2), [X], 1),
        (lambda x, y: (x.sum(0), (x * y).sum(0)), [X, X], 0),  # one loop for both
        (lambda x, y: (x.sum(0), (x * y).sum(-2)), [X, X], 0),
        (lambda x, y: (x.sum(0), (x * y).view(ROWS, 1, WIDTH).squeeze(1).sum(0)), [X, X], 0),
        (lambda x, y: (x.sum(0), (x * y).sum(1)), [X, X], 1),
        (lambda x: x.sum(0), [torch.empty(0, WIDTH)], 0),
        (lambda x: x.sum(()), [torch.empty(())], 0),
    ],
)
def test_which_sums_are_called(function: Callable[..., Any], inputs: list[Tensor], called: int) -> None:
    assert len(_called(function, *inputs)) == called


def test_sums_whose_dimensions_a_pass_has_named_are_left_as_they_are() -> None:
    graph_module = make_fx(lambda x: x.sum(0), tracing_mode="fake")(X)
    (node,) = graph_module.graph.find_nodes(op="call_function", target=_aten.sum.dim_IntList)
    node.args, node.kwargs = node.args[:1], {"dim": node.args[1]}
    sum_rows_with_aten(graph_module)
    assert "should_fallback" not in node.meta


def test_a_normalizations_sums_stay_in_one_loop() -> None:
    norm, x = nn.LayerNorm(WIDTH), torch.randn(ROWS, WIDTH)
    session = Session()
    for _ in range(2):
        found, calls = session.gradients(lambda: norm(x).sin().sum(), [*norm.parameters()])
    assert calls["aten::sum"] == 0 and session.session.stats().compiles == 1
    assert_same(found, torch.autograd.grad(norm(x).sin().sum(), [*norm.parameters()]), bitwise=False)


# ---- GELU


def _gelu_backward(gradient: Tensor, x: Tensor, approximate: str = "none") -> Tensor:
    """As a graph has it."""
    return _aten.gelu_backward(gradient, x, approximate=approximate)


def test_gelu_is_nearly_as_exact_as_eagers() -> None:
    """By the largest error of both between -20 and 20; better where nearly nothing is left of one minus one."""
    x = torch.linspace(-20, 20, 1 << 20)
    exact = _gelu_backward(torch.ones_like(x).double(), x.double())
    errors = [(way(torch.ones_like(x), x) - exact).abs() for way in (on_cpu.gelu_backward, _gelu_backward)]
    assert errors[0].max() < 1.2 * errors[1].max() < 5e-7
    for end, largest in ((-3, 1.2e-7), (-5, 1e-9)):
        assert errors[0][x < end].max() < largest


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-40, -1e-40, 1e30, -1e30, float("inf"), -float("inf"), float("nan")])
def test_gelu_of_odd_values(value: float) -> None:
    x = torch.full((4,), value)
    for gradient in (torch.ones(4), torch.zeros(4), torch.full((4,), float("inf"))):
        found, wanted = on_cpu.gelu_backward(gradient, x), _gelu_backward(gradient.double(), x.double()).float()
        torch.testing.assert_close(found, wanted, equal_nan=True, rtol=1e-6, atol=1e-6)


def _gelu(rows: int = ROWS, dtype: torch.dtype = torch.float32, approximate: str = "none") -> tuple[Any, list[Tensor]]:
    x, y = (torch.randn(rows, WIDTH, dtype=dtype, requires_grad=True) for _ in range(2))
    return lambda: (F.gelu(x.sin(), approximate=approximate) * y.cos()).sum(), [x, y]


@pytest.mark.parametrize(
    ("make", "exponentials"),
    [
        (_gelu, 1),
        pytest.param(lambda: _gelu(dtype=torch.float64), 1, marks=pytest.mark.slow),  # and one `erf`, which has another
        pytest.param(lambda: _gelu(dtype=torch.bfloat16), 1, marks=pytest.mark.slow),
        (lambda: _gelu(approximate="tanh"), 0),
    ],
)
def test_gelu_is_fused(make: Callable[[], tuple[Any, list[Tensor]]], exponentials: int) -> None:
    loss, inputs = make()
    session = Session()
    for _ in range(2):
        found, calls = session.gradients(loss, inputs)
    assert calls["aten::gelu_backward"] == 0 and session.session.stats().compiles == 1
    assert_same(found, torch.autograd.grad(loss(), inputs), bitwise=False)
    x = torch.empty(4, dtype=inputs[0].dtype)
    table = InductorBackend().decompositions()
    graph = make_fx(_gelu_backward, dict(table), tracing_mode="fake")(x, x, "none" if exponentials else "tanh").graph
    names = Counter(node.target for node in graph.nodes)
    assert names[_aten.exp.default] == exponentials
    has_erf = exponentials and not (x.dtype == torch.float32 and ONE_EXPONENTIAL)
    assert names[_aten.erf.default] == has_erf


_OTHER_LAYOUTS = [pytest.param(each, marks=pytest.mark.slow) for each in ("apart", "expanded", "of another layout")]


@pytest.mark.parametrize("layout", ["transposed", *_OTHER_LAYOUTS])
def test_gelu_of_any_layout(layout: str) -> None:
    """What comes and what was saved lie in memory as eager has it, and so does the gradient."""
    base = torch.randn(2 * ROWS, WIDTH, requires_grad=True)
    make = {
        "transposed": lambda: base.t(),
        "expanded": lambda: base[:1].expand(ROWS, WIDTH),
        "apart": lambda: base[::2],
        "of another layout": lambda: base.view(8, 16, 16, WIDTH).permute(0, 3, 1, 2).contiguous(),
    }[layout]
    gradient = torch.randn_like(make()).contiguous()

    def gradients() -> tuple[Tensor, ...]:
        x = make()
        return torch.autograd.grad(F.gelu(x), [x, base], gradient)

    session = Session().session
    wanted = gradients()
    for _ in range(2):
        with session:
            found = gradients()
        assert_same(found, wanted, bitwise=False)
        assert [each.stride() for each in found] == [each.stride() for each in wanted]
    assert session.stats().compiles == 1


def test_sizes_that_change_and_a_second_process(tmp_path: Any) -> None:
    """Calls in code with symbols; what is stored of it runs where nothing is compiled."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
    inputs = [*model.parameters()]

    def run(rows: int, seed: int = 0) -> tuple[Session, Counter[str]]:
        torch.manual_seed(seed)
        x = torch.randn(rows, WIDTH)
        loss = lambda: model(x).sin().sum()  # noqa: E731
        found, calls = session.gradients(loss, inputs)
        assert_same(found, torch.autograd.grad(loss(), inputs), bitwise=False)
        return session, calls

    session = Session(cache_dir=str(tmp_path))
    for rows in (2 * ROWS, 2 * ROWS + 64, 2 * ROWS + 128, 2 * ROWS + 200):
        run(rows)
    assert session.session.stats().compiles == 2
    restart()
    session = Session(cache_dir=str(tmp_path))
    run(2 * ROWS + 64)
    _, calls = run(2 * ROWS + 328)
    assert calls["aten::sum"] == 2
    stats = session.session.stats()
    assert (stats.compiles, stats.loads) == (0, 1), stats
