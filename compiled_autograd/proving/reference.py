"""The reference for a compiled region: its calls, run for real, one by one; and the same in float64."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx

from .. import ir
from ..backends.signal_handlers import raise_what_a_handler_raised
from ..steps.memory import memory_of
from .perturbing import HARDLY, Move, RoundedOperators, perturbed
from .tf32 import RoundedOperands, rounding_operators
from .wide_kernels import WideKernels

_WIDER = {
    torch.float32: torch.float64,
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.complex64: torch.complex128,
    **{dtype: dtype for dtype in (torch.float64, torch.complex128)},
}
_WIDER_NUMBERS = {5: 7, 6: 7, 15: 7, 8: 10, 9: 10}
"""The same as numbers (``c10/core/ScalarType.h``), as ``validate_outputs`` and options of tensors have them."""
_ROUNDING = 2
"""Inputs are moved by at most this many units of rounding of the dtype that they have, to see how far results move."""
_ROUNDING_IN_DOUBLE = 1024
"""Maximum move of float64 inputs, in units of rounding: enough to tell it from a move a hundred times smaller."""
_FLUSHED = 4
"""Values are moved by up to this many times what code may flush to zero, since it flushes in one direction."""


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
        last_use = {source: node for node in nodes for source in node.all_input_nodes}
        for node in kept:
            last_use.pop(node, None)
        self._last_used: dict[fx.Node, list[fx.Node]] = {}
        for source, node in last_use.items():
            self._last_used.setdefault(node, []).append(source)

    def run(self, node: fx.Node) -> Any:
        """Run one call; gives its result."""
        known = self.known
        function: Any = node.target
        if self._again and isinstance(function, ir.AOTBackward):
            function = function.trace
        args = _wider_arguments(node) if self._wide else node.args
        result = known[node] = function(*fx.map_arg(args, known.__getitem__))
        self.free_after(node)
        return result

    def free_after(self, node: fx.Node) -> None:
        """Free what is of no use after this call."""
        for source in self._last_used.get(node, ()):
            self.known.pop(source, None)


def in_double(
    nodes: Sequence[fx.Node], given: Mapping[fx.Node, Any], wanted: fx.Node, moved: int = 0
) -> torch.Tensor | None:
    """Return the value that the calls of a region give for ``wanted`` in float64. None if a call cannot be computed so.

    With a number above 0, the inputs are moved first by the rounding of their original dtypes. The results of each
    call, and of each operator within it, are moved too, since terms may cancel for any inputs: see
    :class:`RoundedOperators`. Each number moves them differently. A number below 0 moves them as its opposite does, but
    hardly at all. Values that the settings of CUDA round more coarsely are moved by that rounding too.
    """
    return dict(each_in_double(nodes, given, [wanted], moved))[wanted]


def each_in_double(
    nodes: Sequence[fx.Node], given: Mapping[fx.Node, Any], wanted: Sequence[fx.Node], moved: int = 0
) -> Iterator[tuple[fx.Node, torch.Tensor | None]]:
    """Yield several values in float64 from one run of the calls. Each is yielded as soon as it is computed, and then
    freed.

    Raises:
        KeyError: a value is neither given nor made by a call.
    """
    if unknown := {*wanted}.difference(nodes, given):
        raise KeyError(f"neither given nor made: {', '.join(node.name for node in unknown)}")
    nodes, given = _leading_to(wanted, nodes, given)
    places: dict[Any, int] = {}  # each memory is moved in its own way: like tensors moved alike would not part
    wide = {}
    for node, value in given.items():
        place = places.setdefault(node if (memory := memory_of(value)) is None else memory, len(places))
        wide[node] = widened(value, moved, place)
    calls = RealCalls(nodes, (), wide, again=True, wide=True)
    coarse, fine = _moves(given.values(), moved)
    modes = _modes(given.values(), moved)
    if moved:
        modes.insert(0, RoundedOperators(fine, coarse.by))
    used = {source for node in nodes for source in node.all_input_nodes}
    for node in {*wanted}.intersection(given):
        yield node, wide[node]
    for number, node in enumerate(nodes):
        try:
            with contextlib.ExitStack() as entered:  # for a call alone: of who looks at values nothing is rounded
                for mode in modes:
                    entered.enter_context(mode)
                calls.run(node)
            makes = node.target is not operator.getitem and not ir.is_validation(node)
            if moved and coarse != fine and makes:
                calls.known[node] = _rounded(calls.known[node], coarse, len(places) + number)
        except Exception as error:  # noqa: BLE001  no kernel for float64, no memory, or not what it needs
            raise_what_a_handler_raised(error)
            calls.known.pop(node, None)
            calls.free_after(node)
        if node in wanted:
            yield node, calls.known.get(node)
        if node not in used:
            calls.known.pop(node, None)


def _modes(given: Iterable[Any], moved: int) -> list[AbstractContextManager[Any]]:
    """Return the modes in which float64 is computed."""
    values = [value for value in given if isinstance(value, torch.Tensor)]
    modes: list[AbstractContextManager[Any]] = []
    if any(value.is_cuda for value in values):
        modes.append(WideKernels())
    if moved and (coarse := rounding_operators(values)):
        modes.append(RoundedOperands(coarse, moved))
    return modes


def once_more(nodes: Sequence[fx.Node], given: Mapping[fx.Node, Any], wanted: fx.Node) -> torch.Tensor | None:
    """Run the calls of a region again, and return the value of ``wanted``."""
    nodes, given = _leading_to([wanted], nodes, given)
    calls = RealCalls(nodes, [wanted], dict(given), again=True)
    for node in nodes:
        calls.run(node)
    return calls.known[wanted]


def _leading_to(
    wanted: Iterable[fx.Node], nodes: Sequence[fx.Node], given: Mapping[fx.Node, Any]
) -> tuple[list[fx.Node], dict[fx.Node, Any]]:
    """Return the calls that make some results, and their inputs. NaN checks are left out: the first run had them."""
    made_by = {*wanted}
    for node in reversed(nodes):
        if node in made_by:
            made_by.update(node.all_input_nodes)
    return [node for node in nodes if node in made_by], {node: given[node] for node in given if node in made_by}


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


def widened(value: Any, moved: int = 0, place: int = 0) -> Any:
    """A tensor in float64; ``moved``: with other values, see :func:`in_double`. ``place`` tells inputs apart."""
    if not isinstance(value, torch.Tensor) or value.dtype not in _WIDER:
        return value
    wide = value.to(_WIDER[value.dtype])
    if moved == 0:
        return wide
    return perturbed(wide, _move(value.dtype, moved), place)


def _moves(given: Iterable[Any], moved: int) -> tuple[Move, Move]:
    """Return the moves of calls' results, by the coarsest dtype, and those of operators within calls: kernels
    accumulate in float32 at least."""
    dtypes = {value.dtype for value in given if isinstance(value, torch.Tensor)} & {*_WIDER}
    coarsest = max({torch.float64, *dtypes}, key=_rounding)
    return _move(coarsest, moved), _move(min(coarsest, torch.float32, key=_rounding), moved)


def _move(dtype: torch.dtype, moved: int) -> Move:
    """Return the move that shows how far rounding of a dtype moves results."""
    by, least = _rounding(dtype), torch.finfo(dtype).tiny
    if dtype is not torch.float16:  # of which kernels make float32 before they could flush it
        least *= _FLUSHED / by
    return Move(by if moved > 0 else HARDLY, moved, least)


def _rounding(dtype: torch.dtype) -> float:
    """By how much a number may be moved, to see how far rounding of its dtype moves results."""
    return (_ROUNDING_IN_DOUBLE if _WIDER[dtype] is dtype else _ROUNDING) * torch.finfo(dtype).eps


def _rounded(result: Any, by: Move, place: int) -> Any:
    """Return a call's result, moved."""
    if isinstance(result, (list, tuple)):
        return [_rounded(each, by, place) for each in result]
    floating = isinstance(result, torch.Tensor) and (result.is_floating_point() or result.is_complex())
    return perturbed(result, by, place) if floating and result.layout is torch.strided else result
