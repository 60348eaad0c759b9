"""Backwards of convolutions in channels last: which, what they give, and what of it is seen outside."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._inductor.fx_passes import joint_graph
from torch.fx.experimental.proxy_tensor import make_fx

import compiled_autograd as ca
from backends.inductor.cuda import channels_last
from backends.inductor.cuda.channels_last import convolve_in_channels_last

from .helpers import assert_grads

_aten = torch.ops.aten
_CONVOLUTION = _aten.convolution_backward.default
_IMAGES = 16, 3, 128, 128
_SIZES = [1, 1], [1, 1], [1, 1], False, [0, 0], 1


@pytest.fixture(autouse=True)
def _as_on_a_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setattr(channels_last, "_has_tensor_cores", lambda device: True)
    # PyTorch's own tests, whose samples others use, forbid to set such flags for the rest of the process.
    monkeypatch.setitem(torch.backends.flags_frozen.__globals__, "__allow_nonbracketed_mutation_flag", True)


def _backward(mask: tuple[bool, bool, bool] = (True, True, False), groups: int = 1, stride: int = 1) -> Any:
    def gradients(gradient: Tensor, images: Tensor, weight: Tensor) -> list[Tensor]:
        bias = [weight.shape[0]] if mask[2] else None
        sizes = [stride, stride], [1, 1], [1, 1], False, [0, 0], groups
        results = _aten.convolution_backward(gradient * 2, images, weight, bias, *sizes, [*mask])
        return [each for each in results if each is not None]

    return gradients


def _operands(
    given: int = 64, channels: int = 72, size: int = 6, dtype: torch.dtype = torch.float32, kernel: int = 3
) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = (2, channels, size, size), (2, given, size, size), (channels, given, kernel, kernel)
    return [torch.randn(shape, dtype=dtype) for shape in shapes]


def _rewritten(function: Callable[..., Any], *inputs: Any) -> tuple[fx.GraphModule, int]:
    graph_module = make_fx(function, tracing_mode="fake")(*inputs)
    values = [node.meta["val"] for node in graph_module.graph.nodes if node.op == "placeholder"]
    with values[0].fake_mode:
        count = convolve_in_channels_last(graph_module)
    graph_module.graph.lint()
    return graph_module, count


def _check(function: Callable[..., Any], *inputs: Any, expected: int = 1) -> fx.GraphModule:
    """What the graph gives, and how it lies in memory, stay; each operand of what was chosen is in channels last."""
    graph_module, count = _rewritten(function, *inputs)
    assert count == expected
    for one, other in zip(graph_module(*inputs), function(*inputs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-3)
        assert one.stride() == other.stride()
    output = graph_module.graph.find_nodes(op="output")[0]
    for node, other in zip(output.args[0], function(*inputs), strict=True):
        assert node.meta["val"].stride() == other.stride()
    for node in graph_module.graph.find_nodes(op="call_function", target=_CONVOLUTION)[:expected]:
        for each in node.args[:2]:
            assert each.meta["val"].is_contiguous(memory_format=torch.channels_last)
    return graph_module


@pytest.mark.parametrize("mask", [(True, True, False), (True, True, True)])
@pytest.mark.parametrize("size", [2, 7])
def test_the_results_are_as_they_were(mask: tuple[bool, bool, bool], size: int) -> None:
    _check(_backward(mask), *_operands(size=size))


def test_results_are_transposed_back_once_for_all_who_need_them() -> None:
    def gradients(gradient: Tensor, images: Tensor, weight: Tensor) -> list[Tensor]:
        first, second = _backward()(gradient, images, weight)
        return [first, first.view(2, -1), first.relu(), second]

    graph_module = _check(gradients, *_operands())
    forced = torch.ops.prims.inductor_force_stride_order.default
    assert len(graph_module.graph.find_nodes(op="call_function", target=forced)) == 4


def test_an_operand_of_two_is_transposed_once() -> None:
    def gradients(gradient: Tensor, images: Tensor, one: Tensor, other: Tensor) -> list[Tensor]:
        convolve = _backward()
        return [*convolve(gradient, images, one), *convolve(gradient + 1, images, other)]

    gradient, images, weight = _operands()
    graph_module = _check(gradients, gradient, images, weight, weight + 1, expected=2)
    operands = [node.args[1] for node in graph_module.graph.find_nodes(op="call_function", target=_CONVOLUTION)]
    assert operands[0] is operands[1]


def _in_channels_last(index: int) -> list[Tensor]:
    operands = _operands()
    operands[index] = operands[index].contiguous(memory_format=torch.channels_last)
    return operands


@pytest.mark.parametrize(
    "operands",
    [
        *map(_in_channels_last, range(3)),
        _operands(given=3),
        _operands(channels=56),
        _operands(channels=76),
        _operands(size=1),
        _operands(dtype=torch.float64),
        [each[..., None] for each in _operands()],
        [each[..., 0] for each in _operands()],
        [_operands()[0].transpose(2, 3), *_operands()[1:]],
        [_operands()[0], _operands()[1].transpose(0, 1).contiguous().transpose(0, 1), _operands()[2]],
    ],
)
def test_others_stay(operands: list[Tensor]) -> None:
    dimensions = operands[1].dim() - 2

    def gradients(gradient: Tensor, images: Tensor, weight: Tensor) -> list[Tensor]:
        sizes = [1] * dimensions, [1] * dimensions, [1] * dimensions, False, [0] * dimensions, 1
        if dimensions == 3:
            sizes[1][2] = 0
        return [*_aten.convolution_backward(gradient, images, weight, None, *sizes, [True, True, False])[:2]]

    _check(gradients, *operands, expected=0)


@pytest.mark.parametrize("mask", [(True, False, False), (False, True, False), (False, True, True)])
def test_where_there_is_one_product_operands_stay(mask: tuple[bool, bool, bool]) -> None:
    """The first convolution of a network, or a frozen weight."""
    _check(_backward(mask), *_operands(), expected=0)


def test_a_result_that_is_the_next_ones_gradient_is_not_transposed_there_and_back() -> None:
    def gradients(gradient: Tensor, images: Tensor, weight: Tensor, before: Tensor, first: Tensor) -> list[Tensor]:
        inner, outer = _backward()(gradient, images, weight)
        return [outer, *_aten.convolution_backward(inner, before, first, None, *_SIZES, [True, True, False])[:2]]

    operands = [*_operands(), torch.randn(2, 80, 6, 6), torch.randn(64, 80, 3, 3)]
    graph_module = _check(gradients, *operands, expected=2)
    second = graph_module.graph.find_nodes(op="call_function", target=_CONVOLUTION)[1]
    assert second.args[0].target is operator.getitem


def test_a_result_that_would_not_be_in_channels_last_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the device that fakes go by computes it in another way."""
    monkeypatch.setattr(channels_last, "_in_channels_last", lambda node: None)
    _check(_backward(), *_operands(), expected=0)


def test_those_on_the_cpu_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a graph that has something on a device, too: no device is asked."""
    monkeypatch.undo()
    _check(_backward(), *_operands(), expected=0)


def test_groups_and_transposed_convolutions_stay() -> None:
    gradient, images, weight = _operands(given=128, channels=128)
    _check(_backward(groups=2), gradient, images, weight[:, :64].contiguous(), expected=0)

    def transposed(gradient: Tensor, images: Tensor, weight: Tensor) -> list[Tensor]:
        sizes = [1, 1], [1, 1], [1, 1], True, [0, 0], 1
        return [*_aten.convolution_backward(gradient, images, weight, None, *sizes, [True, True, False])[:2]]

    _check(transposed, gradient, images, weight, expected=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_numbers_of_16_bits(dtype: torch.dtype) -> None:
    _, count = _rewritten(_backward(), *_operands(dtype=dtype))
    assert count == 1


@pytest.mark.parametrize("setting", ["tf32", "cudnn", "device"])
def test_what_a_device_does_with_float32(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if setting == "tf32":
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    elif setting == "cudnn":
        monkeypatch.setattr(torch.backends.cudnn, "enabled", False)
    else:
        monkeypatch.setattr(channels_last, "_has_tensor_cores", lambda device: False)
    _check(_backward(), *_operands(), expected=0)
    _, count = _rewritten(_backward(), *_operands(dtype=torch.bfloat16))
    assert count == (setting == "tf32")


class _Residual(nn.Module):
    """Two convolutions that share their images, and one whose image is a sum; another begins with few channels.

    Biases before a norm have no gradient but rounding errors, and are left out.
    """

    def __init__(self, normed: bool = True) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 64, 3, padding=1)
        self.one, self.other = (nn.Conv2d(64, 72, 3, 2, padding=1, bias=not normed) for _ in range(2))
        self.last = nn.Conv2d(72, 64, 3, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(72) if normed else nn.Identity() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """[batch, 3, height, width] -> [batch]."""
        x = self.first(x).relu()
        x = (self.norms[0](self.one(x)) + self.norms[1](self.other(x))).relu()
        return self.last(x).square().mean((1, 2, 3))


@pytest.mark.parametrize("normed", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_network_that_inductor_compiles(normed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, which has the same lowering."""
    counts, passes = [], joint_graph.joint_graph_passes

    def more_passes(graph_module: fx.GraphModule, *others: Any) -> Any:
        result = passes(graph_module, *others)
        counts.append(convolve_in_channels_last(graph_module))
        return result

    monkeypatch.setattr(joint_graph, "joint_graph_passes", more_passes)
    torch.manual_seed(0)
    model = _Residual(normed)
    reference = copy.deepcopy(model)
    session = ca.enable(backend="inductor", cache_dir=False, tune=False)
    for _ in range(3):
        x = torch.randn(4, 3, 12, 12)
        for each, around in ((reference, ca.disable()), (model, session)):
            each.zero_grad()
            loss = each(x).mean()
            with around:
                loss.backward()
        assert_grads(model, reference, bitwise=False)
    stats = session.stats()
    assert (stats.captures, stats.hits, stats.failures) == (1, 2, 0) and counts == [3]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_on_a_device(dtype: torch.dtype, mode: str, cuda: str) -> None:
    """Fewer transpositions than on eager, no more memory, and its gradients."""
    torch.manual_seed(0)
    model = _Residual().to(cuda)
    reference = copy.deepcopy(model)
    session = ca.enable(backend="inductor", mode=mode, cache_dir=False, tune=False)
    peaks: dict[str, int] = {}
    for step in range(6):
        x = torch.randn(_IMAGES, device=cuda)
        for name, each, around in (("eager", reference, ca.disable()), ("ours", model, session)):
            loss = _loss(each, x, dtype)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            with around:
                loss.backward()
            torch.cuda.synchronize()
            peaks[name] = torch.cuda.max_memory_allocated()
        worst = 2e-2 if dtype is torch.float32 else 6e-2
        for one, other in zip(model.parameters(), reference.parameters(), strict=True):
            assert one.grad is not None and other.grad is not None
            assert one.grad.stride() == other.grad.stride()
            difference = (one.grad - other.grad).norm() / other.grad.norm().clamp_min(1e-6)
            assert difference < worst, (step, difference)
    stats = session.stats()
    assert (stats.captures, stats.hits, stats.failures) == (1, 5, 0)
    assert not session.last.reasons
    transposed = {
        name: _transpositions(_loss(each, x, dtype), around)
        for name, each, around in (("eager", reference, ca.disable()), ("ours", model, session))
    }
    assert session.stats().hits == 6  # else they are those of a first run, which is compared with the engine's
    if transposed["eager"]:  # else cuDNN has chosen other kernels
        assert transposed["ours"] < transposed["eager"]
    assert peaks["ours"] <= peaks["eager"] * 1.02, peaks


def _loss(model: nn.Module, x: Tensor, dtype: torch.dtype) -> Tensor:
    model.zero_grad()
    with torch.autocast("cuda", dtype, enabled=dtype is not torch.float32):
        return model(x).float().mean() * 100


def _transpositions(loss: Tensor, around: Any) -> int:
    """How many kernels of cuDNN's own for that run in a backward."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        with around:
            loss.backward()
        torch.cuda.synchronize()
    return sum("nchwToNhwc" in each.name or "nhwcToNchw" in each.name for each in profile.events())
