"""What is right but rounded otherwise raises no alarm, however little is left of what was added up; what is wrong by as
much elsewhere does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import compiled_autograd as ca
from compiled_autograd.proving.perturbing import Move, RoundedOperators, perturbed
from shadow_cache import Failure

from .helpers import assert_same
from .rounded_otherwise import STYLES, Wrong, rounding_backend, tape

pytestmark = pytest.mark.filterwarnings("ignore")
_AT_ONCE, _TAPES = 100, 2000
_FALSE = (5, 12, 18, 29, 87, 88, 139, 172, 174, 876, 1088)
"""Tapes that raised an alarm once."""

Step = Callable[[int], tuple[torch.Tensor, Sequence[torch.Tensor]]]


def _alarms(
    step: Step, style: str = "order", wrong: Wrong = lambda results: results, steps: int = 2, **settings: Any
) -> list[str]:
    """What is said in some steps, whose gradients are eager's."""
    ca.reset()
    settings = {"cache_dir": False, "tune": False, "compile_budget": float("inf"), **settings}
    session, found = ca.enable(backend=rounding_backend(style, wrong=wrong), **settings), []
    for number in range(steps):
        loss, leaves = step(number)
        wanted = torch.autograd.grad(loss, leaves, allow_unused=True, retain_graph=True)
        with session:
            grads = torch.autograd.grad(loss, leaves, allow_unused=True)
        assert_same(grads, wanted)
        assert session.last is not None
        found += [str(each) for each in session.last.reasons if isinstance(each, Failure)]
    assert not session.stats().bypasses
    return found


def _of_a_tape(seed: int, **settings: Any) -> list[str]:
    return _alarms(lambda step: tape(seed, step), STYLES[seed % 3], **settings)


@pytest.mark.parametrize("seed", [*_FALSE, *range(7000, 7012)])
def test_rounding_raises_no_alarm(seed: int) -> None:
    assert not _of_a_tape(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, _TAPES, _AT_ONCE))
def test_rounding_raises_no_alarm_in_many_tapes(first: int) -> None:
    assert {seed: found for seed in range(first, first + _AT_ONCE) if (found := _of_a_tape(seed))} == {}


@pytest.mark.parametrize("seed", [0, 13, 45, 61, 170])
def test_nor_where_every_backward_is_compared(seed: int) -> None:
    """The third backward is the first that is compared as a whole."""
    assert not _of_a_tape(seed, check=True, steps=4)


# ---- what is wrong beside it -----------------------------------------------------------------------------------------


def _only(shape: tuple[int, ...], change: Callable[[torch.Tensor], torch.Tensor]) -> Wrong:
    """Results of one shape are wrong."""

    def wrong(results: list[Any]) -> list[Any]:
        assert sum(each.shape == shape for each in results) == 1
        return [change(each) if each.shape == shape else each for each in results]

    return wrong


def _zero_beside_small(step: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The gradient of a bias before a softmax is zero, and the real calls give zero or 1e-9; that of a factor is as
    small."""
    torch.manual_seed(step)
    x, bias, factor = torch.randn(16, 3), torch.zeros(1, requires_grad=True), torch.rand(3).requires_grad_()
    return ((x + bias).softmax(1)[:, 0].sum() / 16 + (factor * 3e-8).sum()), [bias, factor]


@pytest.mark.parametrize(("shape", "is_wrong"), [((1,), False), ((3,), True)])
def test_what_rounding_may_leave_of_a_sum_is_wrong_elsewhere(shape: tuple[int, ...], is_wrong: bool) -> None:
    assert bool(_alarms(_zero_beside_small, wrong=_only(shape, lambda each: each + 3e-8))) is is_wrong


def test_a_term_that_is_missing_from_a_sum_that_cancels_is_found() -> None:
    def without_one(results: list[Any]) -> list[Any]:
        return [each - 1e-4 if each.shape == (1,) else each for each in results]

    assert _alarms(_zero_beside_small, wrong=without_one)


def _vanishing(step: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A recurrence whose gradient ends among subnormal numbers."""
    torch.manual_seed(step)
    w, first = (torch.randn(8, 8) * 0.3).requires_grad_(), torch.zeros(8, requires_grad=True)
    h = torch.randn(2, 8) + first
    for _ in range(6):
        h = (h @ w).tanh()
    return h.square().sum() * 1e-39, [first, w]


@pytest.mark.parametrize("style", STYLES)
def test_differences_among_subnormal_numbers_are_rounding(style: str) -> None:
    loss, leaves = _vanishing(0)
    first, _ = torch.autograd.grad(loss, leaves)
    assert first.any() and float(first.abs().max()) < torch.finfo(torch.float32).tiny, "nothing is subnormal"
    assert not _alarms(_vanishing, style)


def _small(step: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    x = torch.full((4,), 0.5 + step, requires_grad=True)
    return (x.sin() * 1e-36).sum(), [x]


@pytest.mark.parametrize(("by", "is_wrong"), [(1e-45, False), (1e-39, False), (1e-37, True)])
def test_small_numbers_that_are_not_subnormal_have_their_digits(by: float, is_wrong: bool) -> None:
    assert bool(_alarms(_small, wrong=_only((4,), lambda each: each + by))) is is_wrong


def _ties(step: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Of tied values each has its part of the gradient; a bias before gets nothing of it."""
    x = torch.tensor([[1.0, 1.0, 0.0], [0.5, 2.0, 2.0]]).requires_grad_()
    y = x + 1e-20 * step
    return (y.amax(1, keepdim=True) - y).log_softmax(1)[:, 0].sum(), [x]


def test_a_tie_that_is_given_to_one_value_is_found() -> None:
    def moved(each: torch.Tensor) -> torch.Tensor:
        return each + torch.tensor([[0.1, -0.1, 0.0], [0.0, 0.0, 0.0]])

    assert not _alarms(_ties)
    assert _alarms(_ties, wrong=_only((2, 3), moved))


def _saturated(step: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    torch.manual_seed(step)
    x = (torch.randn(8, 4) * 30).requires_grad_()
    return F.cross_entropy(x.tanh() * 5, torch.arange(8) % 4), [x]


def test_a_saturated_activation_that_is_wrong_is_found() -> None:
    """Of ``1 - y * y`` little is left, and rounding is as large."""
    assert not _alarms(_saturated)
    assert _alarms(_saturated, wrong=_only((8, 4), lambda each: each + 1e-5))


# ---- how values are moved --------------------------------------------------------------------------------------------

_MOVE = Move(1e-6, 1, least=1e-32)


def test_what_is_moved_and_by_how_much() -> None:
    value = torch.tensor([2.0, 1e-40, 0.0, float("inf"), float("nan")], dtype=torch.float64)
    moved = perturbed(value, _MOVE, 0)
    assert 0 < abs(moved[0] - 2) < 2e-6 and 0 < abs(moved[1] - value[1]) < 1e-38
    assert moved[2] == 0 and moved[3] == float("inf") and moved[4].isnan()
    assert torch.equal(moved[:4], perturbed(value, _MOVE, 0)[:4])
    assert not torch.equal(moved[:2], perturbed(value, _MOVE, 1)[:2])
    zeros = torch._efficientzerotensor((3,), dtype=torch.float64)
    assert perturbed(zeros, _MOVE, 0) is zeros


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_a_sum_is_moved_by_the_rounding_of_its_terms(dtype: torch.dtype) -> None:
    terms = torch.tensor([1.0, -1.0], dtype=dtype)
    with RoundedOperators(_MOVE, _MOVE.by):
        for found in (terms.sum(), terms @ torch.ones_like(terms), terms[None] @ torch.ones_like(terms)[:, None]):
            assert 0 < found.abs() < 4e-6


def test_what_an_operator_is_made_of_is_moved() -> None:
    """The softmax of one class is one, whatever it is given; its logarithm is a zero that no move moves."""
    grad = torch.ones(3, 1, dtype=torch.float64)
    with RoundedOperators(_MOVE, _MOVE.by):
        found = torch.ops.aten._log_softmax_backward_data(grad, torch.zeros_like(grad), 1, torch.float64)
    assert found.all() and found.abs().max() < 4e-6


def test_what_was_equal_is_so_when_it_is_moved() -> None:
    one = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    other = perturbed(one, _MOVE, 3)
    other[2] = 3.1
    with RoundedOperators(_MOVE, _MOVE.by):
        assert (one == other).tolist() == [True, True, False]
        assert (one >= other).tolist() == [True, True, False] and (one < other).tolist() == [False, False, True]
        assert (other == 2).tolist() == [False, True, False]


def test_views_and_writes_stay_what_they_are() -> None:
    base = torch.ones(4, dtype=torch.float64)
    with RoundedOperators(_MOVE, _MOVE.by):
        base[1:3].mul_(2)
    assert base.tolist() == [1, 2, 2, 1]
