"""Backwards of convolutions whose operands are in channels last, the layout of cuDNN's kernels on recent devices.

For contiguous tensors, cuDNN transposes both operands of each product (the gradient of the result twice), and the
results. Here the kernel that makes a gradient writes it in channels last, an image is transposed once, and the results
are transposed back by a kernel that may do more work. That saves nothing for a single product, and for a kernel of one
pixel cuDNN transposes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import _C, fx

_FEWEST_CHANNELS = 64
_CHANNELS_IN_STEPS_OF = 8
"""Minimum number of channels, and a divisor of it. Fewer channels gain nothing
(docs/decisions/faster_compiled_code.md), nor does a number that is no multiple of a tensor core's step."""
_CONVOLUTION = torch.ops.aten.convolution_backward.default


def convolve_in_channels_last(graph_module: fx.GraphModule) -> int:
    """Rewrite an ATen graph whose nodes have fake tensors in ``meta["val"]``, with numbers for sizes.

    What convolutions give keeps its strides.

    Returns:
        How many convolutions there are in channels last.
    """
    graph, copies, count = graph_module.graph, dict[fx.Node, fx.Node](), 0
    for node in graph.find_nodes(op="call_function", target=_CONVOLUTION):
        results = _in_channels_last(node) if _is_faster(node) else None
        if results is None:
            continue
        operands = cast(tuple[fx.Node, ...], node.args[:2])
        for each in operands:
            if each not in copies:
                with graph.inserting_before(node):
                    copies[each] = _with_strides(each, _last(_value(each)))
        node.args = (*(copies[each] for each in operands), *node.args[2:])
        for result, back in _restored(node, results):
            copies[back] = result  # should it be an operand itself
        count += 1
    if count:
        graph.eliminate_dead_code()
        graph_module.recompile()
    return count


def _restored(node: fx.Node, results: Sequence[torch.Tensor | None]) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Give the results of a convolution the strides that they had: those in channels last, each with its copy."""
    before, node.meta["val"] = _value(node), results
    for result in [*node.users]:
        index = cast(int, result.args[1])
        now = result.meta["val"] = results[index]
        if now is not None and now.stride() != before[index].stride():
            with node.graph.inserting_after(result):
                back = _with_strides(result, before[index].stride())
            result.replace_all_uses_with(back, lambda user, back=back: user is not back)  # type: ignore[misc]
            yield result, back


def _value(node: fx.Node) -> Any:
    return node.meta["val"]


def _is_faster(node: fx.Node) -> bool:
    gradient, images, weight = map(_value, cast(tuple[fx.Node, ...], node.args[:3]))
    is_transposed, groups, mask = node.args[7], node.args[9], cast(Sequence[bool], node.args[10])
    if images.dim() != 4 or groups != 1 or is_transposed or torch.version.hip or not _C._get_cudnn_enabled():
        return False
    if not (mask[0] and mask[1]) or weight.shape[2:].numel() == 1:
        return False
    if any(count < _FEWEST_CHANNELS or count % _CHANNELS_IN_STEPS_OF for count in weight.shape[:2]):
        return False
    if not all(each.is_contiguous() for each in (gradient, images, weight)):
        return False
    if any(each.is_contiguous(memory_format=torch.channels_last) for each in (gradient, images)):
        return False
    if not _has_tensor_cores(images.device):
        return False
    if images.dtype is torch.float32:
        return _C._get_fp32_precision_getter("cuda", "conv") == "tf32"
    return images.dtype in (torch.float16, torch.bfloat16)


def _in_channels_last(node: fx.Node) -> Sequence[torch.Tensor | None] | None:
    """Return the results for such operands; None if they are not in channels last."""
    operands = [_empty(each, _last(each)) for each in map(_value, cast(tuple[fx.Node, ...], node.args[:2]))]
    results = _CONVOLUTION(*operands, *fx.node.map_arg(node.args[2:], _value))
    return results if all(each.is_contiguous(memory_format=torch.channels_last) for each in results[:2]) else None


def _has_tensor_cores(device: torch.device) -> bool:
    """For float32 as well."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def _last(value: torch.Tensor) -> tuple[int, ...]:
    _, channels, height, width = value.shape
    return channels * height * width, 1, width * channels, channels


def _empty(value: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    return torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device)


def _with_strides(node: fx.Node, strides: tuple[int, ...]) -> fx.Node:
    """A copy, where the graph has others inserted. Inductor stores it: what reads it need not read across."""
    from torch._inductor import inductor_prims  # whoever loads this file may compile nothing

    copy = node.graph.call_function(inductor_prims.force_stride_order, (node, [*strides]))
    copy.meta["val"] = _empty(_value(node), strides)
    return copy
