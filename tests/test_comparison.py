"""When two results of one computation are the same within rounding, and when not."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import fx

from compiled_autograd.proving.comparison import (
    _is_close,
    _moved_by,
    largest,
    metadata_difference,
    sizes_up,
    tolerance,
    value_difference,
)
from compiled_autograd.proving.reference import in_double


def _never(moved: int) -> torch.Tensor | None:
    raise AssertionError("float64 was asked for, though the plain tolerance settles it")


def _differs(want: torch.Tensor, found: torch.Tensor, relative: float, double: torch.Tensor | None = None) -> bool:
    return value_difference(want, found, relative, lambda _: double) is not None


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (None, "undefined"),
        (torch.zeros(2, 3, dtype=torch.float64), "dtype"),
        (torch.zeros(3, 2), "shape"),
        (torch.zeros(3, 2).t(), "strides"),
        (torch.zeros(2, 3, device="meta"), "device"),
    ],
)
def test_what_can_be_seen_without_looking_at_values(other: torch.Tensor | None, what: str) -> None:
    want = torch.zeros(2, 3)
    assert metadata_difference(want, want.clone()) is None
    assert what in str(metadata_difference(want, other))


def test_strides_that_nobody_sees_do_not_count() -> None:
    one = torch.zeros(3, 1).as_strided((3, 1), (1, 7))
    assert metadata_difference(torch.zeros(3, 1), one) is None
    assert metadata_difference(torch.zeros(0, 4), torch.zeros(4, 0).t()) is None
    assert metadata_difference(torch.zeros(2, 3), torch.zeros(3, 2).t(), strides=False) is None


def test_the_same_bits_are_asked_for_where_the_backend_promises_them() -> None:
    want = torch.tensor([1.0, float("nan"), float("inf")])
    assert value_difference(want, want.clone(), 0.0, _never) is None
    found = want.clone()
    found[0] = torch.nextafter(found[0], torch.tensor(2.0))
    assert value_difference(want, found, 0.0, _never) is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_close_is_so_by_torch_too(dtype: torch.dtype) -> None:
    """Also with what is not finite in one of the two, or in both."""
    torch.manual_seed(0)
    odd = torch.tensor(
        [0.0, -0.0, 1e-30, float("inf"), -float("inf"), float("nan"), torch.finfo(dtype).max], dtype=dtype
    )
    odd = torch.cat([odd, -odd])
    seen = set()
    for number in range(2000):
        want = torch.randn(4, dtype=dtype)
        found = want + 10 ** (-8 * torch.rand(())) * torch.randn(4, dtype=dtype)
        if number % 2:
            want[0] = odd[number // 2 % len(odd)]
            found[0] = odd[torch.randint(len(odd), ())] if number % 4 == 1 else want[0]
        relative, scale = [(0.0, 0.0), (1e-4, 1.0), (1e-2, 0.3)][number % 3]
        close = torch.allclose(found, want, rtol=relative, atol=relative * scale, equal_nan=True)
        assert _is_close(want, found, relative, scale) == close, (want, found, relative, scale)
        seen.add((close, bool(want.isfinite().all()), bool(found.isfinite().all())))
    assert len(seen) >= 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.int64])
def test_the_largest_value(dtype: torch.dtype) -> None:
    values = torch.tensor([1, -3, 2]).to(dtype)
    floating = dtype is not torch.int64
    assert largest(values) == (3 if floating else 0) and largest(-values) == largest(values)
    assert sizes_up(values)[1] and largest(values[:0]) == 0 and sizes_up(values[:0])[1]
    if floating:
        assert not sizes_up(values * 0)[1]
        for odd in ("nan", "inf", "-inf"):
            values[2] = float(odd)
            assert largest(values) == 3 and not sizes_up(values)[1]


def test_rounding_is_settled_without_float64() -> None:
    want = torch.randn(1000)
    found = want * (1 + 1e-6 * torch.randn(1000))
    assert value_difference(want, found, tolerance([torch.float32]), _never) is None


def test_one_wrong_value_among_many_is_found() -> None:
    want = torch.randn(100_000)
    found = want.clone()
    found[77] += 0.01
    difference = value_difference(want, found, tolerance([torch.float32]), lambda _: want.double())
    assert difference == f"the largest difference is 0.01, where the largest value is {float(want.abs().max()):.3g}"


def test_a_mask_of_what_was_rounded_may_differ_where_float64_sides_with_it() -> None:
    want = torch.tensor([True, False, True])
    found = torch.tensor([True, True, True])
    assert not _differs(want, found, 1e-4, found)
    assert _differs(want, found, 1e-4, want), "float64 sides with the real calls"
    assert _differs(want, found, 1e-4, None)
    assert _differs(want, found, 0.0, found), "the same bits were promised"
    many = torch.arange(2000)
    other = many.clone()
    other[7] += 1
    assert not _differs(many, other, 1e-4, many), "a tie among many"
    other[:9] += 1
    assert _differs(many, other, 1e-4, many)


def test_an_ill_conditioned_result_is_as_far_from_float64_as_the_real_calls_own() -> None:
    double = torch.full((4,), 1e-7, dtype=torch.float64)  # what is left of terms as large as one
    want, found = torch.tensor([3e-7, 0.0, 2e-7, -1e-7]), torch.tensor([-2e-7, 4e-7, 0.0, 1e-7])
    assert not _differs(want, found, 1e-4, double)
    assert _differs(want, found, 1e-4, None), "nothing says that it is ill-conditioned"
    assert _differs(want, found + 1e-5, 1e-4, double)


def test_what_is_not_finite_in_one_of_the_two_alone() -> None:
    want = torch.tensor([1.0, 2.0])
    assert _differs(want, torch.tensor([1.0, float("nan")]), 1e-4, want.double())
    overflown = torch.tensor([1.0, float("inf")])
    finite = torch.tensor([1.0, 70000.0])
    assert not _differs(overflown, finite, 1e-4, finite.double()), "fused code rounds less often than real calls"
    assert _differs(overflown, torch.tensor([1.0, 3.0]), 1e-4, finite.double())


def test_where_sixteen_bits_overflow_nothing_is_said() -> None:
    want, noise = torch.tensor([float("inf"), 1.0]), torch.tensor([0.5, 1.0])
    double = torch.tensor([0.0, 1.0], dtype=torch.float64)
    assert not _differs(want, noise, tolerance([torch.float16]), double) and not sizes_up(want)[1]
    assert _differs(want, noise, tolerance([torch.float32]), double)
    assert _differs(noise, want, tolerance([torch.float16]), double)


def test_what_cancels_has_the_scale_of_what_lies_beside_it_where_float64_cannot_be_asked() -> None:
    """A bias of two elements before a batch norm: by luck, the real calls round to nothing."""
    want, found = torch.tensor([0.0, 4e-9]), torch.tensor([2e-8, -1e-8])
    exact = torch.zeros(2, dtype=torch.float64)

    def double(moved: int) -> torch.Tensor:
        return exact + (1e-8 if moved > 0 else 1e-16 * moved)

    assert value_difference(want, found, 1e-4, lambda _: None) is not None
    assert value_difference(want, found, 1e-4, lambda _: None, beside=0.1) is None
    assert value_difference(want, found + 1e-6, 1e-4, lambda _: None, beside=0.1) is not None
    assert value_difference(want, found, 1e-4, double) is None
    assert value_difference(want, found + 1e-7, 1e-4, double, beside=0.1) is not None


def test_in_float64_what_cancels_has_the_scale_of_what_lies_beside_it() -> None:
    """A layer norm over one element: its gradient is zero, and each way to compute it rounds to something else."""
    want, found = torch.tensor([2e-13, -1e-13]).double(), torch.zeros(2).double()
    relative = tolerance([torch.float64])
    assert value_difference(want, found, relative, lambda moved: want + (1e-13 if moved else 0), beside=1.0) is None
    assert value_difference(want, found + 1e-10, relative, lambda _: want, beside=1.0) is not None
    assert value_difference(want.float(), found.float(), 1e-4, lambda _: want, beside=1.0) is not None


def test_what_rounding_of_the_inputs_moves_may_differ_as_far() -> None:
    """One value of two is ill-conditioned; the real calls have its bits by luck. The other one is not excused by it."""
    exact = torch.tensor([1e-3, 1e-3], dtype=torch.float64)
    want = exact.float()

    def double(moved: int) -> torch.Tensor:
        return exact + (moved if moved > 0 else -1e-6) * torch.tensor([1e-4, 1e-12], dtype=torch.float64)

    assert value_difference(want, want + torch.tensor([1e-4, 0.0]), 1e-4, double) is None
    assert value_difference(want, want + torch.tensor([0.0, 1e-4]), 1e-4, double) is not None
    assert value_difference(want, want + torch.tensor([1e-2, 0.0]), 1e-4, double) is not None


def test_where_a_value_jumps_rounding_of_the_inputs_excuses_nothing() -> None:
    want = torch.tensor([0.5, 0.5])

    def double(moved: int) -> torch.Tensor:
        smooth = 1e-3 if moved > 0 else 1e-12
        return want.double() + (torch.tensor([0.5, smooth], dtype=torch.float64) if moved else 0.0)

    assert value_difference(want, torch.tensor([0.0, 0.5]), 1e-4, double) is not None
    assert value_difference(want, torch.tensor([0.5, 0.501]), 1e-4, double) is None


def _graph(function: Callable[..., torch.Tensor]) -> tuple[list[fx.Node], list[fx.Node]]:
    """Two inputs, and one call."""
    graph = fx.Graph()
    inputs = [graph.placeholder("x"), graph.placeholder("y")]
    return inputs, [graph.call_function(function, tuple(inputs))]


def test_inputs_are_moved_each_in_its_own_way() -> None:
    """If two like ones moved alike, their difference would look exact."""
    inputs, nodes = _graph(torch.sub)
    x = torch.rand(5) + 1
    moved = in_double(nodes, dict(zip(inputs, (x, x.clone()), strict=True)), nodes[0], 1)
    assert moved is not None and 1e-9 < moved.abs().max() < 1e-6
    same = in_double(nodes, dict.fromkeys(inputs, x), nodes[0], 1)
    assert same is not None and not same.any()


def test_where_float64_fails_in_whatever_way_the_plain_tolerance_decides() -> None:
    def fails(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        raise AssertionError("not in float64")

    inputs, nodes = _graph(fails)
    assert in_double(nodes, dict.fromkeys(inputs, torch.ones(2)), nodes[0]) is None


def test_complex_numbers_and_bits() -> None:
    want = torch.randn(5, dtype=torch.complex64)
    assert value_difference(want, want.conj().resolve_conj().conj(), 1e-4, _never) is None
    assert _differs(want, want.conj(), 1e-4)
    negative = want.conj().imag
    assert negative.is_neg() and value_difference(negative, -want.imag, 1e-4, _never) is None


def test_whole_numbers_are_equal_or_not() -> None:
    want = torch.tensor([1, 2, 1 << 40])
    assert _differs(want, want + torch.tensor([0, 0, 1]), 1e-4)
    assert not _differs(torch.tensor([True, False]), torch.tensor([True, False]), 1e-4)


@pytest.mark.parametrize(
    ("values", "telling"),
    [([0.0, 0.0], False), ([1.0, float("nan")], False), ([float("inf"), 1.0], False), ([0.0, 1e-30], True), ([], True)],
)
def test_results_that_show_little(values: list[float], telling: bool) -> None:
    assert sizes_up(torch.tensor(values))[1] is telling


def test_the_coarsest_dtype_decides() -> None:
    assert tolerance([torch.float64, torch.float32, torch.int64]) == tolerance([torch.float32])
    assert tolerance([torch.float32, torch.bfloat16]) == tolerance([torch.bfloat16])
    assert tolerance([torch.int64]) == 0


def test_how_far_rounding_moves_a_value_is_the_mean_of_some_moves() -> None:
    """The largest of them would let more through: a bfloat16 result that is off by a tenth at random."""
    exact = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)
    moves = {1: 0.1, 2: -0.2, 3: 0.3, 4: math.nan}

    def moved_inputs(number: int) -> torch.Tensor:
        moved = exact + torch.tensor([1.0, 2.0, 0.0]) * (moves[number] if number > 0 else 0.0)
        moved[1] += 0.0 if number > 0 else 1.0  # jumps
        return moved

    found = next(_moved_by(exact, moved_inputs))
    torch.testing.assert_close(found, torch.tensor([0.2, 0.0, 0.0], dtype=torch.float64))
