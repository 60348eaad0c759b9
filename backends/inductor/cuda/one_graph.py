"""One CUDA graph of a region: how it is captured, and how its results are given."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

import torch

from ...protocol import Compiled
from .capture import CannotCaptureError, Device, Replayable
from .inputs import copy_all


@dataclass(slots=True)
class Graph:
    """One graph, and how its results are given.

    Attributes:
        graph: what is replayed.
        memory: of each result the tensor that the graph writes it to; what is no tensor, as it is.
        through: of each result that lies in the memory of an input instead: its number, that of the input, and how.
        used: when, by the region's number of calls.
        pieces: the memory that the results lie in.
        places: where each of these is, and how large.
        unused: how many hold each while nobody outside does.
    """

    graph: Replayable
    memory: list[Any]
    through: list[tuple[int, int, tuple[Any, ...]]]
    used: int = 0
    pieces: list[torch.UntypedStorage] = field(init=False)
    places: list[tuple[int, int]] = field(init=False)
    unused: list[int] = field(init=False)
    _numbers: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.pieces = [each.untyped_storage() for each in self.memory if isinstance(each, torch.Tensor)]
        self._numbers = [each._cdata for each in self.pieces]
        self.places, self.unused = self._places(), self._holders()

    def is_free(self) -> bool:
        """Whether nobody holds what the last run gave, nor anything else in that memory, and it is where it was."""
        return self._holders() == self.unused and not self.is_spoilt()

    def is_spoilt(self) -> bool:
        """Whether somebody who had a result gave its memory back, or took some elsewhere (``resize_``, ``out=``)."""
        return self._places() != self.places

    def _holders(self) -> list[int]:
        """Tensors and what else in C++ holds each piece; and who has the one object of Python that stands for it."""
        return [*map(torch._C._storage_Use_Count, self._numbers), *map(sys.getrefcount, self.pieces)]

    def _places(self) -> list[tuple[int, int]]:
        return [(each.data_ptr(), each.nbytes()) for each in self.pieces]

    def run(self, arguments: list[Any]) -> list[Any]:
        """Replay it, and give tensors in its memory that are new to everybody. The arguments are emptied."""
        given = [each.data if isinstance(each, torch.Tensor) else each for each in self.memory]
        for number, source, (size, stride, offset) in self.through:
            given[number] = _lying_in(arguments[source], size, stride, offset)
        self.graph.replay()
        arguments.clear()
        return given


def layout_of(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.size(), value.stride(), value.dtype, value.device, value.is_conj(), value.is_neg()


def bytes_of(layout: Any) -> int:
    return layout[0].numel() * layout[2].itemsize if isinstance(layout, tuple) else 0


def memory_for(layout: Any, device: Device) -> Any:
    if not isinstance(layout, tuple):
        return layout
    size, stride, dtype, place, *bits = layout
    if place.type != device.kind or any(bits):
        raise CannotCaptureError(f"one of its results lies on {place}, or has a conjugate or negative bit")
    return torch.empty_strided(size, stride, dtype=dtype, device=place)


def captured(compiled: Compiled, arguments: list[Any], memory: list[Any], device: Device) -> Graph:
    """A graph of a call. Its last part writes the results to ``memory``, where no other graph writes.

    Raises:
        CannotCaptureError: there can be none.
    """
    inputs: dict[int, list[int]] = {}  # by what memory they lie in
    for number, each in enumerate(arguments):
        if isinstance(each, torch.Tensor):
            inputs.setdefault(each.untyped_storage().data_ptr(), []).append(number)
    through: list[tuple[int, int, tuple[Any, ...]]] = []

    def run() -> None:
        found = list(compiled(list(arguments)))
        if list(map(layout_of, found)) != list(map(layout_of, memory)):
            raise CannotCaptureError("its results lie otherwise at each run")
        pairs = []
        for number, each in enumerate(found):
            if not isinstance(each, torch.Tensor):
                continue
            beside = inputs.get(each.untyped_storage().data_ptr(), ())
            source = next((at for at in beside if _lies_within(each, arguments[at])), None)
            if source is None:
                pairs.append((memory[number], each))
            else:
                offset = (each.data_ptr() - arguments[source].data_ptr()) // each.element_size()
                through.append((number, source, (each.size(), each.stride(), offset)))
        copy_all([to for to, _ in pairs], [each for _, each in pairs])

    return Graph(device.capture(run), memory, through)


def _lies_within(result: torch.Tensor, argument: torch.Tensor) -> bool:
    """Whether all of a result lies between the first and the last element of an input, with the same dtype."""
    if argument.dtype is not result.dtype or not result.numel():
        return False
    begin = result.data_ptr() - argument.data_ptr()
    return 0 <= begin <= (extent(argument) - extent(result)) * result.element_size()


def extent(tensor: torch.Tensor) -> int:
    """How many elements lie between the first and the last of a tensor, both counted; 0 of one without any."""
    if not tensor.numel():
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _lying_in(source: torch.Tensor, size: Any, stride: Any, offset: int) -> torch.Tensor:
    """A tensor in another one's memory, so many elements behind its first, which is no view of it."""
    return source.data.as_strided(size, stride, source.storage_offset() + offset).data
