"""Whole gradients of compiled code beside those of the eager engine: are they plainly the same?

This settles nothing by itself. Other differences may be rounding that accumulated over many regions. They are judged by
a comparison region by region (:mod:`prover`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from .. import ir
from ..native.interface import Module
from .comparison import Optional, largest, plain, value_difference

_AGAIN = 4.0
"""Factor by which a gradient's distance from eager's may grow, relative to its distance when its regions were right."""

_MOST = 0.1
"""Such a part of a gradient's largest value may be rounding that went through many regions; or ten times the tolerance,
where that is more."""


def apart(
    wanted: list[Optional],
    found: list[Optional],
    relative: float,
    known: Mapping[int, float],
    module: Module | None = None,
) -> list[int]:
    """Return the numbers of the gradients that are not plainly the same.

    Args:
        wanted: eager's gradients.
        found: the gradients of compiled code.
        relative: the tolerance, by the root mean square of each gradient alone; 0 asks for the same bits.
        known: for some gradients, the distance from eager's when their regions were found to be right.
        module: the extension, if available: it settles most gradients at once.
    """
    unclear: Iterable[int] = range(len(wanted)) if module is None else module.unlike(wanted, found, relative)
    doubtful: list[int] = []
    alike: dict[Any, list[int]] = {}
    for index in unclear:
        want, got = wanted[index], found[index]
        if want is None or got is None:
            if want is not got:
                doubtful.append(index)
        elif is_like(want, got):
            alike.setdefault((want.dtype, want.device), []).append(index)
        else:
            doubtful.append(index)
    for numbers in alike.values():
        wants, gots = ([one_of[each] for each in numbers] for one_of in (wanted, found))
        for each in _unclear(wants, gots, relative):  # type: ignore[arg-type]
            want, got, index = wants[each], gots[each], numbers[each]
            assert want is not None and got is not None
            if value_difference(want, got, relative, lambda _: None) is None:
                continue
            if not distance(want, got) <= _AGAIN * known.get(index, 0.0):  # it may be no number
                doubtful.append(index)
    return doubtful


def is_like(want: Optional, got: Optional) -> bool:
    """Return whether the values of two gradients can be compared; strides do not count."""
    if want is None or got is None:
        return False
    same = want.dtype is got.dtype and want.shape == got.shape and want.device == got.device
    return same and ir.is_plain(want) and ir.is_plain(got)


def distance(want: Optional, got: Optional) -> float:
    """The largest difference of two gradients; infinite where they cannot be compared, or a value of one alone is not
    finite."""
    if want is None or got is None or not is_like(want, got):
        return math.inf
    want, got = plain(want).to(torch.float64), plain(got).to(torch.float64)
    same = (want == got) | (want.isnan() & got.isnan())
    errors = (got - want).abs().masked_fill(same, 0.0).nan_to_num(math.inf, math.inf)
    return float(errors.max()) if want.numel() else 0.0


def most_of_rounding(wanted: list[Optional], index: int, relative: float, known: float = 0.0) -> float:
    """Return how far rounding alone may move a gradient: by its own largest value, by that of all gradients, whose
    terms may have cancelled in it, and by its known distance."""
    sizes = [largest(each) if each is not None and ir.is_plain(each) else 0.0 for each in wanted]
    return max(_MOST, 10 * relative) * sizes[index] + relative * max(sizes) + _AGAIN * known


def _unclear(wants: list[torch.Tensor], gots: list[torch.Tensor], relative: float) -> list[int]:
    """Return the gradients, all of one dtype on one device, whose norms do not show that they are the same."""
    if relative == 0 or not wants[0].is_floating_point():
        return [index for index, (want, got) in enumerate(zip(wants, gots, strict=True)) if not torch.equal(want, got)]
    counts = [want.numel() for want in wants]
    if 0 in counts:
        return list(range(len(wants)))
    wide = torch.float64 if wants[0].dtype is torch.float64 else torch.float32
    differences = torch._foreach_sub(gots, wants)
    torch._foreach_abs_(differences)
    errors = torch.stack(torch._foreach_max(differences)).to(wide)
    norms = torch.stack(torch._foreach_norm(wants, 2, dtype=wide))
    roots = torch.tensor(counts, dtype=wide, device=norms.device).sqrt_()
    clear = (errors * roots <= relative * norms) & norms.isfinite()
    return [] if bool(clear.all()) else [index for index, each in enumerate(clear.tolist()) if not each]
