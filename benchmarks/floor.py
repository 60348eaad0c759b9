"""The floor: the part of eager's backward that lies in matrix products, convolutions and attention kernels.

No fusion shortens these: a compiled backward calls the same kernels. With all else gone, its time would be this part
of eager's.
"""

import gc
import re
import statistics
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

STEPS = 10
_BACKWARD = "the backward that is profiled"
# By the profiler's names, which are without overload. Composite operators (matmul, linear, conv2d, attention by way of
# plain products) are left out: what they call is met by itself.
_PRODUCTS = re.compile(
    r"""aten::(
        (add|b|addb|baddb)?mm | (add)?mv | v?dot | _addmm_activation | _int_mm | _(scaled_)?(grouped_)?mm
        | (mkldnn_)?linear_backward(_input|_weights)? | mkldnn_linear
        | _?convolution(_overrideable)?(_backward)?(_overrideable)?
        | (mkldnn|cudnn|miopen)_(depthwise_)?convolution\w*
        | _?(slow|thnn)_conv\w+ | _?conv_depthwise[23]d\w* | conv_tbc_backward
        | _scaled_dot_product_(?!attention_math)\w+ | _(flash|efficient|cudnn)_attention_(forward|backward)
    )_? | mkldnn::_(linear|convolution)\w+""",
    re.VERBOSE,
)


def is_product(name: str) -> bool:
    """Whether the operator that the profiler calls `name` is a matrix product, a convolution or an attention kernel."""
    return _PRODUCTS.fullmatch(name) is not None


def measure(
    step: Callable[[], float], make_loss: Callable[[], Tensor], device: str, steps: int | None = None
) -> dict[str, Any]:
    """`floor`, and `floor_ms`: milliseconds a backward, by operator.

    Steps that are profiled alternate with steps that are not, and the floor is the median of the one's products by the
    other's whole backward: the profiler takes time for each operator, which would make the products a smaller part.

    Args:
        step: a step of eager; gives the seconds of its backward.
        make_loss: its forward.
        steps: how many of each; STEPS without it.
    """
    profiled_products(make_loss, device)  # the first profile of a process sets itself up inside the backward
    shares, found = [], []
    for _ in range(steps or STEPS):
        gc.collect()  # the last profile's events, which would be collected inside the step
        whole = step()
        products = profiled_products(make_loss, device)
        shares.append(sum(products.values()) / whole)
        found.append(products)
    names = sorted(set().union(*found))
    by_name = {name: 1e3 * statistics.median(each.get(name, 0.0) for each in found) for name in names}
    return {"floor": statistics.median(shares), "floor_ms": by_name}


def profiled_products(make_loss: Callable[[], Tensor], device: str) -> dict[str, float]:
    """Seconds that one eager backward spends in products, by operator: of the CPU, or of the device on CUDA."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device == "cuda")
    with profile(activities=activities) as profiler:
        loss = make_loss()
        with record_function(_BACKWARD):
            loss.backward()
        if device == "cuda":
            torch.cuda.synchronize()
    return seconds_by_product(profiler.events() or (), device)


def seconds_by_product(events: Iterable[Any], device: str) -> dict[str, float]:
    """Of the products among the profiler's `events` that began after the mark of the backward did.

    A product's time includes what it calls itself, such as the filling of an attention kernel's output with zeros:
    that lies inside the kernel for a compiler too. A product within a product is not counted twice.
    """
    on_host = [event for event in events if event.device_type == torch.autograd.DeviceType.CPU]
    (begin,) = (event.time_range.start for event in on_host if event.name == _BACKWARD)
    seconds: dict[str, float] = {}
    for event in on_host:
        # By time, not by what is inside what: on CUDA the backward runs in another thread than the mark.
        if event.time_range.start < begin or not is_product(event.name) or _inside_a_product(event):
            continue
        spent = event.device_time_total if device == "cuda" else event.cpu_time_total
        seconds[event.name] = seconds.get(event.name, 0.0) + 1e-6 * spent
    return seconds


def _inside_a_product(event: Any) -> bool:
    parent = event.cpu_parent
    while parent is not None:
        if is_product(parent.name):
            return True
        parent = parent.cpu_parent
    return False
