"""Float32 on CUDA whose operands may be rounded to ten bits (TF32): what is taken for rounding then."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import compiled_autograd as ca
from benchmarks.models import ResNet
from compiled_autograd.guards.ambient import ambient
from compiled_autograd.proving import judging, tf32
from compiled_autograd.proving.wide_kernels import WideKernels
from shadow_cache import Mismatch

from .helpers import close, expect

pytestmark = pytest.mark.filterwarnings("ignore")
aten = torch.ops.aten
_ROUNDED = {
    "matmul": {aten.mm.default: (0, 1), aten.addmm.default: (1, 2), aten.bmm.default: (0, 1)},
    "conv": {aten.convolution_backward.default: (0, 1, 2)},
}


@pytest.fixture(autouse=True)
def may_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's own tests, whose samples others use, forbid to set such flags for the rest of the process."""
    monkeypatch.setitem(torch.backends.flags_frozen.__globals__, "__allow_nonbracketed_mutation_flag", True)


class _CutOff(TorchDispatchMode):
    """A GPU that takes the upper bits of what it multiplies, as some algorithms do: all errors go the same way."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.rounded = _ROUNDED[kind]

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        positions = self.rounded.get(function, ())
        args = [self._short(each) if index in positions else each for index, each in enumerate(args)]
        return function(*args, **(kwargs or {}))

    @staticmethod
    def _short(value: torch.Tensor) -> torch.Tensor:
        return (value.view(torch.int32) & -(1 << 13)).view(torch.float32)


def _compiled(kind: str, planted: float, exact: bool = False) -> Callable[..., Any]:
    """A backend whose code runs so.

    Args:
        planted: by what part of it the largest value of each result is wrong.
        exact: it runs as the device has it.
    """

    def backend(graph_module: Any, examples: Any) -> Any:
        def run(*arguments: Any) -> Sequence[torch.Tensor]:
            with contextlib.nullcontext() if exact else _CutOff(kind):
                results = [each.contiguous().clone() for each in graph_module(*arguments)]
            for each in results:
                flat = each.view(-1)
                flat[flat.abs().argmax()] *= 1 + planted
            return results

        return run

    return backend


def _convolutions(device: str = "cpu", normed: bool = True) -> tuple[nn.Module, torch.Tensor]:
    layers: list[nn.Module] = []
    for channels in (3, 8, 8):
        layers += [nn.Conv2d(channels, 8, 3, padding=1), *([nn.BatchNorm2d(8)] if normed else []), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()).to(device)
    return model, torch.randn(8, 3, 12, 12, device=device)


def _products(device: str = "cpu", normed: bool = True) -> tuple[nn.Module, torch.Tensor]:
    norm = nn.LayerNorm if normed else nn.Identity
    layers = [layer for _ in range(4) for layer in (nn.Linear(64, 64), norm(64), nn.GELU())]
    return nn.Sequential(*layers).to(device), torch.randn(32, 64, device=device)


MODELS = {"conv": _convolutions, "matmul": _products}


def _set_back() -> None:
    torch.backends.cuda.matmul.fp32_precision = torch.backends.cudnn.rnn.fp32_precision = "none"
    torch.backends.cudnn.conv.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = True


@pytest.fixture
def settings() -> Iterator[None]:
    """What a test sets is set back."""
    yield
    _set_back()


def _turn(kind: str, on: bool) -> None:
    if kind == "conv":
        torch.backends.cudnn.allow_tf32 = on
    else:
        torch.backends.cuda.matmul.allow_tf32 = on


def _mismatches(session: ca.Session, model: nn.Module, x: torch.Tensor, steps: int = 2) -> list[Mismatch]:
    """Those of some steps; gradients are eager's in all of them."""
    found: list[Mismatch] = []
    reference_model = copy.deepcopy(model)
    for _ in range(steps):
        for each, around in ((reference_model, ca.disable()), (model, session)):
            each.zero_grad()
            loss = each(x).square().mean()
            with around:
                loss.backward()
        assert session.last is not None
        found += [each for each in session.last.reasons if isinstance(each, Mismatch)]
        if x.device.type == "cpu":
            pairs = zip(model.parameters(), reference_model.parameters(), strict=True)
            assert all(close(one.grad, other.grad) for one, other in pairs)
    return found


@pytest.mark.usefixtures("settings")
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("wide", [True, False])
def test_rounding_of_operands_is_no_mistake_where_it_is_set(
    kind: str, wide: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Downstream of such a call too, and where an operator has no kernel for float64, which shows what cancels."""
    monkeypatch.setattr(tf32, "_DEVICE", "cpu")
    if not wide:
        monkeypatch.setattr(judging, "each_in_double", lambda nodes, given, wanted: [(each, None) for each in wanted])
    model, x = MODELS[kind](normed=wide)
    _turn(kind, True)
    assert not _mismatches(ca.enable(backend=_compiled(kind, 0.0), tune=False), model, x)


@pytest.mark.usefixtures("settings")
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("other", ["cpu", "off", "other kind"])
def test_it_is_one_everywhere_else(kind: str, other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if other != "cpu":
        monkeypatch.setattr(tf32, "_DEVICE", "cpu")
    _turn(kind, other == "cpu")
    for each in MODELS:
        if each != kind:
            _turn(each, True)
    model, x = MODELS[kind]()
    assert _mismatches(ca.enable(backend=_compiled(kind, 0.0), tune=False), model, x)


@pytest.mark.usefixtures("settings")
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("wide", [True, False])
def test_a_larger_mistake_is_found(kind: str, wide: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 5 % in one value of each gradient."""
    monkeypatch.setattr(tf32, "_DEVICE", "cpu")
    if not wide:
        monkeypatch.setattr(judging, "each_in_double", lambda nodes, given, wanted: [(each, None) for each in wanted])
    model, x = MODELS[kind]()
    _turn(kind, True)
    assert _mismatches(ca.enable(backend=_compiled(kind, 0.05), tune=False), model, x)


SETTINGS: dict[str, Callable[[], object]] = {
    "backends.cuda.matmul.allow_tf32": lambda: _turn("matmul", True),
    "set_float32_matmul_precision": lambda: torch.set_float32_matmul_precision("high"),
    "backends.cudnn.allow_tf32": lambda: _turn("conv", False),
    "backends.cudnn.conv.fp32_precision": lambda: setattr(torch.backends.cudnn.conv, "fp32_precision", "ieee"),
    "backends.cuda.matmul.fp32_precision": lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32"),
    "backends.cudnn.rnn.fp32_precision": lambda: setattr(torch.backends.cudnn.rnn, "fp32_precision", "ieee"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_each_setting_is_part_of_the_state(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "_initialized", True)
    before = ambient()
    try:
        SETTINGS[name]()
        assert ambient() != before
    finally:
        _set_back()
    assert ambient() == before


def test_what_cudnn_left_for_a_batch_norm_is_computed_in_float64() -> None:
    """cuDNN's own kernel takes nothing wider; another operator of PyTorch's does. (The CPU has none of cuDNN's.)"""
    x = torch.randn(4, 3, 5, 5, dtype=torch.float64, requires_grad=True)
    weight, bias = (torch.randn(3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    grad, epsilon = torch.randn_like(x), 1e-5
    wanted = torch.autograd.grad(F.batch_norm(x, None, None, weight, bias, True, 0.1, epsilon), (x, weight, bias), grad)
    mean = x.detach().mean((0, 2, 3))
    deviation = (x.detach().var((0, 2, 3), correction=0) + epsilon).rsqrt()
    left = torch.empty(0, dtype=torch.uint8)
    with torch.no_grad(), WideKernels():
        found = torch.ops.aten.cudnn_batch_norm_backward(x, grad, weight, None, None, mean, deviation, epsilon, left)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("log", [True, False])
def test_a_softmax_is_told_the_dtype_that_its_backward_has(log: bool) -> None:
    operator = aten._log_softmax_backward_data if log else aten._softmax_backward_data

    class Told(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is operator.default:
                assert args[3] is args[0].dtype, "as CUDA's kernel would say"
            return function(*args, **(kwargs or {}))

    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    grad = torch.randn_like(x)
    result = F.log_softmax(x, 1) if log else F.softmax(x, 1)
    (wanted,) = torch.autograd.grad(result, x, grad)
    for dtype in (torch.float32, torch.float64):
        with torch.no_grad(), Told(), WideKernels():
            assert torch.equal(operator(grad, result.detach(), 1, dtype), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in SETTINGS if "rnn" not in name])
def test_each_setting_is_another_variant(cuda: str, name: str) -> None:
    model, x = _convolutions(cuda)
    session = ca.enable(backend="eager")
    try:
        for change in (lambda: None, lambda: None, SETTINGS[name], lambda: None):
            change()
            with session:
                model(x).square().mean().backward()
            model.zero_grad()
        expect(session.stats(), structure_misses=1, shape_misses=1, hits=2, captures=1)
    finally:
        _set_back()


@pytest.mark.gpu
@pytest.mark.parametrize("on", [True, False])
@pytest.mark.parametrize("kind", MODELS)
def test_on_a_device(cuda: str, kind: str, on: bool) -> None:
    """Inductor's code is right with and without it; and what is wrong by 5 % in one value is found."""
    try:
        _turn(kind, on)
        model, x = MODELS[kind](cuda)
        assert not _mismatches(ca.enable(backend="inductor", tune=False), model, x, steps=4)
        assert _mismatches(ca.enable(backend=_compiled(kind, 0.05, exact=True), tune=False), model, x)
    finally:
        _set_back()


@pytest.mark.gpu
@pytest.mark.parametrize("on", [True, False])
def test_a_deep_network_with_batch_norms(cuda: str, on: bool) -> None:
    """Each convolution adds its own rounding to what comes from above."""
    try:
        _turn("conv", on)
        torch.manual_seed(0)
        model = ResNet(channels=16).to(cuda)
        x = torch.randn(8, 3, 64, 64, device=cuda)
        assert not _mismatches(ca.enable(backend="inductor", tune=False), model, x, steps=4)
    finally:
        _set_back()
