"""One CUDA graph of a region: its capture, and its results."""

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
    """One graph, and the memory of its results.

    Attributes:
        graph: the captured graph.
        memory: for each result the tensor that the graph writes it to; a value that is no tensor, unchanged.
        through: for each result in the memory of an input: its index, that of the input, and its layout.
        used: the time of the last use, as the region's number of calls.
        pieces: the memory of the results.
        places: the address and size of each piece.
        unused: the number of references to each piece if no result is referenced.
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
        """Return whether no result of the last run, nor anything else in its memory, is referenced, and no memory has
        moved."""
        return self._holders() == self.unused and not self.is_spoilt()

    def is_spoilt(self) -> bool:
        """Return whether a holder of a result has freed its memory, or replaced it (``resize_``, ``out=``)."""
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
    """Return whether all of a result lies between the first and the last element of an input, with the same dtype."""
    if argument.dtype is not result.dtype or not result.numel():
        return False
    begin = result.data_ptr() - argument.data_ptr()
    return 0 <= begin <= (extent(argument) - extent(result)) * result.element_size()


def extent(tensor: torch.Tensor) -> int:
    """Return the number of elements from the first to the last of a tensor in memory, both included; 0 for an empty
    one."""
    if not tensor.numel():
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _lying_in(source: torch.Tensor, size: Any, stride: Any, offset: int) -> torch.Tensor:
    """Return a tensor in another one's memory, ``offset`` elements behind its first. It is no view of the other."""
    return source.data.as_strided(size, stride, source.storage_offset() + offset).data
