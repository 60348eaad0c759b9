"""Which gradients are plainly the same: by torch alone, and by the extension."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from compiled_autograd.proving.comparison import plainly_alike
from compiled_autograd.proving.whole import apart, distance, most_of_rounding

from .both_walks import library_of


@pytest.fixture(params=["torch", "extension"])
def module(request: pytest.FixtureRequest) -> Any:
    return None if request.param == "torch" else library_of(request.config).module()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_what_is_plainly_the_same(dtype: torch.dtype, module: Any) -> None:
    torch.manual_seed(0)
    large, small = torch.randn(40, 30).to(dtype), (torch.randn(2000) * 1e-4).to(dtype)
    wanted: list[Any] = [large, small, None, torch.zeros(3, dtype=dtype), torch.ones(0, dtype=dtype), large.t()]
    relative = 1e-2 if dtype is torch.bfloat16 else 1e-4

    def differ(*changes: tuple[int, Any]) -> list[int]:
        found = [each if each is None else each.clone() for each in wanted]
        for index, change in changes:
            found[index] = change(found[index])
        return sorted(apart(wanted, found, relative, {}, module))

    def one_value(by: float) -> Callable[[torch.Tensor], torch.Tensor]:
        def change(tensor: torch.Tensor) -> torch.Tensor:
            tensor.view(-1)[-1] += by
            return tensor

        return change

    assert differ() == []
    assert differ((0, lambda each: each * (1 + relative / 4)), (1, lambda each: each * (1 - relative / 4))) == []
    assert differ((1, one_value(1e-5))) == [1], "by its own scale"
    assert differ((0, one_value(0.1))) == [0]
    assert differ((3, one_value(1e-20))) == [3], "what is zero"
    assert differ((0, lambda each: each.t().contiguous().t())) == [], "strides are not asked"
    assert differ((0, lambda each: None), (2, lambda each: large)) == [0, 2]
    assert differ((1, lambda each: each[:-1]), (0, lambda each: each.to(torch.float16))) == [0, 1]
    assert differ((1, one_value(torch.nan)), (0, one_value(torch.inf))) == [0, 1]


def test_nans_and_infinities_in_both_are_the_same(module: Any) -> None:
    values = torch.tensor([1.0, torch.nan, torch.inf, -torch.inf])
    assert apart([values], [values.clone()], 1e-4, {}, module) == []
    assert apart([values], [values.clone()], 0.0, {}, module) == []
    assert apart([values], [-values], 1e-4, {}, module) == [0]


def test_a_difference_that_was_rounding_may_be_so_again(module: Any) -> None:
    want = torch.ones(5)
    assert apart([want], [want + 0.01], 1e-4, {}, module) == [0]
    assert apart([want], [want + 0.01], 1e-4, {0: 0.005}, module) == []
    assert apart([want], [want + 0.03], 1e-4, {0: 0.005}, module) == [0]


def test_the_distance_leaves_out_what_is_not_finite_in_both() -> None:
    want = torch.tensor([torch.nan, torch.inf, 1.0])
    assert distance(want, want + 1) == 1
    assert distance(want, torch.tensor([torch.nan, -torch.inf, 1.0])) == torch.inf
    assert distance(want, torch.tensor([0.0, torch.inf, 1.0])) == torch.inf


def test_how_much_may_be_rounding() -> None:
    wanted: list[Any] = [torch.tensor([0.0, -2.0]), None, torch.zeros(3), torch.zeros(0)]
    assert most_of_rounding(wanted, 0, 1e-4) == pytest.approx(0.2 + 2e-4)
    assert most_of_rounding(wanted, 2, 1e-4) == pytest.approx(2e-4), "what cancels leaves rounding of the others"
    assert most_of_rounding(wanted, 3, 5e-2) == pytest.approx(0.1)


_LAYOUTS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda x: x,
    torch.t,
    lambda x: x[1:, ::2],
    lambda x: x[:1].expand(6, 5),
    lambda x: x[0, 0],
    lambda x: x[:0],
    torch._neg_view,
]


@pytest.mark.parametrize("relative", [1e-9, 1e-4, 2e-2])
def test_what_the_extension_takes_for_the_same_is_so_for_torch(relative: float, request: pytest.FixtureRequest) -> None:
    """A comparison asks torch of nothing that the extension has settled."""
    module, generator, settled = library_of(request.config).module(), torch.Generator().manual_seed(0), 0
    for number in range(600):
        dtype = (torch.float32, torch.float64, torch.bfloat16, torch.int64)[number % 4]
        values = torch.randn(6, 5, generator=generator) * 10.0 ** (number % 7 - 3)
        moved = values * (1 + relative * (number % 5) * torch.randn(6, 5, generator=generator) / 4)
        if number % 11 == 0:
            moved[number % 6, 0] = (torch.nan, torch.inf, 0.0, 1e30)[number % 4]
        if number % 13 == 0:
            values[number % 6, 1] = moved[number % 6, 1] = torch.inf
        layout = _LAYOUTS[number % len(_LAYOUTS)]
        want, found = layout(values.to(dtype)), layout(moved.to(dtype))
        if not module.unlike([want], [found], relative):
            settled += 1
            assert plainly_alike(want, found, relative), (number, want, found)
    assert settled > 100
