"""Functions of the engine that get one gradient for each piece into which their forward split a tensor.

The engine's key of a structure lacks the number of pieces (2.13). If some are not used, a tensor of three rows and one
of five make the same tape. But the number follows from sizes, which are passed at each run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

Grads = Sequence[torch.Tensor | None]


def _of_split(
    grads: Grads, needed: Any, dim: int, options: Any, sizes: Sequence[int], split_size: int
) -> tuple[Any, ...]:
    count = -(-sizes[dim] // split_size) if split_size else 1
    return _fitted(grads, max(int(count), 1)), needed, dim, options, sizes, split_size


def _of_unbind(grads: Grads, needed: Any, dim: int, size: int | None = None) -> tuple[Any, ...]:
    return grads if size is None else _fitted(grads, int(size)), needed, dim


def _fitted(grads: Grads, count: int) -> list[torch.Tensor | None]:
    """Return as many gradients as there are pieces; missing or additional ones belong to unused pieces."""
    return [*grads[:count], *[None] * (count - len(grads))]


UNBIND = ("UnbindBackward0", "UnbindBackward0_copy")
"""Functions that do not know the size that was cut; the tape graph hands it to them as their last argument."""
FITTED: dict[str, Callable[..., tuple[Any, ...]]] = {
    **dict.fromkeys(("SplitBackward0", "SplitBackward0_copy", "UnsafeSplitBackward0"), _of_split),
    **dict.fromkeys(UNBIND, _of_unbind),
}
"""By the name of the engine's function, what makes its arguments of those in the tape graph. One that is given a list
of sizes (``SplitWithSizesBackward0``) needs none: how long the list is, the engine's key has."""
