"""Compares two results of one computation: are they equal within rounding, in everything that a program can see?

A plain tolerance settles nearly all results. Otherwise the caller computes the same values in float64. An
ill-conditioned result is as far from these as the real calls' result, and a wrong one is further.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

Optional = torch.Tensor | None

_TOLERANCES = {
    torch.float64: 1e-9,
    torch.complex128: 1e-9,
    torch.float32: 1e-4,
    torch.complex64: 1e-4,
    torch.bfloat16: 2e-2,
    torch.float16: 5e-3,
}
"""Tolerance relative to a value and to the root mean square of all values beside it. Smaller differences count as
rounding."""
_EIGHT_BIT_TOLERANCE = 1e-1
"""For dtypes of eight bits."""
_CANCELLED_SHARE = 1e-2
"""Fraction of the largest value beside a result. Terms that cancel may leave this fraction times the tolerance."""
_ERROR_FACTOR = 4.0
"""A result may be this many times further from the float64 values than the real calls' own result, or than rounding of
the inputs alone moves them."""

_PERTURBATIONS = 4, 16
"""Numbers of times that a region is computed from moved inputs, since a few moves may leave a value unchanged by
chance. The second number is used before a difference counts as wrong."""

_JUMP = 0.5
"""Threshold of a jump: the move of a value if its inputs hardly move, relative to its move if they move by rounding.
Smooth functions stay far below."""

_NOISE_SHARE = 0.5
"""Fraction of its root mean square from which the distance to float64 shows that a result has no correct digits."""
_NOISE_FACTOR = 16.0
"""Factor by which a result that is zero but for rounding may grow in other runs, by chance."""

_TIED_SHARE = 1e-3
"""Such a part of many whole numbers may be what rounding alone decides, and float64 decides otherwise."""


def tolerance(dtypes: Sequence[torch.dtype]) -> float:
    """Return the tolerance of the coarsest of the dtypes in a computation."""
    floating = [dtype for dtype in dtypes if dtype.is_floating_point or dtype.is_complex]
    return max((_TOLERANCES.get(dtype, _EIGHT_BIT_TOLERANCE) for dtype in floating), default=0.0)


def metadata_difference(want: Optional, found: Optional, strides: bool = True) -> str | None:
    """Return the difference of two results in definedness, dtype, device, shape or strides, in words; None if there is
    none."""
    if want is None or found is None:
        one, other = ("undefined", "defined") if found is None else ("defined", "undefined")
        return None if want is found else f"it is {one}, and {other} as the real calls give it"
    for name in ("dtype", "device", "layout", "shape"):
        one, other = getattr(found, name), getattr(want, name)
        if one != other:
            return f"its {name} is {_text(one)}, and {_text(other)} as the real calls give it"
    if strides and want.layout is torch.strided and _strides(want) != _strides(found):
        return f"its strides are {found.stride()}, and {want.stride()} as the real calls give it"
    return None


def _text(value: object) -> str:
    return str(tuple(value)) if isinstance(value, torch.Size) else str(value)


def _strides(tensor: torch.Tensor) -> list[int]:
    """Return the strides that a program can see: not those of dimensions of one element, and none of empty tensors."""
    if tensor.numel() == 0:
        return []
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1]


def has_other_format(want: torch.Tensor, found: torch.Tensor) -> bool:
    """Return whether only one of two tensors is channels-last, and only the strides of dimensions of one element show
    it. No program sees these, but operators give their results such a layout."""
    if want.layout is not torch.strided or 1 not in want.shape or _strides(want) != _strides(found):
        return False
    return _is_channels_last(want.shape, want.stride()) != _is_channels_last(found.shape, found.stride())


def _is_channels_last(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether operators that keep a memory format treat a tensor as channels-last.

    As ``is_channels_last_strides_2d_s4`` and its like in ``c10/core/MemoryFormat.h`` (2.13).
    """
    if len(shape) not in (4, 5) or strides[1] == 0:
        return False
    least = 0
    for dim in (1, *range(len(shape) - 1, 1, -1), 0):
        if shape[dim] == 0 or strides[dim] < least or (dim == 0 and least == strides[1]):
            return False
        least = strides[dim] * shape[dim]
    return True


def value_difference(
    want: torch.Tensor,
    found: torch.Tensor,
    relative: float,
    in_double: Callable[[int], Optional],
    beside: float = 0.0,
    coarse: Callable[[], float] = lambda: 0.0,
) -> str | None:
    """Return the difference of the values of two tensors of one dtype and shape, in words; None if there is none.

    Args:
        want: the real calls' result.
        found: the result to judge.
        relative: the tolerance; 0 asks for the same bits.
        in_double: returns the same value computed in float64; None if that is impossible. For a number above 0 the
            inputs are moved first by their own rounding, differently for each number. The opposite number moves them in
            the same way, but hardly at all.
        beside: the largest of all values computed together. A result that is zero but for rounding (a bias before a
            normalisation) has no scale of its own: its terms had the scale of the others, and cancelled. If float64 is
            wider than the computation, it shows that; else the result is assumed to be such a zero.
        coarse: returns the tolerance of operators that round more coarsely than their dtype, or 0. It applies if
            float64 cannot be computed.
    """
    if plainly_alike(want, found, relative, beside):
        return None
    want, found = plain(want), plain(found)
    if relative == 0:
        return _measured(want, found)
    if not want.is_floating_point():
        return None if _as_good(want, found, in_double(0)) else _measured(want, found)
    want, found = _exact(want), _exact(found)
    double = in_double(0)
    if double is None:
        relative, scale = max(relative, coarse()), root_mean_square(want) + _CANCELLED_SHARE * beside
        return None if _is_close(want, found, relative, _floored(scale, want, relative)) else _measured(want, found)
    exact = plain(double).to(torch.float64)
    own_error = largest(want.to(torch.float64) - exact)
    if _as_near(want, found, exact, own_error, relative):
        return None
    for moves in _moved_by(exact, in_double):
        rounding = own_error + moves
        if coarse():  # what many values add up to that were moved the same way may be less by chance than what one was
            rounding += root_mean_square(moves)
        if _as_near(want, found, exact, rounding, relative):
            return None
    return _measured(want, found)


def plainly_alike(want: torch.Tensor, found: torch.Tensor, relative: float, beside: float = 0.0) -> bool:
    """Return whether :func:`value_difference` finds no difference, without computing in float64."""
    want, found = plain(want), plain(found)
    if torch.equal(want, found) or want.numel() == 0:
        return True
    if not want.is_floating_point():
        return False
    want, found = _exact(want), _exact(found)
    if relative == 0:
        return _is_close(want, found, 0.0, 0.0)  # NaNs may have other bits
    scale = root_mean_square(want)
    if relative <= _TOLERANCES[torch.float64]:  # nothing is wider, to show what has cancelled
        scale += _CANCELLED_SHARE * beside
    return _is_close(want, found, relative, _floored(scale, want, relative))


def _floored(scale: float, want: torch.Tensor, relative: float) -> float:
    """Differences among subnormal numbers, which code may flush to zero, are rounding."""
    return max(scale, torch.finfo(want.dtype).tiny / relative)


def _is_close(want: torch.Tensor, found: torch.Tensor, relative: float, scale: float) -> bool:
    """Return as ``torch.allclose`` does. That function takes several times as long, and is called if a value is not
    finite."""
    beyond = float((found - want).abs_().sub_(want.abs(), alpha=relative).max())
    if math.isnan(beyond):
        return torch.allclose(found, want, rtol=relative, atol=relative * scale, equal_nan=True)
    return math.isfinite(beyond) and beyond <= relative * scale


def _moved_by(exact: torch.Tensor, in_double: Callable[[int], Optional]) -> Iterator[torch.Tensor]:
    """Yield how far rounding of the inputs moves each value, as the mean of more and more moves. The real calls may be
    nearer if the terms that cancel are exact.

    A value that jumps at the smallest move of its inputs is not moved by rounding: its inputs lie on a boundary (the
    bound of a clamp, a tie), and rounding does not decide on which side.
    """
    moves, counted = torch.zeros_like(exact), torch.zeros_like(exact)
    for number in range(1, _PERTURBATIONS[-1] + 1):
        moved, hardly = in_double(number), in_double(-number)
        if moved is not None and hardly is not None:
            error, jump = ((plain(each).to(torch.float64) - exact).abs() for each in (moved, hardly))
            counts = error.isfinite() & (jump <= _JUMP * error)
            moves += torch.where(counts, error, 0.0)
            counted += counts
        if number in _PERTURBATIONS:
            yield moves / counted.clamp(min=1)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Without history, conjugate and negative bits, and with real numbers for complex ones."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def root_mean_square(tensor: torch.Tensor) -> float:
    """Return the root mean square of the finite values; not finite if a value is not."""
    dtype = torch.float64 if tensor.dtype is torch.float64 else torch.float32
    size = float(torch.linalg.vector_norm(tensor, dtype=dtype)) / math.sqrt(max(1, tensor.numel()))
    if math.isfinite(size):
        return size
    return float(torch.linalg.vector_norm(tensor.nan_to_num(0, 0, 0), dtype=torch.float64)) / math.sqrt(tensor.numel())


def largest(tensor: torch.Tensor) -> float:
    """The largest finite value."""
    return sizes_up(tensor)[0]


def _largest_of_all(tensor: torch.Tensor) -> float:
    """Without regard to sign; NaN where a value is."""
    least, most = torch.aminmax(tensor)
    return float(torch.maximum(-least, most))


def sizes_up(tensor: torch.Tensor) -> tuple[float, bool]:
    """The largest finite value of a result, and whether it can show a mistake: it has values other than zero, and all
    are finite."""
    tensor = plain(tensor)
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return 0.0, True
    tensor = _exact(tensor)
    most = _largest_of_all(tensor)
    if math.isfinite(most):
        return most, most > 0
    return _largest_of_all(tensor.nan_to_num(0, 0, 0)), False


def are_zeros(values: Sequence[object]) -> bool:
    """Return whether all results are floating-point tensors whose values are all zero."""
    if not all(isinstance(each, torch.Tensor) and each.layout is torch.strided for each in values):
        return False
    found = [plain(each) for each in values if isinstance(each, torch.Tensor)]
    return all(each.is_floating_point() and each.numel() > 0 for each in found) and at_most(0.0, *found)


def noise_of(want: torch.Tensor, found: torch.Tensor, double: torch.Tensor, most: float) -> float | None:
    """Return a bound for a result that is mostly rounding; None if the result has correct digits.

    Args:
        most: a larger bound is discarded. One value may be far from float64 for another reason, such as a jump or
            overflow.
    """
    want, found, exact = (plain(each) for each in (want, found, double))
    if not want.is_floating_point() or want.numel() == 0:
        return None
    want, found, exact = (each.to(torch.float64) for each in (want, found, exact))
    size = root_mean_square(want)
    if not 0 < _NOISE_SHARE * size <= root_mean_square(want - exact) < math.inf:
        return None
    bound = _NOISE_FACTOR * max(map(_largest_of_all, (want, found)))
    return bound if bound <= most else None


def at_most(bound: float, *tensors: torch.Tensor) -> bool:
    """Return whether the absolute values are at most ``bound``, and none is a NaN."""
    found = [_exact(plain(each)) for each in tensors]
    return all(each.numel() == 0 or _largest_of_all(each) <= bound for each in found)


@dataclass(frozen=True)
class Worst:
    """The place of the largest difference of two results: its index, the difference, and both values."""

    index: tuple[int, ...]
    error: float
    want: complex
    found: complex

    def __str__(self) -> str:
        where = f"at {list(self.index)} " if self.index else ""
        return f"{where}the real calls give {self.want:.6g}, and it is {self.found:.6g}"


def worst(want: Optional, found: Optional) -> Worst | None:
    """Return the place of the largest difference of two results; None if no values can be compared."""
    if want is None or found is None or metadata_difference(want, found, strides=False) is not None:
        return None
    if want.numel() == 0 or want.layout is not torch.strided:
        return None
    wide = torch.complex128 if want.is_complex() else torch.float64
    one, other = (each.detach().resolve_conj().resolve_neg().to(wide).flatten() for each in (want, found))
    error = (other - one).abs()
    same = (one == other) | (one.isnan() & other.isnan())
    error = torch.where(same, 0.0, error.nan_to_num(math.inf, math.inf))
    place = rest = int(error.argmax())
    index: list[int] = []
    for size in reversed(want.shape):
        rest, part = divmod(rest, size)
        index.insert(0, part)
    return Worst(tuple(index), float(error[place]), one[place].item(), other[place].item())


def _exact(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in a dtype in which differences can be computed."""
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.to(torch.float32)


def _as_near(
    want: torch.Tensor,
    found: torch.Tensor,
    double: torch.Tensor,
    rounding: torch.Tensor | float,
    relative: float,
) -> bool:
    """Return whether ``found`` is at most a few times ``rounding`` away from the float64 values. ``rounding`` is one
    number, or one for each value.

    If the real calls overflow, a computation with less rounding may not. But a value that is not finite is wrong if
    both the real calls and float64 have a finite one. In 16 bits, values that cancel after an overflow are noise. If
    the real calls overflow there, nothing is judged, and :func:`sizes_up` does not count the run.
    """
    error = (found.to(torch.float64) - double).abs()
    scale = root_mean_square(double[double.isfinite()]) if bool(double.isfinite().any()) else 0.0
    scale = scale if math.isfinite(scale) else 0.0
    allowed = _ERROR_FACTOR * rounding + relative * (double.abs() + scale)
    near = (error <= allowed) | (~want.isfinite() & ~found.isfinite()) | (~double.isfinite() & ~found.isfinite())
    if relative >= _TOLERANCES[torch.float16]:
        near |= ~want.isfinite()
    return bool(near.all())


def _as_good(want: torch.Tensor, found: torch.Tensor, double: Optional) -> bool:
    """Return whether integers and masks that were computed from rounded numbers differ by rounding alone.

    If they differ, float64 must agree with the compiled code, except for a few values, since those are rounded as well.
    """
    if double is None or double.dtype != want.dtype:
        return False
    wrong = int(((found != want) & (found != plain(double))).sum())
    return wrong <= want.numel() * _TIED_SHARE


def _measured(want: torch.Tensor, found: torch.Tensor) -> str:
    want, found = want.to(torch.float64), found.to(torch.float64)
    error = (found - want).abs()
    wrong_kind = int((found.isfinite() != want.isfinite()).sum())
    text = f"the largest difference is {largest(error):.3g}, where the largest value is {largest(want):.3g}"
    if wrong_kind:
        text += f"; {wrong_kind} of {want.numel()} values are not finite in one of the two alone"
    return text
