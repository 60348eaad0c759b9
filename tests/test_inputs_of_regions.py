"""What compiled code is given: parts of larger tensors, and tensors with a conjugate or a negative bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import compiled_autograd as ca
from compiled_autograd import ir
from compiled_autograd.lowering.fake_tensors import fake_of
from compiled_autograd.steps.memory import extent, made_plain

from .helpers import assert_same, expect

BACKENDS = ["eager", "inductor"]
Run = Callable[[], Any]


# ---- parts of larger tensors -----------------------------------------------------------------------------------------

_LARGE = torch.arange(4 * 36, dtype=torch.float32)


def _written_into_a_view(which: int, size: int = 6, hand_on: bool = False) -> Any:
    """The backward of a write into a view looks at places in a copy of the gradient, which a backend may leave out."""
    torch.manual_seed(0)
    x, row = torch.randn(size, size, requires_grad=True), torch.randn(size, requires_grad=True)
    written = x.clone()
    written[0] = row
    part = _LARGE[which * size * size :][: size * size].view(size, size)
    if hand_on:
        return torch.autograd.grad(_Gives.apply(written, part).sum(), [x, row])
    return torch.autograd.grad(written, [x, row], part)


class _Gives(torch.autograd.Function):
    """Its gradient is a part of something that a user keeps."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        ctx.part = part
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return ctx.part, None


@pytest.mark.parametrize("hand_on", [False, True], ids=["given", "handed on"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_code_holds_for_any_part_of_a_larger_tensor(backend: str, hand_on: bool) -> None:
    session = ca.enable(backend=backend)
    for which in (2, 2, 1, 0, 3):
        wanted = _written_into_a_view(which, hand_on=hand_on)
        with session:
            found = _written_into_a_view(which, hand_on=hand_on)
        assert_same(found, wanted, bitwise=backend == "eager")
    expect(session.stats(), structure_misses=1, hits=4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_it_does_with_sizes_that_change(backend: str) -> None:
    session = ca.enable(backend=backend)
    for which, size in ((2, 6), (1, 5), (3, 4), (0, 3), (1, 6)):
        wanted = _written_into_a_view(which, size)
        with session:
            found = _written_into_a_view(which, size)
        assert_same(found, wanted, bitwise=backend == "eager")
    assert session.stats().hits >= 2 and not session.stats().failures and not session.stats().bypasses


@pytest.mark.parametrize("backend", BACKENDS)
def test_it_does_when_it_comes_from_the_store(backend: str, tmp_path: Path) -> None:
    with ca.enable(backend=backend, cache_dir=tmp_path):
        _written_into_a_view(2)
    ca.reset()
    with ca.enable(backend=backend, cache_dir=tmp_path) as session:
        for which in (1, 3):
            found = _written_into_a_view(which)
            with ca.disable():
                wanted = _written_into_a_view(which)
            assert_same(found, wanted, bitwise=backend == "eager")
    assert session.stats().compiles == 0 and session.stats().loads == 1
    assert session.stats().hits == 2


def test_a_write_into_a_view_of_which_the_gradient_lies_anywhere() -> None:
    """The second half of a write into a view, where another step has handed on what the first half made."""
    result = torch.arange(20.0)[6:12].view(2, 3)
    sizes = ([True], result, [torch.full((3,), -1.0)], [3], [1], 10, 7)
    (found,) = ir.copy_slices_epilogue(*sizes)
    assert found is not None and found.tolist() == [[6, 7, 8], [-1, -1, -1]]


def test_a_fake_tensor_has_memory_of_its_own() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode()
    for tensor in (torch.ones(5, 6)[2:, ::2], torch.ones(4).expand(3, 4), torch.ones(0, 3), torch.tensor(1.0)):
        fake = fake_of(mode, tensor)
        assert (fake.shape, fake.stride(), fake.storage_offset()) == (tensor.shape, tensor.stride(), 0)
        assert fake.untyped_storage().nbytes() == 4 * extent(tensor)


# ---- dimensions of one element ---------------------------------------------------------------------------------------


def _with_stride(shape: tuple[int, ...], dim: int, stride: int) -> torch.Tensor:
    value = torch.randn(shape)
    return value.as_strided(shape, [*value.stride()[:dim], stride, *value.stride()[dim + 1 :]])


def _conv1d(stride: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    x, weight = _with_stride((2, 4, 1), 2, stride), torch.randn(5, 4, 3, requires_grad=True)
    return [weight], (F.conv1d(x, weight.sin(), padding=1) * torch.randn(2, 5, 1)).sum()


def _conv1d_without_batch(stride: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    x, weight = _with_stride((4, 1), 1, stride), torch.randn(5, 4, 3, requires_grad=True)
    return [weight], (F.conv1d(x, weight.sin(), padding=1) * torch.randn(5, 1)).sum()


def _depthwise(stride: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    weight, x = _with_stride((4, 1, 3), 1, stride), torch.randn(2, 4, 6, requires_grad=True)
    return [x], (F.conv1d(x.sin(), weight, groups=4) * torch.randn(2, 4, 4)).sum()


def _unpacked(stride: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    x, weight = torch.randn(2, 4, 1), torch.randn(5, 4, 3, requires_grad=True)

    def unpack(packed: torch.Tensor) -> torch.Tensor:
        return packed.as_strided(packed.shape, (4, 1, stride)) if packed.shape == x.shape else packed

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
        y = F.conv1d(x, weight.sin(), padding=1)
    return [weight], (y * torch.randn(2, 5, 1)).sum()


def _handed_on(stride: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Pointwise operators lay their results out in another order."""
    r, value = torch.randn(1, 3, 4, 2, requires_grad=True), torch.randn(4, dtype=torch.complex64)
    z = torch.view_as_complex(r.sin()) * (2 + 1j)
    z.register_hook(lambda grad: value.as_strided((1, 3, 4), (stride, 0, 1)))
    return [r], z.real.sum()


def _grouped(stride: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Each group of a convolution is looked at by itself."""
    value = torch.randn(300, dtype=torch.float64).as_strided((1, 4, 1), (12, 1, 3) if stride == 1 else (4, 1, 48))
    p = torch.randn(1, 4, 3, dtype=torch.float64, requires_grad=True)
    w = torch.randn(4, 1, 1, dtype=torch.float64)
    x = torch.randn(1, 4, 1, dtype=torch.float64, requires_grad=True)
    (grad,) = torch.autograd.grad(F.conv1d(x, w, padding=1, groups=4), x, p.sin(), create_graph=True)
    return [p], _Gives.apply(grad, value).sum()


@pytest.mark.parametrize(
    ("program", "backend"),
    [
        *(pytest.param(each, "inductor", marks=pytest.mark.slow) for each in (_depthwise, _unpacked)),
        *((each, "inductor") for each in (_conv1d, _conv1d_without_batch, _handed_on, _grouped)),
        *((each, "eager") for each in (_conv1d, _conv1d_without_batch, _depthwise, _unpacked, _handed_on, _grouped)),
    ],
)
def test_the_stride_of_one_element_decides_how_results_lie(program: Any, backend: str) -> None:
    """Convolutions in one dimension add one, and then their channels come last, or not."""
    session = ca.enable(backend=backend, cache_dir=False, dynamic=False)
    for step, stride in enumerate((4, 4, 4, 4, 1, 1, 1, 4, 1, 3, 3)):
        torch.manual_seed(step)
        inputs, loss = program(stride)
        wanted = torch.autograd.grad(loss, inputs, retain_graph=True)
        with session:
            found = torch.autograd.grad(loss, inputs)
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    # Of a grouped convolution the fake kernel knows nothing of that: the proof finds it.
    assert session.stats().failures == (program is _grouped and backend == "inductor")


@pytest.mark.slow
def test_so_it_does_where_each_set_of_shapes_is_compiled_by_itself() -> None:
    """There are more calls that cannot be traced with symbols than are left opaque."""
    session = ca.enable(backend="inductor", cache_dir=False)
    for step, (size, stride) in enumerate([(4, 9), (5, 9), (5, 9), (5, 9), (5, 9), (5, 1), (5, 1), (5, 9)]):
        torch.manual_seed(step)
        z = torch.randn(40, dtype=torch.complex64).as_strided((1, 3, size), (stride, 0, 1))
        r = torch.randn(1, 3, size, 2, requires_grad=True)
        x = torch.randn(1, 2, size, size, requires_grad=True)
        loss = (torch.view_as_complex(r.sin()) * z).sum().real
        for _ in range(6):
            loss = loss + F.interpolate(x * 2, scale_factor=2.0, mode="bilinear").exp().sum()
        wanted = torch.autograd.grad(loss, [r, x], retain_graph=True)
        with session:
            found = torch.autograd.grad(loss, [r, x])
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert session.stats().hits >= 4


def test_strides_of_a_gradient_that_is_added_to_make_no_variant(tmp_path: Path) -> None:
    """A seed of the random tapes was compiled twice for them."""
    for process, strides in enumerate([((3, 1, 1), (3, 1, 3), (1, 4, 1)), ((1, 4, 1), (3, 1, 3), (3, 1, 1))]):
        session = ca.enable(backend="eager", cache_dir=tmp_path, tune=False)
        for each in strides:
            x, other = torch.randn(4, 3, 1, requires_grad=True), torch.randn(4, 3, 1)
            x.grad = torch.empty_strided((4, 3, 1), each).copy_(other)
            with session:
                (x * other).sum().backward()
            assert x.grad.stride() == each and torch.equal(x.grad, 2 * other)
        expect(session.stats(), structure_misses=1 - process, hits=2 + process, captures=1, compiles=1 - process)
        ca.reset()


# ---- conjugate and negative bits -------------------------------------------------------------------------------------


def _complex(size: int, *more: int) -> torch.Tensor:
    torch.manual_seed(size)
    return torch.randn(size, *more, dtype=torch.complex64)


def _negative_saved(size: int) -> Any:
    x = torch.randn(size, requires_grad=True)
    factor = _complex(size).conj().imag
    assert factor.is_neg()
    return torch.autograd.grad((factor * x).sin().sum(), x)


def _negative_factor(size: int) -> Any:
    x = torch.randn(size, size, requires_grad=True)
    return torch.autograd.grad((_complex(size, size).conj().imag @ x).sin().sum(), x)


def _conjugate_factor(size: int) -> Any:
    x = torch.randn(size, size, dtype=torch.complex64, requires_grad=True)
    return torch.autograd.grad((_complex(size, size).conj() @ x).abs().sum(), x)


def _negative_gradient(size: int) -> Any:
    x = torch.randn(size, requires_grad=True)
    return torch.autograd.grad(x.sin(), x, _complex(size).conj().imag)


class _Conjugate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return grad.conj()


class _Negative(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return torch.complex(torch.zeros_like(grad), -grad).conj().imag


def _negative_handed_on(size: int) -> Any:
    x = torch.randn(size, requires_grad=True)
    y = x * 1.5
    return torch.autograd.grad((_Negative.apply(y * 2) + y * 3).sin().sum(), x)


def _conjugate_handed_on(size: int) -> Any:
    x = torch.randn(size, dtype=torch.complex64, requires_grad=True)
    y = x * 1
    return torch.autograd.grad(((_Conjugate.apply(y) * (1 + 2j)) + y * 3j).abs().sum(), x)


_WITH_BITS = [
    _negative_saved,
    _negative_factor,
    _conjugate_factor,
    _negative_gradient,
    _negative_handed_on,
    _conjugate_handed_on,
]


@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex")
@pytest.mark.parametrize(
    ("backend", "dynamic"),
    [("eager", False), ("eager", None), ("inductor", None), pytest.param("inductor", False, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("run", _WITH_BITS)
def test_bits_are_heeded(run: Callable[[int], Any], backend: str, dynamic: bool | None) -> None:
    session = ca.enable(backend=backend, dynamic=dynamic)
    for size in (5, 6, 6, 7, 7):
        torch.manual_seed(size)
        wanted = run(size)
        torch.manual_seed(size)
        with session:
            found = run(size)
        assert_same(map(_plain, found), map(_plain, wanted), bitwise=backend == "eager")
    assert session.stats().hits >= 2 and not session.stats().failures and not session.stats().bypasses


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().resolve_neg()


@pytest.mark.parametrize("dynamic", [False, True])
def test_the_eager_backend_keeps_the_bits(dynamic: bool) -> None:
    def run() -> tuple[bool, bool]:
        seen = []
        x = torch.randn(5, dtype=torch.complex64, requires_grad=True)
        y = x * 1
        y.register_hook(lambda grad: seen.append((grad.is_conj(), grad.is_neg())))
        z = y.conj()
        torch.autograd.grad((z * torch.tensor(2j).conj()).abs().sum(), x)
        return seen[0]

    wanted = run()
    with ca.enable(backend="eager", dynamic=dynamic) as session:
        assert run() == wanted and run() == wanted
    expect(session.stats(), structure_misses=1, hits=1)


def test_a_copy_without_bits_has_the_same_strides() -> None:
    values = _complex(4, 6)
    tensors = [
        *(values.conj(), values.conj().imag, values.conj()[1:, ::2].t(), values.conj().imag[2]),
        *(
            values.conj()[:, :1].expand(4, 6),
            values.conj().imag[1].expand(3, 6),
            values.conj()[:0],
            values[0, 0].conj(),
        ),
    ]
    for tensor in tensors:
        assert tensor.is_conj() or tensor.is_neg()
        copy = made_plain(tensor)
        assert not copy.is_conj() and not copy.is_neg() and copy.storage_offset() == 0
        assert copy.stride() == tensor.stride() and torch.equal(copy, tensor)


def test_a_copy_is_made_only_where_the_backend_ignores_bits() -> None:
    for backend in ("eager", lambda graph_module, examples: graph_module.forward):
        with ca.enable(backend=backend) as session:
            _negative_saved(5)
        assert session.last is not None and session.last.graph is not None
        (region,) = session.last.graph.regions
        (compiled,) = region.compiled_regions()
        assert len(compiled.plain) == (backend != "eager")


# ---- zeros without memory --------------------------------------------------------------------------------------------


class _SometimesZeros(torch.autograd.Function):
    zeros = False

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return torch._efficientzerotensor(grad.shape) if _SometimesZeros.zeros else grad.clone()


def _handed_on_zeros(zeros: bool, size: int = 6) -> Any:
    torch.manual_seed(0)
    x, weight = torch.randn(size, 5, requires_grad=True), torch.randn(5, 7)
    _SometimesZeros.zeros = zeros
    return torch.autograd.grad(_SometimesZeros.apply((x @ weight).sin()).square().sum(), x)


@pytest.mark.parametrize("check", [False, "new"])
@pytest.mark.parametrize("stored", [False, True], ids=["compiled", "loaded"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_zeros_without_memory_are_of_another_kind(backend: str, stored: bool, check: Any, tmp_path: Path) -> None:
    """Code that was compiled for a plain tensor would read what is not there."""
    kinds = (False, False, False, True, True, True, False)
    for _ in range(1 + stored):
        ca.reset()
        session = ca.enable(backend=backend, cache_dir=tmp_path if stored else False, tune=False, check=check)
        for zeros in kinds:
            wanted = _handed_on_zeros(zeros)
            with session:
                found = _handed_on_zeros(zeros)
            assert_same(found, wanted, bitwise=backend == "eager")
        assert not session.stats().failures and not session.stats().bypasses
        assert session.stats().hits >= 5
    assert (session.stats().loads >= 2) == stored


@pytest.mark.parametrize("backend", BACKENDS)
def test_they_are_made_by_real_calls_alone(backend: str) -> None:
    """As ``sgn`` gives them: Inductor's code for a product with them would read at address 0, and end the process."""

    def penalty() -> Any:
        torch.manual_seed(0)
        x, weight = torch.randn(1, 1, requires_grad=True), torch.randn(1, 1, requires_grad=True)
        loss = torch.nn.functional.linear(x.sin(), weight).abs().sum()
        return sum(each.square().sum() for each in torch.autograd.grad(loss, [x, weight], create_graph=True)), x, weight

    def gradients() -> Any:
        loss, *leaves = penalty()
        loss.backward()
        return [leaf.grad for leaf in leaves]

    wanted = gradients()
    session = ca.enable(backend=backend, cache_dir=False)
    for _ in range(3):
        loss, *leaves = penalty()
        with session:
            loss.backward()
        assert_same([leaf.grad for leaf in leaves], wanted, bitwise=backend == "eager")
    assert session.stats().hits == 2 and not session.stats().failures
    assert not any("_efficientzerotensor" in each.code for each in session.last.graph.aten)  # type: ignore[union-attr]


@pytest.mark.parametrize("backend", BACKENDS)
def test_they_have_sizes_that_change(backend: str) -> None:
    session = ca.enable(backend=backend, cache_dir=False, tune=False, dynamic=True)
    for zeros, size in ((False, 6), (True, 6), (True, 7), (True, 8), (False, 9), (True, 9)):
        wanted = _handed_on_zeros(zeros, size)
        with session:
            found = _handed_on_zeros(zeros, size)
        assert_same(found, wanted, bitwise=backend == "eager")
    assert not session.stats().failures and not session.stats().bypasses
