"""What a compiled region is compared with: its calls, run for real, one by one; and the same in float64."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from .. import ir

_WIDER = {
    torch.float32: torch.float64,
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.complex64: torch.complex128,
}
_WIDER_NUMBERS = {5: 7, 6: 7, 15: 7, 8: 10, 9: 10}
"""The same as numbers (``c10/core/ScalarType.h``), as ``validate_outputs`` and options of tensors have them."""
_PERTURBED = 8
"""What is float64 already is moved by at most this many of its units of rounding, to see how far results move."""
_MOVED = 2
"""What was widened is moved by at most this many units of the dtype that it had, where errors of rounding are asked
for."""


class RealCalls:
    """The calls of a region, to be run one after the other. Each value is freed after its last use, as under eager.

    Args:
        nodes: the calls.
        kept: values that are not freed.
        known: the region's inputs; gets what the calls give.
        again: they may run again on the same values: a backward that AOTAutograd compiled may write into what was
            saved for it, so of such a one the graph is run.
        wide: where a call names a dtype, it is to be the wider one.
    """

    def __init__(
        self,
        nodes: Sequence[fx.Node],
        kept: Sequence[fx.Node],
        known: dict[fx.Node, Any],
        again: bool = False,
        wide: bool = False,
    ) -> None:
        self.known = known
        self._again = again
        self._wide = wide
        self._last_use = {source: node for node in nodes for source in node.all_input_nodes}
        for node in kept:
            self._last_use.pop(node, None)

    def run(self, node: fx.Node) -> Any:
        """Run one call; gives its result."""
        known = self.known
        function: Any = repeatable(node.target) if self._again else node.target
        args = _wider_arguments(node) if self._wide else node.args
        result = known[node] = function(*fx.map_arg(args, known.__getitem__))
        for source in node.all_input_nodes:
            if self._last_use.get(source) is node:
                del known[source]
        return result


def repeatable(target: Any) -> Any:
    """What runs a call without touching what it is given."""
    return target.trace if isinstance(target, ir.AOTBackward) else target


def in_double(
    nodes: Sequence[fx.Node], given: Mapping[fx.Node, Any], wanted: fx.Node, moved: int = 0
) -> torch.Tensor | None:
    """What the calls of a region give for ``wanted`` where every value is computed in float64.

    What is float64 to begin with is perturbed instead, so that the result shows how far rounding moves it; with
    ``moved`` all inputs are, by the rounding of the dtypes that they had: each number moves them in another way. None
    where a call cannot be computed so.
    """
    wide = {node: widened(value, moved) for node, value in given.items()}
    calls = RealCalls(nodes, [wanted], wide, again=True, wide=True)
    try:
        for node in nodes:
            calls.run(node)
    except (RuntimeError, NotImplementedError, TypeError):  # no kernel for float64, most likely
        return None
    return calls.known[wanted]


def once_more(nodes: Sequence[fx.Node], given: Mapping[fx.Node, Any], wanted: fx.Node) -> torch.Tensor | None:
    """What the calls of a region give for ``wanted``."""
    calls = RealCalls(nodes, [wanted], dict(given), again=True)
    for node in nodes:
        calls.run(node)
    return calls.known[wanted]


def _wider_arguments(node: fx.Node) -> tuple[Any, ...]:
    if not isinstance(node.target, ir.OpaqueOp):
        return node.args
    validates = ir.is_validation(node)
    return tuple(_wider_constant(each, validates and position == 1) for position, each in enumerate(node.args))


def _wider_constant(value: Any, is_validation: bool) -> Any:
    """Options of tensors, ``[_, _, device, dtype, layout, pinned]``, with another number for the dtype.

    ``validate_outputs`` has a list ``[options, sizes, is nested, dtype]`` for each gradient.
    """
    if not isinstance(value, (list, tuple)):
        return value
    if is_validation:
        return [
            each
            if each is None
            else [_wider_constant(each[0], False), *each[1:-1], _WIDER_NUMBERS.get(each[-1], each[-1])]
            for each in value
        ]
    if len(value) == 6 and isinstance(value[2], torch.device) and isinstance(value[3], int):
        return [*value[:3], _WIDER_NUMBERS.get(value[3], value[3]), *value[4:]]
    return value


def widened(value: Any, moved: int = 0) -> Any:
    """A tensor in float64, with the strides that it has; ``moved``: as far as rounding might have moved its values."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.dtype in (torch.float64, torch.complex128):
        return _perturbed(value, _PERTURBED * torch.finfo(torch.float64).eps, moved)
    if value.dtype not in _WIDER:
        return value
    wide = value.to(_WIDER[value.dtype])
    return _perturbed(wide, _MOVED * torch.finfo(value.dtype).eps, moved) if moved else wide


def _perturbed(value: torch.Tensor, by: float, seed: int) -> torch.Tensor:
    generator = torch.Generator(value.device).manual_seed(seed)  # the user's own must not notice
    noise = torch.rand(value.shape, generator=generator, device=value.device, dtype=torch.float64) - 0.5
    return value * (1 + noise * (2 * by))
