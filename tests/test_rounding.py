"""Numbers of 16 bits in Inductor's code for CUDA: rounded, and overflowing, where eager rounds them."""

from __future__ import annotations

from contextlib import AbstractContextManager

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from backends.inductor.backend import _settings
from backends.inductor.rounding import SETTING, noting_where_to_round
from backends.inductor.workarounds.narrowing_casts import all_casts_kept
from backends.modes import DEFAULT
from compiled_autograd.lowering.tracing import trace

_convert = torch.ops.prims.convert_element_type.default


def _through(dtype: torch.dtype, device: str = "cuda") -> tuple[fx.GraphModule, list[FakeTensor]]:
    """A graph whose values go through another dtype, traced as if there were such a device."""
    mode = FakeTensorMode()
    example = FakeTensor(mode, torch.empty(4, device="meta"), torch.device(device))

    def function(x: torch.Tensor) -> list[torch.Tensor]:
        return [_convert(_convert(x, dtype), torch.float32)]

    with noting_where_to_round([example]), mode:
        return trace(function, None, [example]), [example]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_what_is_set(dtype: torch.dtype, device: str) -> None:
    """For numbers of 16 bits on CUDA alone; and nodes say where."""
    graph_module, _ = _through(dtype, device)
    short = dtype is not torch.float64
    found = _settings(DEFAULT, graph_module, device == "cuda")
    assert found.get(SETTING, False) is (short and device == "cuda")
    noted = [node.meta.get("low_precision_pointwise_barrier", False) for node in graph_module.graph.nodes]
    assert any(noted) is (short and device == "cuda")


def test_what_the_user_has_set_wins() -> None:
    from torch._inductor import config

    try:
        setattr(config, SETTING, True)
        assert SETTING not in _settings(DEFAULT, _through(torch.float16)[0], True)
    finally:
        setattr(config, SETTING, False)


def test_two_casts_stay_two() -> None:
    assert casts_kept(all_casts_kept()) == 2


def casts_kept(mending: AbstractContextManager[None]) -> int:
    """How many of two casts are left where Inductor is to round as eager does."""
    from torch._inductor import config
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes

    graph_module, (example,) = _through(torch.float16, "cpu")
    with config.patch({SETTING: True}), mending, example.fake_mode:
        joint_graph_passes(graph_module)
    return len(graph_module.graph.find_nodes(op="call_function", target=_convert))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_sum_that_overflows_is_infinite(cuda: str, dtype: torch.dtype) -> None:
    """As the gradient of a bias under autocast: summed in float32, and rounded before it is float32 again."""
    import compiled_autograd as ca

    x = torch.ones(64, 4, device=cuda)
    bias = torch.zeros(4, device=cuda, requires_grad=True)
    scale = torch.finfo(dtype).max / 16
    session = ca.enable(backend="inductor")
    for _ in range(3):
        grads = []
        for around in (ca.disable(), session):
            loss = ((x + bias.to(dtype)).to(dtype).float() * scale).sum()
            with around:
                grads.append(torch.autograd.grad(loss, bias)[0])
        assert grads[0].isinf().all() and grads[1].isinf().all()
