"""Which tensors compiled code takes for alike."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch._prims_common import are_strides_like_channels_last_or_false

from compiled_autograd.guards.value_kinds import kind_of_value


@pytest.mark.parametrize(("dims", "sizes", "strides"), [(4, (1, 2, 3), (0, 1, 2, 6)), (5, (1, 2), (1, 2, 4))])
def test_unit_dimensions_have_the_strides_that_operators_go_by(
    dims: int, sizes: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    """The strides of dimensions of one element differ, and nobody sees it: but for whether the channels come last."""
    memory = torch.zeros(64)
    seen: dict[object, bool] = {}
    for shape in itertools.product(sizes, repeat=dims):
        if 1 not in shape:
            continue
        for stride in itertools.product(strides, repeat=dims):
            kind = kind_of_value(torch.as_strided(memory, shape, stride))
            last = are_strides_like_channels_last_or_false(shape, stride)
            assert seen.setdefault(kind, last) == last, (shape, stride)
    assert set(seen.values()) == {True, False}
