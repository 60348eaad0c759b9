"""When memory is freed, what a cached graph holds, and what makes a new variant."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import compiled_autograd as ca
from compiled_autograd.cache.graphs import GRAPHS

from .helpers import assert_same, compare, expect, mlp


def _grads(make_loss: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, session: ca.Session | None) -> Any:
    with session or ca.disable():
        return torch.autograd.grad(make_loss(x), x)


# ---- memory --------------------------------------------------------------------------------------------------------


class _Saves(torch.autograd.Function):
    """Saves a tensor of its own that nobody else holds, and notes which earlier ones are gone."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, number: int) -> torch.Tensor:
        own = torch.full((1000,), float(number))
        ctx.number = number
        ctx.save_for_backward(own)
        _Saves.references[number] = weakref.ref(own)
        return x * 2

    references: dict[int, weakref.ref[torch.Tensor]] = {}  # noqa: RUF012
    alive: dict[int, list[int]] = {}  # noqa: RUF012

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        _Saves.alive[ctx.number] = sorted(n for n, each in _Saves.references.items() if each() is not None)
        (own,) = ctx.saved_tensors
        return grad * own[0], None


def _chain(x: torch.Tensor) -> torch.Tensor:
    _Saves.references.clear()
    _Saves.alive.clear()
    for number in range(1, 5):
        x = _Saves.apply(x.sin(), number)
    return x.sum()


def test_what_a_python_function_saved_is_freed_after_it_ran() -> None:
    alive = []
    sessions = [None, *[ca.enable(backend="eager")] * 3]
    for session in sessions:
        x = torch.randn(3, requires_grad=True)
        loss = _chain(x)
        gc.disable()
        with session or ca.disable():
            loss.backward()
        gc.enable()
        alive.append(dict(_Saves.alive))
        assert x.grad is not None
    eager, _, *hits = alive
    assert eager == {4: [1, 2, 3, 4], 3: [1, 2, 3], 2: [1, 2], 1: [1]}
    assert hits == [eager, eager]


def test_what_a_region_takes_is_freed_as_it_goes() -> None:
    """The argument list that a backend gets is the only holder of what has no later use."""
    seen: list[tuple[int, int]] = []

    def backend(graph_module: Any, example_inputs: Any) -> Any:
        def run(arguments: list[Any]) -> Any:
            own = [weakref.ref(each) for each in arguments if each.shape == (321,)]
            before = sum(each() is not None for each in own)
            taken = list(arguments)
            arguments.clear()
            results = graph_module.forward(*taken)
            del taken
            seen.append((before, sum(each() is not None for each in own)))
            return results

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    session = ca.enable(backend=backend, check=False)
    for _ in range(3):
        x = torch.randn(321, requires_grad=True)
        loss = (x * 2).exp().sin().sum()
        with session:
            loss.backward()
    assert [before for before, _ in seen] == [2, 2, 2]  # what exp and sin saved
    assert [after for _, after in seen[1:]] == [0, 0]


def _tensors() -> set[int]:
    gc.collect()
    return {id(each) for each in gc.get_objects() if type(each) is torch.Tensor and each.numel() == 4321}


@pytest.mark.parametrize("function", [False, True])
@pytest.mark.parametrize("accumulates", [False, True])
def test_cached_graphs_hold_no_tensor_of_the_step(function: bool, accumulates: bool) -> None:
    before = _tensors()
    session = ca.enable(backend="eager")

    def step() -> None:
        x = torch.randn(4321, requires_grad=True)
        y = _Saves.apply(x.exp(), 1) if function else x.exp()
        loss = (y * torch.randn(4321)).sin().sum()
        with session:
            if accumulates:
                loss.backward()
            else:
                torch.autograd.grad(loss, x)

    for _ in range(2):
        step()
        assert _tensors() == before
    expect(session.stats(), structure_misses=1, hits=1)
    assert len(GRAPHS) == 1


def test_cached_graphs_hold_no_ctx_and_no_model() -> None:
    session = ca.enable(backend="eager")
    model = mlp()
    loss = _Saves.apply(model(torch.ones(2, 8)), 1).sum()
    held = [weakref.ref(model), weakref.ref(model[0].weight), weakref.ref(loss), weakref.ref(model[2])]
    with session:
        loss.backward()
    del model, loss
    gc.collect()
    assert [reference() is None for reference in held] == [True] * 4


def test_a_failed_region_holds_no_tensor_either() -> None:
    def fails(graph_module: Any, example_inputs: Any) -> Any:
        raise RuntimeError("never")

    before = _tensors()
    with pytest.warns(UserWarning, match="never"), ca.enable(backend=fails):
        for _ in range(2):
            x = torch.randn(4321, requires_grad=True)
            x.exp().sum().backward()
            del x
    assert _tensors() == before


def test_the_tape_is_released_as_under_eager() -> None:
    for context in (ca.disable(), ca.enable(backend="eager")):
        x = torch.randn(4321, requires_grad=True)
        y = x.exp()
        loss = y.sin().sum()
        with context:
            loss.backward()
        with pytest.raises(RuntimeError, match="after they have already been freed"):
            _ = y.grad_fn._saved_result  # type: ignore[union-attr]


# ---- variants --------------------------------------------------------------------------------------------------------


def test_other_shapes_miss_once_and_hit_on_return() -> None:
    session = ca.enable(backend="eager")
    for size in (3, 5, 3, 5, 7, 3):
        x = torch.randn(size, 2, requires_grad=True)
        wanted = _grads(lambda x: (x.exp() @ x.t()).sum(), x, None)
        assert_same(_grads(lambda x: (x.exp() @ x.t()).sum(), x, session), wanted)
    expect(session.stats(), structure_misses=1, shape_misses=1, hits=4, captures=1, compiles=2)
    (graph,) = session.graphs()
    assert [variant.shapes.dynamic for variant in graph.variants] == [False, True]


def test_a_shape_miss_says_what_changed() -> None:
    session = ca.enable(backend="eager")
    for size in (3, 5):
        _grads(lambda x: x.exp().sum(), torch.randn(size, requires_grad=True), session)
    assert session.last is not None and session.last.outcome == "shape_miss"
    (miss,) = session.last.reasons
    assert (miss.kind, miss.old, miss.new) == ("shape", "3", "5")


def test_other_strides_are_another_variant() -> None:
    session = ca.enable(backend="eager")
    for transposed in (False, True, False, True):
        x = torch.randn(4, 4)
        x = (x.t() if transposed else x).requires_grad_()
        wanted = _grads(lambda x: x.exp().sin().sum(), x, None)
        assert_same(_grads(lambda x: x.exp().sin().sum(), x, session), wanted)
    expect(session.stats(), structure_misses=1, shape_misses=1, hits=2)


def test_other_strides_of_a_dimension_of_one_element_are_one_other_variant() -> None:
    """What the real calls hand on at the first runs, and what compiled code hands on later, may differ in them."""

    class Passes(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad

    def backend(module: torch.fx.GraphModule, examples: list[Any]) -> Callable[..., list[torch.Tensor]]:
        return lambda *inputs: [grad.as_strided(grad.shape, (77, 1)) for grad in module(*inputs)]

    session = ca.enable(backend=backend)
    for _ in range(4):
        x = torch.randn(1, 4, requires_grad=True)
        (wanted,) = torch.autograd.grad(Passes.apply(x.sin()).cos().sum(), x)
        with session:
            Passes.apply(x.sin()).cos().sum().backward()
        assert x.grad is not None and torch.equal(x.grad, wanted)
    expect(session.stats(), structure_misses=1, shape_misses=1, hits=2, compiles=3)


def test_strides_of_dimensions_of_one_element_say_whether_channels_come_last() -> None:
    """Operators that keep a memory format give another layout then, and so does what they compute for a leaf."""
    strides = [8, 1, 1, 1]

    class Gives(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad.contiguous().as_strided((2, 8, 1, 1), strides)

    def run() -> list[Any]:
        x = torch.linspace(-1, 1, 256).reshape(2, 8, 4, 4).requires_grad_()
        Gives.apply(nn.functional.interpolate(x.sin(), size=(1, 1))).sum().backward()
        y = torch.linspace(-1, 1, 256).reshape(2, 8, 4, 4).requires_grad_()
        Gives.apply(nn.functional.interpolate(y, size=(1, 1), mode="bilinear")).sum().backward()
        return [x.grad, y.grad]

    session = ca.enable(backend="eager", tune=False)
    for last in (1, 8, 1, 8):  # of these the channels come last in [8, 1, 8, 8]
        strides[2:] = [last, last]
        wanted = run()
        with session:
            found = run()
        assert_same(found, wanted)
    expect(session.stats(), structure_misses=2, shape_misses=2, hits=4, compiles=6)


def test_broadcasting_that_depends_on_a_size_of_one() -> None:
    session = ca.enable(backend="eager")
    for rows in (1, 4, 1, 4):
        x, y = torch.randn(rows, 3, requires_grad=True), torch.randn(4, 3, requires_grad=True)
        wanted = torch.autograd.grad((x * y).sum(), [x, y])
        with session:
            assert_same(torch.autograd.grad((x * y).sum(), [x, y]), wanted)
    assert session.stats().hits == 2 and session.stats().backwards == 4


def test_conjugate_views_are_another_variant() -> None:
    session = ca.enable(backend="eager")
    for conjugated in (False, True, False, True):
        x = torch.randn(4, dtype=torch.complex64, requires_grad=True)
        other = torch.randn(4, dtype=torch.complex64)
        other = other.conj() if conjugated else other
        wanted = torch.autograd.grad((x * other).abs().sum(), x)
        with session:
            assert_same(torch.autograd.grad((x * other).abs().sum(), x), wanted)
    assert session.stats().backwards == 4 and not session.stats().failures


def test_scalars_are_part_of_the_variant() -> None:
    session = ca.enable(backend="eager")
    for power in (2.0, 3.0, 2.0):
        x = torch.rand(4, requires_grad=True)
        wanted = _grads(lambda x, power=power: x.pow(power).sum(), x, None)
        assert_same(_grads(lambda x, power=power: x.pow(power).sum(), x, session), wanted)
    assert session.stats().hits == 1 and session.stats().backwards == 3


@contextmanager
def _default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _precision() -> Iterator[None]:
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")
        for backend in ("mkldnn", "cuda"):  # set for products, "highest" would hide what is set for all operators
            torch._C._set_fp32_precision_setter(backend, "matmul", "none")


def _backends(backend: str, operators: str) -> Any:
    """As ``torch.backends.mkldnn.conv.fp32_precision = ...`` sets it, which PyTorch's own tests forbid for good."""

    @contextmanager
    def set_for() -> Iterator[None]:
        torch._C._set_fp32_precision_setter(backend, operators, "bf16")
        try:
            yield
        finally:
            torch._C._set_fp32_precision_setter(backend, operators, "none")

    return set_for


@contextmanager
def _no_nnpack() -> Iterator[None]:
    torch.backends.nnpack.set_flags(False)
    try:
        yield
    finally:
        torch.backends.nnpack.set_flags(True)


@contextmanager
def _mkldnn_deterministic() -> Iterator[None]:
    torch._C._set_mkldnn_deterministic(True)
    try:
        yield
    finally:
        torch._C._set_mkldnn_deterministic(False)


_AMBIENT = {
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "default_dtype": _default_dtype,
    "deterministic": _deterministic,
    "threads": _threads,
    "matmul_precision": _precision,
    "mkldnn_precision": _backends("mkldnn", "conv"),
    "mkldnn_precision rnn": _backends("mkldnn", "rnn"),
    "matmul_precision matmul": _backends("mkldnn", "matmul"),
    "matmul_precision all": _backends("mkldnn", "all"),
    "matmul_precision of all backends": _backends("generic", "all"),
    "nnpack": _no_nnpack,
    "mkldnn_deterministic": _mkldnn_deterministic,
}


@pytest.mark.parametrize("name", _AMBIENT)
def test_ambient_state_makes_a_variant_of_its_own(name: str) -> None:
    def loss(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return (x @ x.exp()).sum()

    x = torch.randn(3, 3, requires_grad=True)
    wanted = _grads(loss, x, None)
    session = ca.enable(backend="eager")
    assert_same(_grads(loss, x, session), wanted)
    with _AMBIENT[name]():
        assert_same(_grads(loss, x, session), _grads(loss, x, None))
        assert session.last is not None and session.last.outcome == "shape_miss"
        assert (
            session.last.reasons[0].kind == "ambient_state" and session.last.reasons[0].where == name.partition(" ")[0]
        )
        assert_same(_grads(loss, x, session), _grads(loss, x, None))
        assert session.last.outcome == "hit"
    assert_same(_grads(loss, x, session), wanted)
    expect(session.stats(), structure_misses=1, shape_misses=1, hits=2)


def test_autocast_to_another_dtype_is_another_variant() -> None:
    session = ca.enable(backend="eager")
    x = torch.randn(3, requires_grad=True)
    for dtype in (torch.bfloat16, torch.float16, torch.bfloat16):
        with torch.autocast("cpu", dtype=dtype):
            _grads(lambda x: x.exp().sum(), x, session)
    expect(session.stats(), structure_misses=1, shape_misses=1, hits=1)


def test_backward_inside_autocast_is_eagers() -> None:
    """A Python function's backward sees the autocast that is on; a built-in node's does not change."""
    batch = torch.randn(2, 8)

    class Multiplies(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, w)
            return x @ w

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            x, w = ctx.saved_tensors
            return grad @ w.t().to(grad.dtype), x.t().to(grad.dtype) @ grad

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()
            self.last = nn.Parameter(torch.randn(3, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Multiplies.apply(self.inner(x), self.last)

    compare(Model, lambda m: m(batch).float().sum(), around=lambda: torch.autocast("cpu", dtype=torch.bfloat16))


def test_backward_under_no_grad_and_inference_of_grad_mode() -> None:
    session = ca.enable(backend="eager")
    x = torch.randn(3, requires_grad=True)
    for mode in (torch.no_grad(), torch.enable_grad()):
        loss = x.exp().sum()
        with mode, session:
            loss.backward()
        assert torch.is_grad_enabled()
    assert x.grad is not None and not x.grad.requires_grad
    assert session.stats().backwards == 2 and not session.stats().failures


@pytest.mark.parametrize("met_before", [False, True])
def test_backward_under_inference_mode(met_before: bool) -> None:
    """What a capture computes with would be inference tensors, which nothing may save."""
    session = ca.enable(backend="eager")
    x = torch.randn(3, requires_grad=True)
    if met_before:
        with session:
            (x * x.exp()).sum().backward()
        x.grad = None
    loss = (x * x.exp()).sum()
    with torch.inference_mode(), session:
        loss.backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad.clone(), ((1 + x) * x.exp()).detach())
    assert session.stats().bypasses == {"inference_mode": 1}


def test_what_a_function_gives_another_way_is_a_miss_that_says_so() -> None:
    """The tape is the same, but a function's gradient has other strides: the region behind it is compiled again."""

    class Gives(torch.autograd.Function):
        turned = False

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad.t().contiguous().t() if Gives.turned else grad.contiguous()

    session = ca.enable(backend="eager")
    for turned, outcome in (
        (False, "structure_miss"),
        (False, "hit"),
        (True, "shape_miss"),
        (True, "hit"),
        (False, "hit"),
    ):
        Gives.turned = turned
        x = torch.randn(3, 4, requires_grad=True)
        loss = (Gives.apply(x.exp()) * torch.randn(3, 4)).sum()
        (wanted,) = torch.autograd.grad(loss, x, retain_graph=True)
        with session:
            (found,) = torch.autograd.grad(loss, x)
        assert torch.equal(found, wanted)
        assert session.last is not None and session.last.outcome == outcome
        if outcome == "shape_miss":
            (reason,) = session.last.reasons
            assert "(4, 1)" in str(reason) and "(1, 3)" in str(reason) and "GivesBackward" in str(reason)
