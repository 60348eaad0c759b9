"""Values that are moved a little, to see how far results move."""

from __future__ import annotations

import torch

HARDLY = 8 * torch.finfo(torch.float64).eps
"""Values are moved by at most this, eight units of float64, to see whether a result jumps."""
_PLACES = 26
"""The number of bits that tell values apart."""
ELSEWHERE = 1 << (_PLACES - 1)
"""Places from here on are not used for values that a call is given or gives."""


def perturbed(value: torch.Tensor, by: float, number: int, place: int) -> torch.Tensor:
    """Each value moved by at most ``by``, relative to it.

    Args:
        number: for another one (of its amount, whatever its sign), they are moved in another way.
        place: the same, for another value.
    """
    seed = abs(number) << _PLACES | place  # the CPU's generator takes 32 bits of it
    generator = torch.Generator(value.device).manual_seed(seed)  # the user's own must not notice
    noise = torch.rand(value.shape, generator=generator, device=value.device, dtype=torch.float64) - 0.5
    return value * (1 + noise * (2 * by))
